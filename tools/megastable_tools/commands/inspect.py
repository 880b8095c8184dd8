"""`megastable inspect`: show what a step trained on, and which documents are bad."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megastable.commands.app import App
from megastable.commands.options import Csv, Html, Json, JsonFile, Rows, Run, Texts

app = App("Find the text behind a step or an incident, the steps that read a document, and bad documents.")
Shards = Annotated[list[Path], typer.Argument(help="A corpus, or shards by prefix, .idx or .bin")]
IncidentNumber = Annotated[int, typer.Argument(metavar="NUMBER", help="Of the incident, from 1 on")]
DocumentNumber = Annotated[
    int, typer.Argument(metavar="NUMBER", help="Of the document in the shard, from 0 on")
]
Tokenizer = Annotated[Path | None, typer.Option(help="For shards without a manifest")]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Colour every token by its loss: a checkpoint, or a run")
]
Again = Annotated[bool, typer.Option("--again", help="Forget what an earlier call left in --keep")]


@app.add_command("step", examples="megastable inspect step runs/quickstart 120-122 --html batch.html")
def inspect_step(run: Run, steps: Annotated[str, typer.Argument(metavar="STEP[-STEP]")], checkpoint: Checkpoint = None,
                 as_json: Json = False, output: JsonFile = None, csv: Csv = None, html: Html = None, rows: Rows = 20,
                 texts: Texts = 1) -> None:  # fmt: skip
    """Show what a step trained on: positions, corpora, shards, documents, tokens, bytes, losses, text."""
    from megastable.report.sheet.output import Output
    from megastable_tools.forensics.history import History
    from megastable_tools.forensics.samples import losses_under, step_range, step_sheet

    out, (first_step, last_step) = Output(as_json, csv, html, rows, texts, output=output), step_range(steps)
    out.put_sheet(step_sheet(History(run), first_step, last_step, out.wanted_texts, losses_under(checkpoint)))


@app.add_command(
    "incident", examples="megastable inspect incident runs/quickstart 1 --checkpoint runs/quickstart"
)
def inspect_incident(run: Run, number: IncidentNumber, checkpoint: Checkpoint = None, as_json: Json = False,
                     output: JsonFile = None, csv: Csv = None, html: Html = None, rows: Rows = 20,
                     texts: Texts = 3) -> None:  # fmt: skip
    """Show the samples of an incident, the bad ones first."""
    from megastable.report.sheet.output import Output
    from megastable_tools.forensics.history import History
    from megastable_tools.forensics.samples import incident_sheet, losses_under

    out = Output(as_json, csv, html, rows, texts, output=output)
    out.put_sheet(incident_sheet(History(run), number, out.wanted_texts, losses_under(checkpoint)))


@app.add_command(
    "document",
    examples="megastable inspect document data/stdlib-planted/stdlib-train-00000 490 --run runs/quickstart",
)
def inspect_document(shard: Annotated[Path, typer.Argument(metavar="SHARD", help="Its prefix, .idx or .bin")],
                     number: DocumentNumber,
                     run: Annotated[list[Path] | None, typer.Option(help="Runs whose steps to list")] = None,
                     tokenizer: Tokenizer = None, as_json: Json = False, output: JsonFile = None,
                     csv: Csv = None, html: Html = None, rows: Rows = 20, texts: Texts = 1) -> None:  # fmt: skip
    """Show a document, and every step of the given runs that trained on it."""
    from megastable.report.sheet.output import Output
    from megastable_tools.forensics.consumption import document_sheet
    from megastable_tools.forensics.history import History
    from megastable_tools.forensics.shard_set import open_shelf, prefix_of

    shard_shelf, runs = open_shelf([shard], tokenizer), [History(given_run) for given_run in run or ()]
    found_sheet = document_sheet(shard_shelf, prefix_of(shard).name, number, runs, 20_000 if html else 1_000)
    Output(as_json, csv, html, rows, texts, output=output).put_sheet(found_sheet)


@app.add_command("run", examples="megastable inspect run runs/quickstart --json")
def run_(
    run: Run, as_json: Json = False, output: JsonFile = None, csv: Csv = None, html: Html = None
) -> None:
    """Show what a run has read so far: tokens and epochs of every corpus, skips, blends."""
    from megastable.report.sheet.output import Output
    from megastable_tools.forensics.consumption import run_sheet
    from megastable_tools.forensics.history import History

    Output(as_json, csv, html, output=output).put_sheet(run_sheet(History(run)))


@app.add_command("scan", examples="megastable inspect scan data/mine --html mine.html")
def scan_corpus(
    shards: Shards,
    against: Annotated[Path | None, typer.Option(help="What is usual. Default: this corpus")] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder of the scan. Default: scans/NAME")] = None,
    workers: Annotated[int | None, typer.Option(min=1, show_default="one per CPU", help="Processes")] = None,
    near: Annotated[bool, typer.Option("--near", help="Look for near duplicates, too")] = False,
    top: Annotated[int, typer.Option(min=1, help="Worst documents in tables and pages")] = 200,
    tokenizer: Tokenizer = None, again: Again = False, as_json: Json = False, output: JsonFile = None,
    csv: Csv = None, html: Html = None,
    rows: Rows = 20, texts: Texts = 1
) -> None:  # fmt: skip
    """Measure every document of a corpus, and rank the odd ones, with reasons. An interrupted scan resumes."""
    from megastable.report.sheet.output import Output
    from megastable_tools.forensics.scanning.scan import default_folder, scan_shards
    from megastable_tools.forensics.scanning.scan_sheet import scan_sheet_of
    from megastable_tools.forensics.scanning.units import workers_for
    from megastable_tools.forensics.shard_set import open_shelf

    sheet_output = Output(as_json, csv, html, rows, texts, output=output)
    shelf, reference = open_shelf(shards, tokenizer), open_shelf([against]) if against else None
    folder = keep or default_folder(shelf)
    made = scan_shards(shelf, folder, against=reference, workers=workers_for(workers), near=near, top=top, again=again,
                       progress=not as_json)  # fmt: skip
    sheet_output.put_sheet(scan_sheet_of(made, shelf, top, folder))


@app.add_command("score", examples="megastable inspect score data/mine --checkpoint runs/7b --sample 1000")
def score_corpus(
    shards: Shards, checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or a run for its newest")],
     keep: Annotated[Path | None, typer.Option(help="Folder of the scores. Default: scores/NAME")] = None,
     documents: Annotated[Path | None, typer.Option(help="Only those of a plan or a list")] = None,
     sample: Annotated[int | None, typer.Option(min=1, help="Only N documents, evenly spread")] = None,
     gradients: Annotated[bool, typer.Option("--gradients", help="Gradient norms: three times slower")] = False,
     exact: Annotated[bool, typer.Option("--exact", help="Compute in fp32: slower")] = False,
     by: Annotated[str, typer.Option(help="Order: window, loss, low, odd or gradient")] = "window",
     top: Annotated[int, typer.Option(min=1, help="Documents in tables and pages")] = 200,
     tokenizer: Tokenizer = None, again: Again = False, as_json: Json = False, output: JsonFile = None,
    csv: Csv = None, html: Html = None,
     rows: Rows = 20, texts: Texts = 1
) -> None:  # fmt: skip
    """Measure the loss of every document under a checkpoint, its worst window, and its gradient norm."""
    from megastable.report.sheet.output import Output
    from megastable_tools.forensics.scoring.document_scores import Scorer, pick_listed, score_shelf
    from megastable_tools.forensics.scoring.losses import load_model
    from megastable_tools.forensics.scoring.score_sheet import score_sheet
    from megastable_tools.forensics.scoring.scored import check_order
    from megastable_tools.forensics.shard_set import open_shelf

    check_order(by)
    shelf = open_shelf(shards, tokenizer)
    show = Output(as_json, csv, html, rows, texts, on_page=50, output=output)
    folder = keep or Path("scores") / shelf.folder_name
    chosen = pick_listed(shelf, documents) if documents is not None else None
    score_shelf(shelf, checkpoint, folder, documents=chosen, sample=sample, gradients=gradients, exact=exact,
                again=again, progress=not as_json)  # fmt: skip
    show.put_sheet(
        score_sheet(
            folder, shelf, Scorer.of_shelf(shelf, load_model(checkpoint, exact)), top, show.wanted_texts, by
        )
    )


@app.add_command("ahead", examples="megastable inspect ahead runs/7b --steps 500")
def inspect_ahead(run: Run, steps: Annotated[int, typer.Option(min=1, help="Number of steps")] = 100,
                  as_json: Json = False, output: JsonFile = None, csv: Csv = None, html: Html = None, rows: Rows = 20,
                  texts: Texts = 1) -> None:  # fmt: skip
    """Show which samples of the next steps of a run look corrupt."""
    from megastable.report.sheet.output import Output
    from megastable_tools.forensics.history import History
    from megastable_tools.forensics.prescan import ahead_sheet

    sheet_output = Output(as_json, csv, html, rows, texts, output=output)
    sheet_output.put_sheet(ahead_sheet(History(run), steps, sheet_output.wanted_texts))
