"""`megastable change`: settings of a run that trains, changed by a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from megastable.commands.app import App
from megastable.commands.options import Json, Run, put_json

if TYPE_CHECKING:
    from megastable.run.directory import RunDirectory
    from megastable.run.events.event import Event
    from megastable.run.events.reading import Follower

app = App()
PATIENCE = 60.0  # seconds to wait for the run's answer


@app.add_command(
    examples="""
    megastable change runs/7b optimizer.lr=2e-4 --reason "the loss swings since step 41000"
    megastable change runs/7b optimizer.clip=0.5 model.z_loss=1e-4 --reason "large logits" --until 42000
    megastable change runs/7b schedule.total_steps=90000 --reason "the cluster goes away in May"
    """,
    more="Live are optimizer.lr, optimizer.weight_decay, optimizer.betas, optimizer.clip, model.z_loss and all of "
    "schedule. A change holds from the next step on, the same one on all ranks, over restarts and rewinds, until it "
    "is changed again, --until is over, or a start has another value in its recipe. Remedies apply on top of it. "
    "100 steps later, or at the end, the journal says what became of loss and gradient norm.\n\n"
    "Exit codes: 0 asked for (and made, unless it says that the run has not answered yet), 2 bad input, a run that is "
    "not at work, or a change that the run refuses.",
)
def change(
    run: Run,
    settings: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="Of the recipe, e.g. optimizer.lr=2e-4")
    ],
    reason: Annotated[str, typer.Option(help="Why, for the record of the run")],
    until: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEP", help="The last step with it; then as before. Default: for good"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Change settings of a run that trains, such as its learning rate; the journal says who, why, what came."""
    from megastable.base.errors import ConfigError, DataError
    from megastable.base.process import login_name
    from megastable.config.recipe import load_recipe
    from megastable.run import changes
    from megastable.run.directory import RunDirectory, read_object
    from megastable.run.events.event import read_whole
    from megastable.run.events.people_events import ChangeMade, ChangeRefused
    from megastable.run.events.reading import Follower
    from megastable.supervise.locks import nobody_works

    run_directory, reason = RunDirectory(run), " ".join(reason.split())
    if not run_directory.recipe.is_file():
        hint = "give the directory of a run, such as runs/quickstart"
        raise DataError(f"{run_directory.recipe} does not exist: {hint}")
    if not reason:
        raise ConfigError("--reason is empty: say why, for those who read the record")
    recipe, values = load_recipe(run_directory.recipe), changes.parse_values(settings)
    step = read_whole(read_object(run_directory.progress).get("step")) or 0
    request = changes.ChangeRequest(id="", time=0.0, reason=reason, values=values, until=until)
    journal = Follower(run_directory.journal)
    changes_made = [event for event in journal.stream_events() if isinstance(event, ChangeMade)]
    if journal.problem:
        raise DataError(journal.problem)
    refusal_event = changes.answer_request(request, recipe, changes_made, step, None)
    if isinstance(refusal_event, ChangeRefused):
        raise ConfigError(str(refusal_event.problem))
    if nobody_works(run_directory):
        if step >= recipe.train.steps:
            raise ConfigError(
                f"{run_directory.root} is finished: with a larger train.steps it goes on, with another setting from "
                "any checkpoint (megastable checkpoint branch)"
            )
        raise ConfigError(
            f"{run_directory.root}: no process trains here: start it again with {' '.join(settings)} "
            f"({run_directory.resuming}) and --reason"
        )
    request = changes.ask_change(run_directory.changes, values, reason, login_name(), until)
    run_answer = _answer(run_directory, journal, request.id)
    if isinstance(run_answer, ChangeRefused):
        raise ConfigError(str(run_answer.problem))
    if as_json:
        fields = None if run_answer is None else dict(run_answer.fields)
        put_json({"change": request.id, "made": fields}, True, None)
    elif run_answer is None:
        print(
            f"{run_directory.changes} has the request; the run has not answered it yet, and does so at its next step "
            "or start (the journal says from which step)"
        )
    else:
        print(run_answer.format_line())


def _answer(directory: RunDirectory, journal: Follower, change: str) -> Event | None:
    """What the run says of a request in what is new in its journal; None if it has not said anything within `PATIENCE`,
    or does not train."""
    import time

    from megastable.supervise.locks import nobody_works

    end_time, has_ended = time.monotonic() + PATIENCE, False
    while True:
        for event in journal.stream_events():
            if event.get("change") == change:
                return event
        if has_ended or time.monotonic() > end_time:
            return None
        time.sleep(0.2)
        has_ended = nobody_works(directory)
