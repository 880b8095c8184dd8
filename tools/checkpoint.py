"""Checkpoints in your hands: verify, list, show, pin, compare, reshape and average them; no GPU is needed."""

# ruff: noqa: E402 (imports take a while, and Ctrl-C must end them quietly)
from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below ends it without a traceback

from pathlib import Path
from typing import Annotated

import typer

from megastable.base.errors import DataError, user_errors
from megastable.convert.tool.makers import MAKERS, Checkpoint
from megastable.report.sheet.options import Csv, Html, Json, Rows
from megastable.report.sheet.output import Output

signal.signal(signal.SIGINT, signal.default_int_handler)

EXAMPLES = """Examples:

CHECKPOINT verify runs/7b

CHECKPOINT list runs/7b

CHECKPOINT show runs/7b/checkpoints/step-500 --tensor "blocks.0.*"

CHECKPOINT pin runs/7b/checkpoints/step-500 --reason "before the new data"

CHECKPOINT accept runs/7b/checkpoints/rejected-step-500 --reason "the kernels were wrong, not the weights"

CHECKPOINT diff runs/7b/checkpoints/step-500 runs/other

CHECKPOINT reshape runs/7b runs/7b-tp2 --tensor 2 --pipeline 1 --zero 1 --data 4

CHECKPOINT average --last 5 runs/7b runs/7b-mean

CHECKPOINT export runs/7b runs/7b-weights

CHECKPOINT import-deepspeed old/checkpoints runs/new --recipe launch/recipes/7b.yaml model.vocab_size=50304

CHECKPOINT import-megatron megatron/checkpoints runs/new --recipe launch/recipes/7b.yaml model.vocab_size=50304

CHECKPOINT export-megatron runs/7b megatron/checkpoints --tensor 2 --pipeline 2

Exit codes: 0 fine, 1 a difference or damage was found (diff, verify), 2 bad input or a checkpoint that cannot be used,
130 Ctrl-C.""".replace("CHECKPOINT", "python tools/checkpoint.py")
app = typer.Typer(help=__doc__, epilog=EXAMPLES, add_completion=False, pretty_exceptions_enable=False)
One = Annotated[Path, typer.Argument(help="RUN/checkpoints/step-N, or RUN/checkpoints/latest")]
# Imports are where they are needed: torch takes a second.


@app.command(epilog=EXAMPLES)
@user_errors()
def verify(paths: Annotated[list[Path], typer.Argument(help="Checkpoints, or runs: all of theirs")],
           as_json: Json = False, csv: Csv = None, html: Html = None, rows: Rows = 100) -> None:  # fmt: skip
    """Check every file against the manifests: torn, cut off, flipped bits, swapped, missing, of another checkpoint."""
    from megastable.convert.tool import verifying

    found = verifying.verify(paths, as_json)
    Output(as_json, csv, html, rows).put(verifying.verified_sheet(found))
    raise typer.Exit(1 if any(one.problems for one in found) else 0)


@app.command("list", epilog=EXAMPLES)
@user_errors()
def list_(run: Annotated[Path, typer.Argument(help="Directory of a run, such as runs/quickstart")],
          as_json: Json = False, csv: Csv = None, html: Html = None, rows: Rows = 100) -> None:  # fmt: skip
    """The checkpoints of a run: step, size, layout, fresh, healthy or suspect, pinned, loss, age. Nothing is hashed."""
    from megastable.convert import catalogue

    Output(as_json, csv, html, rows).put(catalogue.sheet(run, catalogue.entries(run)))


@app.command(epilog=EXAMPLES)
@user_errors()
def show(checkpoint: Checkpoint,
         tensor: Annotated[str | None, typer.Option(help="Only tensors named so, e.g. 'blocks.0.*'")] = None,
         as_json: Json = False, csv: Csv = None, html: Html = None, rows: Rows = 30) -> None:  # fmt: skip
    """What one is: model, step, tokens, layout, versions, fingerprints, and every tensor's norm, largest and mean."""
    from megastable.convert.tool.showing import show as look
    from megastable.run.directory import as_json as to_json

    if as_json and (csv or html):
        raise DataError("--json of show is more than a table: leave out --csv and --html")
    out, shown = Output(False, csv, html, rows), look(checkpoint, tensor)
    if as_json:
        print(to_json(shown.facts, indent=1))
    else:
        out.put(shown.sheet)


@app.command(epilog=EXAMPLES)
@user_errors()
def pin(
    checkpoint: One, reason: Annotated[str, typer.Option(help="Why, for whoever wonders later")] = ""
) -> None:
    """Keep a checkpoint, whatever checkpoint.keep says."""
    from megastable.convert.tool.pinning import pin as keep

    print(keep(checkpoint, reason))


@app.command(epilog=EXAMPLES)
@user_errors()
def unpin(checkpoint: One) -> None:
    """Let a checkpoint go again as any other."""
    from megastable.convert.tool.pinning import unpin as let_go

    print(let_go(checkpoint))


@app.command(epilog=EXAMPLES)
@user_errors()
def accept(
    checkpoint: One, reason: Annotated[str, typer.Option(help="Why, for whoever wonders later")] = ""
) -> None:
    """Let runs go on from a checkpoint that was convicted or put aside (rejected-step-N, suspect-step-N)."""
    from megastable.convert.tool.accepting import accept as take

    print(take(checkpoint, reason))


@app.command(epilog=EXAMPLES)
@user_errors()
def diff(a: Checkpoint, b: Checkpoint,
         weights_only: Annotated[bool, typer.Option("--weights-only", help="No moments, no step and cursor")] = False,
         as_json: Json = False, csv: Csv = None, html: Html = None,
         top: Annotated[int, typer.Option(min=0, help="Tensors that the terminal shows")] = 20) -> None:  # fmt: skip
    """Which tensors differ, the most different first, and by how much; layouts may differ. Ends with 1 if any does."""
    from megastable.convert.tool.comparing import compare

    out = Output(as_json, csv, html, top)
    sheet, same = compare(a, b, weights_only, everything=as_json or bool(csv or html), silent=as_json)
    out.put(sheet)
    raise typer.Exit(0 if same else 1)


for name, maker in MAKERS.items():
    app.command(name, epilog=EXAMPLES)(maker)


if __name__ == "__main__":
    app()
