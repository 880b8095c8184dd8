"""Draws the inputs of a burn-in: pure functions of seed, round and case, so that a fault can be repeated."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from megastable.base.splitmix import GOLDEN, mixed, sequence, unsigned_shift

T = TypeVar("T")
PRIME = 65521  # numbers drawn for large inputs: then rows of any usual length differ


def key(*parts: int | str) -> int:
    """64 bits that depend on every part, and on their order."""
    total = 0
    for part in parts:
        number = zlib.crc32(part.encode()) if isinstance(part, str) else part
        total = mixed(total * GOLDEN + number + 1)
    return total


def pick(options: Sequence[T], *parts: int | str) -> T:
    return options[key(*parts) % len(options)]


def between(low: int, high: int, *parts: int | str) -> int:
    """A number from `low` to `high`, both included."""
    return low + key(*parts) % (high - low + 1)


def integers(of: int, shape: Sequence[int], low: int, high: int) -> Tensor:
    """Integers from `low` to `high`, both included: int64 on the CPU. of: a key."""
    drawn = unsigned_shift(sequence(of, 0, prod(shape)), 1)
    return (low + drawn % (high - low + 1)).view(*shape)


def nonzero(of: int, shape: Sequence[int], most: int) -> Tensor:
    """Integers from -most to most without 0: int64 on the CPU. Without zeros no sum is -0."""
    drawn = integers(of, shape, -most, most - 1)
    return drawn + (drawn >= 0)


def floats(of: int, shape: Sequence[int], low: float, high: float) -> Tensor:
    """Uniform from `low` to `high`: fp32 on the CPU."""
    drawn = unsigned_shift(sequence(of, 0, prod(shape)), 11).double() * 2.0**-53
    return (low + (high - low) * drawn).float().view(*shape)


def tiled(values: Tensor, shape: Sequence[int]) -> Tensor:
    """`values` [n] over and over, in `shape`: large inputs cost a copy. Best if n is a prime number."""
    count = prod(shape)
    return values.repeat(-(-count // len(values)))[:count].view(*shape)


def permutation(of: int, count: int) -> Tensor:
    """0 to count - 1, shuffled: int64 on the CPU."""
    return torch.argsort(sequence(of, 0, count), stable=True)
