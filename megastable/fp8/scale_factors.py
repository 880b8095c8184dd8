"""The two FP8 formats, scale factors, tensors quantized by them, and the history that delayed scales follow from.

Formats: E4M3 and E5M2 (Micikevicius et al., arXiv:2209.05433, table 1). E4M3 has no infinities and one NaN (torch's
float8_e4m3fn), E5M2 is a shorter fp16. Numbers beyond the range saturate, infinities too; NaN stays NaN.
`tests/fp8/model.py` is the independent reference.

Scales as Transformer Engine 2.20 defines them: the format's largest number over the largest magnitude, of a whole
tensor, or powers of two of blocks of 128 neighbours along the dimension that a product sums over, 128 x 128 of a weight
(DeepSeek-V3, arXiv:2412.19437 section 3.3.2).

Delayed scaling: section 3 of Micikevicius et al.; Transformer Engine's DelayedScaling. Deliberate differences: the
history moves once per step, not per micro-batch; magnitudes of a refused update and non-finite ones never enter it;
and without a history the scale is the tensor's own instead of 1, which would turn the first gradients into zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class FP8Format:
    """max: the largest number; normal: the smallest with a full mantissa; least: the smallest above zero.
    mantissa: its bits; bias: of the exponent."""

    name: str
    dtype: torch.dtype
    max: float
    mantissa: int
    bias: int

    @property
    def normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def least(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa)


E4M3 = FP8Format("E4M3", torch.float8_e4m3fn, 448.0, mantissa=3, bias=7)
E5M2 = FP8Format("E5M2", torch.float8_e5m2, 57344.0, mantissa=2, bias=15)


def cast_to_fp8(x: Tensor, scale: Tensor, to: FP8Format) -> Tensor:
    """fp32(x) * scale, rounded to the nearest number of the format, ties to even, saturating; of type `to.dtype`.

    scale: fp32, broadcastable to x.
    """
    scaled_x = x * scale if x.dtype is torch.float32 else x.float().mul_(scale)
    return scaled_x.clamp_(-to.max, to.max).to(to.dtype)


def decode_fp8(values: Tensor, of: FP8Format, dtype: torch.dtype) -> Tensor:
    """The numbers encoded by `values`, of type `of.dtype`: each is also a bf16 number."""
    if values.device.type != "cpu" or dtype is not torch.bfloat16:
        return values.to(dtype)
    # torch converts one number at a time on CPUs. Instead shift exponent and mantissa to their place in bf16, and
    # correct the exponent's bias by a product, which is exact for subnormals as well. 15 times as fast.
    mantissa_shift = 7 - of.mantissa
    bf16_bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(mantissa_shift)
    bf16_bits.bitwise_and_(((0x7F << mantissa_shift) | 0x8000) - 0x10000)
    decoded_numbers = bf16_bits.view(torch.bfloat16).mul_(2.0 ** (127 - of.bias))
    if float(largest_magnitude(decoded_numbers)) > of.max:  # codes that encode no number
        decoded_numbers.masked_fill_(decoded_numbers.abs() > of.max, torch.nan)
    return decoded_numbers


BLOCK = 128
LARGEST = torch.finfo(torch.float32).max
AT_ONCE = 1 << 20  # numbers counted at a time: their copies in fp32 take 4 MiB each


@dataclass(frozen=True)
class Quantized:
    """values: of an FP8 type. inverse: fp32, the factor that restores them: one number, or one per block
    [rows / height, columns / width], with smaller blocks at the ends."""

    values: Tensor
    inverse: Tensor
    format: FP8Format
    height: int = 0
    width: int = 0

    @property
    def layout(self) -> tuple[FP8Format, int, int]:
        """The fields that are not tensors."""
        return self.format, self.height, self.width

    def slice_rows(self, begin: int, end: int) -> Quantized:
        """These rows of a matrix, from a multiple of `height` on."""
        row_scales = self.inverse
        if row_scales.dim():
            row_scales = row_scales[begin // self.height : -(-end // self.height)]
        return Quantized(self.values[begin:end], row_scales, *self.layout)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The values with all scales taken as one."""
        return decode_fp8(self.values, self.format, dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The values with their scales; exact for powers of two (except subnormal numbers of `dtype`)."""
        decoded_numbers = self.decoded(dtype)
        if not self.inverse.dim():
            return decoded_numbers.float().mul_(self.inverse).to(dtype)
        number_blocks = _grid(decoded_numbers, self.height, self.width)
        return _flat(number_blocks * self.inverse.to(dtype)[:, None, :, None], decoded_numbers.shape)


def largest_magnitude(x: Tensor) -> Tensor:
    """The largest magnitude, fp32; nan if any is nan; 0 if empty."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low).float()


def scale_of(largest: Tensor, to: FP8Format, power_of_two: bool = False) -> Tensor:
    """fp32, of the shape of `largest`: the factor that maps these magnitudes to the format's largest number, or just
    below it with powers of two. 1 where the magnitude is 0, infinite or nan."""
    # A number divided by a tensor would be computed as a reciprocal and a product, rounded twice.
    raw_scale = torch.full_like(largest, to.max).div_(largest)
    raw_scale.clamp_(max=LARGEST)  # infinite for the tiniest magnitudes
    if power_of_two:
        raw_scale = (raw_scale.view(torch.int32) & -0x800000).view(torch.float32)
    is_usable = torch.isfinite(largest) & (largest > 0)
    return torch.where(is_usable, raw_scale, torch.ones_like(raw_scale))


def by_tensor(x: Tensor, scale: Tensor, to: FP8Format) -> Quantized:
    """x of any shape; scale: fp32, one number."""
    return Quantized(cast_to_fp8(x, scale, to), scale.reciprocal(), to)


def by_rows(x: Tensor, to: FP8Format) -> Quantized:
    """x [rows, columns] in blocks of 1 x 128."""
    return _by_blocks(x, to, 1, BLOCK)


def by_columns(x: Tensor, to: FP8Format) -> Quantized:
    """x [rows, columns] in blocks of 128 x 1: as `by_rows` of its transpose."""
    return _by_blocks(x, to, BLOCK, 1)


def by_tiles(x: Tensor, to: FP8Format) -> Quantized:
    """x [rows, columns] in blocks of 128 x 128."""
    return _by_blocks(x, to, BLOCK, BLOCK)


def _by_blocks(x: Tensor, to: FP8Format, height: int, width: int) -> Quantized:
    matrix_blocks = _grid(x, height, width)
    block_scales = scale_of(matrix_blocks.abs().amax(-1).amax(1).float(), to, power_of_two=True)
    fp8_values = _flat(cast_to_fp8(matrix_blocks, block_scales[:, None, :, None], to), x.shape)
    return Quantized(fp8_values, block_scales.reciprocal(), to, height, width)


def _grid(x: Tensor, height: int, width: int) -> Tensor:
    """[rows, columns] -> [blocks down, height, blocks across, width], padded with zeros."""
    rows, columns = x.shape
    if rows % height or columns % width:
        x = F.pad(x, (0, -columns % width, 0, -rows % height))
    return x.reshape(x.shape[0] // height, height, x.shape[1] // width, width)


def _flat(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_grid`."""
    return blocks.flatten(2).flatten(0, 1)[: shape[0], : shape[1]].contiguous()


SLOTS = ("input", "weight", "gradient")


class Meters:
    """The history of the layers `names`, of which a rank may compute some only. formats: of the slots.

    scales: fp32 [layers, slots], 0 if unknown. history: fp32 [layers, slots, length], the newest first, 0
    if unknown. seen: the largest magnitudes of this step so far.
    """

    def __init__(
        self,
        names: Sequence[str],
        formats: Sequence[FP8Format],
        length: int,
        margin: int,
        device: torch.device,
    ) -> None:
        self.names = list(names)
        slot_maxima = torch.tensor([to.max for to in formats], device=device)
        self._most = slot_maxima / 2.0**margin
        cell_shape = (len(self.names), len(SLOTS))
        self.history = torch.zeros(*cell_shape, length, device=device)
        self.scales = torch.zeros(cell_shape, device=device)
        self.seen = torch.zeros(cell_shape, device=device)

    def note_magnitude(self, layer: int, slot: int, largest: Tensor) -> None:
        """Record a magnitude of this step; fp32, one number."""
        seen_cell = self.seen[layer, slot]
        torch.maximum(seen_cell, largest, out=seen_cell)

    def settle_step(self, applied: bool, group: Any = None) -> None:
        """After a step: move the recorded magnitudes into the history if the step's update was applied. Collective over
        `group` (None: the world; without a process group: this rank only), with the same `applied` on all ranks."""
        if applied:
            if dist.is_initialized() and dist.get_world_size(group) > 1:
                dist.all_reduce(self.seen, dist.ReduceOp.MAX, group=group)
            is_usable = torch.isfinite(self.seen) & (self.seen > 0)
            moved_history = torch.cat((self.seen.unsqueeze(-1), self.history[..., :-1]), -1)
            self.history.copy_(torch.where(is_usable.unsqueeze(-1), moved_history, self.history))
            self._rescale()
        self.seen.zero_()

    def _rescale(self) -> None:
        largest_magnitudes = self.history.amax(-1)
        clamped_scales = (self._most / largest_magnitudes).clamp_(max=LARGEST)
        self.scales.copy_(torch.where(largest_magnitudes > 0, clamped_scales, 0.0))

    def forget_history(self) -> None:
        """Clear the history."""
        for meter_tensor in (self.history, self.scales, self.seen):
            meter_tensor.zero_()

    def copy_state(self) -> Tensor:
        """A copy of the history, from which everything follows."""
        return self.history.clone()

    def restore_state(self, saved: Tensor) -> None:
        """Restore what `copy_state` returned."""
        self.history.copy_(saved)
        self._rescale()
        self.seen.zero_()

    def write_history(self) -> dict[str, list[list[float]]]:
        """The history by layer, for a checkpoint: exact, since Python's floats hold every fp32 number."""
        return dict(zip(self.names, self.history.tolist(), strict=True))

    def read_history(self, told: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Load what `write_history` returned, for the layers on this rank; cut or padded to this history's length."""
        saved_history = torch.zeros_like(self.history)
        for layer_number, layer in enumerate(self.names):
            for slot, slot_values in enumerate(told.get(layer, ())):
                kept_values = list(slot_values)[: saved_history.shape[-1]]
                saved_history[layer_number, slot, : len(kept_values)] = torch.tensor(kept_values)
        self.restore_state(saved_history)
