"""Input and output of the detector for one step. Plain numbers, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Signals:
    """One step before its update.

    loss: mean cross-entropy of the global batch, nats per token. grad_norm: global L2 norm before clipping, inf if a
    gradient is not finite, None if a trace has none. lr: rate of the coming update, None if unknown.
    mixed: the data mix changes on purpose from this step on.
    """

    step: int
    loss: float
    grad_norm: float | None = None
    lr: float | None = None
    mixed: bool = False


class Verdict(StrEnum):
    """The detector's judgement of a step, against the accepted steps before it."""

    HEALTHY = "healthy"
    NON_FINITE = "non_finite"  # loss or gradient norm is nan or inf
    OUTLIER = "outlier"  # this step stands out by itself: a hard batch, or the first of a spike
    SPIKE = "spike"  # several do: the loss or the norm has jumped and stays up
    DRIFT = "drift"  # slow departure from the trend: a divergence
    PLATEAU = "plateau"  # settled above the level that was reached before
    OSCILLATION = "oscillation"  # wider swings up and down than before
    SHIFT = "shift"  # another level or scatter of the loss, with an ordinary gradient norm: other data
    DAMAGE = "damage"  # the probe samples, which are never trained on, are harder than before
    CORRUPTED = "corrupted"  # copies of the state that must be equal differ, or a gradient is proven wrong


@dataclass(frozen=True)
class Finding:
    """A verdict with its evidence.

    severity: of the strongest test relative to its threshold: 1 = just beyond, 0 = healthy. onset: the first step
    that belongs to it (`step` itself for an outlier). reason: a sentence with the numbers. on_trend: whether loss
    and norm are at their trend. reset: the detector's baseline is reset here.
    """

    step: int
    verdict: Verdict
    severity: float
    onset: int
    reason: str = ""
    on_trend: bool = True
    reset: bool = False
