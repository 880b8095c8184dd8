"""Present the results of an FP8 check: tables, advice, JSON and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from megastable.base.text import plural
from megastable.report.figures import draw_figure
from megastable.report.text_output import make_table
from megastable_tools.fp8_check.advice import ErrorLimits, LayerLoss, ModelLoss, RecipeOutcome, best

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEGEND = (
    "y, dx, dw: relative errors of a layer's products in FP8. input, weight, gradient: rounding errors "
    "of each. cut, lost: the largest share of their numbers that became the format's largest, or zero."
)


def models(loss: float, outcomes: Sequence[RecipeOutcome]) -> Table:
    """The whole model by every recipe, with all layers in FP8 and with the advised ones kept out."""
    table = make_table("recipe", "in FP8", ">loss", ">change", ">KL", ">gradient off", ">cosine", "verdict")
    table.add_row("none", "", f"{loss:.4f}", "", "", "", "", "")
    for outcome in outcomes:
        layers, kept = len(outcome.layers), len(outcome.keep)
        verdict = "stable" if outcome.stable else "NOT STABLE"
        last = outcome.kept is None
        table.add_row(
            outcome.recipe, f"all {layers} layers", *_model(loss, outcome.everything), verdict if last else ""
        )
        if outcome.kept is not None:
            table.add_row("", f"{kept} kept out", *_model(loss, outcome.kept), verdict)
    return table


def _model(loss: float, found: ModelLoss) -> Iterator[str]:
    yield f"{found.loss:.4f}"
    yield f"{found.loss - loss:+.4f}"
    yield f"{found.kl:.2e}"
    yield _percent(found.gradient_error)
    yield f"{found.cosine:.4f}"


def layers(outcome: RecipeOutcome, rows: int) -> Table:
    """Errors of a recipe's products and tensors, the worst layers first."""
    numbers = (">y", ">dx", ">dw", ">input", ">weight", ">gradient", ">cut", ">lost")
    table = make_table("layer", *numbers, "", title=f"{outcome.recipe}: errors, the worst layers first")
    for layer in worst(outcome.layers)[:rows]:
        tensors = list(layer.tensors.values())
        table.add_row(
            _name(layer.name), *(_percent(error) for error in layer.products.values()),
            *(_percent(tensor.error) for tensor in tensors), _share(max(t.saturation for t in tensors)),
            _share(max(t.underflow for t in tensors)), "keep" if layer.name in outcome.keep else "",
            style="bold" if layer.name in outcome.keep else None,
        )  # fmt: skip
    return table


def tensors(outcome: RecipeOutcome) -> Table:
    """Every tensor of a recipe, the worst first."""
    headings = ("layer", "tensor", "format", ">error", ">dB", ">cut", ">lost", ">largest")
    table = make_table(*headings, title=f"{outcome.recipe}: every tensor, the worst first")
    found = [(layer.name, slot, tensor) for layer in outcome.layers for slot, tensor in layer.tensors.items()]
    for name, slot, t in sorted(found, key=lambda row: -_rank(row[2].error)):
        table.add_row(
            _name(name), slot, t.format, _percent(t.error), f"{t.decibels:.1f}", _share(t.saturation),
            _share(t.underflow), f"{t.largest:.3g}",
        )  # fmt: skip
    return table


def worst(found: Sequence[LayerLoss]) -> list[LayerLoss]:
    """Layers sorted by the largest error of their products."""
    return sorted(found, key=lambda layer: -layer.worst)


