"""Detect a new kind of text in a corpus, by tokens alone, among its somewhat hard samples.

Samples of a corpus are shuffled, so their time is independent of their content: as long as nothing new appears, the
nearest neighbours of a sample by tokens come from any time. A scan over the samples since the last look tests whether
the neighbours of one of them are recent more often than by chance. For a sample and a number of neighbours the null
distribution is hypergeometric; Bonferroni's bound over everything tried holds for any text, without random draws. So a
kind that is no harder than the corpus's own tail is detected after ten samples or so, where losses show nothing.

A new kind alone is not guilty (recovery/trickle.py). Pure.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.stability.likeness import Tokens, words

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

PERIOD = 4  # steps between two looks: samples met in between are trained on
HARD = 1.0  # sigma above its corpus required of a sample: one in eight
# Limit of hard samples per step, in order: a pool should span more steps than lie between looks.
OF_STEP = 16
POOL = 1024  # maximum number of samples compared with each other
FEWEST = 96  # minimum: with fewer, no number of late neighbours is rare enough
SHARES = (
    1 / 16,
    1 / 12,
    1 / 8,
    1 / 6,
    1 / 4,
)  # latest shares of the pool in which a new kind may have appeared
NEIGHBOURS = 24  # maximum number of neighbours per sample
FACTORIALS = np.append(0.0, np.cumsum(np.log(np.arange(1, POOL + 1))))  # their logarithms
DIRECTIONS = 1 << 11  # hash buckets of tokens; enough to separate kinds in a tail of 1,024 samples


class NewKind(NamedTuple):
    """p: upper bound on the chance of as many late neighbours anywhere. kind: indexes of the sample that has them,
    and of these, oldest first."""

    p: float
    kind: Int64s


class Pool:
    """The latest hard samples of one corpus, kept from look to look. Known samples were compared when they came: the
    cost of a look depends only on the new ones."""

    def __init__(self) -> None:
        self._at: dict[int, int] = {}  # the row of a position
        # Each sample's count of each token, as log(1 + n), and its square: rows are written once, and never moved.
        self._rows = np.zeros((2, POOL, DIRECTIONS), np.float32)
        self._having = np.zeros(DIRECTIONS, np.int64)  # samples that have each token

    def missing(self, positions: Int64s) -> Int64s:
        """The positions whose tokens are not known yet."""
        return np.array([p for p in positions.tolist() if p not in self._at], dtype=np.int64)

    def scan(self, positions: Int64s, tokens: Tokens) -> NewKind:
        """The kind that is least likely to be new by chance, around one of the samples that are new to the pool.

        positions: the pool from now on, oldest first, at most POOL. tokens: of the missing, [n, L + 1].
        """
        fresh = self._exchange(positions, self.missing(positions), tokens)
        best, count = NewKind(1.0, np.empty(0, np.int64)), positions.size
        seeds = fresh[fresh >= count - int(max(SHARES) * count)]
        if count < FEWEST or not seeds.size:
            return best
        nearest = self._nearest(positions, seeds)
        for late in (int(share * count) for share in SHARES):
            among = seeds >= count - late
            of, most = nearest[among], min(nearest.shape[1], late - 1)
            if not of.size:
                continue
            hits = np.cumsum(of[:, :most] >= count - late, axis=1)
            tried = len(of) * most * len(SHARES)
            p = _table(count - 1, late - 1, most)[np.arange(most), hits] * tried
            seed, last = np.unravel_index(np.argmin(p), p.shape)
            if p[seed, last] < best.p:
                chosen = of[seed, : last + 1]
                kind = np.append(chosen[chosen >= count - late], seeds[among][seed])
                best = NewKind(float(p[seed, last]), np.sort(kind))
        return best

    def _exchange(self, positions: Int64s, missing: Int64s, tokens: Tokens) -> Int64s:
        """Forget samples that left the pool, and learn the missing ones; returns their indexes."""
        gone = self._at.keys() - set(positions.tolist())
        left = np.array([self._at.pop(p) for p in gone], dtype=np.int64)
        self._having -= np.count_nonzero(self._rows[0, left], axis=0)
        self._rows[:, left] = 0
        free = np.setdiff1d(np.arange(POOL), np.fromiter(self._at.values(), np.int64))[: missing.size]
        if missing.size:
            learnt = _counts(tokens)
            self._rows[0, free], self._rows[1, free] = learnt, learnt**2
            self._having += np.count_nonzero(learnt, axis=0)
        self._at.update(zip(missing.tolist(), free.tolist(), strict=True))
        return np.flatnonzero(np.isin(positions, missing))

    def _nearest(self, positions: Int64s, seeds: Int64s) -> Int64s:
        """Indexes of the nearest neighbours of the seeds, without themselves: int64 [seeds, NEIGHBOURS]."""
        at = np.array([self._at[p] for p in positions.tolist()])
        used = int(at.max()) + 1
        # Rarer tokens have more weight.
        rarity = -np.log(np.maximum(self._having, 1) / positions.size).astype(np.float32)
        lengths = np.sqrt(self._rows[1, :used] @ rarity**2)[at]
        like = (self._rows[0, at[seeds]] * rarity**2 @ self._rows[0, :used].T)[:, at]
        unlike = 1 - like / np.maximum(lengths[seeds, None] * lengths, 1e-9)
        unlike[np.arange(seeds.size), seeds] = np.inf
        # Among equals older ones come first, which is conservative.
        return np.argsort(unlike, axis=1, kind="stable")[:, :NEIGHBOURS]


def _counts(tokens: Tokens) -> npt.NDArray[np.float32]:
    """log(1 + count of each token in each sample), hashed: fp32 [n, DIRECTIONS]."""
    at = words(tokens) % DIRECTIONS + DIRECTIONS * np.arange(len(tokens))[:, None]
    counts = np.bincount(at.ravel(), minlength=DIRECTIONS * len(tokens)).reshape(len(tokens), -1)
    return np.log1p(np.arange(counts.max() + 1)).astype(np.float32)[counts]


@lru_cache(maxsize=64)
def _table(others: int, late: int, most: int) -> Floats:
    """The chance that this many or more of the k = 1.. `most` nearest of `others`, `late` of them late, are late: fp64
    [most, most + 1]."""
    k, hits = np.arange(1, most + 1)[:, None], np.arange(most + 1)
    p = np.exp(_ways(late, hits) + _ways(others - late, k - hits) - _ways(others, k))
    return np.asarray(np.minimum(np.cumsum(p[:, ::-1], axis=1)[:, ::-1], 1))


def _ways(of: int, chosen: Int64s) -> Floats:
    """Logarithm of the number of ways to choose this many, -inf if impossible."""
    can = (chosen >= 0) & (chosen <= of)
    taken = np.where(can, chosen, 0)
    return np.where(can, FACTORIALS[of] - FACTORIALS[taken] - FACTORIALS[of - taken], -np.inf)
