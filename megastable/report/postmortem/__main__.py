"""python -m megastable.report.postmortem RUN [NUMBER] [--json]"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megastable.base.errors import DataError, user_errors
from megastable.report.postmortem import incidents_of, write_incidents
from megastable.run.directory import as_json

EXAMPLES = """Examples:

POSTMORTEM runs/quickstart

POSTMORTEM runs/quickstart 1

POSTMORTEM runs/quickstart 1 --json | jq .incident.positions""".replace(
    "POSTMORTEM", "python -m megastable.report.postmortem"
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=EXAMPLES)
@user_errors()
def run_postmortem(
    run: Annotated[Path, typer.Argument(help="The directory of a run")],
    number: Annotated[
        int | None, typer.Argument(help="One incident, written again though nothing changed")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the facts instead of writing files")] = False,
) -> None:
    """Write the files of a run's incidents: incidents/NNNN/report.html, postmortem.md and what they are made from."""
    if json:
        found = [e.model_dump(mode="json") for e in incidents_of(run) if number in (None, e.incident.number)]
        if number is not None and not found:
            raise DataError(f"{run / 'journal.jsonl'} has no incident {number}")
        print(as_json(found if number is None else found[0], indent=1))
        return
    written_folders = write_incidents(run, number)
    for incident_folder in written_folders:
        print(incident_folder / "report.html")
    if not written_folders:
        index_page = run / "incidents" / "index.html"
        print(f"nothing new: {index_page}" if index_page.exists() else f"{run}: no incidents")


if __name__ == "__main__":
    app(prog_name="python -m megastable.report.postmortem")
