"""Adafactor (Shazeer & Stern, arXiv:1804.04235, algorithm 4): the second moment of a matrix from its rows and columns.

The rate is the schedule's: no relative steps. Weight decay is decoupled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.optim.pieces import Piece, PieceOptimizer, chunk_size
from megastable.parallel.sharding import Fragment, Rectangle, shape_of, split_in_rectangles, whole_index

TINY = 1e-30  # the paper's first epsilon, added to squares of gradients
ROWS, COLUMNS, PRESENT = "rows", "columns", "present"


class Adafactor(PieceOptimizer):
    """v_ij = r_i c_j / mean(r), with r and c averages of g^2 over rows and columns; the average's decay rate is
    1 - t^-`decay_exponent` at update t. u = g / sqrt(v), divided by max(1, RMS(u) / clip); w -= lr (u + decay w).

    A matrix is the whole tensor as it is stored: q, k and v in one, gate and up in one. r and c are shared state. Norms
    and biases have a full second moment. momentum: decay rate of an average of u, taken in its place; 0 keeps none.

    Two all-reduces per update: of all rows and columns, fp32, and of a number per parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        decay_exponent: float = 0.8,
        clip: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr)
        self.decay_exponent, self.clip, self.momentum = decay_exponent, clip, momentum
        for param_group in self.param_groups:
            param_group["matrices"] = all(len(shape_of(p)) > 1 for p in param_group["params"])

    def kinds_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",) * (self.momentum > 0) + ("exp_avg_sq",) * (not group["matrices"])

    def update(self, pieces: Sequence[Piece], step: int) -> None:
        average_decay = 1 - step**-self.decay_exponent
        for name, new_mean in self._means(pieces).items():
            shared_mean = self.shared.setdefault(name, torch.zeros_like(new_mean))
            shared_mean.mul_(average_decay).add_(new_mean.add_(TINY) * (1 - average_decay))
        square_norms = list[tuple[Piece, Tensor]]()
        for piece in pieces:
            if not piece.group["matrices"]:
                new_square = piece.gradient.square().add_(TINY).mul_(1 - average_decay)
                piece.state["exp_avg_sq"].mul_(average_decay).add_(new_square)
            # A comprehension: the last `u` of a loop would live on through the second pass.
            square_norms += [
                (piece, torch.linalg.vector_norm(u).double().square()) for _, u in self._scaled(piece)
            ]
        square_sums = self.sum_by_parameter(square_norms, 1)[:, 0].tolist()
        for piece in pieces:
            whole_parameter, group = self.at.parameters[piece.name], piece.group
            rms = math.sqrt(square_sums[whole_parameter.row] / whole_parameter.numel)
            clip_shrink = 1 / max(1.0, rms / self.clip)
            factor = clip_shrink * (1 - self.momentum) if self.momentum else -group["lr"] * clip_shrink
            for part_range, change in self._scaled(piece, factor):
                if self.momentum:
                    average = piece.state["exp_avg"][part_range].mul_(self.momentum).add_(change)
                    torch.mul(average, -group["lr"], out=change)
                if group["weight_decay"]:
                    change.add_(piece.weight[part_range] * (-group["lr"] * group["weight_decay"]))
                self.move_weights(piece, change, part_range)

    def _means(self, pieces: Sequence[Piece]) -> dict[str, Tensor]:
        """Means of squared gradients over the rows and columns of the matrices that some rank updates. Collective."""
        matrices = {n: p.shape for n, p in self.at.parameters.items() if len(p.shape) > 1}
        names = [(kind, matrice_name) for matrice_name in matrices for kind in (ROWS, COLUMNS, PRESENT)]
        lengths = [1 if kind == PRESENT else matrices[name][kind == COLUMNS] for kind, name in names]
        flat_sums = torch.zeros(sum(lengths), device=next(iter(self._fragments)).device)
        sums = dict(zip(names, flat_sums.split(lengths), strict=True))
        for piece in pieces:
            if piece.group["matrices"] and piece.fragment.counted:
                sums[PRESENT, piece.name] += 1
                rows, columns = self._indices(piece)
                for band in split_in_bands(piece.fragment, chunk_size(piece.weight)):
                    squares = band.view_of(piece.gradient).square()
                    sums[ROWS, piece.name].index_add_(0, rows[band.rows], squares.sum(1))
                    sums[COLUMNS, piece.name].index_add_(0, columns[band.columns], squares.sum(0))
        if dist.is_initialized():
            dist.all_reduce(flat_sums)
        # Some of ZeRO's wrappers update one group of parameters at a time: the others' averages stay.
        update_counts = torch.cat([sums[PRESENT, matrice_name] for matrice_name in matrices]).tolist()
        present = {name for name, count in zip(matrices, update_counts, strict=True) if count}
        return {
            f"{kind}/{name}": sums[kind, name].div_(matrices[name][kind == ROWS])
            for kind, name in names
            if kind != PRESENT and name in present
        }

    def _indices(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Where this tensor rank's rows and columns lie in the whole matrix."""
        rows, columns = (whole_index(piece.fragment, dim, *self.at.tensor) for dim in (0, 1))
        return rows.to(piece.weight.device), columns.to(piece.weight.device)

    def _scaled(self, piece: Piece, factor: float = 1.0) -> Iterator[tuple[slice, Tensor]]:
        """g / sqrt(v) times `factor` of a piece, in parts, in new memory."""
        if not piece.group["matrices"]:
            yield slice(None), (piece.gradient / piece.state["exp_avg_sq"].sqrt()).mul_(factor)
            return
        rows, columns = self._indices(piece)
        r, c = (self.shared[f"{kind}/{piece.name}"] for kind in (ROWS, COLUMNS))
        by_row, by_column = (r / r.mean()).rsqrt_().mul_(factor)[rows, None], c.rsqrt()[None, columns]
        for row_band in split_in_bands(piece.fragment, chunk_size(piece.weight)):
            u = row_band.view_of(piece.gradient) * by_row[row_band.rows]
            yield row_band.part, u.mul_(by_column[:, row_band.columns]).flatten()


def split_in_bands(fragment: Fragment, size: int) -> Iterator[Rectangle]:
    """The rectangles of a piece of a matrix, whole rows some `size` elements at a time."""
    row_width = fragment.shape[1]
    rows_at_once = max(1, size // row_width)
    for whole_rectangle in split_in_rectangles(fragment):
        for first_row in range(whole_rectangle.rows.start, whole_rectangle.rows.stop, rows_at_once):
            band_end = min(first_row + rows_at_once, whole_rectangle.rows.stop)
            band_start = whole_rectangle.part.start + (first_row - whole_rectangle.rows.start) * row_width
            part_end = min(band_start + (band_end - first_row) * row_width, whole_rectangle.part.stop)
            yield Rectangle(slice(band_start, part_end), slice(first_row, band_end), whole_rectangle.columns)
