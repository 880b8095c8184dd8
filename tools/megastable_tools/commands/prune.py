"""`megastable prune`: remove documents, or spans of them, from a corpus."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megastable.base.errors import DataError
from megastable.commands.app import App
from megastable.commands.options import Json, Run, put_json

if TYPE_CHECKING:
    from megastable_tools.forensics.pruning.prune_plan import Loss

app = App("Remove documents or spans from a corpus: a plan to edit, a new corpus, a check of what is left.")
USUAL = "5%"
Most = Annotated[
    str, typer.Option(metavar="SHARE", help="The largest share of tokens or documents that may be removed")
]


@app.add_command(
    "plan",
    examples="""
    megastable prune plan data/mine --incident runs/7b:3 --spans --output bad.txt
    megastable prune plan data/mine --step runs/7b:90-91 --spans --output bad.txt
    megastable prune plan data/mine --scan scans/mine --kind "random tokens" --score 6 --output bad.txt
    megastable prune plan data/mine --list ids.txt --output bad.txt
    """,
)
def plan_pruning(
    corpus: Path,
    incident: Annotated[list[str] | None, typer.Option(help="RUN:NUMBER, e.g. runs/7b:3; repeatable")] = None,
    step: Annotated[list[str] | None, typer.Option(help="RUN:STEP or RUN:FIRST-LAST, all samples that these steps "
                                                   "read, e.g. runs/7b:90-91; repeatable")] = None,
    positions: Annotated[list[str] | None, typer.Option(help="RUN:FIRST-LAST, samples of the run by position, "
                                                        "e.g. runs/7b:1908-1947; repeatable")] = None,
    scan: Annotated[Path | None, typer.Option(help="A scan that `megastable inspect scan` made")] = None,
    score: Annotated[float | None, typer.Option(help="With --scan: documents with at least this score")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="With --scan: documents of this kind; repeatable")] = None,
    duplicates: Annotated[bool, typer.Option("--duplicates", help="With --scan: later duplicates")] = False,
    listed: Annotated[list[Path] | None, typer.Option("--list", help="A text, CSV or JSONL list")] = None,
    spans: Annotated[bool, typer.Option("--spans", help="Only spans: the tokens of the samples, or "
                                         "what a scan finds odd (duplicates still go as a whole)")] = False,
    most: Most = USUAL,
    output: Annotated[Path, typer.Option(help="The plan")] = Path("prune-plan.txt"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there")] = False,
    as_json: Json = False
) -> None:  # fmt: skip
    """Write a plan: which documents or spans to remove, and why. It is a text file to read and edit."""
    from megastable_tools.forensics.pruning import choose
    from megastable_tools.forensics.pruning.prune_plan import parse_share

    _, plan_loss = choose.make_plan(
        corpus, output, lists=listed or (), incidents=incident or (), steps=step or (), positions=positions or (),
        scan=scan, score=score, kinds=kind or (), duplicates=duplicates, spans=spans, most=parse_share(most),
        overwrite=overwrite,
    )  # fmt: skip
    what = f"{output} takes {plan_loss}; delete the lines of what is to stay"
    next_command = f"megastable prune apply {output} OUTPUT" + (f" --most {most}" if most != USUAL else "")
    if as_json:
        put_json({"plan": str(output), **plan_loss.told}, True, None)
    else:
        print(f"{what}, then: {next_command}")


@app.add_command("apply", examples="megastable prune apply bad.txt data/mine-pruned")
def apply_plan(plan: Path, output: Path,
               corpus: Annotated[Path | None, typer.Option(help="Where it is now, if it was moved")] = None,
               most: Most = USUAL, as_json: Json = False) -> None:  # fmt: skip
    """Write OUTPUT, a new corpus without the documents and spans of a plan; the old one is not changed."""
    from megastable.base.progress_bar import show_bar
    from megastable_tools.forensics.pruning import prune
    from megastable_tools.forensics.pruning.prune_plan import parse_share

    most_share = parse_share(most)

    def say(loss: Loss) -> None:
        if not as_json:
            print(f"{plan} takes {loss}", flush=True)

    with show_bar("pruning", prune.corpus_bytes(plan, corpus), as_json) as progress_bar:
        pruned_corpus = prune.apply_plan(plan, output, corpus, progress_bar, most_share, say)
    if as_json:
        put_json(pruned_corpus.model_dump(mode="json", exclude_none=True), True, None)
    else:
        print(f"pruned {output}: {pruned_corpus}")


@app.add_command("verify", examples="megastable prune verify data/mine-pruned --plan bad.txt")
def verify_pruned(pruned: Path,
                  original: Annotated[Path | None, typer.Option(help="Where it is now, if it was moved")] = None,
                  plan: Annotated[Path | None, typer.Option(help="Check that exactly its documents are gone")] = None,
                  as_json: Json = False) -> None:  # fmt: skip
    """Check that PRUNED is the original without the removed documents and spans. Exit code 2 if it is not."""
    from megastable.base.progress_bar import show_bar
    from megastable_tools.forensics.pruning import prune

    with show_bar("comparing", prune.original_bytes(pruned, original), as_json) as progress_bar:
        prune_proof = prune.verify_pruned(pruned, original, plan, progress_bar)
    if as_json:
        put_json(asdict(prune_proof) | {"original": str(prune_proof.original)}, True, None)
    else:
        print(f"verified {pruned}: {prune_proof}")


@app.add_command(
    "skip",
    examples="""
    megastable prune skip runs/7b bad.txt --reason "mojibake in web"
    megastable prune skip runs/7b --corpus web
    """,
)
def skip_documents(
    run: Run, plan: Annotated[Path | None, typer.Argument(help="A plan for one of the run's corpora")] = None,
    corpus: Annotated[str | None, typer.Option(help="Leave a whole corpus out instead, by its name")] = None,
    reason: Annotated[str | None, typer.Option(help="Why, for the skip ledger and the record of the run")] = None,
    as_json: Json = False
) -> None:  # fmt: skip
    """Make a run skip the documents of a plan, a live run from its next step on. No shard is changed."""
    from megastable_tools.forensics.history import History
    from megastable_tools.forensics.skip import skip_plan, swap_out

    if (plan is None) == (corpus is None):
        raise DataError("say what to leave out: a plan, or --corpus NAME")
    run_history = History(run)
    skip_result = (
        skip_plan(run_history, plan, reason)
        if plan is not None
        else swap_out(run_history, str(corpus), *([reason] if reason else []))
    )
    if as_json:
        put_json(asdict(skip_result), True, None)
    else:
        print(skip_result.text)
