"""Units of work of a scan: runs of whole documents of a shard, found in the index by bisection, and read in blocks.

A unit is one task of a process and the granularity of resuming. Its size in tokens and
documents is bounded, so that memory does not grow with the corpus; only a longer document makes it
longer, and is then read in several blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.data.shard_format import ShardInfo, with_suffix
from megastable.data.shards import Shard

UNIT = 1 << 22  # tokens
MOST_UNITS = 2048  # units grow beyond `UNIT` in a corpus that would have more
DOCUMENTS = 1 << 16  # of a unit, at most
BLOCK = 1 << 18  # tokens measured at once: fits in the cache of a core
SAMPLE = 12_000_000  # tokens for a yardstick
RUNS = 512  # places of a sample

Int64s = npt.NDArray[np.int64]
Raw = npt.NDArray[np.integer]
Cut = Callable[[Int64s], tuple[Int64s, Int64s]]


@dataclass(frozen=True)
class Unit:
    """Documents [first_document, first_document + documents) of a shard; `number` counts all units, `before` the
    documents of all earlier shards. prefix, info: to open the shard in another process; stamp: sizes and
    modification times of its files, to detect changes."""

    number: int
    shard: int
    before: int
    prefix: Path
    info: ShardInfo | None
    stamp: tuple[int, ...]
    first_document: int
    documents: int
    first_token: int
    tokens: int

    @property
    def numbers(self) -> Int64s:
        """Its documents, in their shard: int64 [documents]."""
        return np.arange(self.first_document, self.first_document + self.documents)


@dataclass(frozen=True)
class PieceBlock:
    """Pieces of a unit, one after another: tokens as they are stored [n]; edges int64 [k + 1], first_token is where
    edges[0] lies in the shard; owner int64 [k]: the document of each, counted from the first of the unit."""

    tokens: Raw
    edges: Int64s
    owner: Int64s
    first_token: int


def unit_size(tokens: int) -> int:
    """Tokens of a unit for shards with this many tokens."""
    return max(UNIT, -(-tokens // MOST_UNITS))


def split_into_units(shards: Sequence[Shard], size: int) -> Iterator[Unit]:
    """All documents of `shards`, in their order, in runs of about `size` tokens. O(log documents) for each.

    Raises DataError for an index that is damaged where it is read.
    """
    unit_number = before = 0
    for shard_index, shard in enumerate(shards):
        first_document = first_token = 0
        shard_prefix = shard.bin_path.with_name(shard.name)
        shard_stamp = stamp_of(shard_prefix)
        while first_document < shard.documents:
            aimed_token = min(first_token + size, shard.tokens)
            end = min(shard.documents_before(aimed_token), first_document + DOCUMENTS)
            # A document as long as a unit gets one of its own; every unit has at least one.
            end = max(end, first_document + 1)
            end_token = shard.tokens if end == shard.documents else shard.document_bounds(end)[0]
            if end_token < first_token:
                raise DataError(
                    f"{shard.idx_path}: document {end} begins before one that precedes it: write the shard again"
                )
            yield Unit(
                unit_number, shard_index, before, shard_prefix, shard.info, shard_stamp, first_document,
                end - first_document, first_token, end_token - first_token,
            )  # fmt: skip
            first_document, first_token, unit_number = end, end_token, unit_number + 1
        before += shard.documents


def open_unit(unit: Unit) -> Shard:
    """The shard of a unit, opened once per process. Raises DataError if it has changed."""
    # The index is mapped: a truncated file would kill the process without a message.
    if stamp_of(unit.prefix) != unit.stamp:
        raise DataError(
            f"{unit.prefix}.bin or .idx changed while it was in use: start again when it is complete"
        )
    return _opened(unit.prefix, unit.info, unit.stamp)


@lru_cache(maxsize=4)
def _opened(prefix: Path, info: ShardInfo | None, stamp: tuple[int, ...]) -> Shard:
    return Shard(prefix, info)


def stamp_of(prefix: Path) -> tuple[int, ...]:
    """Sizes and modification times of a shard's files. Raises DataError if they are missing."""
    stamp_parts: list[int] = []
    for suffix in (".bin", ".idx"):
        file_path = with_suffix(prefix, suffix)
        try:
            file_stat = file_path.stat()
        except OSError as error:
            raise DataError(f"{file_path} can no longer be read: {error.strerror}") from error
        stamp_parts += (file_stat.st_size, file_stat.st_mtime_ns)
    return tuple(stamp_parts)


def edges_of(shard: Shard, unit: Unit) -> Int64s:
    """Where the documents of a unit begin, and its end: int64 [documents + 1], tokens of the shard.

    Raises DataError if the index has changed.
    """
    edges = shard.document_edges(unit.first_document, unit.documents)
    if int(edges[0]) != unit.first_token or int(edges[-1]) != unit.first_token + unit.tokens:
        raise DataError(
            f"{shard.idx_path} changed while it was in use, or is not ascending near document "
            f"{unit.first_document}: write the shard again"
        )
    return edges


