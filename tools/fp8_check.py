"""Would this model be stable in FP8, and which layers had better stay out of it? No FP8 hardware is needed."""

# ruff: noqa: E402 (imports take a while, and Ctrl-C must end them quietly)
from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below ends it without a traceback

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megastable.base import durable
from megastable.base.errors import ConfigError, user_errors
from megastable.base.text import visible
from megastable.fp8_check import display
from megastable.fp8_check.advice import USUAL
from megastable.run.directory import as_json

signal.signal(signal.SIGINT, signal.default_int_handler)

EXAMPLES = """Examples:

CHECK runs/quickstart

CHECK runs/7b/checkpoints/step-5000 --recipe delayed --samples 32 --json fp8.json

CHECK runs/7b --recipe current --recipe block --plot fp8.png --all

CHECK runs/7b --text book.txt --micro-batch 1

Exit codes: 0 stable by some recipe, with the layers kept that it names; 1 by none; 2 bad input.""".replace(
    "CHECK", "python tools/fp8_check.py"
)
PICTURES = (".png", ".svg", ".pdf")


class Recipe(StrEnum):
    current = "current"
    delayed = "delayed"
    block = "block"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__, epilog=EXAMPLES)
@user_errors()
def check(
    checkpoint: Annotated[Path, typer.Argument(help="RUN/checkpoints/step-N, or a run: its newest")],
    recipes: Annotated[
        list[Recipe] | None,
        typer.Option("--recipe", help="Of FP8; repeatable. Default: all"),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="To measure on, of the model's sequence length")] = 8,
    micro_batch: Annotated[int | None, typer.Option(min=1, show_default="the run's", help="At a time")] = None,
    history: Annotated[
        int, typer.Option(min=1, max=1024, help="Micro-batches before them, for scales of delayed")
    ] = 4,
    text: Annotated[
        Path | None, typer.Option(help="A text file, in place of the run's samples")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="For --text", show_default="the run's")] = None,
    formats: Annotated[
        Literal["auto", "hybrid", "e4m3"] | None,
        typer.Option(show_default="the run's, else auto", help="As precision.fp8.formats"),
    ] = None,
    dtype: Annotated[
        Literal["bf16", "fp32"] | None, typer.Option(show_default="as the run trains", help="Around FP8")
    ] = None,
    device: Annotated[str | None, typer.Option(show_default="cuda where there is one, else cpu")] = None,
    rows: Annotated[int, typer.Option(min=0, help="Layers that a table shows")] = 8,
    everything: Annotated[bool, typer.Option("--all", help="All layers, and every tensor")] = False,
    json: Annotated[Path | None, typer.Option(help="All numbers")] = None,
    plot: Annotated[Path | None, typer.Option(help="A map of errors: .png, .svg or .pdf")] = None,
) -> None:  # fmt: skip
    """See the module."""
    for option, path in (("--json", json), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no directory {path.parent}")
    if plot is not None and plot.suffix not in PICTURES:
        raise ConfigError(f"--plot {plot}: a name ending in {', '.join(PICTURES)}")
    # Not above: --help needs no torch.
    from megastable.fp8_check.effect import check as measure
    from megastable.fp8_check.effect import passes
    from megastable.fp8_check.material import configs_of, gather, in_words, open_model

    wanted = [recipe.value for recipe in dict.fromkeys(recipes or Recipe)]
    model = open_model(checkpoint, dtype, device)
    configs, said = configs_of(model.run, wanted, formats, history)
    size = min(micro_batch or model.run.train.micro_batch, samples)
    before = history * size if "delayed" in configs else 0
    material = gather(model, before + samples, text, tokenizer)
    batches = material.batches(model, size)
    warm, measured = batches[: before // size], batches[before // size :]
    spread = f"; {samples} of them measured, {before} before these for delayed scales" if before else ""
    _say(in_words(model), f"{material.origin}{spread}", *(f"note: {note}" for note in material.notes))
    columns = TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=passes(len(measured), len(warm), configs))
        found = measure(
            model, measured, warm, configs, USUAL, lambda: progress.advance(task),
            lambda more: progress.update(task, total=(progress.tasks[0].total or 0) + more),
        )  # fmt: skip
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, emoji=False, highlight=False, width=120)
    _say("", display.LEGEND, "")
    for outcome in found.outcomes:
        console.print(display.layers(outcome, len(outcome.layers) if everything else rows))
        if everything:
            console.print(display.tensors(outcome))
    console.print(display.models(found.loss, found.outcomes))
    _say(*display.advice(found.outcomes, said))
    if json is not None:
        about: dict[str, Any] = {
            "checkpoint": str(model.checkpoint), "step": model.step, "dtype": str(next(model.parameters()).dtype),
            "samples": samples, "micro_batch": size, "history": history, "origin": material.origin,
            "notes": list(material.notes),
        }  # fmt: skip
        durable.write_output(
            json, as_json(about | display.tree(found.loss, found.outcomes, said, USUAL), indent=1) + "\n"
        )
    if plot is not None:
        display.picture(found.outcomes, f"FP8: {model.checkpoint}", plot)
    raise typer.Exit(0 if any(outcome.stable for outcome in found.outcomes) else 1)


def _say(*lines: str) -> None:
    """Lines that a terminal may wrap, and a pipe gets whole: commands are copied from them."""
    console = Console(markup=False, emoji=False, highlight=False)
    for line in lines:
        console.print(visible(line), soft_wrap=True)


if __name__ == "__main__":
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:  # a locale that lacks a character must not end it
        reconfigure(errors="backslashreplace")
    app()
