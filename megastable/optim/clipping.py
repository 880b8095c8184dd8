"""Gradient clipping on the pieces of ZeRO's flat buffers, between the gate's yes and the update.

    clipping = CLIPPINGS[kind](config.optimizer, parameters, tensor, device)
    kept = clipping.clip_pieces(pieces, norm, scale)           # in place; collective

The gate has judged the gradients before any clipping. Every rank computes the same factors from the same sums, so that
copies of a weight stay the same bits. State has the form of an optimizer's shared state (pieces.py): it changes with an
update only, and snapshots, checkpoints and other layouts keep it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from megastable.config.optimizers import OptimizerConfig
from megastable.optim.pieces import Piece, WholeParameter, sum_by_parameter, sum_over_world
from megastable.parallel.sharding import Fragment, split_in_rectangles, whole_index

EPS = 1e-6  # of clipping by a global norm, as in DeepSpeed


class Clipping(ABC):
    """parameters: of the whole model by name; tensor: this rank's (rank, size) in the tensor group.

    names: of the state, all of it or none is in `shared`. THRESHOLD, DECAY, WARMUP: where the recipe leaves them out.
    """

    names: ClassVar[tuple[str, ...]] = ()
    THRESHOLD: ClassVar[float] = math.inf
    DECAY: ClassVar[float] = 0.0
    WARMUP: ClassVar[int] = 0

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Mapping[str, WholeParameter],
        tensor: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.config, self.parameters, self.tensor, self.device = config, parameters, tensor, device
        clipping_config = config.clipping
        self.threshold = self.THRESHOLD if clipping_config.threshold is None else clipping_config.threshold
        self.decay = self.DECAY if clipping_config.decay is None else clipping_config.decay
        self.warmup = self.WARMUP if clipping_config.warmup is None else clipping_config.warmup
        self.shared: dict[str, Tensor] = {}

    @abstractmethod
    def clip_pieces(self, pieces: Sequence[Piece], norm: float, scale: float) -> float:
        """Clip the gradients of this rank's pieces in place; returns the share of their norm that is left, 1 if nothing
        was clipped, the same on all ranks.

        norm: global L2 norm of the gradients, finite; scale: the gradients are multiplied by it, the norm is not.
        Collective over the world.
        """

    def restore_state(self, saved: Mapping[str, Tensor]) -> None:
        """Replace the state by a copy of `saved`; one of another kind of clipping is dropped."""
        is_complete = all(name in saved for name in self.names)
        self.shared = {n: saved[n].to(self.device, copy=True) for n in self.names} if is_complete else {}


def by_norm(norm: float, most: float) -> float:
    """The factor that clips to a global norm of `most` (arXiv:1211.5063, algorithm 1); most = 0: never."""
    return min(1.0, most / (norm + EPS)) if most else 1.0


def _scaled(pieces: Sequence[Piece], factor: float) -> float:
    """Multiply all gradients."""
    for piece in pieces if factor < 1 else ():
        piece.gradient.mul_(factor)
    return factor


def _left(removed: Tensor, norm: float) -> float:
    """The share of `norm` after squares of the sum `removed` have been taken away."""
    return math.sqrt(max(0.0, 1 - float(removed) / norm**2)) if norm else 1.0


class Value(Clipping):
    """Clamp every element to [-threshold, threshold] (Mikolov's, as described in arXiv:1211.5063, section 3.2)."""

    def clip_pieces(self, pieces: Sequence[Piece], norm: float, scale: float) -> float:
        most, removed = self.threshold * scale, torch.zeros(1, dtype=torch.float64, device=self.device)
        for piece in pieces:
            before = _squared(piece.gradient)
            piece.gradient.clamp_(-most, most)
            if piece.fragment.counted:
                removed += before - _squared(piece.gradient)
        return _left(sum_over_world(removed) / scale**2, norm)


class AdaGC(Clipping):
    """Clip each tensor to `threshold` times an average of its own clipped norms (AdaGC, arXiv:2502.11034, algorithm 1).

    In the first `warmup` updates all are clipped to a global norm of optimizer.clip, and the average is the smallest
    norm of a tensor so far. Zeros do not count: they would clip for long, or forever, what is used again, as an expert
    that no token has chosen for a while. State: "adagc/norms", fp64 [parameters], 0 = none yet, in the order of their
    names; "adagc/updates", fp64 [1], updates since clipping began.
    """

    names = ("adagc/norms", "adagc/updates")
    THRESHOLD, DECAY, WARMUP = 1.05, 0.98, 100

    def clip_pieces(self, pieces: Sequence[Piece], norm: float, scale: float) -> float:
        if not self.shared:
            for name, count in zip(self.names, (len(self.parameters), 1), strict=True):
                self.shared[name] = torch.zeros(count, dtype=torch.float64, device=self.device)
        past_norms, update_count = (self.shared[name] for name in self.names)
        piece_squares = ((p.fragment, _squared(p.gradient)) for p in pieces)
        current_norms = sum_by_parameter(piece_squares, 1, self.parameters, self.device)[:, 0].sqrt() / scale
        if int(update_count) < self.warmup:
            norm_share = _scaled(pieces, by_norm(norm, self.config.clip))
            clipped_norms = current_norms * norm_share
            average_norms = torch.minimum(past_norms, clipped_norms)
        else:
            clip_factors = compute_factors(current_norms, self.threshold * past_norms, unless=past_norms == 0)
            for piece in pieces:
                piece.gradient.mul_(clip_factors[self.parameters[piece.name].row].float())
            clipped_norms = current_norms * clip_factors
            average_norms = self.decay * past_norms + (1 - self.decay) * clipped_norms
            norm_share = _left((current_norms.square() - clipped_norms.square()).sum(), norm)
        average_norms = torch.where(clipped_norms == 0, past_norms, average_norms)
        past_norms.copy_(torch.where(past_norms == 0, clipped_norms, average_norms))
        update_count += 1
        return norm_share


class ZClip(Clipping):
    """Clip the global norm where it is an outlier of its own history (ZClip, arXiv:2504.02507, algorithm 1).

    z = (norm - mean) / deviation beyond `threshold` (t) is reduced to t² / z ("reciprocal clipping"). The clipped norm
    enters the averages. The first `warmup` norms are not clipped, and give the first mean and variance. State:
    "zclip/mean", "zclip/variance", "zclip/updates", fp64 [1].
    """

    names = ("zclip/mean", "zclip/variance", "zclip/updates")
    THRESHOLD, DECAY, WARMUP = 2.5, 0.97, 25

    def clip_pieces(self, pieces: Sequence[Piece], norm: float, scale: float) -> float:
        mean, variance, update_count = (float(self.shared.get(name, 0.0)) for name in self.names)
        clipped_norm = norm
        if update_count < self.warmup:  # Welford's sums: those of all norms so far
            mean_before = mean
            mean += (norm - mean) / (update_count + 1)
            variance += ((norm - mean_before) * (norm - mean) - variance) / (update_count + 1)
        else:
            clipped_norm = reciprocal(norm, mean, math.sqrt(variance), self.threshold)
            mean = self.decay * mean + (1 - self.decay) * clipped_norm
            variance = self.decay * variance + (1 - self.decay) * (clipped_norm - mean) ** 2
        for name, value in zip(self.names, (mean, variance, update_count + 1), strict=True):
            self.shared[name] = torch.tensor([value], dtype=torch.float64, device=self.device)
        return _scaled(pieces, clipped_norm / norm if norm else 1.0)


def reciprocal(norm: float, mean: float, deviation: float, threshold: float) -> float:
    """The norm that ZClip clips `norm` to (arXiv:2504.02507, algorithm 1)."""
    z = (norm - mean) / (deviation + EPS)
    return mean + threshold**2 / z * deviation if z > threshold else norm


class AGC(Clipping):
    """Clip each row's gradient to `threshold` times the norm of its weights (AGC, arXiv:2102.06171, equation 3).

    Rows of a matrix are the units of the paper: all weights into one output. Vectors are one unit. The output layer is
    not clipped, nor an embedding that is tied to it.
    """

    THRESHOLD = 0.01
    LEAST = 1e-3  # of the norm of weights, so that those that are zero can grow

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Mapping[str, WholeParameter],
        tensor: tuple[int, int],
        device: torch.device,
    ) -> None:
        super().__init__(config, parameters, tensor, device)
        self.head = "head.weight" if "head.weight" in parameters else "embedding.weight"
        self._first: dict[str, int] = {}  # the row in the table of every tensor's first unit
        self._rows: dict[Fragment, Tensor] = {}  # of every row of a fragment's shard
        self._units = 0
        for parameter_name, whole_parameter in parameters.items():
            self._first[parameter_name] = self._units
            self._units += whole_parameter.shape[0] if len(whole_parameter.shape) > 1 else 1

    def clip_pieces(self, pieces: Sequence[Piece], norm: float, scale: float) -> float:
        square_table = torch.zeros(2, self._units, dtype=torch.float64, device=self.device)
        clip_units = [unit for piece in pieces if piece.name != self.head for unit in self._split(piece)]
        for piece, table_rows, gradient, weight in clip_units:
            for square_row, unit_values in zip(square_table, (gradient, weight), strict=True):
                if piece.fragment.counted:
                    unit_squares = torch.linalg.vector_norm(unit_values, dim=1).double().square()
                    square_row.index_add_(0, table_rows, unit_squares)
        gradient_norms, weight_norms = sum_over_world(square_table).sqrt_()
        gradient_norms /= scale
        row_factors = compute_factors(gradient_norms, self.threshold * weight_norms.clamp(min=self.LEAST))
        for _, table_rows, gradient, _ in clip_units:
            gradient.mul_(row_factors[table_rows].float().unsqueeze(1))
        return _left(((1 - row_factors.square()) * gradient_norms.square()).sum(), norm)

    def _split(self, piece: Piece) -> list[tuple[Piece, Tensor, Tensor, Tensor]]:
        """(piece, rows of the table, gradient, weight) of matrices of units; views [rows, n]."""
        f = piece.fragment
        if f not in self._rows:
            index = whole_index(f, 0, *self.tensor) if len(f.shape) > 1 else torch.zeros(1, dtype=torch.int64)
            self._rows[f] = index.to(self.device) + self._first[f.name]
        rows = self._rows[f]
        if len(f.shape) == 1:
            return [(piece, rows, piece.gradient.view(1, -1), piece.weight.view(1, -1))]
        return [
            (piece, rows[r.rows], r.view_of(piece.gradient), r.view_of(piece.weight))
            for r in split_in_rectangles(f)
        ]


