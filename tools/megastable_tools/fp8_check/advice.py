"""Judge the effect of FP8 on a model, choose the layers that should stay out of it, and present both. Without torch.

    keep = advise(layers)                   # {"blocks.3.mlp.down": ("y is 31 % off, other layers 4 %",)}
    problems = unstable(loss, measured)     # () if nothing speaks against it
    best(outcomes)                          # the recipe to take, None if there is none

The limits are in `ErrorLimits`, each with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from megastable.base.text import count_noun
from megastable.report.figures import draw_figure
from megastable.report.text_output import make_table

ORDINARY = 1.4826  # times the median absolute deviation: a standard deviation, robustly


@dataclass(frozen=True)
class ErrorLimits:
    """Rounding to three bits of mantissa (E4M3) changes a tensor by 2.6 %, to two (E5M2) by 5.3 %, in any model; a
    product of two by the root of the sum of squares, 4 to 6 %, or less. Anything beyond is saturation, underflow or
    cancellation.

    product: an output or gradient with at most this error is no reason to keep a layer, whatever the others have.
    robust: standard deviations, of the logarithm, above the other layers; factor: and multiple of their median, in case
    they are all alike. useless: error at which a product says little about the true one, even if the others are as bad.
    saturation: share of numbers that were cut. In an ordinary step delayed scales cut a few in 10^5, the largest ones.
    underflow: share of nonzero numbers that became zero. Ordinary tensors lose up to a few percent, too small to
    matter; if one channel is 10^4 times as large as the rest, the whole rest is lost, and no error shows it, because
    that channel dominates the error. crowd: and multiple of the median of the same tensor in the other layers. loss: of
    the whole model, relative: DeepSeek-V3 trained within 0.25 % of bf16 (arXiv:2412.19437 section 3.3), this is four
    times that. cosine: of the whole gradient with that of bf16. kept: share of the layers beyond which too little would
    be left in FP8.
    """

    product: float = 0.12
    robust: float = 5.0
    factor: float = 2.0
    useless: float = 0.5
    saturation: float = 1e-3
    underflow: float = 0.1
    crowd: float = 3.0
    loss: float = 0.01
    cosine: float = 0.9
    kept: float = 0.5


LIMITS = ErrorLimits()


@dataclass(frozen=True)
class TensorLoss:
    """error: |q(x) - x| / |x|. saturation, underflow: shares of its numbers. largest: magnitude. format: its FP8
    type."""

    error: float
    saturation: float
    underflow: float
    largest: float
    format: str

    @property
    def decibels(self) -> float:
        """Signal to noise."""
        return -20 * math.log10(self.error) if self.error > 0 else math.inf


@dataclass(frozen=True)
class LayerLoss:
    """tensors: of input, weight, gradient. products: relative errors of y, dx, dw."""

    name: str
    tensors: Mapping[str, TensorLoss]
    products: Mapping[str, float]

    @property
    def worst(self) -> float:
        """The largest error of its products; nan counts as infinite."""
        return max(_finite(error) for error in self.products.values())


@dataclass(frozen=True)
class ModelLoss:
    """The whole model: loss, nats per token; kl: divergence from bf16's predictions, nats per token; cosine: of the
    gradient with bf16's; gradient_error: their distance relative to bf16's norm."""

    loss: float
    kl: float
    cosine: float
    gradient_error: float


@dataclass(frozen=True)
class RecipeOutcome:
    """Results of a recipe. everything: with all layers in FP8; keep: layer -> why to keep it out; kept: the whole model
    with those left out, None if there are none."""

    recipe: str
    layers: Sequence[LayerLoss]
    keep: Mapping[str, Sequence[str]]
    everything: ModelLoss
    kept: ModelLoss | None
    problems: Sequence[str] = field(default=())

    @property
    def stable(self) -> bool:
        return not self.problems

    @property
    def advised(self) -> ModelLoss:
        return self.kept or self.everything


def choose_kept_layers(layers: Sequence[LayerLoss]) -> dict[str, tuple[str, ...]]:
    """Layers to keep out of FP8, in their order, and why. A nan error counts as infinite."""
    found = {layer.name: tuple(_list_reasons(layer, layers)) for layer in layers}
    return {layer_name: layer_reasons for layer_name, layer_reasons in found.items() if layer_reasons}


def _list_reasons(layer: LayerLoss, layers: Sequence[LayerLoss]) -> Iterator[str]:
    for product_name, error in layer.products.items():
        error, other_errors = _finite(error), [_finite(other.products[product_name]) for other in layers]
        if error > LIMITS.useless:
            yield f"{product_name} is {_percent(error)} off"
        elif error > LIMITS.product and error > _usual(other_errors):
            yield f"{product_name} is {_percent(error)} off, the median of all layers {_percent(median(other_errors))}"
    for slot, tensor in layer.tensors.items():
        if tensor.saturation > LIMITS.saturation:
            yield f"{_percent(tensor.saturation)} of its {slot} are cut"
        usual = median([other_layer.tensors[slot].underflow for other_layer in layers])
        if tensor.underflow > max(LIMITS.underflow, LIMITS.crowd * usual):
            yield f"{_percent(tensor.underflow)} of its {slot} become zero, the median of all layers {_percent(usual)}"


def _usual(errors: Sequence[float]) -> float:
    """An upper limit for ordinary errors among these."""
    log_errors = [math.log(min(max(error, 1e-12), 1e12)) for error in errors]
    middle_log = median(log_errors)
    log_spread = ORDINARY * median([abs(log_error - middle_log) for log_error in log_errors])
    return math.exp(middle_log + max(LIMITS.robust * log_spread, math.log(LIMITS.factor)))


def find_instabilities(loss: float, found: ModelLoss, kept: int = 0, layers: int = 0) -> tuple[str, ...]:
    """Why a model should not be trained so; nothing where it can. loss: of bf16, nats per token; kept: so many of its
    layers are not in FP8."""
    if not all(map(math.isfinite, (found.loss, found.kl, found.cosine, found.gradient_error))):
        return ("loss or gradient is not finite",)
    problems_found = []
    loss_change = (found.loss - loss) / loss if loss > 0 else 0.0
    if abs(loss_change) > LIMITS.loss:
        problems_found.append(f"the loss changes by {loss_change:+.2%}, more than {LIMITS.loss:.0%}")
    if found.cosine < LIMITS.cosine:
        problems_found.append(
            f"the gradient's direction changes: cosine {found.cosine:.3f}, less than {LIMITS.cosine:g}"
        )
    if kept > LIMITS.kept * layers:
        problems_found.append(f"{kept} of {layers} layers would have to be kept: too little is left to FP8")
    return tuple(problems_found)


def best_outcome(outcomes: Sequence[RecipeOutcome]) -> RecipeOutcome | None:
    """The stable outcome that keeps the fewest layers out; among equals the one whose gradient is nearest
    to bf16's."""
    stable_outcomes = [outcome for outcome in outcomes if outcome.stable]
    return min(stable_outcomes, key=lambda o: (len(o.keep), o.advised.gradient_error), default=None)


