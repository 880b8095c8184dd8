"""The commands of `tools/checkpoint.py` that make a new run from one or more checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megastable.base.errors import user_errors
from megastable.report.sheet.options import Json

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
Recipe = Annotated[Path, typer.Option(help="Of the run; its model is the checkpoint's")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Of the recipe")]
# Imported where needed: torch takes a second.


@user_errors()
def reshape(checkpoint: Checkpoint, out: Out, tensor: Tensor = None, pipeline: Pipeline = None, zero: Zero = None,
            data: Data = None, micro_batch: MicroBatch = None, as_json: Json = False) -> None:  # fmt: skip
    """Make OUT, a run that continues from the checkpoint in another layout: the same weights, moments, step, cursor."""
    from megastable.convert.tool.making import make_reshaped

    made = make_reshaped(checkpoint, out, tensor, pipeline, zero, data, micro_batch, silent=as_json)
    _tell(made, as_json)


@user_errors()
def export(checkpoint: Checkpoint, out: Out, as_json: Json = False) -> None:
    """Make OUT, a run without optimizer state, a third of the size: to evaluate, or to continue with fresh moments."""
    from megastable.convert.tool.making import make_reshaped

    _tell(make_reshaped(checkpoint, out, optimizer=False, silent=as_json), as_json)


@user_errors()
def average(paths: Annotated[list[Path], typer.Argument(metavar="CHECKPOINT... OUT")],
            weights: Annotated[str | None, typer.Option(help="Weight of each, e.g. 0.1,0.2,0.7")] = None,
            last: Annotated[int | None, typer.Option(min=2, help="The newest of a run: --last 5 RUN OUT")] = None,
            as_json: Json = False) -> None:  # fmt: skip
    """Make OUT from the mean of weights (LAWA, arXiv:2209.14981; model soups, arXiv:2203.05482), without moments."""
    from megastable.convert.tool.making import make_average

    _tell(make_average(paths, weights, last, silent=as_json), as_json)


@user_errors()
def import_deepspeed(folder: Annotated[Path, typer.Argument(help="With latest, or one global_step*")], out: Out,
                     recipe: Recipe, overrides: Overrides = None, as_json: Json = False) -> None:  # fmt: skip
    """Make OUT, a run that continues from a checkpoint written by DeepSpeed itself (ZeRO 1 to 3)."""
    from megastable.convert.tool.imports import from_deepspeed

    _tell(from_deepspeed(folder, out, recipe, overrides or ()), as_json)


@user_errors()
def import_megatron(folder: Annotated[Path, typer.Argument(help="With its tracker file, or one iter_*")], out: Out,
                    recipe: Annotated[Path | None, typer.Option(show_default="from its arguments")] = None,
                    overrides: Overrides = None, as_json: Json = False) -> None:  # fmt: skip
    """Make OUT, a run that starts from weights in Megatron-core's "torch" format; moments are not imported."""
    from megastable.convert.tool.imports import from_megatron

    _tell(from_megatron(folder, out, recipe, overrides or ()), as_json)


@user_errors()
def export_megatron(checkpoint: Checkpoint, out: Annotated[Path, typer.Argument(help="A new folder")],
                    tensor: Annotated[int, typer.Option(min=1)] = 1, pipeline: Annotated[int, typer.Option(min=1)] = 1,
                    local: Annotated[bool, typer.Option("--local", help="For --transformer-impl local")] = False,
                    as_json: Json = False) -> None:  # fmt: skip
    """Write the weights in Megatron-core's "torch" format, for that many tensor and pipeline ranks."""
    from megastable.convert.tool.imports import to_megatron

    print(to_megatron(checkpoint, out, tensor, pipeline, local, as_json))


def _tell(made: Made, as_json: bool) -> None:
    from megastable.base.text import visible
    from megastable.convert.tool.making import dict_of, text_of
    from megastable.run.directory import as_json as to_json

    print(to_json(dict_of(made)) if as_json else visible(text_of(made), keep="\n"))


MAKERS: dict[str, Callable[..., None]] = {
    "reshape": reshape,
    "export": export,
    "average": average,
    "import-deepspeed": import_deepspeed,
    "import-megatron": import_megatron,
    "export-megatron": export_megatron,
}
