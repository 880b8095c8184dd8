"""Result of a scan: `scan.json` in its folder, and the odd documents, from the parts beside it.

It is made of a summary of bounded size of all rows: counters, histograms, the worst documents and a sample. The summary
also gives the advice from which score on documents deserve a look. By construction one ordinary piece in 10^s has a
score of s (`judgement.py`), so a document of n pieces does with probability 1 - (1 - 10^-s)^n. If the far tail is
heavier, the scores of the corpus itself (or of a reference known to be good) show by how much, at a score that ordinary
documents still reach. The advice is the lowest score at which the expected ordinary documents are at most a given share
of all documents above it: a false discovery rate (Benjamini and Hochberg, 1995), by which a corpus without damage gets
hardly any named, and a large one a higher score than a small one.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from megastable.base.errors import DataError
from megastable_tools.forensics import resumable_map
from megastable_tools.forensics.oddness.features import NAMES
from megastable_tools.forensics.oddness.judgement import MOST, ODD
from megastable_tools.forensics.oddness.yardstick import PIECE, Span, Yardstick, find_odd_spans
from megastable_tools.forensics.resumable_map import MapResult
from megastable_tools.forensics.scanning.duplicates import COPY, Records, mix_bits, read_copies
from megastable_tools.forensics.scanning.rows import (
    ALL_KINDS,
    EMPTY,
    REPETITIVE,
    cached_yardstick,
    decode_names,
    document_keys,
    long_key,
)
from megastable_tools.forensics.scanning.units import BLOCK
from megastable_tools.forensics.shard_set import Shelf

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

    def add_summary(self, other: ScanSummary) -> None:
        """Add another summary's counts."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.lengths += other.lengths
        self.sampled += other.sampled
        self.worst = heapq.nsmallest(self.top, [*self.worst, *other.worst], key=sort_key)

    def count_above(self, score: float, kind: str | None = None) -> tuple[int, int]:
        """(documents, tokens) with that score (a multiple of STEP) or more; of one kind, or of all but empty ones."""
        first_bin = min(round(score / STEP), BINS - 1)
        kinds = slice(0, len(ALL_KINDS) - 1) if kind is None else ALL_KINDS.index(kind)
        return int(self.documents[kinds, first_bin:].sum()), int(self.tokens[kinds, first_bin:].sum())

    def by_kind(self) -> dict[str, int]:
        """Documents of each kind that occurs."""
        kind_counts = self.documents.sum(axis=1).tolist()
        return {kind_name: kind_count for kind_name, kind_count in zip(ALL_KINDS, kind_counts) if kind_count}

    def count_by_score(self) -> Int64s:
        """Documents by their score, empty ones left out: int64 [bins]."""
        return np.asarray(self.documents[:-1].sum(axis=0))

    def compute_quantiles(self, shares: tuple[float, ...]) -> dict[str, list[float]]:
        """Quantiles of each of TOLD, over the sampled documents."""
        return {name: np.quantile(values, shares).tolist() for name, values in self._columns() if len(values)}

    def draw_histograms(self) -> dict[str, Bars]:
        """Of each column except the score over the sampled documents; outliers are in the end bars."""
        histograms_found = {}
        for column_name, column_values in self._columns():
            if column_name == "score" or not len(column_values):
                continue
            low_edge, high_edge = np.quantile(column_values, (0.002, 0.998)).astype(np.float64)
            edges = np.linspace(low_edge, high_edge if high_edge > low_edge else low_edge + 1.0, BARS + 1)
            counts, _ = np.histogram(np.clip(column_values, edges[0], edges[-1]), edges)
            histograms_found[column_name] = Bars(edges=edges.tolist(), counts=counts.tolist())
        return histograms_found

    def _columns(self) -> Iterator[tuple[str, npt.NDArray[np.float64]]]:
        some = np.concatenate([np.empty((0, len(TOLD)), np.float32), *self.sampled]).astype(np.float64)
        return ((column_name, some[:, column_number]) for column_number, column_name in enumerate(TOLD))


