"""Bounded-size summary of a scan's rows: counters, histograms, the worst documents and a sample."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megastable_tools.forensics.oddness.judgement import MOST
from megastable_tools.forensics.oddness.yardstick import NAMES
from megastable_tools.forensics.scanning.minhash import mix
from megastable_tools.forensics.scanning.rows import ALL_KINDS, codes

TOLD = ("score", *NAMES, "compression")  # columns with quantiles
STEP = 0.25  # of the histogram of scores
BINS = int(MOST / STEP) + 1  # the last is MOST and above
THRESHOLDS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 30.0)  # multiples of STEP
LENGTHS = 64  # powers of two
SAMPLED = 65_536  # documents sampled for quantiles
BARS = 40  # of the histogram of a feature

Int64s = npt.NDArray[np.int64]
Row = dict[str, Any]


def _by_kind() -> Int64s:
    return np.zeros((len(ALL_KINDS), BINS), np.int64)


@dataclass
class ScanSummary:
    """Of documents and of tokens [kinds, bins of the score]; lengths: documents by powers of two, those of 0 tokens
    first; sampled: float32 [n, TOLD] of some documents; worst: rows, worst first, at most `top`."""

    top: int
    documents: Int64s = field(default_factory=_by_kind)
    tokens: Int64s = field(default_factory=_by_kind)
    lengths: Int64s = field(default_factory=lambda: np.zeros(LENGTHS, np.int64))
    sampled: list[npt.NDArray[np.float32]] = field(default_factory=list)
    worst: list[Row] = field(default_factory=list)

    def add(self, other: ScanSummary) -> None:
        """Add another summary's counts."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.lengths += other.lengths
        self.sampled += other.sampled
        self.worst = heapq.nsmallest(self.top, [*self.worst, *other.worst], key=order)

    def above(self, score: float, kind: str | None = None) -> tuple[int, int]:
        """(documents, tokens) with that score (a multiple of STEP) or more; of one kind, or of all but empty ones."""
        begin = min(round(score / STEP), BINS - 1)
        kinds = slice(0, len(ALL_KINDS) - 1) if kind is None else ALL_KINDS.index(kind)
        return int(self.documents[kinds, begin:].sum()), int(self.tokens[kinds, begin:].sum())

    def by_kind(self) -> dict[str, int]:
        """Documents of each kind that occurs."""
        counts = self.documents.sum(axis=1).tolist()
        return {kind: count for kind, count in zip(ALL_KINDS, counts) if count}

    def scores(self) -> Int64s:
        """Documents by their score, empty ones left out: int64 [bins]."""
        return np.asarray(self.documents[:-1].sum(axis=0))

    def quantiles(self, shares: tuple[float, ...]) -> dict[str, list[float]]:
        """Quantiles of each of TOLD, over the sampled documents."""
        return {name: np.quantile(values, shares).tolist() for name, values in self._columns() if len(values)}

    def histograms(self) -> dict[str, tuple[list[float], list[int]]]:
        """(edges, counts) of each column except the score over the sampled documents; outliers are in the end bars."""
        found = {}
        for name, values in self._columns():
            if name == "score" or not len(values):
                continue
            low, high = np.quantile(values, (0.002, 0.998)).astype(np.float64)
            edges = np.linspace(low, high if high > low else low + 1.0, BARS + 1)
            counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
            found[name] = edges.tolist(), counts.tolist()
        return found

    def _columns(self) -> Iterator[tuple[str, npt.NDArray[np.float64]]]:
        some = np.concatenate([np.empty((0, len(TOLD)), np.float32), *self.sampled]).astype(np.float64)
        return ((name, some[:, column]) for column, name in enumerate(TOLD))


def order(row: Row) -> tuple[float, int, int]:
    """Sort key: worst first, then in corpus order."""
    return -row["score"], row["place"], row["document"]


def tally(rows: pa.Table, place: int, before: int, total: int, top: int) -> ScanSummary:
    """Summarise the rows of one unit of shard number `place`; `before` of `total` documents are in earlier shards."""
    score, tokens = rows["score"].to_numpy(), rows["tokens"].to_numpy()
    kind = codes(rows["kind"], ALL_KINDS)
    # Bins include their lower edge, like the thresholds.
    cell = kind * BINS + np.minimum(score / STEP, BINS - 1).astype(np.int64)
    size = len(ALL_KINDS) * BINS
    documents = np.bincount(cell, minlength=size).reshape(-1, BINS)
    weights = np.zeros(size, np.int64)
    np.add.at(weights, cell, tokens)
    power = np.where(tokens > 0, np.frexp(tokens.astype(np.float64))[1], 0)
    numbers = (rows["document"].to_numpy() + before).astype(np.uint64)
    share = min(1.0, SAMPLED / max(total, 1))
    chosen = np.flatnonzero((mix(numbers) <= np.uint64(share * (2**64 - 2048))) & (tokens > 0))
    part = rows.take(chosen)
    sampled = np.stack([part[name].to_numpy() for name in TOLD], axis=1).astype(np.float32)
    least = min(top, len(score))
    worst = np.argsort(-score, kind="stable")[:least]
    worst = worst[score[worst] > 0]
    return ScanSummary(
        top, documents, weights.reshape(-1, BINS), np.bincount(power, minlength=LENGTHS), [sampled],
        [row | {"place": place} for row in rows.take(worst).to_pylist()],
    )  # fmt: skip
