"""SPAM, spike-aware Adam with momentum reset (Huang et al., arXiv:2501.06842, algorithm 1).

Sparse momentum: at every reset each element of a matrix is chosen with probability `density`, and until the next one
only the chosen ones have moments and are updated. The draw is a hash of parameter, period and place in the whole
matrix, so it is the same in every layout and after a resume or a rewind. Moments lie in buffers as large as the
weights: this has the paper's updates, not its saving of memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megastable.base.splitmix import GOLDEN, mix, signed, unsigned_shift
from megastable.optim.adam_pieces import AdamPieces, chunks
from megastable.optim.pieces import Piece
from megastable.parallel.fragments import whole_index

DRAWN_BITS = 32  # of a hash, compared with the density


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
        density: float = 1.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps)
        self.interval, self.threshold, self.warmup, self.density = interval, threshold, warmup, density

    def update(self, pieces: Sequence[Piece], step: int) -> None:
        count = since_reset(step, self.interval)
        for piece in pieces:
            rate = piece.group["lr"] * warmed_up(count, self.warmup)
            if count == 1:
                forget(piece)
            chosen = draw_elements(piece, (step - 1) // self.interval, self.density, self.at.tensor)
            for at in chunks(piece):
                gradient = clipped(piece.gradient[at], piece.state["exp_avg_sq"][at], self.threshold)
                self.adamw(piece, at, rate, count, gradient, chosen(at))


def forget(piece: Piece) -> None:
    """Reset the moments of a piece."""
    for moment in piece.state.values():
        moment.zero_()


def draw_elements(
    piece: Piece, period: int, density: float, tensor: tuple[int, int]
) -> Callable[[slice], Tensor | None]:
    """Which elements of a part of a piece are trained in a period: bool, of each element; None: all, as of vectors.
    tensor: this rank's (rank, size) in the tensor group."""
    f, device = piece.fragment, piece.weight.device
    if density == 1 or len(f.shape) != 2:
        return lambda at: None
    rows, columns = (whole_index(f, dim, *tensor).to(device) for dim in (0, 1))
    width, width_of_whole = f.shape[1], f.shape[1] * (tensor[1] if f.dim == 1 else 1)
    name = hashlib.blake2b(f"{period} {f.name}".encode(), digest_size=8).digest()
    key, bound = signed(int.from_bytes(name, "little")), round(density * 2**DRAWN_BITS)

    def chosen(at: slice) -> Tensor:
        places = torch.arange(f.start + at.start, f.start + at.stop, device=device)
        whole = rows[places // width] * width_of_whole + columns[places % width]
        return unsigned_shift(mix((whole + 1) * signed(GOLDEN) + key), 64 - DRAWN_BITS) < bound

    return chosen


def clipped(gradient: Tensor, v: Tensor, threshold: float) -> Tensor:
    """The gradient with spikes clipped, in new memory if there are any."""
    bound = v * threshold
    excess = gradient.square().sub_(bound)
    if gradient.device.type == "cpu" and float(excess.max()) <= 0:
        return gradient  # most parts; elsewhere the question would wait for the device
    return torch.where((excess > 0) & (v > 0), bound.sqrt_().copysign_(gradient), gradient)
