"""Result of a scan: `scan.json` in its folder, and the odd documents, from the parts beside it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from megastable.base.errors import DataError
from megastable_tools.forensics import document_map
from megastable_tools.forensics.document_map import MapResult
from megastable_tools.forensics.oddness.kinds import ODD
from megastable_tools.forensics.oddness.windows import Span, spans_of
from megastable_tools.forensics.oddness.yardstick import NAMES, Yardstick
from megastable_tools.forensics.scanning.duplicates import COPY, Records, read_copies
from megastable_tools.forensics.scanning.rows import (
    ALL_KINDS,
    EMPTY,
    REPETITIVE,
    cached_yardstick,
    codes,
    document_keys,
    long_key,
)
from megastable_tools.forensics.scanning.units import BLOCK
from megastable_tools.forensics.shard_set import Shelf

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
    of as many ordinary documents would score as high, the expected false positives (`score_threshold.py`); usual: the
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
    def of(cls, copies: Records) -> CopyFacts:
        groups = len(np.unique(copies["of"]))
        return cls(documents=len(copies), tokens=int(copies["tokens"].sum()), groups=groups)


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
    (`score_threshold.py`), None if there is none. worst: at most `top`, none with a score of 0. quantiles: of the score
    and each feature over documents, and of their compression, at `shares`; they and the histograms are of a sample of a
    large corpus. seconds: of the measuring in this call, of `measured_tokens`, by `workers`; yardstick_seconds: before
    that. sample_documents: those with tokens, with parts of long ones counted separately.
    """

    file = document_map.RESULT
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

    def place(self, number: int) -> tuple[str, int]:
        """(shard, document) of document `number`, counted over all shards."""
        befores = [shard.before for shard in self.shards]
        at = int(np.searchsorted(befores, number, side="right")) - 1
        return self.shards[at].name, number - befores[at]


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


def suspects(
    folder: Path,
    least: float | None = None,
    kinds: Collection[str] | None = None,
    duplicates: bool = False,
) -> Iterator[SuspectDocument]:
    """The documents of a scan that are odd, in the order of the shards; memory grows with the copies only.

    least: minimum score; kinds: only these (`ALL_KINDS`); with neither, none for its score. "empty" among
    the kinds selects documents without tokens, which have no score. duplicates: also those with an earlier copy,
    of any score and kind. Raises DataError for a missing or damaged scan, and an unknown kind.
    """
    scan = Scan.load(folder)
    wanted = set(ALL_KINDS[:-1] if kinds is None else kinds)
    if unknown := sorted(wanted - set(ALL_KINDS)):
        raise DataError(f"there is no kind {unknown[0]!r}: the kinds are {', '.join(ALL_KINDS[1:])}")
    odd = least is not None or kinds is not None
    take = np.array([odd and kind in wanted for kind in ALL_KINDS])
    yardstick = Yardstick.load(folder / document_map.YARDSTICK)
    copies = read_copies(folder / document_map.DUPLICATES) if duplicates else np.empty(0, COPY)
    befores = {shard.name: shard.before for shard in scan.shards}
    for rows in document_map.read_parts(folder, scan.units, "scan again", ["shard", *COLUMNS]):
        if not len(rows):
            continue
        shard = rows["shard"][0].as_py()
        kind, score = codes(rows["kind"], ALL_KINDS), rows["score"].to_numpy()
        high = take[kind] & ((score >= (0.0 if least is None else least)) | (kind == len(ALL_KINDS) - 1))
        first = int(rows["document"][0].as_py()) + befores[shard]
        low, end = np.searchsorted(copies["document"], (first, first + len(rows)))
        copied = copies[low:end]
        of = dict(zip((copied["document"] - first).tolist(), copied))
        chosen = np.union1d(np.flatnonzero(high), np.fromiter(of, np.int64)).astype(np.int64)
        for index, row in zip(chosen.tolist(), rows.select(COLUMNS).take(chosen).to_pylist()):
            why = (
                []
                if not high[index]
                else ["it has no tokens" if row["kind"] == EMPTY else told(yardstick, row)]
            )
            called = row["kind"]
            if index in of:
                text, sort = _copy(scan, of[index])
                why.append(text)
                called = called if high[index] else sort
            yield SuspectDocument(
                shard, row["document"], row["first_token"], row["tokens"], row["score"], called, "; ".join(why),
                row["piece"] if high[index] else row["first_token"],
                copy=index in of or row["kind"] == EMPTY,
            )  # fmt: skip


def odd_spans(folder: Path, shelf: Shelf, suspect: SuspectDocument, least: float | None = None) -> list[Span]:
    """The odd tokens [first, end) of a scanned document: with a score of `least`, or of its kind's default."""
    shard = shelf.shard(suspect.shard)
    path = folder / document_map.YARDSTICK
    yardstick = cached_yardstick(path, path.stat().st_mtime_ns)
    ids = shard.raw(suspect.first_token, suspect.tokens)
    if suspect.tokens > BLOCK:
        key = long_key(suspect.shard, suspect.document)
    else:
        key = int(document_keys(ids, np.array([0, len(ids)]))[0])
    wanted = ODD if least is None else max(least, ODD)
    return spans_of(yardstick, ids, key, min(wanted, suspect.score))


def told(yardstick: Yardstick, row: dict[str, object]) -> str:
    """The reason for a row's score, in words."""
    values = dict.fromkeys(NAMES, 0.0)
    values |= {str(row["feature"]): float(row["value"]), "length": float(row["piece_tokens"])}  # type: ignore[arg-type]
    why = yardstick.explain(values, str(row["feature"]))
    compression = float(row["compression"])  # type: ignore[arg-type]
    return why + f"; zstd compresses it {compression:.0f} times" * (compression >= REPETITIVE)


def _copy(scan: Scan, copy: Records) -> tuple[str, str]:
    shard, document = scan.place(int(copy["of"]))
    if not copy["near"]:
        return f"a copy of document {document} of {shard}", DUPLICATE
    return f"{copy['similarity']:.0%} the same as document {document} of {shard}", NEAR_DUPLICATE
