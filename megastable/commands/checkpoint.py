"""`megastable checkpoint`: verify, list, show, pin, accept and compare checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megastable.base.errors import BAD_INPUT, FAILED, DataError
from megastable.commands.app import App
from megastable.commands.checkpoint_makers import Checkpoint, add_makers
from megastable.commands.options import Csv, Html, Json, JsonFile, Rows, Run, put_json

app = App(
    "Verify, list, show, pin, compare, reshape, branch, average, roll back to checkpoints. Needs no GPU."
)
Reason = Annotated[str, typer.Option(help="Why, for later readers")]
One = Annotated[Path, typer.Argument(help="RUN/checkpoints/step-N, or RUN/checkpoints/latest")]


@app.add(
    examples="""
    megastable checkpoint verify runs/7b
    megastable checkpoint verify runs/7b/checkpoints/step-500 runs/other --json
    """,
    more="Exit codes: 0 all good, 2 one is damaged, or there is none.",
)
def verify(paths: Annotated[list[Path], typer.Argument(help="Checkpoints, or runs for all of theirs")],
           as_json: Json = False, output: JsonFile = None, csv: Csv = None, html: Html = None,
           rows: Rows = 100) -> None:  # fmt: skip
    """Check every file against the manifests: torn, cut off, flipped bits, swapped, missing, of another checkpoint."""
    from megastable.convert import verifying
    from megastable.report.sheet.output import Output

    found = verifying.verify(paths, as_json)
    Output(as_json, csv, html, rows, output=output).put(verifying.verified_sheet(found))
    raise typer.Exit(BAD_INPUT if any(one.problems for one in found) else 0)


@app.add(
    "list",
    examples="""
    megastable checkpoint list runs/7b
    """,
)
def list_(run: Run, as_json: Json = False, output: JsonFile = None, csv: Csv = None, html: Html = None,
          rows: Rows = 100) -> None:  # fmt: skip
    """List a run's checkpoints: step, size, layout, fresh, healthy or suspect, pinned, loss, age. Hashes nothing."""
    from megastable.convert import catalogue
    from megastable.report.sheet.output import Output

    Output(as_json, csv, html, rows, output=output).put(catalogue.sheet(run, catalogue.entries(run)))


@app.add(
    examples="""
    megastable checkpoint show runs/7b/checkpoints/step-500 --tensor "blocks.0.*"
    """,
)
def show(checkpoint: Checkpoint,
         tensor: Annotated[str | None, typer.Option(help="Only tensors whose name matches, e.g. 'blocks.0.*'")] = None,
         as_json: Json = False, output: JsonFile = None, csv: Csv = None, html: Html = None,
         rows: Rows = 30) -> None:  # fmt: skip
    """Show a checkpoint: model, step, tokens, layout, versions, fingerprints, norm, maximum and mean of each tensor."""
    from megastable.convert.showing import show as look
    from megastable.report.sheet.output import Output

    if as_json and (csv or html):
        raise DataError("--json of show is more than a table: leave out --csv and --html")
    out, shown = Output(False, csv, html, rows), look(checkpoint, tensor)
    if not as_json:
        out.put(shown.sheet)
    put_json(shown.facts, as_json, output)


@app.add(
    examples="""
    megastable checkpoint pin runs/7b/checkpoints/step-500 --reason "before the new data"
    """,
)
def pin(checkpoint: One, reason: Reason = "") -> None:
    """Keep a checkpoint, whatever checkpoint.keep says."""
    from megastable.convert.marking import pin as keep

    print(keep(checkpoint, reason))


@app.add(
    examples="""
    megastable checkpoint unpin runs/7b/checkpoints/step-500
    """,
)
def unpin(checkpoint: One) -> None:
    """Undo pin: checkpoint.keep may delete it again."""
    from megastable.convert.marking import unpin as let_go

    print(let_go(checkpoint))


@app.add(
    examples="""
    megastable checkpoint accept runs/7b/checkpoints/rejected-step-500 --reason "the kernels were wrong"
    """,
)
def accept(checkpoint: One, reason: Reason = "") -> None:
    """Allow runs to resume from a checkpoint that was rejected or set aside (rejected-step-N, suspect-step-N)."""
    from megastable.convert.marking import accept as take

    print(take(checkpoint, reason))


@app.add(
    examples="""
    megastable checkpoint rollback runs/7b/checkpoints/step-500 --reason "step 520 spiked"
    """,
)
def rollback(checkpoint: One, reason: Reason = "") -> None:
    """Have a run that is not at work go on from an earlier checkpoint: newer ones are set aside, nothing is deleted."""
    from megastable.convert.marking import roll_back

    print(roll_back(checkpoint, reason))


@app.add(
    examples="""
    megastable checkpoint diff runs/7b/checkpoints/step-500 runs/other
    """,
    more="Exit codes: 0 the same, 1 they differ, 2 bad input or a damaged checkpoint.",
)
def diff(a: Checkpoint, b: Checkpoint,
         weights_only: Annotated[bool, typer.Option("--weights-only", help="Ignore moments, step and cursor")] = False,
         as_json: Json = False, output: JsonFile = None, csv: Csv = None, html: Html = None,
         top: Annotated[int, typer.Option(min=0, help="Tensors to print")] = 20) -> None:  # fmt: skip
    """Compare two checkpoints tensor by tensor, largest difference first. Layouts may differ. Exit code 1 if any."""
    from megastable.convert.diff import compare
    from megastable.report.sheet.output import Output

    out = Output(as_json, csv, html, top, output=output)
    sheet, same = compare(a, b, weights_only, bool(as_json or output or csv or html), silent=as_json)
    out.put(sheet)
    raise typer.Exit(0 if same else FAILED)


add_makers(app)
