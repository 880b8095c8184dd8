"""Has a new kind of text come into a corpus? Told by tokens alone, among samples that are a little hard.

Samples of a corpus are shuffled, so when a sample came says nothing of what it is like: as long as nothing new comes,
the ones nearest to it by their tokens are of any time. A scan over the latest samples asks whether those nearest to one
of them are late, too, more often than chance brings. For a sample and a number of neighbours chance is hypergeometric,
as if times were drawn; the bound of Bonferroni over all that is tried holds whatever text is like, and without draws.
So a kind that is no harder than a corpus's own tail is seen after ten samples or so, where no loss says anything.

That a kind is new is no guilt (trickle.py). Pure.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.stability.likeness import Tokens, words

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

PERIOD = 4  # steps between two looks: what is met in between is trained on
HARD = 1.0  # sigma above its corpus, from which on a sample is looked at: one of eight
# Of a step, so many hard samples at most, whichever come first: a pool is to span more steps than lie between looks.
OF_STEP = 16
POOL = 1024  # samples that are compared with each other, at most
FEWEST = 96  # at least: of fewer, no number of late neighbours is rare enough
SHARES = (1 / 16, 1 / 12, 1 / 8, 1 / 6, 1 / 4)  # of the pool, the latest, that a new kind may have come with
NEIGHBOURS = 24  # of a sample that are looked at, at most
DIRECTIONS = 1 << 11  # into which tokens are hashed; of a tail of 1,024 samples that keeps kinds apart


class Found(NamedTuple):
    """p: how often chance brings as many late neighbours anywhere, at most. kind: indexes of the sample that has them,
    and of these, oldest first."""

    p: float
    kind: Int64s


def scan(tokens: Tokens) -> Found:
    """Of samples of one corpus, oldest first, [n, L + 1]: the kind that is the least likely to be new by chance."""
    count = len(tokens)
    best = Found(1.0, np.empty(0, np.int64))
    if count < FEWEST:
        return best
    nearest = _nearest(tokens, int(max(SHARES) * count))
    for late in (int(share * count) for share in SHARES):
        of, most = nearest[-late:], min(nearest.shape[1], late - 1)
        hits = np.cumsum(of[:, :most] >= count - late, axis=1)
        p = _table(count - 1, late - 1, most)[np.arange(most), hits] * (late * most * len(SHARES))
        seed, last = np.unravel_index(np.argmin(p), p.shape)
        if p[seed, last] < best.p:
            chosen = of[seed, : last + 1]
            kind = np.append(chosen[chosen >= count - late], count - late + seed)
            best = Found(float(p[seed, last]), np.sort(kind))
    return best


def _nearest(tokens: Tokens, late: int) -> Int64s:
    """Indexes of those that the `late` latest are most like, but for themselves: int64 [late, NEIGHBOURS]."""
    rows, count = _directions(tokens), len(tokens)
    unlike = 1 - rows[-late:] @ rows.T
    unlike[np.arange(late), np.arange(count - late, count)] = np.inf
    # Of equals the older ones come first, which errs on the side of chance.
    return np.argsort(unlike, axis=1, kind="stable")[:, :NEIGHBOURS]


def _directions(tokens: Tokens) -> npt.NDArray[np.float32]:
    """How often each sample has each token, the rarer the token the more: unit rows, fp32 [n, DIRECTIONS]."""
    at = words(tokens) % DIRECTIONS + DIRECTIONS * np.arange(len(tokens))[:, None]
    counts = np.bincount(at.ravel(), minlength=DIRECTIONS * len(tokens)).reshape(len(tokens), -1)
    rarity = -np.log(np.maximum(np.count_nonzero(counts, axis=0), 1) / len(tokens))
    rows = np.log1p(np.arange(counts.max() + 1)).astype(np.float32)[counts] * rarity.astype(np.float32)
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9))


@lru_cache(maxsize=64)
def _table(others: int, late: int, most: int) -> Floats:
    """How often so many of the k = 1.. `most` nearest of `others`, of which `late` are, are late or more: fp64
    [most, most + 1]."""
    found = np.zeros((most, most + 1))
    for k in range(1, most + 1):
        ways = [
            math.comb(late, h) * math.comb(others - late, k - h) / math.comb(others, k) for h in range(k + 1)
        ]
        found[k - 1, : k + 1] = np.cumsum(ways[::-1])[::-1]
    return found
