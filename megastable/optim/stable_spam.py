"""Stable-SPAM (Huang et al., arXiv:2502.17055, algorithm 1): Adam on gradients with normalised spikes and norms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megastable.optim.adam_pieces import AdamPieces, chunks
from megastable.optim.pieces import Piece
from megastable.optim.spam import draw_elements, forget, since_reset

KIND = "gradient_sizes"  # of a parameter: running averages of its largest |g|, its norm, and the square of its norm


class StableSpam(AdamPieces):
    """Three changes of AdamW, the first two to the gradient g of every tensor:

    AdaClip: with T the average of max |g|, elements above T become g T / max |g|. AdaGN: g is scaled to the norm
    n / (sqrt(s) + eps), with n and s the averages of its norm and of the norm's square. MoRet: moments and bias
    correction begin anew every `interval` updates. The three averages, corrected for bias, do not. With a `density`
    below 1 momentum is sparse, as SPAM's; AdaClip and AdaGN see whole tensors.

    They are shared state, fp64 [3] for every parameter. Two all-reduces of a number per parameter and update.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        interval: int = 1000,
        max_decay: float = 0.999,
        norm_decays: tuple[float, float] = (0.7, 0.9),
        density: float = 1.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps)
        self.interval, self.decays, self.density = interval, (max_decay, *norm_decays), density

    def update(self, pieces: Sequence[Piece], step: int) -> None:
        parts = [(piece, at) for piece in pieces for at in chunks(piece)]
        peaks = [largest(piece.gradient[at]) for piece, at in parts]
        owners = [piece for piece, _ in parts]
        highest = self.maxima(zip(owners, peaks, strict=True), 1)[:, 0]
        averages, decays = self._averages(), highest.new_tensor(self.decays)
        unbias = 1 / (1 - decays**step)
        averages[:, 0].mul_(decays[0]).add_(highest * (1 - decays[0]))
        limits = averages[:, 0] * unbias[0]
        bounds = torch.stack([limits, torch.where(highest > limits, limits / highest, 1.0)], 1).tolist()

        beyond = torch.stack(peaks).tolist() if peaks else []

        def clipped_part(index: int) -> Tensor:
            (piece, at), (limit, scale) = parts[index], self._at(owners[index], bounds)
            return clipped(piece.gradient[at], limit, scale) if beyond[index] > limit else piece.gradient[at]

        def seen(index: int) -> tuple[Piece, Tensor]:
            part = clipped_part(index)
            square = torch.linalg.vector_norm(part).double().square()
            return owners[index], torch.stack([square, square.new_tensor(part.numel())])

        squares, present = self.totals(map(seen, range(len(parts))), 2).unbind(1)
        norms = squares.sqrt()
        averages[:, 1].mul_(decays[1]).add_(norms * (1 - decays[1]))
        averages[:, 2].mul_(decays[2]).add_(norms.square() * (1 - decays[2]))
        eps = self.param_groups[0]["eps"]
        wanted = averages[:, 1] * unbias[1] / ((averages[:, 2] * unbias[2]).sqrt() + eps)
        scales = torch.where(norms > 0, wanted / norms, 0.0).tolist()
        # Some of ZeRO's wrappers update one group of parameters at a time: the others' averages stay.
        for name, row, numel in zip(sorted(self.at.parameters), averages, present.tolist(), strict=True):
            if numel:
                self.shared[f"{KIND}/{name}"] = row.clone()

        count = since_reset(step, self.interval)
        for piece in pieces if count == 1 else ():
            forget(piece)
        period = (step - 1) // self.interval
        chosen = {
            piece.fragment: draw_elements(piece, period, self.density, self.at.tensor) for piece in pieces
        }
        for index, (piece, at) in enumerate(parts):
            gradient = clipped_part(index) * self._at(piece, scales)
            self.adamw(piece, at, piece.group["lr"], count, gradient, chosen[piece.fragment](at))

    def _averages(self) -> Tensor:
        """[parameters, 3], in their order; zeros before the first update."""
        zeros = torch.zeros(3, dtype=torch.float64, device=self._device)
        return torch.stack([self.shared.get(f"{KIND}/{name}", zeros) for name in sorted(self.at.parameters)])

    def _at(self, piece: Piece, numbers: list[Any]) -> Any:
        return numbers[self.at.parameters[piece.name].row]


def largest(x: Tensor) -> Tensor:
    """The largest magnitude, 0-d."""
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low)


def clipped(gradient: Tensor, limit: float, scale: float) -> Tensor:
    """Elements beyond `limit` times `scale`, the others as they are."""
    return torch.where(gradient.abs() > limit, gradient * scale, gradient)
