"""Rounding to the two FP8 formats, E4M3 and E5M2 (Micikevicius et al., arXiv:2209.05433, table 1).

E4M3 has no infinities and one NaN (torch's float8_e4m3fn), E5M2 is a shorter fp16. Numbers beyond the range saturate,
infinities too; NaN stays NaN. `tests/fp8/model.py` is the independent reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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


def cast(x: Tensor, scale: Tensor, to: FP8Format) -> Tensor:
    """fp32(x) * scale, rounded to the nearest number of the format, ties to even, saturating; of type `to.dtype`.

    scale: fp32, broadcastable to x.
    """
    scaled = x * scale if x.dtype is torch.float32 else x.float().mul_(scale)
    return scaled.clamp_(-to.max, to.max).to(to.dtype)


def decode(values: Tensor, of: FP8Format, dtype: torch.dtype) -> Tensor:
    """The numbers encoded by `values`, of type `of.dtype`: each is also a bf16 number."""
    if values.device.type != "cpu" or dtype is not torch.bfloat16:
        return values.to(dtype)
    # torch converts one number at a time on CPUs. Instead shift exponent and mantissa to their place in bf16, and
    # correct
    # the exponent's bias by a product, which is exact for subnormals as well. 15 times as fast.
    shift = 7 - of.mantissa
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(shift)
    bits.bitwise_and_(((0x7F << shift) | 0x8000) - 0x10000)
    numbers = bits.view(torch.bfloat16).mul_(2.0 ** (127 - of.bias))
    low, high = torch.aminmax(numbers) if numbers.numel() else (numbers.new_zeros(()),) * 2
    if float(high) > of.max or float(low) < -of.max:  # codes that encode no number
        numbers.masked_fill_(numbers.abs() > of.max, torch.nan)
    return numbers
