"""What the detector hears of a step, and what it says about it. Plain numbers, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True)
class Signals:
    """One step before its update.

    loss: mean cross-entropy of the global batch, nats per token. grad_norm: global L2 norm before clipping, inf when a
    gradient is not finite, None where a trace has none. lr: rate of the coming update, None where it is unknown.
    indicators: slow ones by name, only at the steps at which they are measured (Adam's second moment norm, the
    largest attention logit, ...). mixed: the data is another mixture from this step on, on purpose.
    """

    step: int
    loss: float
    grad_norm: float | None = None
    lr: float | None = None
    indicators: Mapping[str, float] = field(default_factory=dict)
    mixed: bool = False


class Verdict(StrEnum):
    """What a step looks like, against the accepted steps before it."""

    HEALTHY = "healthy"
    NON_FINITE = "non_finite"  # loss or gradient norm is nan or inf
    OUTLIER = "outlier"  # this step stands out by itself: a hard batch, or the first of a spike
    SPIKE = "spike"  # several do: the loss or the norm has jumped and stays up
    DRIFT = "drift"  # slowly away from the trend: a divergence
    PLATEAU = "plateau"  # settled above the level that was reached before
    OSCILLATION = "oscillation"  # up and down, more widely than before
    SHIFT = "shift"  # another level or scatter of the loss, with an ordinary gradient norm: other data
    TRICKLE = "trickle"  # single samples stand out more often than before, though no step need do so


@dataclass(frozen=True)
class Finding:
    """A verdict with its evidence.

    severity: how far beyond its threshold the strongest test is: 1 = just beyond, 0 = healthy. onset: the first step
    that belongs to it (`step` itself for an outlier). reason: a sentence with the numbers. warnings: leading indicators
    that move, on which nobody acts. on_trend: whether loss and norm lie where the trend expects them. reset: what is
    usual is learnt anew from here on.
    """

    step: int
    verdict: Verdict
    severity: float
    onset: int
    reason: str = ""
    warnings: tuple[str, ...] = ()
    on_trend: bool = True
    reset: bool = False
