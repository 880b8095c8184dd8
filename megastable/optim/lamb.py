"""LAMB (You et al., arXiv:1904.00962, algorithm 2): Adam's steps scaled to the size of each matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megastable.optim import fused
from megastable.optim.adam_pieces import AdamPieces, chunk_size, chunks, count_of
from megastable.optim.pieces import Piece


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
