"""Measurements of a step before its update, and the gate that judges them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Measured:
    """Measurements of a step before the optimizer runs. The same numbers on every rank.

    losses, squares: fp64 [global batch], per-sample cross-entropy (nats) and mean logsumexp^2, in the order of the
    step's positions. grad_norm: global L2 norm before clipping, unscaled; inf if any gradient is not finite. ballot: of
    all ranks (`Engine.train_step`), summed, by name. overflow: gradients beyond fp16's range, which a smaller loss
    scale fixes: normal in fp16, not an incident. fp8: whether it was computed in FP8, None if the recipe does not use
    it. gradients: of every data rank (local_gradients.py), () if they are not watched. counts: fp64 [vocabulary], how
    often each token is in the batch. entropies: as `losses`, mean entropy of the model's predictions, nats; None where
    `trends` do not look.
    """

    losses: Tensor
    squares: Tensor
    grad_norm: float
    ballot: dict[str, tuple[float, ...]]
    loss_scale: float
    overflow: bool = False
    fp8: bool | None = None
    gradients: tuple[float, ...] = ()
    counts: Tensor | None = None
    entropies: Tensor | None = None

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Judge(Protocol):
    """The gate: True clips and updates, False drops the gradients. A pure function of its input."""

    def __call__(self, measured: Measured) -> bool: ...
