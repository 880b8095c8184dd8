"""Scatters 64-bit integers by the finalizer of splitmix64 (Steele et al., doi:10.1145/2660193.2660195), on any device.

Every bit of the result depends on every bit of the input, and different inputs have different results.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # the step between inputs: odd, and far from any regular pattern
FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def mix(x: Tensor) -> Tensor:
    """x: int64, changed in place and returned. Products of int64 wrap around, as unsigned ones do."""
    for shift, factor in FACTORS:
        x ^= unsigned_shift(x, shift)
        x *= signed(factor)
    x ^= unsigned_shift(x, 31)
    return x


def mixed(number: int) -> int:
    """The same of one number, modulo 2^64: unsigned, below 2^64."""
    number %= 2**64
    for shift, factor in FACTORS:
        number = (number ^ (number >> shift)) * factor % 2**64
    return number ^ (number >> 31)


def sequence(key: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Numbers `start` to `start + count` of the generator with this key: int64 [count]."""
    x = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    x *= signed(GOLDEN)
    x += signed(key % 2**64)
    return mix(x)


def unsigned_shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits, of int64 that stand for unsigned numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def signed(number: int) -> int:
    """The int64 that has the bits of an unsigned number below 2^64."""
    return number - (1 << 64) if number >= 1 << 63 else number
