"""`megastable court`: did a run choose well what to do about an incident?"""

from __future__ import annotations

from typing import Annotated

import typer

from megastable.base.errors import FAILED, DataError
from megastable.commands.app import App
from megastable.commands.options import Drawing, Json, JsonFile, Run, put_json

app = App()


@app.add_command(
    examples="""
    megastable court runs/7b 3
    megastable court runs/7b 3 --only cut_lr --only reset_moments --picture court.png
    megastable court runs/7b --step 41250-41252 --steps 32 --json
    """,
    more="From the newest good checkpoint before the trouble the run is replayed up to there, with its data, skips and "
    "refused updates. Then every branch trains the same steps from the same state. Half of the suspects are in no "
    "branch: by them is measured what was learnt. It works in one process, on a GPU or a CPU, for a run of any layout, "
    "also alongside a run at work, and writes nothing to the run directory.\n\nRemedies (all but 'nothing' and 'other "
    "data') count only if training on other data does harm, too: a lower rate wins over a few steps in any case. What "
    "the run did counts as good if the data to come is at most 0.01 nats harder than after the best branch, or not "
    "clearly so (3 standard errors).\n\nExit codes: 0 the run chose well, 1 it did not, 2 bad input.",
)
def retry_incident(
    run: Run,
    incident: Annotated[int | None, typer.Argument(metavar="[INCIDENT]", help="Its number, from 1 on")] = None,
    step: Annotated[
        str | None, typer.Option(metavar="STEP[-STEP]", help="Instead of an incident: all samples of these steps")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of every branch")] = 16,
    only: Annotated[list[str] | None, typer.Option(help="Only this branch, by name; repeatable. Default: all")] = None,
    picture: Drawing = None,
    as_json: Json = False,
    output: JsonFile = None,
) -> None:  # fmt: skip
    """Try an incident's remedies again, and more of them, from a checkpoint: did the run choose well?"""

    from megastable.base.progress_bar import show_bar
    from megastable.report.text_output import TextOutput
    from megastable_tools.forensics.court import hold_court as display
    from megastable_tools.forensics.court.hold_court import hold_court, open_incident, open_steps
    from megastable_tools.forensics.history import History
    from megastable_tools.forensics.samples import step_range

    if (incident is None) == (step is None):
        raise DataError("say what to try: the number of an incident, or --step N")
    run_history = History(run)
    if step is not None:
        court_case = open_steps(run_history, *step_range(step))
    elif incident is not None:
        court_case = open_incident(run_history, incident)
    with show_bar("reading the run", 0, as_json, "steps") as progress_bar:
        court_record = hold_court(run_history, court_case, only or [], steps, progress_bar)
    text_output = TextOutput(as_json)
    text_output.say_lines(*display.describe_case(court_record))
    text_output.show_table(display.draw_table(court_record))
    text_output.say_lines(display.LEGEND, *display.describe_outcome(court_record))
    put_json(display.court_tree(court_record), as_json, output)
    if picture is not None:
        display.court_picture(court_record, run_history, picture)
    raise typer.Exit(0 if court_record.verdict.is_good else FAILED)
