"""Documents, or spans of them, out of a corpus: a plan to edit, a new corpus, the proof that the rest is intact."""

# ruff: noqa: E402 (imports take a while, and Ctrl-C must end them quietly)
from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below ends it without a traceback

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megastable.base.errors import DataError, user_errors
from megastable.base.progress_bar import bar
from megastable.forensics.pruning import choose, prune
from megastable.forensics.pruning import proof as prune_check
from megastable.forensics.pruning.prune import corpus_bytes
from megastable.forensics.pruning.token_loss import MOST, Loss, share_of

signal.signal(signal.SIGINT, signal.default_int_handler)

EXAMPLES = """Examples:

PRUNE plan data/mine --incident runs/7b:3 --spans --output bad.txt

PRUNE plan data/mine --scan scans/mine --kind "random tokens" --score 6 --output bad.txt

PRUNE plan data/mine --list ids.txt --output bad.txt

PRUNE apply bad.txt data/mine-pruned

PRUNE verify data/mine-pruned --plan bad.txt

PRUNE skip runs/7b bad.txt

PRUNE skip runs/7b --corpus web""".replace("PRUNE", "python tools/prune_data.py")
app = typer.Typer(help=__doc__, epilog=EXAMPLES, add_completion=False, pretty_exceptions_enable=False)
Most = Annotated[
    str, typer.Option(metavar="SHARE", help="Of the tokens, and of the documents, that may be gone")
]
Json = Annotated[bool, typer.Option("--json", help="Print a summary for machines")]


@app.command()
@user_errors()
def plan(corpus: Path,
         incident: Annotated[list[str] | None, typer.Option(help="RUN:NUMBER, e.g. runs/7b:3; repeatable")] = None,
         scan: Annotated[Path | None, typer.Option(help="A scan that tools/inspect_data.py made")] = None,
         score: Annotated[float | None, typer.Option(help="Of the scan: this and more")] = None,
         kind: Annotated[list[str] | None, typer.Option(help="Of the scan: of this kind; repeatable")] = None,
         duplicates: Annotated[bool, typer.Option("--duplicates", help="Of the scan: copies, but the first")] = False,
         listed: Annotated[list[Path] | None, typer.Option("--list", help="SHARD DOCUMENT, CSV, JSONL")] = None,
         spans: Annotated[bool, typer.Option("--spans", help="Of an incident the tokens of its samples, of a scan what "
                                              "is odd: not whole documents")] = False,
         most: Most = f"{MOST:.0%}",
         output: Annotated[Path, typer.Option(help="The plan")] = Path("prune-plan.txt"),
         overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there")] = False,
         as_json: Json = False) -> None:  # fmt: skip
    """Write down which documents are to go, or which spans of them, and why: a text file to read and to edit."""
    _, loss = choose.make_plan(
        corpus, output, lists=listed or (), incidents=incident or (), scan=scan, score=score, kinds=kind or (),
        duplicates=duplicates, spans=spans, most=share_of(most), overwrite=overwrite,
    )  # fmt: skip
    what = f"{output} takes {loss}; delete the lines of what is to stay"
    then = f"python tools/prune_data.py apply {output} OUTPUT" + (
        f" --most {most}" if most != f"{MOST:.0%}" else ""
    )
    print(json.dumps({"plan": str(output), **loss.told}) if as_json else f"{what}, then: {then}")


@app.command()
@user_errors()
def apply(plan: Path, output: Path,
          corpus: Annotated[Path | None, typer.Option(help="Where it lies now, if not where the plan says")] = None,
          most: Most = f"{MOST:.0%}", as_json: Json = False) -> None:  # fmt: skip
    """Make OUTPUT, a new corpus without the documents and spans of a plan; the old one stays as it is."""
    share = share_of(most)

    def say(loss: Loss) -> None:
        if not as_json:
            print(f"{plan} takes {loss}", flush=True)

    with bar("pruning", corpus_bytes(plan, corpus), as_json) as progress:
        made = prune.apply(plan, output, corpus, progress, share, say)
    print(made.model_dump_json(exclude_none=True) if as_json else f"pruned {output}: {made}")


@app.command()
@user_errors()
def verify(pruned: Path,
           original: Annotated[Path | None, typer.Option(help="Where it lies now, if not where it lay")] = None,
           plan: Annotated[Path | None, typer.Option(help="Are just its documents gone?")] = None,
           as_json: Json = False) -> None:  # fmt: skip
    """Prove that PRUNED is the original without the documents that are gone; ends with 2 if it is not."""
    with bar("comparing", prune_check.original_bytes(pruned, original), as_json) as progress:
        proof = prune_check.verify(pruned, original, plan, progress)
    print(json.dumps(asdict(proof), default=str) if as_json else f"verified {pruned}: {proof}")


@app.command()
@user_errors()
def skip(run: Path, plan: Annotated[Path | None, typer.Argument(help="Of documents of one of its corpora")] = None,
         corpus: Annotated[str | None, typer.Option(help="Swap a whole corpus out instead, by its name")] = None,
         as_json: Json = False) -> None:  # fmt: skip
    """Have a run leave the documents of a plan out, from its next step on if it is at work; no shard is changed."""
    from megastable.forensics.history import History
    from megastable.forensics.skip import skip_plan, swap_out

    if (plan is None) == (corpus is None):
        raise DataError("say what to leave out: a plan, or --corpus NAME")
    history = History(run)
    done = skip_plan(history, plan) if plan is not None else swap_out(history, str(corpus))
    print(json.dumps(asdict(done)) if as_json else done.text)


if __name__ == "__main__":
    app()
