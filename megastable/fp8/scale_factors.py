"""FP8 scale factors, and tensors quantized by them: one for a whole tensor, or one (a power of two) per block.

As Transformer Engine 2.20 defines them: a scale is the format's largest number over the largest magnitude. Blocks of
128 neighbours along the dimension that a product sums over, 128 x 128 of a weight: DeepSeek-V3, arXiv:2412.19437
section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megastable.fp8.formats import FP8Format, cast, decode

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

    def rows(self, begin: int, end: int) -> Quantized:
        """These rows of a matrix, from a multiple of `height` on."""
        blocks = self.inverse
        if blocks.dim():
            blocks = blocks[begin // self.height : -(-end // self.height)]
        return Quantized(self.values[begin:end], blocks, *self.layout)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The values with all scales taken as one."""
        return decode(self.values, self.format, dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The values with their scales; exact for powers of two (except subnormal numbers of `dtype`)."""
        numbers = self.decoded(dtype)
        if not self.inverse.dim():
            return numbers.float().mul_(self.inverse).to(dtype)
        blocks = _grid(numbers, self.height, self.width)
        return _flat(blocks * self.inverse.to(dtype)[:, None, :, None], numbers.shape)


def magnitude(x: Tensor) -> Tensor:
    """The largest magnitude, fp32; nan if any is nan; 0 if empty."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low).float()


def scale_of(largest: Tensor, to: FP8Format, power_of_two: bool = False) -> Tensor:
    """fp32, of the shape of `largest`: the factor that maps these magnitudes to the format's largest number, or just
    below it with powers of two. 1 where the magnitude is 0, infinite or nan."""
    # A number divided by a tensor would be computed as a reciprocal and a product, rounded twice.
    scale = (
        torch.full_like(largest, to.max).div_(largest).clamp_(max=LARGEST)
    )  # infinite for the tiniest magnitudes
    if power_of_two:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    usable = torch.isfinite(largest) & (largest > 0)
    return torch.where(usable, scale, torch.ones_like(scale))


def by_tensor(x: Tensor, scale: Tensor, to: FP8Format) -> Quantized:
    """x of any shape; scale: fp32, one number."""
    return Quantized(cast(x, scale, to), scale.reciprocal(), to)


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
    blocks = _grid(x, height, width)
    scale = scale_of(blocks.abs().amax(-1).amax(1).float(), to, power_of_two=True)
    values = _flat(cast(blocks, scale[:, None, :, None], to), x.shape)
    return Quantized(values, scale.reciprocal(), to, height, width)


def _grid(x: Tensor, height: int, width: int) -> Tensor:
    """[rows, columns] -> [blocks down, height, blocks across, width], padded with zeros."""
    rows, columns = x.shape
    if rows % height or columns % width:
        x = F.pad(x, (0, -columns % width, 0, -rows % height))
    return x.reshape(x.shape[0] // height, height, x.shape[1] // width, width)


def _flat(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_grid`."""
    return blocks.flatten(2).flatten(0, 1)[: shape[0], : shape[1]].contiguous()
