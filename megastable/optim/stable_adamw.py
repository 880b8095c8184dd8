"""StableAdamW (Wortsman et al., arXiv:2304.13013, section 3.4, algorithm 2): AdamW with Adafactor's update clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megastable.optim.adam_pieces import AdamPieces, chunks
from megastable.optim.pieces import Piece


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
