"""`megastable note`: a person's note in the journal of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from megastable.commands.app import App
from megastable.commands.options import Json, Run, put_json

app = App()


@app.add_command(
    examples="""
    megastable note runs/7b "learning rate looks high since the new blend, watching"
    megastable note runs/7b "the dip is the move to other hosts" --step 41250
    """,
    more="The run may be at work or not. The record that `megastable report` makes has the note, without the name, "
    "and without words that megastable itself does not use.\n\nExit codes: 0 written, 2 bad input.",
)
def note(
    run: Run,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to remember, one line")],
    step: Annotated[
        int | None, typer.Option(min=0, help="That it is about. Default: the last one that was done")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a note in the journal of a run: who, when, at which step; the run page and the record show it."""
    from megastable.base.errors import DataError
    from megastable.base.process import login_name
    from megastable.run.directory import RunDirectory, read_object
    from megastable.run.events.event import read_whole
    from megastable.run.events.people_events import Note
    from megastable.run.log import RunLog

    run_directory, text = RunDirectory(run), " ".join(text.split())
    if not run_directory.journal.is_file():
        hint = "give the directory of a run, such as runs/quickstart"
        raise DataError(f"{run_directory.journal} does not exist: {hint}")
    if not text:
        raise DataError("the note is empty: write it in quotes behind the run")
    done_step = read_whole(read_object(run_directory.progress).get("step"))
    if step is not None and done_step is not None and step > done_step:
        raise DataError(
            f"--step {step}: the run has done {done_step} steps; a note is about what has happened"
        )
    note_step = done_step if step is None else step
    note_event = Note(step=note_step, who=login_name(), text=text)
    RunLog(run_directory).write_event(note_event)
    if as_json:
        put_json(note_event.fields, True, None)
    else:
        print(f"{run_directory.journal}: {note_event.format_line() or note_event.format_sentence()}")
