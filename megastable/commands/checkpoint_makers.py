"""The commands of `megastable checkpoint` that make a new run from one or more checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megastable.commands.app import App
from megastable.commands.options import Json, Overrides, put_json

if TYPE_CHECKING:
    from megastable.convert.reshaping import Made

Checkpoint = Annotated[Path, typer.Argument(help="RUN/checkpoints/step-N, or a run: its newest good one")]
Out = Annotated[Path, typer.Argument(help="A new run directory")]
Tensor = Annotated[
    int | None, typer.Option(min=1, show_default="unchanged", help="Ranks that share every layer")
]
Pipeline = Annotated[int | None, typer.Option(min=1, show_default="unchanged", help="Stages")]
Zero = Annotated[
    int | None, typer.Option(min=0, max=3, show_default="unchanged", help="Stage of ZeRO, 1 to 3")
]
Data = Annotated[int | None, typer.Option(min=1, show_default="unchanged", help="Data-parallel ranks")]
MicroBatch = Annotated[
    int | None, typer.Option(min=1, show_default="unchanged", help="Samples per rank and pass")
]
DecayShape = Literal["linear", "cosine", "sqrt"]
Recipe = Annotated[Path, typer.Option(help="Of the run; its model is the checkpoint's")]


def reshape(checkpoint: Checkpoint, out: Out, tensor: Tensor = None, pipeline: Pipeline = None, zero: Zero = None,
            data: Data = None, micro_batch: MicroBatch = None, as_json: Json = False) -> None:  # fmt: skip
    """Make OUT, a run that continues from the checkpoint in another layout: the same weights, moments, step, cursor."""
    from megastable.convert.reshaping import Sizes
    from megastable.convert.tool.making import make_reshaped

    sizes = Sizes(tensor, pipeline, zero, data, micro_batch)
    _tell(make_reshaped(checkpoint, out, sizes, silent=as_json), as_json)


def branch(checkpoint: Checkpoint, out: Out,
           decay_steps: Annotated[int, typer.Option(min=1, help="Updates until the new run's end")],
           kind: Annotated[DecayShape, typer.Option(help="Shape of the decay; sqrt: 1 - sqrt")] = "linear",
           floor: Annotated[float | None, typer.Option(min=0, max=1, show_default="the run's", help="Share of the peak "
                                                       "rate at its end")] = None,
           as_json: Json = False) -> None:  # fmt: skip
    """Make OUT, a run that continues from a checkpoint of the constant phase with a final decay of the learning rate.

    Moments, data order, skips and position continue; the parent stays as it is (arXiv:2404.06395, arXiv:2405.18392).
    """
    from megastable.base.text import visible
    from megastable.convert.tool.making import dict_of_branch, make_branch, text_of_branch

    made = make_branch(checkpoint, out, decay_steps, kind, floor, silent=as_json)
    if as_json:
        put_json(dict_of_branch(made), True, None)
    else:
        print(visible(text_of_branch(made), keep="\n"))


def export(checkpoint: Checkpoint, out: Out, as_json: Json = False) -> None:
    """Make OUT, a run without optimizer state, a third of the size: to evaluate, or to continue with fresh moments."""
    from megastable.convert.tool.making import make_reshaped

    _tell(make_reshaped(checkpoint, out, optimizer=False, silent=as_json), as_json)


def average(paths: Annotated[list[Path], typer.Argument(metavar="CHECKPOINT... OUT")],
            weights: Annotated[str | None, typer.Option(help="Weight of each, e.g. 0.1,0.2,0.7")] = None,
            last: Annotated[int | None, typer.Option(min=2, help="The newest of a run: --last 5 RUN OUT")] = None,
            as_json: Json = False) -> None:  # fmt: skip
    """Make OUT from the mean of weights (LAWA, arXiv:2209.14981; model soups, arXiv:2203.05482), without moments."""
    from megastable.convert.tool.making import make_average

    _tell(make_average(paths, weights, last, silent=as_json), as_json)


def import_deepspeed(folder: Annotated[Path, typer.Argument(help="With latest, or one global_step*")], out: Out,
                     recipe: Recipe, overrides: Overrides = None, as_json: Json = False) -> None:  # fmt: skip
    """Make OUT, a run that continues from a checkpoint written by DeepSpeed itself (ZeRO 1 to 3)."""
    from megastable.convert.tool.imports import from_deepspeed

    _tell(from_deepspeed(folder, out, recipe, overrides or ()), as_json)


def import_megatron(folder: Annotated[Path, typer.Argument(help="With its tracker file, or one iter_*")], out: Out,
                    recipe: Annotated[Path | None, typer.Option(show_default="from its arguments")] = None,
                    overrides: Overrides = None, as_json: Json = False) -> None:  # fmt: skip
    """Make OUT, a run that starts from weights in Megatron-core's "torch" format; moments are not imported."""
    from megastable.convert.tool.imports import from_megatron

    _tell(from_megatron(folder, out, recipe, overrides or ()), as_json)


def export_megatron(checkpoint: Checkpoint, out: Annotated[Path, typer.Argument(help="A new folder")],
                    tensor: Annotated[int, typer.Option(min=1)] = 1, pipeline: Annotated[int, typer.Option(min=1)] = 1,
                    local: Annotated[bool, typer.Option("--local", help="For --transformer-impl local")] = False,
                    as_json: Json = False) -> None:  # fmt: skip
    """Write the weights as Megatron-core's "torch" format, for that many tensor and pipeline ranks."""
    from megastable.convert.tool.imports import load_hint, to_megatron

    written, options = to_megatron(checkpoint, out, tensor, pipeline, local, as_json)
    if as_json:
        put_json({"folder": str(out), "checkpoint": str(written), "options": options}, True, None)
    else:
        print(load_hint(written, options))


def _tell(made: Made, as_json: bool) -> None:
    from megastable.base.text import visible
    from megastable.convert.tool.making import dict_of, text_of

    if as_json:
        put_json(dict_of(made), True, None)
    else:
        print(visible(text_of(made), keep="\n"))


def add_makers(app: App) -> None:
    """Add them to `app`."""
    app.add(
        examples="megastable checkpoint reshape runs/7b runs/7b-tp2 --tensor 2 --pipeline 1 --zero 1 --data 4"
    )(reshape)
    app.add(
        examples="""
        megastable checkpoint branch runs/7b runs/7b-final --decay-steps 20000
        megastable checkpoint branch runs/7b/checkpoints/step-100000 runs/7b-100k --decay-steps 10000 --kind sqrt
        """
    )(branch)
    app.add(examples="megastable checkpoint export runs/7b runs/7b-weights")(export)
    app.add(
        examples="""
        megastable checkpoint average --last 5 runs/7b runs/7b-mean
        megastable checkpoint average --weights 0.3,0.7 runs/a runs/b runs/ab
        """
    )(average)
    app.add(
        "import-deepspeed",
        examples="megastable checkpoint import-deepspeed old/checkpoints runs/new --recipe launch/recipes/7b.yaml "
        "model.vocab_size=50304",
    )(import_deepspeed)
    app.add(
        "import-megatron",
        examples="megastable checkpoint import-megatron megatron/checkpoints runs/new --recipe launch/recipes/7b.yaml "
        "model.vocab_size=50304",
    )(import_megatron)
    app.add(
        "export-megatron",
        examples="megastable checkpoint export-megatron runs/7b megatron/checkpoints --tensor 2 --pipeline 2",
    )(export_megatron)
