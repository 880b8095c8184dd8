"""The base of optimizers whose update is AdamW's with another gradient, another rate of each tensor, or new beginnings.

They update by torch's fused kernel (adamw.py). What they compute before it runs over parts that fit a CPU's cache.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megastable.base.reproducible import GOLDEN, mix_tensor, to_signed, unsigned_shift
from megastable.optim.adamw import update_fused
from megastable.optim.pieces import Piece, PieceOptimizer, UpdateSize, chunk_size, split_in_chunks
from megastable.parallel.sharding import whole_index


class AdamPieces(PieceOptimizer):
    """Adam's averages of gradients and of their squares (arXiv:1412.6980), and decoupled weight decay."""

    def __init__(self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps)

    def apply_adamw(
        self, piece: Piece, at: slice, rate: float, count: int, gradient: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> None:  # fmt: skip
        """AdamW's update of a part of a piece, in place. count: of the updates that its averages see, this one
        included. gradient: of the part, in place of the piece's. chosen: bool, the elements to update; the others
        keep their weight, and moments of zero."""
        weight, group = piece.weight[at], piece.group
        old_weight = weight.clone() if self.recording or chosen is not None else weight
        if chosen is not None:
            gradient = torch.where(chosen, piece.gradient[at] if gradient is None else gradient, 0.0)
        moments = [piece.state[kind][at] for kind in self.kinds]
        update_fused(
            (weight, piece.gradient[at] if gradient is None else gradient, *moments), count_of(count, weight),
            rate, group["betas"], group["eps"], group["weight_decay"],
        )  # fmt: skip
        if chosen is not None:  # weight decay has changed the others, too
            weight.copy_(torch.where(chosen, weight, old_weight))
        if self.recording and piece.fragment.counted:
            self.sizes.append(UpdateSize.of_change(piece.name, weight - old_weight))


def count_of(count: int, like: Tensor) -> Tensor:
    """A count of updates as the kernel wants it."""
    return torch.full((), float(count), device=like.device)


class Lamb(AdamPieces):
    """u = m_hat / (sqrt(v_hat) + eps) + decay w; w -= lr |w| / |u| u, with norms over the whole matrix.

    The ratio is 1 where a norm is 0. Norms and biases take the step u itself, as in the authors' program. The averages
    are those of AdamW. One all-reduce of two numbers per parameter and update.
    """

    def update(self, pieces: Sequence[Piece], step: int) -> None:
        matrix_pieces = [piece for piece in pieces if len(piece.fragment.shape) > 1]
        norm_pairs = self.sum_by_parameter(self._squares(matrix_pieces, step), 2).sqrt().tolist()
        for piece in pieces:
            row = self.at.parameters[piece.name].row
            weight_norm, step_norm = norm_pairs[row]  # both 0 for norms and biases
            rate = piece.group["lr"] * (weight_norm / step_norm if weight_norm and step_norm else 1.0)
            for part_range in split_in_chunks(piece):
                self.apply_adamw(piece, part_range, rate, step)

    def _squares(self, pieces: Sequence[Piece], step: int) -> Iterator[tuple[Piece, Tensor]]:
        """|w|^2 and |u|^2 of parts of pieces, with u of this update; fp64 [2]."""
        buffer_size = max((min(chunk_size(p.weight), p.weight.numel()) for p in pieces), default=0)
        work_buffers = [
            torch.empty(buffer_size, device=p.weight.device) for p in pieces[:1] for _ in range(3)
        ]
        for piece in pieces:
            group = piece.group
            for part_range in split_in_chunks(piece):
                weight, gradient = piece.weight[part_range], piece.gradient[part_range]
                u, *moments = (work_buffer[: weight.numel()] for work_buffer in work_buffers)
                # The kernel subtracts its step times the rate from what it is told are the weights.
                torch.mul(weight, group["weight_decay"], out=u)
                for moment_copy, kind in zip(moments, self.kinds, strict=True):
                    moment_copy.copy_(piece.state[kind][part_range])
                update_count = count_of(step, weight)
                update_fused((u, gradient, *moments), update_count, -1.0, group["betas"], group["eps"], 0.0)
                yield piece, torch.stack([torch.linalg.vector_norm(x) for x in (weight, u)]).double().square()


class StableAdamW(AdamPieces):
    """AdamW whose rate for a tensor is divided by max(1, RMS), RMS^2 = mean(g^2 / max(v_hat, eps^2)).

    A second moment that lags behind the gradients makes AdamW's steps too large; RMS is 1 where it does not lag. The
    averages are those of AdamW. One all-reduce of a number per parameter and update.
    """

    def update(self, pieces: Sequence[Piece], step: int) -> None:
        lags = ((piece, lag(piece, at, step)) for piece in pieces for at in split_in_chunks(piece))
        lag_sums = self.sum_by_parameter(lags, 1)[:, 0].tolist()
        for piece in pieces:
            whole_parameter = self.at.parameters[piece.name]
            rms_lag = math.sqrt(lag_sums[whole_parameter.row] / whole_parameter.numel)
            for part_range in split_in_chunks(piece):
                self.apply_adamw(piece, part_range, piece.group["lr"] / max(1.0, rms_lag), step)


def lag(piece: Piece, at: slice, step: int) -> Tensor:
    """The sum of g^2 / max(v_hat, eps^2) over a part, with v_hat after this update; fp64, 0-d."""
    beta2, least = piece.group["betas"][1], piece.group["eps"] ** 2
    biased = 1 - beta2**step
    squares = piece.gradient[at].square()
    v = torch.lerp(piece.state["exp_avg_sq"][at], squares, 1 - beta2).clamp_(min=least * biased)
    return squares.div_(v).sum().double().mul_(biased)


# SPAM, spike-aware Adam with momentum reset (Huang et al., arXiv:2501.06842, algorithm 1).
#
# Sparse momentum: at every reset each element of a matrix is chosen with probability `density`, and until the next
# one only the chosen ones have moments and are updated. The draw is a hash of parameter, period and place in the
# whole matrix, so it is the same in every layout and after a resume or a rewind. Moments lie in buffers as large as
# the weights: this has the paper's updates, not its saving of memory.


DRAWN_BITS = 32  # of a hash, compared with the density


def since_reset(step: int, interval: int) -> int:
    """Which update of its period number `step` is, both from 1; a period begins with moments of zero."""
    return (step - 1) % interval + 1


def warmed_up(count: int, warmup: int) -> float:
    """The share of the rate at update `count` of a period: half a cosine up to 1 at `warmup`."""
    return 1.0 if count >= warmup else 0.5 * (1 - math.cos(math.pi * count / warmup))


class Spam(AdamPieces):
    """AdamW that clips elements of the gradient with g^2 > threshold v to sign(g) sqrt(threshold v), v of the update
    before, and that begins again every `interval` updates: moments and bias correction, and `warmup` updates with a
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
            for at in split_in_chunks(piece):
                gradient = clip_spikes(piece.gradient[at], piece.state["exp_avg_sq"][at], self.threshold)
                self.apply_adamw(piece, at, rate, count, gradient, chosen(at))


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
    key, bound = to_signed(int.from_bytes(name, "little")), round(density * 2**DRAWN_BITS)

    def chosen(at: slice) -> Tensor:
        shard_places = torch.arange(f.start + at.start, f.start + at.stop, device=device)
        whole_places = rows[shard_places // width] * width_of_whole + columns[shard_places % width]
        hashes = mix_tensor((whole_places + 1) * to_signed(GOLDEN) + key)
        return unsigned_shift(hashes, 64 - DRAWN_BITS) < bound

    return chosen


def clip_spikes(gradient: Tensor, v: Tensor, threshold: float) -> Tensor:
    """The gradient with spikes clipped, in new memory if there are any."""
    square_bound = v * threshold
    excess = gradient.square().sub_(square_bound)
    if gradient.device.type == "cpu" and float(excess.max()) <= 0:
        return gradient  # most parts; elsewhere the question would wait for the device
    return torch.where((excess > 0) & (v > 0), square_bound.sqrt_().copysign_(gradient), gradient)


# Stable-SPAM (Huang et al., arXiv:2502.17055, algorithm 1): Adam on gradients with normalised spikes and norms.


KIND = "gradient_sizes"  # of a parameter: running averages of its largest |g|, its norm, and the square of its norm


class StableSpam(AdamPieces):
    """Three changes of AdamW, the first two to the gradient g of every tensor:

    AdaClip: with T the average of max |g|, elements above T become g T / max |g|. AdaGN: g is scaled to the norm
    n / (sqrt(s) + eps), with n and s the averages of its norm and of the norm's square. MoRet: moments and bias
    correction begin again every `interval` updates. The three averages, corrected for bias, do not. With a `density`
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
        parts = [(piece, at) for piece in pieces for at in split_in_chunks(piece)]
        peaks = [largest(piece.gradient[at]) for piece, at in parts]
        owners = [piece for piece, _ in parts]
        highest = self.find_maxima(zip(owners, peaks, strict=True))
        no_average, decays = highest.new_zeros(3), highest.new_tensor(self.decays)
        names = sorted(self.at.parameters)
        averages = torch.stack([self.shared.get(f"{KIND}/{name}", no_average) for name in names])
        bias_factors = 1 / (1 - decays**step)
        averages[:, 0].mul_(decays[0]).add_(highest * (1 - decays[0]))
        clip_limits = averages[:, 0] * bias_factors[0]
        clip_scales = torch.where(highest > clip_limits, clip_limits / highest, 1.0)
        bounds = torch.stack([clip_limits, clip_scales], 1).tolist()
        beyond = torch.stack(peaks).tolist() if peaks else []

        def clipped_part(index: int) -> Tensor:
            (piece, part_range), (limit, scale) = parts[index], self._at(owners[index], bounds)
            gradient = piece.gradient[part_range]
            if beyond[index] > limit:
                gradient = torch.where(gradient.abs() > limit, gradient * scale, gradient)
            return gradient

        def seen(index: int) -> tuple[Piece, Tensor]:
            gradient_part = clipped_part(index)
            square_norm = torch.linalg.vector_norm(gradient_part).double().square()
            return owners[index], torch.stack([square_norm, square_norm.new_tensor(gradient_part.numel())])

        square_sums, present_counts = self.sum_by_parameter(map(seen, range(len(parts))), 2).unbind(1)
        norms = square_sums.sqrt()
        averages[:, 1].mul_(decays[1]).add_(norms * (1 - decays[1]))
        averages[:, 2].mul_(decays[2]).add_(norms.square() * (1 - decays[2]))
        eps = self.param_groups[0]["eps"]
        wanted_norms = averages[:, 1] * bias_factors[1] / ((averages[:, 2] * bias_factors[2]).sqrt() + eps)
        norm_scales = torch.where(norms > 0, wanted_norms / norms, 0.0).tolist()
        # Some of ZeRO's wrappers update one group of parameters at a time: the others' averages stay.
        for name, average_row, numel in zip(names, averages, present_counts.tolist(), strict=True):
            if numel:
                self.shared[f"{KIND}/{name}"] = average_row.clone()

        period_update = since_reset(step, self.interval)
        for piece in pieces if period_update == 1 else ():
            forget(piece)
        reset_period = (step - 1) // self.interval
        chosen = {p.fragment: draw_elements(p, reset_period, self.density, self.at.tensor) for p in pieces}
        for part_index, (piece, at) in enumerate(parts):
            scaled_gradient = clipped_part(part_index) * self._at(piece, norm_scales)
            elements, rate = chosen[piece.fragment](at), piece.group["lr"]
            self.apply_adamw(piece, at, rate, period_update, scaled_gradient, elements)

    def _at(self, piece: Piece, numbers: list[Any]) -> Any:
        return numbers[self.at.parameters[piece.name].row]


def largest(x: Tensor) -> Tensor:
    """The largest magnitude, 0-d."""
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low)