def _finite(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


LEGEND = (
    "y, dx, dw: relative errors of a layer's products in FP8. input, weight, gradient: rounding errors "
    "of each. cut, lost: the largest share of their numbers that became the format's largest, or zero."
)


def draw_models_table(loss: float, outcomes: Sequence[RecipeOutcome]) -> Table:
    """The whole model by every recipe, with all layers in FP8 and with the advised ones kept out."""
    table = make_table("recipe", "in FP8", ">loss", ">change", ">KL", ">gradient off", ">cosine", "verdict")
    table.add_row("none", "", f"{loss:.4f}", "", "", "", "", "")
    for outcome in outcomes:
        layers, kept_count = len(outcome.layers), len(outcome.keep)
        verdict = "stable" if outcome.stable else "NOT STABLE"
        last = outcome.kept is None
        table.add_row(
            outcome.recipe,
            f"all {layers} layers",
            *_show_model(loss, outcome.everything),
            verdict if last else "",
        )
        if outcome.kept is not None:
            table.add_row("", f"{kept_count} kept out", *_show_model(loss, outcome.kept), verdict)
    return table


def _show_model(loss: float, found: ModelLoss) -> Iterator[str]:
    yield f"{found.loss:.4f}"
    yield f"{found.loss - loss:+.4f}"
    yield f"{found.kl:.2e}"
    yield _rounded(found.gradient_error)
    yield f"{found.cosine:.4f}"


def draw_layers_table(outcome: RecipeOutcome, rows: int) -> Table:
    """Errors of a recipe's products and tensors, the worst layers first."""
    numbers = (">y", ">dx", ">dw", ">input", ">weight", ">gradient", ">cut", ">lost")
    table = make_table("layer", *numbers, "", title=f"{outcome.recipe}: errors, the worst layers first")
    for layer in sorted(outcome.layers, key=lambda layer: -layer.worst)[:rows]:
        tensors = list(layer.tensors.values())
        table.add_row(
            Text(layer.name, no_wrap=True), *(_rounded(product_error) for product_error in layer.products.values()),
            *(_rounded(tensor_loss.error) for tensor_loss in tensors), _share(max(t.saturation for t in tensors)),
            _share(max(t.underflow for t in tensors)), "keep" if layer.name in outcome.keep else "",
            style="bold" if layer.name in outcome.keep else None,
        )  # fmt: skip
    return table


def draw_tensors_table(outcome: RecipeOutcome) -> Table:
    """Every tensor of a recipe, the worst first."""
    headings = ("layer", "tensor", "format", ">error", ">dB", ">cut", ">lost", ">largest")
    tensors_table = make_table(*headings, title=f"{outcome.recipe}: every tensor, the worst first")
    tensors_found = [
        (layer.name, slot, tensor) for layer in outcome.layers for slot, tensor in layer.tensors.items()
    ]
    for layer_name, slot, tensor_loss in sorted(tensors_found, key=lambda row: -_finite(row[2].error)):
        tensors_table.add_row(
            Text(layer_name, no_wrap=True), slot, tensor_loss.format, _rounded(tensor_loss.error),
            f"{tensor_loss.decibels:.1f}", _share(tensor_loss.saturation), _share(tensor_loss.underflow),
            f"{tensor_loss.largest:.3g}",
        )  # fmt: skip
    return tensors_table


def _rounded(share: float) -> str:
    return f"{share:.1%}" if share < 10 else f"{share:.1e}"


def _share(share: float) -> str:
    return "-" if share == 0 else f"{share:.0e}" if share < 1e-4 else f"{share:.2%}"


def describe_advice(
    outcomes: Sequence[RecipeOutcome], given: Mapping[str, object], most: int = 12
) -> Iterator[str]:
    """Lines of advice: layers to keep by each recipe and why, the recipe to take, overrides to add after RECIPE. given:
    as for `overrides_for`."""
    for outcome in outcomes:
        if outcome.keep:
            kept_text = f"{count_noun(len(outcome.keep), 'layer')} of {len(outcome.layers)}"
            yield f"{outcome.recipe}: keep {kept_text} out of FP8:"
            for layer_name, layer_reasons in list(outcome.keep.items())[:most]:
                yield f"  {layer_name}: {'; '.join(layer_reasons)}"
            if len(outcome.keep) > most:
                yield f"  and {len(outcome.keep) - most} more: --json has them all"
        for problem in outcome.problems:
            yield f"{outcome.recipe}: NOT STABLE: {problem}"
    chosen = best_outcome(outcomes)
    if chosen is None:
        yield "verdict: not stable in FP8 by any of these recipes; leave precision.fp8 out"
        return
    many_text = "the best of these (regardless of speed): " if len(outcomes) > 1 else ""
    kept = (
        f", {count_noun(len(chosen.keep), 'layer')} kept out"
        if chosen.keep
        else ", no layer has to be kept out"
    )
    yield f"verdict: stable in FP8; {many_text}{chosen.recipe}{kept}. Say after the recipe:"
    yield " ".join(overrides_for(chosen, given))


def overrides_for(outcome: RecipeOutcome, given: Mapping[str, object]) -> list[str]:
    """KEY=VALUE for an outcome. given: further KEY -> VALUE that the run needs."""
    overrides_said = {"precision.fp8.recipe": outcome.recipe, **given}
    if outcome.keep:
        overrides_said["precision.fp8.keep"] = f"[{','.join(outcome.keep)}]"
    return [f"{override_key}={override_value}" for override_key, override_value in overrides_said.items()]


def advice_tree(
    loss: float, outcomes: Sequence[RecipeOutcome], given: Mapping[str, object]
) -> dict[str, Any]:
    """All numbers, as a tree for JSON."""
    chosen = best_outcome(outcomes)
    return {
        "loss": loss,
        "stable": chosen is not None,
        "best": chosen and chosen.recipe,
        "overrides": chosen and overrides_for(chosen, given),
        "limits": vars(LIMITS),
        "recipes": [
            {
                "recipe": o.recipe, "stable": o.stable, "problems": list(o.problems),
                "keep": {name: list(reasons) for name, reasons in o.keep.items()},
                "overrides": overrides_for(o, given),
                "everything": vars(o.everything) | {"change": o.everything.loss - loss},
                "kept": o.kept and vars(o.kept) | {"change": o.kept.loss - loss},
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


def draw_error_map(outcomes: Sequence[RecipeOutcome], title: str, path: Path) -> None:
    """A map of errors for every recipe: layers downwards, their tensors and products across. The file name decides the
    format. Raises DataError if it cannot be written."""
    from matplotlib.colors import LogNorm

    names = [layer.name for layer in outcomes[0].layers]
    column_names = [*outcomes[0].layers[0].tensors, *outcomes[0].layers[0].products]
    with draw_figure(path, 3 + 3 * len(outcomes), min(2 + 0.2 * len(names), 60)) as figure:
        (axes,) = figure.subplots(1, len(outcomes), squeeze=False, sharey=True)
        # The same colours for every recipe and model: from rounding alone to nothing left.
        error_colours = LogNorm(0.01, 1.0, clip=True)
        for axis, outcome in zip(axes, outcomes, strict=True):
            error_rows = [
                [*(tensor_loss.error for tensor_loss in layer.tensors.values()), *layer.products.values()]
                for layer in outcome.layers
            ]
            table = [
                [max(error, 1e-6) if math.isfinite(error) else 1.0 for error in error_row]
                for error_row in error_rows
            ]
            image = axis.imshow(
                table, aspect="auto", cmap="magma", norm=error_colours, interpolation="nearest"
            )
            axis.set_title(outcome.recipe)
            axis.set_xticks(range(len(column_names)), column_names, rotation=60)
            for row, layer_name in enumerate(names):
                if layer_name in outcome.keep:
                    axis.text(len(column_names) - 0.5, row, " keep", va="center", fontsize=6, clip_on=False)
        axes[0].set_yticks(range(len(names)), names, fontsize=6)
        figure.colorbar(image, ax=list(axes), label="relative error", shrink=0.8)
        figure.suptitle(title, parse_math=False)
