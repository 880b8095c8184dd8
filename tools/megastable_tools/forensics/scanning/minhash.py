"""Similarity of documents by MinHash over 5-grams of tokens, and banding to find candidate pairs.

Broder, "On the resemblance and containment of documents" (1997); Leskovec, Rajaraman, Ullman, "Mining of Massive
Datasets", ch. 3. One hash of each 5-gram serves all bins of a signature (Li, Owen, Zhang, "One Permutation Hashing",
2012); a bin without a 5-gram copies another one, in an order that is the same for all documents
(Shrivastava, "Optimal Densification for Fast and Accurate Minwise Hashing", 2017); 16 bits of a value are kept (Li and
König, "b-Bit Minwise Hashing", 2010).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

GRAM = 5  # tokens
BINS = 128  # of a signature: a standard error of 0.035 for documents whose similarity is 0.8
RECALL = 0.995  # of pairs exactly at the threshold

CHUNK = 4096  # signatures completed at once

# A number of up to 16 bits before a hash of 48 bits: collisions of different 5-grams in a pair are negligible.
_NUMBER, _HASH = np.uint64(16), np.uint64(48)
_LOW = np.uint64((1 << 48) - 1)
_EMPTY = np.uint32(0xFFFFFFFF)
_ROUNDS = 32  # of the search for a filled bin to copy
_FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F],
    dtype=np.uint64,
)

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Signatures = npt.NDArray[np.uint16]


def mix(values: UInt64s) -> UInt64s:
    """Each value scattered over 64 bits, one to one (the finaliser of splitmix64; Steele, Lea, Flood, 2014)."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def grams(tokens: npt.NDArray[np.integer]) -> UInt64s:
    """A hash of every 5-gram: uint64 [n - 4], empty for fewer than 5 tokens."""
    count = len(tokens) - GRAM + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    wide = tokens.astype(np.int64).astype(np.uint64) + np.uint64(1)
    total = np.zeros(count, np.uint64)
    for place, factor in enumerate(_FACTORS):
        total += mix(wide[place : place + count] * factor)
    return mix(total)


def signatures(parts: Iterable[tuple[npt.NDArray[np.integer], Int64s, Int64s]], documents: int) -> Signatures:
    """Signatures uint16 [documents, BINS] of documents that are given in parts.

    A part: tokens [n], its edges int64 [k + 1] and the document of each stretch between them, int64 [k]. The
    continuation of a document cut into parts must repeat the last 4 tokens. A document of fewer than 5 tokens has none:
    0.
    """
    least = np.full(documents * BINS, _EMPTY, dtype=np.uint32)
    for tokens, edges, owner in parts:
        hashes = grams(tokens)
        values = hashes[_inside(edges, len(hashes))]
        of = np.repeat(owner * BINS, np.maximum(np.diff(edges) - GRAM + 1, 0))
        bins = (values >> np.uint64(64 - 7)).astype(np.int64)  # 2^7 of them
        np.minimum.at(least, of + bins, (values & np.uint64(0x7FFFFFFF)).astype(np.uint32))
    table = least.reshape(documents, BINS)
    parts_of = (slice(first, first + CHUNK) for first in range(0, documents, CHUNK))
    dense = [_densified(table[part]).astype(np.uint16) for part in parts_of]
    return np.concatenate([np.empty((0, BINS), np.uint16), *dense])


def _inside(edges: Int64s, count: int) -> npt.NDArray[np.bool_]:
    """Which of `count` 5-grams lie within a stretch; those across an edge do not count: bool [count]."""
    inside = np.ones(count, np.bool_)
    for back in range(1, GRAM):
        crossing = edges[1:-1] - back
        inside[crossing[(crossing >= 0) & (crossing < count)]] = False
    return inside


def _densified(table: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Every empty bin takes the value of the first filled one in its own fixed random order, then of the next one."""
    filled = table != _EMPTY
    some = np.flatnonzero(filled.any(axis=1) & ~filled.all(axis=1))
    random = np.random.default_rng(0)
    sources = random.integers(0, BINS, (_ROUNDS, BINS))
    part, known = table[some], filled[some]
    result, missing = part.copy(), ~known
    for source in sources:
        take = missing & known[:, source]
        result = np.where(take, part[:, source], result)
        missing &= ~take
        if not missing.any():
            break
    if missing.any():
        # The next filled bin to the right, around the end.
        twice = np.concatenate([known, known], axis=1)
        at = np.where(twice, np.arange(2 * BINS), 2 * BINS)
        following = np.minimum.accumulate(at[:, ::-1], axis=1)[:, ::-1][:, :BINS] % BINS
        result = np.where(missing, np.take_along_axis(part, following, axis=1), result)
    dense = table.copy()
    dense[some] = result
    dense[~filled.any(axis=1)] = 0
    return dense


def banding(threshold: float) -> tuple[int, int]:
    """(bands, rows of each): the longest rows for which a pair exactly at `threshold` is found with `RECALL`."""
    for rows in range(16, 0, -1):
        bands = BINS // rows
        if 1 - (1 - threshold**rows) ** bands >= RECALL:
            return bands, rows
    return BINS, 1


def band_keys(table: Signatures, bands: int, rows: int) -> UInt64s:
    """A key for each band of each signature: uint64 [documents, bands]; equal for equal rows of one band."""
    keys = np.zeros((len(table), bands), np.uint64)
    cut = table[:, : bands * rows].reshape(len(table), bands, rows).astype(np.uint64)
    for row in range(rows):
        keys = mix(keys * np.uint64(0x9E3779B97F4A7C15) + cut[:, :, row] + np.uint64(1))
    salts: UInt64s = np.arange(bands, dtype=np.uint64)
    return mix(keys + salts)


def estimate(one: Signatures, other: Signatures) -> npt.NDArray[np.float64]:
    """The similarity (Jaccard) of pairs of documents by their signatures [n, BINS]: float64 [n]."""
    equal = (one == other).mean(axis=1)
    # 16 bits are equal by chance once in 65,536 times.
    return np.maximum(0.0, (equal - 2.0**-16) / (1 - 2.0**-16))


def similarities(
    tokens: npt.NDArray[np.integer], edges: Int64s, one: Int64s, other: Int64s
) -> npt.NDArray[np.float64]:
    """The exact similarity of pairs of documents by their sets of 5-grams: float64 [n].

    tokens: [t]; edges: int64 [d + 1], of d documents; one, other: int64 [n], their indexes. At most 65,536 tokens each.
    """
    hashes, documents = grams(tokens), len(edges) - 1
    owner = np.repeat(np.arange(documents), np.maximum(np.diff(edges) - GRAM + 1, 0))
    kept = hashes[_inside(edges, len(hashes))] >> _NUMBER
    sets = np.unique((owner.astype(np.uint64) << _HASH) | kept)
    sizes = np.bincount((sets >> _HASH).astype(np.int64), minlength=documents)
    begins = np.cumsum(sizes) - sizes
    # Both sets of each pair, one after the other; what is there twice is in both.
    members = np.stack([one, other], axis=1).ravel()
    counts = sizes[members]
    pair = np.repeat(np.arange(len(members)) // 2, counts)
    place = np.arange(len(pair)) + np.repeat(begins[members] - (np.cumsum(counts) - counts), counts)
    keys = np.sort((pair.astype(np.uint64) << _HASH) | (sets[place] & _LOW))
    twice = (keys[1:][keys[1:] == keys[:-1]] >> _HASH).astype(np.int64)
    common = np.bincount(twice, minlength=len(one))
    union = sizes[one] + sizes[other] - common
    return np.where(union > 0, common / np.maximum(union, 1), 1.0)
