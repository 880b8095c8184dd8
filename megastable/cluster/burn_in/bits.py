"""Compares tensors bit for bit, and says which bits of which elements are wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class BitMismatch:
    """How a result differs from the right one.

    wrong: elements that differ, `of` all. index: of the first wrong one; expected, got: its bits. xor: all bits
    that are wrong in any element. common: per dimension the index that all wrong elements share, or None.
    """

    wrong: int
    of: int
    index: tuple[int, ...]
    expected: str
    got: str
    xor: str
    common: tuple[int | None, ...]


def as_bits(x: Tensor) -> Tensor:
    """The bits of each element as an integer, same shape. A copy only of what is not contiguous."""
    return x.contiguous().view(WORDS[x.element_size()])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one device, shape and dtype are equal bit for bit, as that device sees it."""
    return torch.equal(as_bits(one), as_bits(other))


def mismatch(expected: Tensor, got: Tensor) -> BitMismatch | None:
    """How `got` differs from `expected`; None if it does not. Both on the CPU. Another shape or dtype raises
    ValueError."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        raise ValueError(f"{got.dtype} {list(got.shape)} instead of {expected.dtype} {list(expected.shape)}")
    right, found = as_bits(expected).flatten(), as_bits(got).flatten()
    difference = right ^ found
    where = difference.nonzero().flatten()
    if not len(where):
        return None
    first, size = int(where[0]), expected.element_size()
    indices = np.unravel_index(where.numpy(), tuple(expected.shape))
    return BitMismatch(
        wrong=len(where),
        of=difference.numel(),
        index=tuple(int(along[0]) for along in indices),
        expected=as_hex(int(right[first]), size),
        got=as_hex(int(found[first]), size),
        xor=as_hex(int(np.bitwise_or.reduce(difference[where].numpy())), size),
        common=tuple(int(along[0]) if bool((along == along[0]).all()) else None for along in indices),
    )


def as_hex(bits: int, size: int) -> str:
    """size: in bytes. Negative numbers are two's complements."""
    return f"0x{bits % (1 << 8 * size):0{2 * size}x}"
