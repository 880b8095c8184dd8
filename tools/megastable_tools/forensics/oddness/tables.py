"""Frequencies of tokens and token pairs in a corpus, in two halves: a document is measured with the other half.

Otherwise every document would be usual by its own counts, a repeated one most of all. A bit of a document's key
assigns it to a half.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BUCKETS = 22  # bits: pairs are hashed to 4 M buckets
BONUS = 16  # steps per nat of a bucket's entry
KEEN = 200.0  # weight of the prior in pairs: p(b|a) = (count(a,b) + KEEN p(b)) / (count(a) + KEEN)
HALF = 0.5  # count of a token that never occurred

Ids = npt.NDArray[np.integer]
Int64s = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Tables:
    """rarity: float32 [2, V + 1], -log p(token) in nats; start: float32 [2, V + 1] and bonus: uint8 [2, buckets].

    log p(b|a) / p(b) is start[a] + bonus[bucket(a, b)] / BONUS. The first axis: the half of the documents
    that are measured with it, made of the other half.
    """

    rarity: npt.NDArray[np.float32]
    start: npt.NDArray[np.float32]
    bonus: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, ids: Ids, edges: Int64s, keys: Keys, width: int) -> Tables:
        """Tables of the documents `edges` int64 [d + 1] of `ids` (0 <= id < width), with their keys uint64 [d]."""
        rarity = np.empty((2, width), dtype=np.float32)
        start = np.empty((2, width), dtype=np.float32)
        bonus = np.zeros((2, 1 << BUCKETS), dtype=np.uint8)
        whose = np.repeat(halves(keys), np.diff(edges))
        inside = np.ones(max(len(ids) - 1, 0), dtype=bool)
        inside[edges[1:-1][(edges[1:-1] > 0) & (edges[1:-1] < len(ids))] - 1] = False
        for half in (0, 1):
            of_other = whose != half
            counts = np.bincount(ids[of_other], minlength=width)
            p = (counts + HALF) / (counts.sum() + HALF * width)
            rarity[half] = -np.log(p)
            first = np.flatnonzero(of_other[:-1] & inside)
            a, b = ids[:-1][first], ids[1:][first]
            weights = np.bincount(bucket(a, b), weights=1 / p[b], minlength=1 << BUCKETS)
            seen = np.flatnonzero(weights)  # most are zero, and a logarithm of all of them is slow
            bonus[half, seen] = np.minimum(np.rint(np.log1p(weights[seen] / KEEN) * BONUS), 255)
            start[half] = np.log(KEEN / (np.bincount(a, minlength=width) + KEEN))
        return cls(rarity, start, bonus)


def halves(keys: Keys) -> npt.NDArray[np.uint32]:
    """The half, 0 or 1, of the documents with these keys: the row of the tables to measure them with."""
    mixed = keys * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(63)).astype(np.uint32)


def bucket(a: Ids, b: Ids) -> npt.NDArray[np.uint32]:
    """The bucket of each pair: uint32 [n], below 2^BUCKETS."""
    mixed = a.astype(np.uint32) * np.uint32(0x9E3779B1)
    mixed += b.astype(np.uint32) * np.uint32(0x85EBCA77)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x2C1B3C6D)
    return np.asarray(mixed >> np.uint32(32 - BUCKETS), dtype=np.uint32)
