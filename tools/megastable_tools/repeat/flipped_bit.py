"""Flips a bit of a tensor, and says which bits of two tensors differ."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from megastable.base.text import plural

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def flip(x: Tensor) -> None:
    """Flip a bit of the element in the middle, in place: the highest of a float's mantissa, or an integer's lowest one.
    Autograd does not hear of it, as it would not of a fault."""
    index = torch.unravel_index(torch.tensor(x.numel() // 2), x.shape)
    element = x.data[tuple(int(i) for i in index)]
    element.view(INTEGERS[x.element_size()]).bitwise_xor_(1 << planted_bit(x.dtype))


def planted_bit(dtype: torch.dtype) -> int:
    """The bit that `flip` flips."""
    return round(-math.log2(torch.finfo(dtype).eps)) - 1 if dtype.is_floating_point else 0


@dataclass(frozen=True)
class BitDifference:
    """elements: that differ, of so many; first: the first of them, in the flat tensor, its values in both. bits: how
    many elements differ in each, 0 = the lowest."""

    differing: int
    elements: int
    first: int
    one: float
    other: float
    bits: dict[int, int]

    def __str__(self) -> str:
        """E.g. "1 of 4,096 elements, bit 14: the first is number 17, 0.5 instead of 2"."""
        if len(self.bits) > 3:
            told = f"bits {min(self.bits)} to {max(self.bits)}"
        else:
            told = f"bit{'s' if len(self.bits) > 1 else ''} {', '.join(map(str, self.bits))}"
        first = f"number {self.first:,}, {self.other:.9g} instead of {self.one:.9g}"
        return f"{self.differing:,} of {plural(self.elements, 'element')}, {told}; the first is {first}"


def bit_difference(one: Tensor, other: Tensor) -> BitDifference | None:
    """None if they are the same, or of another shape or dtype. Both on the CPU."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return None
    a, b = (x.contiguous().flatten() for x in (one, other))
    apart = a.view(INTEGERS[a.element_size()]) ^ b.view(INTEGERS[b.element_size()])
    where = apart.nonzero().flatten()
    if not len(where):
        return None
    first, bits = int(where[0]), Counter[int]()
    for bit in range(8 * a.element_size()):
        if count := int(((apart[where] >> bit) & 1).sum()):
            bits[bit] = count
    return BitDifference(len(where), a.numel(), first, float(a[first]), float(b[first]), dict(bits))