def _rank(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _name(name: str) -> Text:
    """A layer name, unbroken so that it can be copied."""
    return Text(name, no_wrap=True)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 10 else f"{share:.1e}"


def _share(share: float) -> str:
    return "-" if share == 0 else f"{share:.0e}" if share < 1e-4 else f"{share:.2%}"


def advice(outcomes: Sequence[RecipeOutcome], given: Mapping[str, object], most: int = 12) -> Iterator[str]:
    """Lines of advice: layers to keep by each recipe and why, the recipe to take, overrides to add after RECIPE. given:
    as for `overrides`."""
    for outcome in outcomes:
        if outcome.keep:
            yield f"{outcome.recipe}: keep {plural(len(outcome.keep), 'layer')} of {len(outcome.layers)} out of FP8:"
            for name, reasons in list(outcome.keep.items())[:most]:
                yield f"  {name}: {'; '.join(reasons)}"
            if len(outcome.keep) > most:
                yield f"  and {len(outcome.keep) - most} more: --json has them all"
        for problem in outcome.problems:
            yield f"{outcome.recipe}: NOT STABLE: {problem}"
    chosen = best(outcomes)
    if chosen is None:
        yield "verdict: not stable in FP8 by any of these recipes; leave precision.fp8 out"
        return
    many = "the best of these (regardless of speed): " if len(outcomes) > 1 else ""
    kept = (
        f", {plural(len(chosen.keep), 'layer')} kept out" if chosen.keep else ", no layer has to be kept out"
    )
    yield f"verdict: stable in FP8; {many}{chosen.recipe}{kept}. Say after the recipe:"
    yield " ".join(overrides(chosen, given))


def overrides(outcome: RecipeOutcome, given: Mapping[str, object]) -> list[str]:
    """KEY=VALUE for an outcome. given: further KEY -> VALUE that the run needs."""
    said = {"precision.fp8.recipe": outcome.recipe, **given}
    if outcome.keep:
        said["precision.fp8.keep"] = f"[{','.join(outcome.keep)}]"
    return [f"{key}={value}" for key, value in said.items()]


def tree(
    loss: float, outcomes: Sequence[RecipeOutcome], given: Mapping[str, object], limits: ErrorLimits
) -> dict[str, Any]:
    """All numbers, as a tree for JSON."""
    chosen = best(outcomes)
    return {
        "loss": loss,
        "stable": chosen is not None,
        "best": chosen and chosen.recipe,
        "overrides": chosen and overrides(chosen, given),
        "limits": vars(limits),
        "recipes": [
            {
                "recipe": o.recipe, "stable": o.stable, "problems": list(o.problems),
                "keep": {name: list(reasons) for name, reasons in o.keep.items()},
                "overrides": overrides(o, given),
                "everything": _tree(loss, o.everything), "kept": o.kept and _tree(loss, o.kept),
                "layers": [
                    {
                        "layer": layer.name, "products": dict(layer.products),
                        "tensors": {slot: vars(t) | {"decibels": t.decibels} for slot, t in layer.tensors.items()},
                    }
                    for layer in o.layers
                ],
            }
            for o in outcomes
        ],
    }  # fmt: skip


def _tree(loss: float, found: ModelLoss) -> dict[str, float]:
    return vars(found) | {"change": found.loss - loss}


def picture(outcomes: Sequence[RecipeOutcome], title: str, path: Path) -> None:
    """A map of errors for every recipe: layers downwards, their tensors and products across. The file name decides the
    format. Raises DataError if it cannot be written."""
    names = [layer.name for layer in outcomes[0].layers]
    with draw_figure(path, 3 + 3 * len(outcomes), min(2 + 0.2 * len(names), 60)) as figure:
        _draw(outcomes, names, figure)
        figure.suptitle(title, parse_math=False)


def _draw(outcomes: Sequence[RecipeOutcome], names: Sequence[str], figure: Figure) -> None:
    from matplotlib.colors import LogNorm

    across = [*outcomes[0].layers[0].tensors, *outcomes[0].layers[0].products]
    (axes,) = figure.subplots(1, len(outcomes), squeeze=False, sharey=True)
    # The same colours for every recipe and model: from rounding alone to nothing left.
    colours = LogNorm(0.01, 1.0, clip=True)
    for axis, outcome in zip(axes, outcomes, strict=True):
        found = [
            [*(t.error for t in layer.tensors.values()), *layer.products.values()] for layer in outcome.layers
        ]
        table = [[max(error, 1e-6) if math.isfinite(error) else 1.0 for error in row] for row in found]
        image = axis.imshow(table, aspect="auto", cmap="magma", norm=colours, interpolation="nearest")
        axis.set_title(outcome.recipe)
        axis.set_xticks(range(len(across)), across, rotation=60)
        for row, name in enumerate(names):
            if name in outcome.keep:
                axis.text(len(across) - 0.5, row, " keep", va="center", fontsize=6, clip_on=False)
    axes[0].set_yticks(range(len(names)), names, fontsize=6)
    figure.colorbar(image, ax=list(axes), label="relative error", shrink=0.8)
