"""SGD with momentum (Polyak, 1964; Sutskever et al., ICML 2013) and decoupled weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megastable.optim.pieces import Piece, PieceOptimizer


class SGD(PieceOptimizer):
    """b = momentum b + g; w -= lr (b + decay w). "exp_avg" is the momentum buffer b. Elementwise: no communication."""

    kinds = ("exp_avg",)

    def __init__(self, params: Iterable[Any], *, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, lr=lr, momentum=momentum)

    def update(self, pieces: Sequence[Piece], step: int) -> None:
        for piece in pieces:
            group = piece.group
            buffer = piece.state["exp_avg"].mul_(group["momentum"]).add_(piece.gradient)
            change = (piece.weight * group["weight_decay"]).add_(buffer).mul_(-group["lr"])
            self.move(piece, change)
