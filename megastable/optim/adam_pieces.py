"""The base of optimizers whose update is AdamW's with another gradient, another rate of each tensor, or new beginnings.

They update by torch's fused kernel (fused.py). What they compute before it runs over parts that fit a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
