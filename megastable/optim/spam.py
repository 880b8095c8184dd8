"""SPAM, spike-aware Adam with momentum reset (Huang et al., arXiv:2501.06842, algorithm 1), without sparse momentum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megastable.optim.adam_pieces import AdamPieces, chunks
from megastable.optim.pieces import Piece


def since_reset(step: int, interval: int) -> int:
    """Which update of its period number `step` is, both from 1; a period begins with moments of zero."""
    return (step - 1) % interval + 1


def warmed_up(count: int, warmup: int) -> float:
    """The share of the rate at update `count` of a period: half a cosine up to 1 at `warmup`."""
    return 1.0 if count >= warmup else 0.5 * (1 - math.cos(math.pi * count / warmup))


class Spam(AdamPieces):
    """AdamW that clips elements of the gradient with g^2 > threshold v to sign(g) sqrt(threshold v), v of the update
    before, and that begins anew every `interval` updates: moments and bias correction, and `warmup` updates with a
    lower rate (the first period included).

    v is not corrected for bias, as in the paper. Where it is 0 (at the first update of a period, or no gradient yet)
    nothing is clipped. All follows from the number of the update. Elementwise: no communication.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        interval: int = 500,
        threshold: float = 5000.0,
        warmup: int = 150,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps)
        self.interval, self.threshold, self.warmup = interval, threshold, warmup

    def update(self, pieces: Sequence[Piece], step: int) -> None:
        count = since_reset(step, self.interval)
        for piece in pieces:
            rate = piece.group["lr"] * warmed_up(count, self.warmup)
            if count == 1:
                forget(piece)
            for at in chunks(piece):
                gradient = clipped(piece.gradient[at], piece.state["exp_avg_sq"][at], self.threshold)
                self.adamw(piece, at, rate, count, gradient)


def forget(piece: Piece) -> None:
    """Reset the moments of a piece."""
    for moment in piece.state.values():
        moment.zero_()


def clipped(gradient: Tensor, v: Tensor, threshold: float) -> Tensor:
    """The gradient with spikes clipped, in new memory if there are any."""
    bound = v * threshold
    excess = gradient.square().sub_(bound)
    if gradient.device.type == "cpu" and float(excess.max()) <= 0:
        return gradient  # most parts; elsewhere the question would wait for the device
    return torch.where((excess > 0) & (v > 0), bound.sqrt_().copysign_(gradient), gradient)