def sort_key(row: Row) -> tuple[float, int, int]:
    """Sort key: worst first, then in corpus order."""
    return -row["score"], row["place"], row["document"]


def tally_rows(rows: pa.Table, place: int, before: int, total: int, top: int) -> ScanSummary:
    """Summarise the rows of one unit of shard number `place`; `before` of `total` documents are in earlier
    shards."""
    score, token_counts = rows["score"].to_numpy(), rows["tokens"].to_numpy()
    kind_codes = decode_names(rows["kind"], ALL_KINDS)
    # Bins include their lower edge, like the thresholds.
    score_cell = kind_codes * BINS + np.minimum(score / STEP, BINS - 1).astype(np.int64)
    cell_count = len(ALL_KINDS) * BINS
    documents = np.bincount(score_cell, minlength=cell_count).reshape(-1, BINS)
    token_weights = np.zeros(cell_count, np.int64)
    np.add.at(token_weights, score_cell, token_counts)
    length_power = np.where(token_counts > 0, np.frexp(token_counts.astype(np.float64))[1], 0)
    numbers = (rows["document"].to_numpy() + before).astype(np.uint64)
    share = min(1.0, SAMPLED / max(total, 1))
    is_chosen = mix_bits(numbers) <= np.uint64(share * (2**64 - 2048))
    part = rows.take(np.flatnonzero(is_chosen & (token_counts > 0)))
    sampled = np.stack([part[column_name].to_numpy() for column_name in TOLD], axis=1).astype(np.float32)
    worst_rows = np.argsort(-score, kind="stable")[:top]
    worst_rows = worst_rows[score[worst_rows] > 0]
    return ScanSummary(
        top, documents, token_weights.reshape(-1, BINS), np.bincount(length_power, minlength=LENGTHS), [sampled],
        [worst_row | {"place": place} for worst_row in rows.take(worst_rows).to_pylist()],
    )  # fmt: skip


# Chosen on the standard library's source, measured on C headers, prose and a mix of both: docs/data.md.
RATE = 0.1  # expected share of ordinary documents among those above the advised score
CHECKED = 2.0  # the score at which expected and observed counts are compared; no lower one is advised


def expect_ordinary(lengths: Int64s, score: float) -> float:
    """Expected documents at `score` or above if all are ordinary. lengths: number of documents of 0 tokens, of 1, of
    2 and 3, ... by powers of two."""
    length_bits = np.arange(1, len(lengths))
    piece_counts = np.maximum(np.ceil(0.75 * 2.0**length_bits / PIECE), 1.0)
    return float(-np.expm1(piece_counts * np.log1p(-(10.0**-score))) @ lengths[1:])


def measure_excess(usual: ScanSummary) -> float:
    """Ratio of documents of `usual` at CHECKED or above to the expectation, at least 1."""
    return max(1.0, usual.count_above(CHECKED)[0] / max(expect_ordinary(usual.lengths, CHECKED), 1.0))


def advise_score(found: ScanSummary, times: float) -> float | None:
    """The lowest score, in steps of STEP, at which `times` the expected ordinary ones are at most RATE of all; None if
    there is none."""
    for score in np.arange(CHECKED, MOST + STEP, STEP).tolist():
        named_documents = found.count_above(score)[0]
        if not named_documents:
            return None
        if times * expect_ordinary(found.lengths, score) <= RATE * named_documents:
            return score
    return None


DUPLICATE, NEAR_DUPLICATE = "duplicate", "near duplicate"
USUAL = ALL_KINDS[0]
SHARES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
COLUMNS = [
    "document", "first_token", "tokens", "piece", "score", "kind", "feature", "value", "piece_tokens", "compression"
]  # fmt: skip


class _ScanPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardFacts(_ScanPart):
    """A scanned shard, its number of documents, and the number of its first one over all shards."""

    name: str
    documents: int
    tokens: int
    before: int


