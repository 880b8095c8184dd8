"""Cut documents into windows of the model's sequence length, and batch these. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Windows:
    """Stretches of documents whose tokens get a loss from those before them in the stretch, int64 [w] each.

    owner: index of the document. begin, length: tokens [begin, begin + length) get a loss; the one before is
    also read. fresh: how many of the first ones another window has covered already.
    """

    owner: Int64s
    begin: Int64s
    length: Int64s
    fresh: Int64s

    def __len__(self) -> int:
        return len(self.owner)


def windows(lengths: Int64s, size: int, first: int) -> Windows:
    """The windows of documents of these lengths [d], with losses from token `first` (0 or 1) on.

    Each starts with a fresh context, as a training sample does, `size` tokens after the last. Only a document's last
    window overlaps the previous one, so that its tokens have as much context as others: a short rest would look bad.
    """
    told = np.maximum(lengths - first, 0)
    count = -(-told // size)
    owner = np.repeat(np.arange(len(lengths)), count)
    at = (np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)) * size
    length = np.minimum(told[owner], size)
    begin = np.minimum(at, told[owner] - length)
    return Windows(owner, begin + first, length, at - begin)


def batches(of: Windows, tokens: int) -> Iterator[Int64s]:
    """The indices of windows, in batches of similar length with at most `tokens` tokens when padded to the longest
    (at least one window)."""
    order = np.argsort(-of.length, kind="stable")
    begin = 0
    while begin < len(order):
        count = max(1, tokens // int(of.length[order[begin]]))
        yield order[begin : begin + count]
        begin += count


def rows(of: Windows, chosen: Int64s, tokens: Integers, edges: Int64s, before: int) -> Int64s:
    """The tokens of the `chosen` windows, int64 [b, longest + 1], padded with zeros at the end.

    tokens [n], edges int64 [d + 1]: of the documents; before: the token before the first token of each.
    """
    table = np.zeros((len(chosen), int(of.length[chosen].max()) + 1), np.int64)
    for row, window in zip(table, chosen.tolist(), strict=True):
        at, length = int(edges[of.owner[window]] + of.begin[window]), int(of.length[window])
        row[1 : length + 1] = tokens[at : at + length]
        row[0] = tokens[at - 1] if of.begin[window] else before
    return table


def worst(of: Windows, means: Floats, documents: int) -> Int64s:
    """The window with the highest mean [w] of each document, the first of equals: int64 [documents], -1 without any."""
    found = np.full(documents, -1, np.int64)
    # nan, from a broken model, counts as the highest.
    order = np.lexsort((np.arange(len(of)), np.where(np.isnan(means), -np.inf, -means), of.owner))
    firsts = np.flatnonzero(np.append(True, np.diff(of.owner[order]) != 0)) if len(of) else order
    found[of.owner[order[firsts]]] = order[firsts]
    return found