def read_blocks(shard: Shard, edges: Int64s, cut: Cut) -> Iterator[PieceBlock]:
    """The pieces of documents with these `edges` (int64 [d + 1], tokens of the shard), in blocks of about `BLOCK`
    tokens. Documents without tokens have no pieces; one longer than a block is in several, and alone in each.

    Raises DataError when they cannot be read.
    """
    filled = np.flatnonzero(np.diff(edges) > 0)
    if not filled.size:
        return
    pieces, owner = cut(np.append(edges[filled], edges[-1]) - edges[filled[0]])
    begin = 0
    while begin < len(owner):
        end = int(np.searchsorted(pieces, pieces[begin] + BLOCK, side="right")) - 1
        end = min(max(end, begin + 1), len(owner))
        if edges[filled[owner[begin]] + 1] - edges[filled[owner[begin]]] > BLOCK:
            end = min(end, int(np.searchsorted(owner, owner[begin], side="right")))
        elif end < len(owner) and owner[begin] != owner[end]:
            # The last document continues in the next block, which begins with it.
            end = int(np.searchsorted(owner, owner[end]))
        first, count = int(edges[filled[0]] + pieces[begin]), int(pieces[end] - pieces[begin])
        piece_edges = pieces[begin : end + 1] - pieces[begin]
        yield PieceBlock(shard.read_raw(first, count), piece_edges, filled[owner[begin:end]], first)
        begin = end


def sample_documents(shards: Sequence[Shard], most: int = SAMPLE) -> Iterator[tuple[Shard, Int64s, Int64s]]:
    """Documents spread evenly over all tokens of `shards`: (shard, edges int64 [d + 1], numbers of the documents [d]).

    All of them if they have at most `most` tokens; else those in up to `RUNS` stretches of equal length. A
    document longer than `BLOCK` comes in parts, in a larger corpus only those in a stretch. Raises DataError
    for a damaged index.
    """
    if sum(shard.tokens for shard in shards) <= most:
        for unit in split_into_units(shards, BLOCK):
            edges = shards[unit.shard].document_edges(unit.first_document, unit.documents)
            yield from _parts(shards[unit.shard], edges, unit.first_document, int(edges[0]), int(edges[-1]))
        return
    shard_before, documents_done = -1, 0
    for shard_number, stretch_begin, stretch_end in _stretches(shards, most):
        documents_done = documents_done if shard_number == shard_before else 0
        shard, shard_before = shards[shard_number], shard_number
        first_document, edges = _touched(shard, stretch_begin, stretch_end)
        # The last document of the previous stretch; other parts of a long one were taken there.
        known = max(documents_done - first_document, 0) if edges[1] - edges[0] <= BLOCK else 0
        if known < len(edges) - 1:
            yield from _parts(shard, edges[known:], first_document + known, stretch_begin, stretch_end)
        documents_done = first_document + len(edges) - 1


def _stretches(shards: Sequence[Shard], most: int) -> list[tuple[int, int, int]]:
    """(shard, first token, end), ascending: as many stretches as have about `most` tokens with all of their
    documents."""
    shard_offsets = np.cumsum([0, *(shard.tokens for shard in shards)])
    stretch_length, tokens_left, stretches_found = -(-most // RUNS), most, []
    # Each next one falls into a large gap between the others (van der Corput): any number of them is evenly spread.
    digit_count = RUNS.bit_length() - 1
    for place_number in range(RUNS):
        token_place = (int(f"{place_number:0{digit_count}b}"[::-1], 2) + 0.5) / RUNS * int(shard_offsets[-1])
        number = int(np.searchsorted(shard_offsets, token_place, side="right")) - 1
        stretch_begin = max(int(token_place) - stretch_length // 2 - int(shard_offsets[number]), 0)
        stretch_end = min(stretch_begin + stretch_length, shards[number].tokens)
        stretches_found.append((number, stretch_begin, stretch_end))
        _, touched_edges = _touched(shards[number], stretch_begin, stretch_end)
        whole = np.diff(touched_edges)
        tokens_left -= int(np.where(whole > BLOCK, np.minimum(whole, stretch_length), whole).sum())
        if tokens_left <= 0:
            break
    return sorted(stretches_found)


def _touched(shard: Shard, begin: int, end: int) -> tuple[int, Int64s]:
    """The documents that hold any of the tokens [begin, end): the first one, edges int64 [d + 1]."""
    first_document = shard.document_of(begin)
    last_document = min(max(shard.documents_before(end), first_document + 1), first_document + DOCUMENTS)
    return first_document, shard.document_edges(first_document, last_document - first_document)


def _parts(
    shard: Shard, edges: Int64s, first: int, begin: int, end: int
) -> Iterator[tuple[Shard, Int64s, Int64s]]:
    """Runs of documents without a long one; for each long one its part in [begin, end), `BLOCK` tokens at a time."""
    documents_done = 0
    for at in [*np.flatnonzero(np.diff(edges) > BLOCK).tolist(), len(edges) - 1]:
        if edges[documents_done] < edges[at]:
            yield shard, edges[documents_done : at + 1], np.arange(first + documents_done, first + at)
        if at < len(edges) - 1:
            part_begin, part_end = max(int(edges[at]), begin), min(int(edges[at + 1]), end)
            for part in range(part_begin, part_end, BLOCK):
                yield shard, np.array([part, min(part + BLOCK, part_end)]), np.array([first + at])
        documents_done = at + 1


def workers_for(asked: int | None) -> int:
    """The requested number of processes; by default one per CPU."""
    return asked if asked is not None else len(os.sched_getaffinity(0))