class Threshold(_ScanPart):
    """Documents whose score is `score` or more: number, tokens, share of the corpus; ordinary: how many
    of as many ordinary documents would score as high, the expected false positives (see above); usual: the
    share in the reference's sample; kinds: number of each."""

    score: float
    documents: int
    tokens: int
    share: float
    ordinary: float
    usual: float
    kinds: dict[str, int]


class Bars(_ScanPart):
    """A histogram; counts: one less than edges."""

    edges: list[float]
    counts: list[int]


class CopyFacts(_ScanPart):
    """Copies after the first one of each group."""

    documents: int
    tokens: int
    groups: int

    @classmethod
    def of_copies(cls, copies: Records) -> CopyFacts:
        group_count = len(np.unique(copies["of"]))
        return cls(documents=len(copies), tokens=int(copies["tokens"].sum()), groups=group_count)


class WorstDocument(_ScanPart):
    """One of the worst documents. piece, piece_tokens: its worst place in the shard; why: in words; compression: ratio
    by zstd of the bytes of its first tokens, up to 64 KiB."""

    shard: str
    document: int
    first_token: int
    tokens: int
    score: float
    kind: str
    piece: int
    piece_tokens: int
    feature: str
    value: float
    why: str
    compression: float
    features: dict[str, float]


class Scan(MapResult):
    """shards are `name` (fingerprint, tokenizer: xxh3 or ""); against: the name of the reference, itself if it is "".

    lengths: documents by powers of two: of 0 tokens, of 1, of 2 and 3, ... scores: documents by score, in steps of
    `score_step`, the last is everything above. advised: the score above which documents deserve a look
    (see above), None if there is none. worst: at most `top`, none with a score of 0. quantiles: of the score
    and each feature over documents, and of their compression, at `shares`; they and the histograms are of a sample of a
    large corpus. seconds: of the measuring in this call, of `measured_tokens`, by `workers`; yardstick_seconds: before
    that. sample_documents: those with tokens, with parts of long ones counted separately.
    """

    file = resumable_map.RESULT
    doing = "scan"

    format: Literal[3] = 3
    name: str
    fingerprint: str
    tokenizer: str
    vocab_size: int
    against: str
    shards: list[ShardFacts]
    units: int
    documents: int
    tokens: int
    empty: int
    sample_documents: int
    sample_tokens: int
    kinds: dict[str, int]
    shares: tuple[float, ...] = SHARES
    quantiles: dict[str, list[float]]
    histograms: dict[str, Bars]
    lengths: list[int]
    score_step: float
    scores: list[int]
    advised: float | None
    thresholds: list[Threshold]
    top: int
    worst: list[WorstDocument]
    copies: CopyFacts
    near: CopyFacts | None
    near_threshold: float | None
    workers: int
    seconds: float
    measured_tokens: int
    yardstick_seconds: float
    duplicates_seconds: float
    warnings: list[str]

    @property
    def tokens_per_second(self) -> float:
        """Measuring speed of all workers together; 0 if nothing was left to measure."""
        return self.measured_tokens / self.seconds if self.measured_tokens else 0.0

    def place_of(self, number: int) -> tuple[str, int]:
        """(shard, document) of document `number`, counted over all shards."""
        befores = [shard.before for shard in self.shards]
        shard_index = int(np.searchsorted(befores, number, side="right")) - 1
        return self.shards[shard_index].name, number - befores[shard_index]


@dataclass(frozen=True)
class SuspectDocument:
    """A document that may be pruned: tokens [first_token, first_token + tokens) of its shard; piece: where in the shard
    its worst piece begins; why: in words; copy: listed as a copy or without tokens, not for its score."""

    shard: str
    document: int
    first_token: int
    tokens: int
    score: float
    kind: str
    why: str
    piece: int
    copy: bool = False


