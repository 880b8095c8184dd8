"""Find near duplicates: signatures of all documents, candidates by banding, verified pairs, groups.

Memory grows only with the findings: some 300 bytes for each near duplicate. Disk space is 256 bytes per document. The
keys of all bands, 16 bytes each, are computed several times for a corpus of millions of documents, each time for
another share of them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.data.local_copy import write_file
from megastable.data.shards import Shard
from megastable_tools.forensics import document_map
from megastable_tools.forensics.document_map import KeptPart
from megastable_tools.forensics.scanning.duplicates import COPY, Records, count_passes
from megastable_tools.forensics.scanning.minhash import (
    BINS,
    GRAM,
    Signatures,
    band_keys,
    banding,
    estimate,
    signatures,
    similarities,
)
from megastable_tools.forensics.scanning.units import BLOCK, Int64s, Raw, Unit, edges_of, open_unit

SMALL = 16  # documents of a bucket up to which all pairs are compared; in a larger one each with two others
CHEAP = 1 << 16  # tokens of a document up to which its text is compared
BUDGET = 1 << 30  # tokens read to compare texts; beyond it signatures decide
MARGIN = 0.15  # four standard errors: pairs estimated this far below the threshold are not read
BATCH = 1 << 15  # pairs
READ = 1 << 22  # tokens compared at once

BAND = np.dtype([("key", "<u8"), ("document", "<i8")])
PAIR = np.dtype([("one", "<i8"), ("other", "<i8")])


def sign(unit: Unit, folder: Path) -> KeptPart:
    """Write the signatures of a unit, unless they exist."""
    path = document_map.near_part(folder, unit.number)
    missing = _load(path, unit.documents) is None
    if missing:
        shard = open_unit(unit)
        edges = edges_of(shard, unit)
        content = io.BytesIO()
        np.save(content, signatures(_parts(shard, edges), unit.documents))
        write_file(path, content.getvalue())
    return KeptPart(unit.tokens, unit.documents, missing)


def _parts(shard: Shard, edges: Int64s) -> Iterator[tuple[Raw, Int64s, Int64s]]:
    """About a block of tokens at a time; a continuation repeats the last 4 tokens."""
    begin, end = int(edges[0]), int(edges[-1])
    while begin < end:
        stop = min(begin + BLOCK, end)
        first = int(np.searchsorted(edges, begin, side="right")) - 1
        last = int(np.searchsorted(edges, stop, side="left"))
        cut = int(edges[last]) > stop
        yield (
            shard.raw(begin, stop - begin),
            np.clip(edges[first : last + 1], begin, stop) - begin,
            np.arange(first, last),
        )
        begin = stop - (GRAM - 1 if cut else 0)


def find_near(
    shards: Sequence[Shard], units: Sequence[Unit], folder: Path, copies: Records, threshold: float
) -> Records:
    """The documents that are at least `threshold` like an earlier one: `COPY` [n], ascending.

    Exact copies, `copies`, are represented by their first one. Documents of fewer than 5 tokens have no signature. A
    copy refers to the first document of its group, possibly linked through others, with its similarity to that one.
    Raises DataError.
    """
    look = _Look(shards, units, folder, threshold)
    groups = _Groups()
    for one, other in look.pairs(copies["document"]):
        groups.join(one, other)
    found = groups.members()
    records = np.empty(len(found), COPY)
    for at in range(0, len(found), BATCH):
        batch = found[at : at + BATCH]
        records["similarity"][at : at + BATCH] = look.similarities(batch[:, 1], batch[:, 0])
    records["document"], records["of"], records["near"] = found[:, 0], found[:, 1], True
    records["tokens"] = [look.tokens_of(document) for document in found[:, 0].tolist()]
    return records


@dataclass
class _Groups:
    """Union-find over the documents of pairs; the first document of a group is its root."""

    parent: dict[int, int] = field(default_factory=dict)

    def root(self, document: int) -> int:
        path = []
        while (up := self.parent.get(document, document)) != document:
            path.append(document)
            document = up
        for below in path:
            self.parent[below] = document
        return document

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.root(one), self.root(other)))
        self.parent[low], self.parent[high] = low, low

    def members(self) -> Int64s:
        """(document, first of its group) of all but the first ones, ascending: int64 [n, 2]."""
        pairs = [(document, self.root(document)) for document in sorted(self.parent)]
        found = [pair for pair in pairs if pair[0] != pair[1]]
        return np.array(found, dtype=np.int64).reshape(-1, 2)


class _Look:
    """Documents by their number over all shards: signatures, texts, lengths."""

    def __init__(
        self, shards: Sequence[Shard], units: Sequence[Unit], folder: Path, threshold: float
    ) -> None:
        self.shards, self.units, self.folder, self.threshold = shards, units, folder, threshold
        self.firsts = np.array([unit.before + unit.first_document for unit in units], dtype=np.int64)
        self.budget = BUDGET
        self._held: tuple[int, Int64s] | None = None
        self._table = lru_cache(maxsize=64)(self._open)
        self._span = lru_cache(maxsize=1 << 16)(self._find)

    def pairs(self, copied: Int64s) -> Iterator[tuple[int, int]]:
        """Pairs with at least the required similarity, without the documents `copied`, ascending."""
        bands, rows = banding(self.threshold)
        passes = count_passes(sum(unit.documents for unit in self.units) * bands * BAND.itemsize)
        for number in range(passes):
            share = [np.empty(0, BAND)]
            for unit, first in zip(self.units, self.firsts.tolist()):
                chosen = self._signed(unit, first, copied)
                keys = band_keys(self._table(unit.number)[chosen], bands, rows).ravel()
                mine = keys % np.uint64(passes) == number
                records = np.empty(int(mine.sum()), BAND)
                records["key"], records["document"] = keys[mine], np.repeat(chosen + first, bands)[mine]
                share.append(records)
            pairs = _candidates(np.concatenate(share))
            for at in range(0, len(pairs), BATCH):
                batch = pairs[at : at + BATCH]
                alike = self.similarities(batch["one"], batch["other"]) >= self.threshold
                yield from zip(batch["one"][alike].tolist(), batch["other"][alike].tolist())

    def _signed(self, unit: Unit, first: int, copied: Int64s) -> Int64s:
        """The documents of a unit that have a signature, without those `copied`, counted from its first."""
        keep = np.diff(self.shards[unit.shard].document_edges(unit.first_document, unit.documents)) >= GRAM
        low, high = np.searchsorted(copied, (first, first + unit.documents))
        keep[copied[low:high] - first] = False
        return np.flatnonzero(keep)

    def similarities(self, one: Int64s, other: Int64s) -> npt.NDArray[np.float64]:
        """Similarities of pairs, float64 [n]: by their texts if those are short and near the threshold."""
        found = estimate(self._signatures(one), self._signatures(other))
        batch: list[int] = []
        tokens = 0
        for at in np.flatnonzero(found >= self.threshold - MARGIN).tolist():
            sizes = self.tokens_of(int(one[at])), self.tokens_of(int(other[at]))
            if max(sizes) > CHEAP or sum(sizes) > self.budget:
                continue
            self.budget -= sum(sizes)
            batch.append(at)
            tokens += sum(sizes)
            if tokens > READ:
                found[batch] = self._exact(one[batch], other[batch])
                batch, tokens = [], 0
        if batch:
            found[batch] = self._exact(one[batch], other[batch])
        return found

    def _exact(self, one: Int64s, other: Int64s) -> npt.NDArray[np.float64]:
        documents, places = np.unique(np.concatenate([one, other]), return_inverse=True)
        texts = []
        for document in documents.tolist():
            first, count = self._span(document)
            texts.append(self.shards[self._place(document)[0].shard].raw(first, count))
        edges = np.cumsum([0, *map(len, texts)])
        return similarities(np.concatenate(texts), edges, places[: len(one)], places[len(one) :])

    def tokens_of(self, document: int) -> int:
        return self._span(document)[1]

    def _find(self, document: int) -> tuple[int, int]:
        """First token, tokens."""
        unit, number = self._place(document)
        first, end = self.shards[unit.shard].document_bounds(number)
        return first, end - first

    def _place(self, document: int) -> tuple[Unit, int]:
        unit = self.units[int(np.searchsorted(self.firsts, document, side="right")) - 1]
        return unit, document - unit.before

    def _signatures(self, documents: Int64s) -> Signatures:
        found = np.empty((len(documents), BINS), np.uint16)
        of = np.searchsorted(self.firsts, documents, side="right") - 1
        for number in np.unique(of).tolist():
            here = of == number
            found[here] = self._table(number)[documents[here] - self.firsts[number]]
        return found

    def _open(self, number: int) -> Signatures:
        path = document_map.near_part(self.folder, number)
        table = _load(path, self.units[number].documents)
        if table is None:
            raise DataError(f"{path} is missing or damaged: scan again, other results are kept")
        return table


def _load(path: Path, documents: int) -> Signatures | None:
    """Signatures, mapped; None if they are missing or of another number of documents."""
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except (ValueError, EOFError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    return table if table.shape == (documents, BINS) and table.dtype == np.uint16 else None


def _candidates(part: Records) -> Records:
    """Pairs of documents with a key in common, the earlier one first: `PAIR` [n].

    All pairs of a small bucket; in a larger one each document with the first and the previous one.
    """
    if not len(part):
        return np.empty(0, PAIR)
    part = part[np.lexsort((part["document"], part["key"]))]
    begins = np.flatnonzero(np.append(True, part["key"][1:] != part["key"][:-1]))
    sizes = np.diff(np.append(begins, len(part))).astype(np.int64)
    place = np.arange(len(part)) - np.repeat(begins, sizes)
    size = np.repeat(sizes, sizes)
    found = []
    for back in range(1, SMALL):
        later = np.flatnonzero((place >= back) & ((size <= SMALL) | (back == 1)))
        found.append((later - back, later))
    later = np.flatnonzero((size > SMALL) & (place > 1))
    found.append((later - place[later], later))
    pairs = np.empty(sum(len(one) for one, _ in found), PAIR)
    pairs["one"] = part["document"][np.concatenate([one for one, _ in found])]
    pairs["other"] = part["document"][np.concatenate([other for _, other in found])]
    return np.unique(pairs[pairs["one"] != pairs["other"]])
