"""`megastable skips`: what a run skips, tried again."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megastable.commands.app import App
from megastable.commands.options import Json, JsonFile, Run, put_json

if TYPE_CHECKING:
    from megastable.report.text_output import TextOutput
    from megastable_tools.forensics.court.skip_review import SkipReview

LOW = ": with so low a rate, little harm shows"

app = App("Try again what a run skips, on its newest checkpoint, and give back what does no harm.")


@app.callback()
def name_commands() -> None:
    """With a callback, a command is named even where there is one only."""


@app.add_command(
    "review",
    examples="""
    megastable skips review runs/7b
    megastable skips review runs/7b --incident 3 --incident 5 --steps 32 --json
    megastable skips review runs/7b --give-back
    """,
    more="Tried is what incidents skip for good. What a person or another tool has named stays skipped, and what was "
    "deferred is read again in any case. Given back is what is new, and what does no harm that can be measured, "
    "unless its losses are those of guessing, or above all others and of 64 samples at most. It is read from the next "
    "start on where it lies ahead, else in the next epoch.\n\n"
    "Exit codes: 0 done, 2 bad input, or with --give-back a run at work.",
)
def review_skips(
    run: Run,
    incident: Annotated[list[int] | None, typer.Option(help="Only of this one; repeatable. Default: all")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of every branch")] = 16,
    give_back: Annotated[
        bool, typer.Option("--give-back", help="Let the run read again what does no harm; nothing is deleted")
    ] = False,
    as_json: Json = False,
    output: JsonFile = None,
) -> None:  # fmt: skip
    """Try again what incidents skip: does the run learn from it by now, and does it do harm?"""

    from megastable.base.progress_bar import show_bar
    from megastable.report.text_output import TextOutput
    from megastable_tools.forensics.court import skip_review
    from megastable_tools.forensics.court.skip_review import LITTLE_RATE
    from megastable_tools.forensics.history import History

    run_history = History(run)
    with skip_review.nobody_at_work(run_history.run) if give_back else nullcontext():
        skipped_groups = skip_review.open_groups(run_history, incident or [])
        if skipped_groups:
            with show_bar("loading the checkpoint", 0, as_json, "steps") as progress_bar:
                found = skip_review.review_groups(run_history, skipped_groups, steps, progress_bar)
            found = skip_review.give_back(run_history, found) if give_back else found
        else:
            found = skip_review.SkipReview("", 0, 0.0, steps, [])
    text_output = TextOutput(as_json)
    if skipped_groups:
        text_output.say_lines(
            f"{run_history.run.root}: tried on {found.checkpoint}, in branches of {steps} steps, at "
            f"{found.rate_share:.0%} of the peak rate{LOW if found.rate_share < LITTLE_RATE else ''}"
        )
        _show(text_output, found, give_back)
    else:
        text_output.say_lines(f"{run_history.run.root}: no incident skips samples for good")
    put_json(_tree(found), as_json, output)


def _show(out: TextOutput, found: SkipReview, give_back: bool) -> None:
    from rich.table import Table

    from megastable.base.text import count_noun

    group_table = Table()
    for name in ("group", "samples", "documents", "cost", "learnt", "verdict", "then"):
        group_table.add_column(
            name, justify="left" if name in ("group", "verdict", "then") else "right", no_wrap=True
        )
    for one in found.groups:
        trial = one.trial
        group_table.add_row(
            one.group.name, f"{one.group.positions.size:,}", "?" if one.documents is None else f"{one.documents:,}",
            _with_error(trial.cost, trial.cost_error), _with_error(trial.learnt, trial.learnt_error), trial.verdict,
            "given back" if one.given_back else "harmless" if one.harmless and not give_back else "stays skipped",
        )  # fmt: skip
    out.show_table(group_table)
    out.say_lines(
        "cost: by how much the data to come is harder after them; learnt: by how much others of them are easier. Nats"
    )
    harmless_count = sum(one.harmless for one in found.groups)
    if harmless_count and not give_back:
        out.say_lines(f"{count_noun(harmless_count, 'group')} would be given back with --give-back")


def _with_error(value: float, error: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:+.3f} ± {error:.3f}" if math.isfinite(value) else f"{value:+}"


def _tree(found: SkipReview) -> dict[str, Any]:
    group_facts = [
        {
            "incident": one.group.incident, "step": one.group.step, "samples": int(one.group.positions.size),
            "documents": one.documents, "harmless": one.harmless, "given_back": one.given_back, **one.trial.facts,
            "reason": one.trial.reason,
        }
        for one in found.groups
    ]  # fmt: skip
    return {
        "checkpoint": found.checkpoint, "step": found.step, "rate_share": found.rate_share, "steps": found.steps,
        "groups": group_facts,
    }  # fmt: skip
