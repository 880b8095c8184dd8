"""Similarity of samples by their tokens alone: evidence beside their losses that costs no model time.

Statistics of a sample, all of counts of tokens and of pairs of neighbours, pairs in `BUCKETS` hashed buckets:
- `Words.surprisal`: nats per token by the token frequencies of harmless text. It explains part of a loss: a page of
  rare names is hard, and harmless. The unexplained part scatters half as much;
- `Resemblance.of`: how much more likely its tokens are in a mixture of harmless text and some accused samples than in
  harmless text alone, nats per token (a sample is left out of the accused that it is compared with, otherwise every
  sample would resemble itself). After AdaDetect, which learns a novelty score from the very samples in question and
  preserves its error rate: Marandon, Lei, Mary and Roquain, "Adaptive novelty detection with false discovery rate
  guarantee", Annals of Statistics 2024;

Pure; tokens are [n, L + 1], as `Source.samples` returns them, or their first `READ` + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.signedinteger[Any]]

BUCKETS = 1 << 16  # of single tokens, and as many of pairs
READ = 1024  # tokens of a sample that are read: its beginning shows its kind
HALF = 0.5  # count of a token or pair that never occurred
PART = 256  # samples with features in memory at a time
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, for multiplicative hashing


def words(tokens: Tokens) -> Int64s:
    """The bucket of each token of n samples except the first, which is not predicted: int64 [n, L], below BUCKETS."""
    return _bucket(tokens[:, 1 : READ + 1].astype(np.uint64))


def pairs(tokens: Tokens) -> Int64s:
    """The bucket of each token together with the one before it: int64 [n, L], BUCKETS to 2 BUCKETS."""
    known = tokens[:, : READ + 1].astype(np.uint64)
    return _bucket(known[:, 1:] + known[:, :-1] * GOLDEN) + BUCKETS


def _bucket(numbers: npt.NDArray[np.uint64]) -> Int64s:
    with np.errstate(over="ignore"):
        mixed = (numbers + np.uint64(1)) * GOLDEN
        mixed ^= mixed >> np.uint64(31)
        mixed *= GOLDEN
    return np.asarray(mixed >> np.uint64(48), dtype=np.int64)


@dataclass(frozen=True)
class Words:
    """rarity: -log frequency of each bucket of single tokens, nats, fp64 [BUCKETS]."""

    rarity: Floats

    @classmethod
    def of(cls, tokens: Tokens) -> Words:
        """From harmless samples."""
        counts = np.bincount(words(tokens).ravel(), minlength=BUCKETS) + HALF
        seen = max(1, int((counts > HALF).sum()))
        # Buckets without any token of the vocabulary get no share.
        return cls(-np.log(counts / (counts.sum() - HALF * (BUCKETS - 2 * seen))))

    def surprisal(self, tokens: Tokens) -> Floats:
        """Surprisal of n samples, nats per token: fp64 [n]."""
        return np.asarray(self.rarity[words(tokens)].mean(axis=1))


@dataclass(frozen=True)
class Resemblance:
    """Resemblance to some accused samples. usual: share of each bucket in harmless text; accused: counts over all
    accused samples, of tokens and of pairs, fp64 [2 BUCKETS]."""

    usual: Floats
    accused: Floats

    @classmethod
    def to(cls, accused: Tokens, harmless: Tokens) -> Resemblance:
        """From the tokens of both."""
        counts = _counts(harmless) + HALF
        return cls(counts / counts.sum(), _counts(accused))

    def of(self, tokens: Tokens, among: npt.NDArray[np.bool_] | None = None) -> Floats:
        """Resemblance of n samples, nats per token: fp64 [n]. among: which of them are accused themselves."""
        found, all_theirs = np.empty(len(tokens)), self.accused.sum()
        parts = (tokens[at : at + PART] for at in range(0, len(tokens), PART))
        buckets = (row for part in parts for row in np.concatenate([words(part), pairs(part)], axis=1))
        for row, at in enumerate(buckets):
            own, counts = np.unique(at, return_counts=True)
            theirs, total = self.accused[own], all_theirs
            if among is not None and among[row]:
                theirs, total = theirs - counts, total - at.size
            share = theirs / total if total > 0 else self.usual[own]
            # Equal parts of accused and harmless text: bounded from below, so that no single pair acquits.
            found[row] = (np.log((share / self.usual[own] + 1) / 2) * counts).sum() / max(1, at.size)
        return found


def _counts(tokens: Tokens) -> Floats:
    found = np.zeros(2 * BUCKETS)
    for part in np.array_split(tokens, max(1, len(tokens) // 256)):
        found += np.bincount(words(part).ravel(), minlength=2 * BUCKETS)
        found += np.bincount(pairs(part).ravel(), minlength=2 * BUCKETS)
    return found
