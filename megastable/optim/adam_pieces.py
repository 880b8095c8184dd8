"""The base of optimizers whose update is AdamW's with another gradient, another rate of each tensor, or new beginnings.

They update by torch's fused kernel (fused.py). What they compute before it runs over parts that fit a CPU's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megastable.optim import fused
from megastable.optim.adamw import CHUNKS
from megastable.optim.pieces import Piece, PieceOptimizer, UpdateSize


def chunks(piece: Piece) -> Iterator[slice]:
    """The elements of a piece in parts to process at a time."""
    size = chunk_size(piece.weight)
    for start in range(0, piece.weight.numel(), size):
        yield slice(start, min(start + size, piece.weight.numel()))


def chunk_size(x: Tensor) -> int:
    """Elements to process at a time on x's device."""
    return CHUNKS.get(x.device.type, CHUNKS["cuda"])


class AdamPieces(PieceOptimizer):
    """Adam's averages of gradients and of their squares (arXiv:1412.6980), and decoupled weight decay."""

    def __init__(self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps)

    def adamw(
        self, piece: Piece, at: slice, rate: float, count: int, gradient: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> None:  # fmt: skip
        """AdamW's update of a part of a piece, in place. count: of the updates that its averages see, this one
        included. gradient: of the part, in place of the piece's. chosen: bool, the elements to update; the others
        keep their weight, and moments of zero."""
        weight, group = piece.weight[at], piece.group
        before = weight.clone() if self.recording or chosen is not None else weight
        if chosen is not None:
            gradient = torch.where(chosen, piece.gradient[at] if gradient is None else gradient, 0.0)
        moments = [piece.state[kind][at] for kind in self.kinds]
        fused.update(
            (weight, piece.gradient[at] if gradient is None else gradient, *moments), count_of(count, weight),
            rate, group["betas"], group["eps"], group["weight_decay"],
        )  # fmt: skip
        if chosen is not None:  # weight decay has changed the others, too
            weight.copy_(torch.where(chosen, weight, before))
        if self.recording and piece.fragment.counted:
            self.sizes.append(UpdateSize.of(piece.name, weight - before))


def count_of(count: int, like: Tensor) -> Tensor:
    """A count of updates as the kernel wants it."""
    return torch.full((), float(count), device=like.device)


class Lamb(AdamPieces):
    """u = m_hat / (sqrt(v_hat) + eps) + decay w; w -= lr |w| / |u| u, with norms over the whole matrix.

    The ratio is 1 where a norm is 0. Norms and biases take the step u itself, as in the authors' program. The averages
    are those of AdamW. One all-reduce of two numbers per parameter and update.
    """

    def update(self, pieces: Sequence[Piece], step: int) -> None:
        matrices = [piece for piece in pieces if len(piece.fragment.shape) > 1]
        squares = self.totals(self._squares(matrices, step), 2)
        norms = squares.sqrt().tolist()
        for piece in pieces:
            weight, taken = norms[self.at.parameters[piece.name].row]  # both 0 for norms and biases
            rate = piece.group["lr"] * (weight / taken if weight and taken else 1.0)
            for at in chunks(piece):
                self.adamw(piece, at, rate, step)

    def _squares(self, pieces: Sequence[Piece], step: int) -> Iterator[tuple[Piece, Tensor]]:
        """|w|^2 and |u|^2 of parts of pieces, with u of this update; fp64 [2]."""
        size = max((min(chunk_size(p.weight), p.weight.numel()) for p in pieces), default=0)
        room = [torch.empty(size, device=p.weight.device) for p in pieces[:1] for _ in range(3)]
        for piece in pieces:
            group = piece.group
            for at in chunks(piece):
                weight, gradient = piece.weight[at], piece.gradient[at]
                u, *moments = (x[: weight.numel()] for x in room)
                # The kernel subtracts its step times the rate from what it is told are the weights.
                torch.mul(weight, group["weight_decay"], out=u)
                for copy, kind in zip(moments, self.kinds, strict=True):
                    copy.copy_(piece.state[kind][at])
                count = count_of(step, weight)
                fused.update((u, gradient, *moments), count, -1.0, group["betas"], group["eps"], 0.0)
                yield piece, torch.stack([torch.linalg.vector_norm(x) for x in (weight, u)]).double().square()


class StableAdamW(AdamPieces):
    """AdamW whose rate for a tensor is divided by max(1, RMS), RMS^2 = mean(g^2 / max(v_hat, eps^2)).

    A second moment that lags behind the gradients makes AdamW's steps too large; RMS is 1 where it does not lag. The
    averages are those of AdamW. One all-reduce of a number per parameter and update.
    """

    def update(self, pieces: Sequence[Piece], step: int) -> None:
        sums = self.totals(((p, lag(p, at, step)) for p in pieces for at in chunks(p)), 1)[:, 0].tolist()
        for piece in pieces:
            whole = self.at.parameters[piece.name]
            rms = math.sqrt(sums[whole.row] / whole.numel)
            for at in chunks(piece):
                self.adamw(piece, at, piece.group["lr"] / max(1.0, rms), step)


def lag(piece: Piece, at: slice, step: int) -> Tensor:
    """The sum of g^2 / max(v_hat, eps^2) over a part, with v_hat after this update; fp64, 0-d."""
    beta2, least = piece.group["betas"][1], piece.group["eps"] ** 2
    biased = 1 - beta2**step
    squares = piece.gradient[at].square()
    v = torch.lerp(piece.state["exp_avg_sq"][at], squares, 1 - beta2).clamp_(min=least * biased)
    return squares.div_(v).sum().double().mul_(biased)
