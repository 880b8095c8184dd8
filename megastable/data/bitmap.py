"""Sparse set of numbers below a size: a page table, with a bitmap for each page that is partly set.

A lookup takes two reads, for any size and any number of set bits. The table takes 4 bytes per page of 4096
numbers (0.25 MB for the 2.4e8 sequences of 10^12 tokens); a page that is neither empty nor full takes 512 bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

PAGE = 4096  # numbers
BYTES = PAGE // 8
EMPTY, FULL = 0, 1  # the pages shared by all empty and all full ones
AT_ONCE = 1 << 22  # numbers set at a time


class Bitmap:
    """The numbers of the ranges [firsts[i], ends[i]), int64 [n], ascending, disjoint, in [0, size)."""

    def __init__(self, size: int, firsts: Int64s, ends: Int64s) -> None:
        low, high = -(-firsts // PAGE), ends // PAGE  # the pages that a range covers completely
        fills = low < high
        edges = np.zeros(-(-size // PAGE) + 1, dtype=np.int64)
        np.add.at(edges, low[fills], 1)
        np.add.at(edges, high[fills], -1)
        self._table = np.where(np.cumsum(edges) > 0, FULL, EMPTY).astype(np.int32)
        # The rest of a range: in its first page, and in its last.
        head = np.minimum(ends, low * PAGE)
        tail = np.maximum(high * PAGE, head)
        begins, stops = np.concatenate([firsts, tail]), np.concatenate([head, ends])
        some = begins < stops
        begins, stops = begins[some], stops[some]
        pages, slots = np.unique(begins // PAGE, return_inverse=True)
        self._table[pages] = np.arange(pages.size) + 2
        self._bits = np.zeros((pages.size + 2, BYTES), dtype=np.uint8)
        self._bits[FULL] = 0xFF
        at = (slots + 2) * PAGE + begins % PAGE
        self._set(at, stops - begins)

    @property
    def nbytes(self) -> int:
        """Memory of the set in bytes."""
        return self._table.nbytes + self._bits.nbytes

    def _set(self, begins: Int64s, lengths: Int64s) -> None:
        """Set `lengths` bits from each of `begins` on, counted over all pages."""
        before = np.cumsum(lengths) - lengths
        flat = self._bits.reshape(-1)
        for part in np.split(
            np.arange(begins.size), np.flatnonzero(np.diff(before // AT_ONCE, prepend=0)).tolist()
        ):
            offsets = np.repeat(begins[part] - (before[part] - before[part][:1]), lengths[part])
            bits = offsets + np.arange(offsets.size)
            np.bitwise_or.at(flat, bits >> 3, np.left_shift(1, bits & 7).astype(np.uint8))

    def __getitem__(self, numbers: Int64s) -> npt.NDArray[np.bool_]:
        """Which of n numbers in [0, size) are in the set: bool [n]."""
        page = self._table[numbers // PAGE]
        return (self._bits[page, (numbers % PAGE) >> 3] >> (numbers & 7).astype(np.uint8) & 1).astype(bool)
