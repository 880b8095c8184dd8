"""Judge the effect of FP8 on a model, and choose the layers that should stay out of it. Pure; without torch.

    keep = advise(layers)                   # {"blocks.3.mlp.down": ("y is 31 % off, other layers 4 %",)}
        problems = unstable(loss, measured)     # () if nothing speaks against it
        best(outcomes)                          # the recipe to take, None if there is none

The limits are in `ErrorLimits`, each with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

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


USUAL = ErrorLimits()


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


def advise(layers: Sequence[LayerLoss], limits: ErrorLimits = USUAL) -> dict[str, tuple[str, ...]]:
    """Layers to keep out of FP8, in their order, and why. A nan error counts as infinite."""
    found = {
        layer.name: [*_products(layer, layers, limits), *_tensors(layer, layers, limits)] for layer in layers
    }
    return {name: tuple(reasons) for name, reasons in found.items() if reasons}


def _products(layer: LayerLoss, layers: Sequence[LayerLoss], limits: ErrorLimits) -> Iterable[str]:
    for product, error in layer.products.items():
        error, others = _finite(error), [_finite(other.products[product]) for other in layers]
        if error > limits.useless:
            yield f"{product} is {_percent(error)} off"
        elif error > limits.product and error > _usual(others, limits):
            yield f"{product} is {_percent(error)} off, the median of all layers {_percent(median(others))}"


def _usual(errors: Sequence[float], limits: ErrorLimits) -> float:
    """An upper limit for ordinary errors among these."""
    logs = [math.log(min(max(error, 1e-12), 1e12)) for error in errors]
    middle = median(logs)
    spread = ORDINARY * median([abs(log - middle) for log in logs])
    return math.exp(middle + max(limits.robust * spread, math.log(limits.factor)))


def _tensors(layer: LayerLoss, layers: Sequence[LayerLoss], limits: ErrorLimits) -> Iterable[str]:
    for slot, tensor in layer.tensors.items():
        if tensor.saturation > limits.saturation:
            yield f"{_percent(tensor.saturation)} of its {slot} are cut"
        usual = median([other.tensors[slot].underflow for other in layers])
        if tensor.underflow > max(limits.underflow, limits.crowd * usual):
            yield f"{_percent(tensor.underflow)} of its {slot} become zero, the median of all layers {_percent(usual)}"


def unstable(
    loss: float, found: ModelLoss, kept: int = 0, layers: int = 0, limits: ErrorLimits = USUAL
) -> tuple[str, ...]:
    """Why a model should not be trained so; nothing where it can. loss: of bf16, nats per token; kept: so many of its
    layers are not in FP8."""
    if not all(map(math.isfinite, (found.loss, found.kl, found.cosine, found.gradient_error))):
        return ("loss or gradient is not finite",)
    problems = []
    change = (found.loss - loss) / loss if loss > 0 else 0.0
    if abs(change) > limits.loss:
        problems.append(f"the loss changes by {change:+.2%}, more than {limits.loss:.0%}")
    if found.cosine < limits.cosine:
        problems.append(
            f"the gradient's direction changes: cosine {found.cosine:.3f}, less than {limits.cosine:g}"
        )
    if kept > limits.kept * layers:
        problems.append(f"{kept} of {layers} layers would have to be kept: too little is left to FP8")
    return tuple(problems)


def best(outcomes: Sequence[RecipeOutcome]) -> RecipeOutcome | None:
    """The stable outcome that keeps the fewest layers out; among equals the one whose gradient is nearest
    to bf16's."""
    stable = [outcome for outcome in outcomes if outcome.stable]
    return min(stable, key=lambda o: (len(o.keep), o.advised.gradient_error), default=None)


def _finite(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
