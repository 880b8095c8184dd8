"""What was in that batch? From steps, incidents and documents to text, and back; and which documents are bad."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megastable.errors import DataError, user_errors
from megastable.report.sheet.options import Csv, Html, Json, Rows, Texts
from megastable.report.sheet.output import Output

EXAMPLES = """Examples:

INSPECT step runs/quickstart 120-122 --html batch.html

INSPECT incident runs/quickstart 1

INSPECT document data/stdlib-planted/stdlib-train-00000 490 --run runs/quickstart

INSPECT run runs/quickstart --json""".replace("INSPECT", "python tools/inspect_data.py")
app = typer.Typer(help=__doc__, epilog=EXAMPLES, add_completion=False, pretty_exceptions_enable=False)
Run = Annotated[Path, typer.Argument(help="Directory of a run, such as runs/quickstart")]
Checkpoint = Annotated[Path | None, typer.Option(help="Colour every token by its loss under this one")]


@app.command(epilog=EXAMPLES)
@user_errors()
def step(run: Run, steps: Annotated[str, typer.Argument(metavar="STEP[-STEP]")], checkpoint: Checkpoint = None,
         as_json: Json = False, csv: Csv = None, html: Html = None, rows: Rows = 20,
         texts: Texts = 1) -> None:  # fmt: skip
    """What a step trained on: positions, corpora, shards, documents, tokens, bytes, losses, text."""
    from megastable.forensics.history import History
    from megastable.forensics.samples import step_sheet

    first, last = step_range(steps)
    out = Output(as_json, csv, html, rows, texts)
    out.put(step_sheet(History(run), first, last, out.wanted_texts, losses(checkpoint)))


@app.command(epilog=EXAMPLES)
@user_errors()
def incident(run: Run, number: int, checkpoint: Checkpoint = None, as_json: Json = False, csv: Csv = None,
             html: Html = None, rows: Rows = 20, texts: Texts = 3) -> None:  # fmt: skip
    """The samples of an incident, the guilty ones first."""
    from megastable.forensics.history import History
    from megastable.forensics.samples import incident_sheet

    out = Output(as_json, csv, html, rows, texts)
    out.put(incident_sheet(History(run), number, out.wanted_texts, losses(checkpoint)))


@app.command(epilog=EXAMPLES)
@user_errors()
def document(shard: Annotated[Path, typer.Argument(help="PREFIX, .idx or .bin of a shard")], number: int,
             run: Annotated[list[Path] | None, typer.Option(help="Every step of it that read the document")] = None,
             tokenizer: Annotated[Path | None, typer.Option(help="For a shard without a corpus")] = None,
             as_json: Json = False, csv: Csv = None, html: Html = None, rows: Rows = 20,
             texts: Texts = 1) -> None:  # fmt: skip
    """A document, and every step of the runs given that ever trained on it."""
    from megastable.forensics.history import History
    from megastable.forensics.shelf import open_shelf, prefix_of
    from megastable.forensics.whereabouts import document_sheet

    shelf = open_shelf([shard], tokenizer)
    Output(as_json, csv, html, rows, texts).put(
        document_sheet(shelf, prefix_of(shard).name, number, [History(path) for path in run or ()])
    )


@app.command("run", epilog=EXAMPLES)
@user_errors()
def run_(run: Run, as_json: Json = False, csv: Csv = None, html: Html = None) -> None:
    """What a run has read so far: tokens and epochs of every corpus, skips, blends."""
    from megastable.forensics.consumption import run_sheet
    from megastable.forensics.history import History

    Output(as_json, csv, html).put(run_sheet(History(run)))


def step_range(text: str) -> tuple[int, int]:
    """STEP or STEP-STEP."""
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
        raise DataError(f"{text!r} is no step and no range of steps: write 120 or 120-122")
    return int(first), int(last or first)


def losses(checkpoint: Path | None):  # type: ignore[no-untyped-def]
    """What colours the tokens; imports torch only where it is wanted."""
    if checkpoint is None:
        return None
    from megastable.forensics.score import losses_under

    return losses_under(checkpoint)


if __name__ == "__main__":
    app()