def find_suspects(
    folder: Path, least: float | None = None, kinds: Collection[str] | None = None, duplicates: bool = False
) -> Iterator[SuspectDocument]:
    """The documents of a scan that are odd, in the order of the shards; memory grows with the copies only.

    least: minimum score; kinds: only these (`ALL_KINDS`); with neither, none for its score. "empty" among
    the kinds selects documents without tokens, which have no score. duplicates: also those with an earlier copy,
    of any score and kind. Raises DataError for a missing or damaged scan, and an unknown kind.
    """
    scan = Scan.load_result(folder)
    wanted = set(ALL_KINDS[:-1] if kinds is None else kinds)
    if unknown := sorted(wanted - set(ALL_KINDS)):
        raise DataError(f"there is no kind {unknown[0]!r}: the kinds are {', '.join(ALL_KINDS[1:])}")
    odd = least is not None or kinds is not None
    take = np.array([odd and all_kind in wanted for all_kind in ALL_KINDS])
    yardstick = Yardstick.load_file(folder / resumable_map.YARDSTICK)
    copies = read_copies(folder / resumable_map.DUPLICATES) if duplicates else np.empty(0, COPY)
    befores = {shard.name: shard.before for shard in scan.shards}
    for rows in resumable_map.read_parts(folder, scan.units, "scan again", ["shard", *COLUMNS]):
        if not len(rows):
            continue
        shard = rows["shard"][0].as_py()
        kind, score = decode_names(rows["kind"], ALL_KINDS), rows["score"].to_numpy()
        high = take[kind] & ((score >= (0.0 if least is None else least)) | (kind == len(ALL_KINDS) - 1))
        first = int(rows["document"][0].as_py()) + befores[shard]
        low, end = np.searchsorted(copies["document"], (first, first + len(rows)))
        copied = copies[low:end]
        copy_by_row = dict(zip((copied["document"] - first).tolist(), copied))
        chosen = np.union1d(np.flatnonzero(high), np.fromiter(copy_by_row, np.int64)).astype(np.int64)
        for index, row in zip(chosen.tolist(), rows.select(COLUMNS).take(chosen).to_pylist()):
            why, called = [], row["kind"]
            if high[index]:
                why = ["it has no tokens" if row["kind"] == EMPTY else explain_row(yardstick, row)]
            if index in copy_by_row:
                copy_text, copy_kind = _copy(scan, copy_by_row[index])
                why.append(copy_text)
                called = called if high[index] else copy_kind
            yield SuspectDocument(
                shard, row["document"], row["first_token"], row["tokens"], row["score"], called, "; ".join(why),
                row["piece"] if high[index] else row["first_token"],
                copy=index in copy_by_row or row["kind"] == EMPTY,
            )  # fmt: skip


def odd_spans(folder: Path, shelf: Shelf, suspect: SuspectDocument, least: float | None = None) -> list[Span]:
    """The odd tokens [first, end) of a scanned document: with a score of `least`, or of its kind's default."""
    shard = shelf.find_shard(suspect.shard)
    yardstick_path = folder / resumable_map.YARDSTICK
    yardstick = cached_yardstick(yardstick_path, yardstick_path.stat().st_mtime_ns)
    document_ids = shard.read_raw(suspect.first_token, suspect.tokens)
    if suspect.tokens > BLOCK:
        document_key = long_key(suspect.shard, suspect.document)
    else:
        document_key = int(document_keys(document_ids, np.array([0, len(document_ids)]))[0])
    wanted_score = ODD if least is None else max(least, ODD)
    return find_odd_spans(yardstick, document_ids, document_key, min(wanted_score, suspect.score))


def explain_row(yardstick: Yardstick, row: dict[str, Any]) -> str:
    """The reason for a row's score, in words."""
    reason_text = yardstick.explain_piece(row["piece_tokens"], row["feature"], row["value"])
    compression = row["compression"]
    return reason_text + f"; zstd compresses it {compression:.0f} times" * (compression >= REPETITIVE)


def _copy(scan: Scan, copy: Records) -> tuple[str, str]:
    shard, document = scan.place_of(int(copy["of"]))
    if not copy["near"]:
        return f"a copy of document {document} of {shard}", DUPLICATE
    return f"{copy['similarity']:.0%} the same as document {document} of {shard}", NEAR_DUPLICATE