def compute_factors(norms: Tensor, most: Tensor, unless: Tensor | None = None) -> Tensor:
    """Factors that reduce `norms` to `most`, exactly 1 where they are not above; unless: where they do not apply."""
    is_above = norms > most
    if unless is not None:
        is_above &= ~unless
    return torch.where(is_above, most / norms, 1.0)


def _squared(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square().view(1)


# Those that need no more than the pieces of averaged gradients.
CLIPPINGS: dict[str, type[Clipping]] = {"value": Value, "adagc": AdaGC, "zclip": ZClip, "agc": AGC}


# QK-clip: where a head's largest attention logit exceeds a threshold, scale its query and key weights down after the
# update, so that it would have been the threshold (MuonClip: Kimi K2, arXiv:2507.20534 section 2.1).
#
# A head's logits are bilinear in its queries and keys: factors f of its query rows and g of its key rows scale them
# by f g. The rotation commutes with both. With grouped queries, heads share a key head: it gets the root of the
# smallest factor among them, and every query head the rest of its own, so that no head's logits are scaled by
# anything but its factor.


def find_heads_over(highest: Tensor, threshold: float) -> Tensor:
    """Which heads to clip. A largest logit that is not finite is no measurement: its head is left alone."""
    return torch.isfinite(highest) & (highest > threshold)


def clip_factors(highest: Tensor, kv_heads: int, threshold: float) -> tuple[Tensor, Tensor]:
    """Factors of query heads [..., heads] and key heads [..., kv_heads], from largest logits [..., heads]. fp32."""
    wanted_factors = torch.where(find_heads_over(highest, threshold), threshold / highest, 1.0)
    grouped_factors = wanted_factors.unflatten(-1, (kv_heads, -1))
    key_factors = grouped_factors.amin(-1).sqrt()
    return (grouped_factors / key_factors.unsqueeze(-1)).flatten(-2), key_factors


def row_factors(queries: Tensor, keys: Tensor, width: int, tensor: int, tensor_rank: int) -> Tensor:
    """The factor of every row of a tensor rank's fused weight (or element of its bias): queries, keys, values.

    queries, keys: factors of all heads of a block; width: of a head; tensor: ranks of the tensor group.
    """
    q, k = (of.chunk(tensor)[tensor_rank].repeat_interleave(width) for of in (queries, keys))
    return torch.cat((q, k, torch.ones_like(k)))


@torch.no_grad()
def scale_rows(piece: Tensor, fragment: Fragment, factors: Tensor) -> None:
    """Multiply the rows of a parameter's shard by `factors` [rows], in place, in the `piece` that `fragment` describes:
    a flat range, which may begin and end inside a row."""
    factors = factors.to(piece.device)
    for row_rectangle in split_in_rectangles(fragment):
        row_rectangle.view_of(piece).mul_(factors[row_rectangle.rows, None])
