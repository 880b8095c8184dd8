"""Compute the remainder of a shard without some documents, and without spans of others: documents, sequences, tokens.

A document with a span cut from its middle becomes several: the piece before the span gets an end-of-document token,
whether or not the document itself ends with one, and the piece after it is a document of its own. It
begins with the begin-of-document token if the document itself does. So no sample contains neighbours joined by a cut.
These two tokens of a document are never cut out themselves: they frame its remainder, and go only with the whole
document.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.data.shard_format import LONGEST_SEQUENCE, chunks, little_endian
from megastable.data.shards import Shard

BLOCK = 1 << 20  # bytes of a file in memory at a time: fits in the cache between two hashes

Int64s = npt.NDArray[np.int64]
Span = tuple[int, int]  # tokens [first, end) of a document


@dataclass(frozen=True)
class Ranges:
    """Ascending ranges [first, end) that do not overlap, int64 [n] each; some may be empty. added: size of the
    replacement of each, int64 [n]; None for nothing."""

    firsts: Int64s
    ends: Int64s
    added: Int64s | None = None

    @property
    def total(self) -> int:
        """Total size of the ranges."""
        return int((self.ends - self.firsts).sum())

    @property
    def less(self) -> int:
        """How much shorter the file is without them and with their replacements."""
        return self.total - int(self._added.sum())

    @property
    def _added(self) -> Int64s:
        return np.zeros_like(self.firsts) if self.added is None else self.added

    def before(self, edges: Int64s) -> Int64s:
        """How far each of `edges` [k], none of which is inside a range, moves towards the beginning without them: int64
        [k]."""
        sums = np.append(0, np.cumsum(self.ends - self.firsts - self._added))
        return sums[np.searchsorted(self.firsts, edges)]

    def inside(self, edge: int) -> bool:
        """Whether `edge` lies strictly inside a range."""
        number = int(np.searchsorted(self.firsts, edge)) - 1
        return number >= 0 and edge < int(self.ends[number])

    def merged(self) -> Ranges:
        """The same without empty ranges and with touching ranges merged; a replacement starts a new range."""
        full = self.ends > self.firsts
        firsts, ends, added = self.firsts[full], self.ends[full], self._added[full]
        if not full.any():
            return Ranges(firsts, ends)
        apart = np.append(True, (firsts[1:] != ends[:-1]) | (added[1:] > 0))
        return Ranges(firsts[apart], ends[np.append(apart[1:], True)], added[apart])

    def scaled(self, size: int, offset: int = 0) -> Ranges:
        """In bytes of a file, with entries of `size` bytes that start at `offset`."""
        return Ranges(self.firsts * size + offset, self.ends * size + offset, self.added)


@dataclass(frozen=True)
class RemainingPiece:
    """The remainder of a document between two spans: its tokens [first, end). closed: it is followed by an added
    end-of-document token; opened: it is preceded by an added begin-of-document token. lengths, modes: of its sequences,
    including these tokens."""

    first: int
    end: int
    closed: bool
    opened: bool
    lengths: tuple[int, ...]
    modes: tuple[int, ...]


class Hole(NamedTuple):
    """Removed tokens [first, end) of a shard. closed, opened: replaced by a token that ends the piece before, and one
    that begins the piece after."""

    first: int
    end: int
    closed: bool
    opened: bool

    @property
    def put(self) -> int:
        """Number of tokens put in its place."""
        return self.closed + self.opened


@dataclass(frozen=True)
class CutDocument:
    """A partly removed document. first: its first token in the shard; pieces: at least one, ascending;
    sequences: [first, end) of the shard; gone: removed tokens, never including those that end and begin the
    document."""

    number: int
    first: int
    tokens: int
    pieces: tuple[RemainingPiece, ...]
    sequences: Span
    gone: int

    @property
    def holes(self) -> Iterator[Hole]:
        """Its removed parts."""
        edges = [0, *(edge for piece in self.pieces for edge in (piece.first, piece.end)), self.tokens]
        closed = [False, *(piece.closed for piece in self.pieces)]
        opened = [*(piece.opened for piece in self.pieces), False]
        for first, end, *put in zip(edges[::2], edges[1::2], closed, opened, strict=True):
            if first < end:
                yield Hole(self.first + first, self.first + end, *put)

    @property
    def spans(self) -> list[Span]:
        """Its removed tokens, as [first, end) of the document."""
        return [(hole.first - self.first, hole.end - self.first) for hole in self.holes]

    @property
    def added(self) -> int:
        """Number of added end and begin tokens: its own still end its last piece and begin its first."""
        return sum(hole.put - (hole.end - hole.first) for hole in self.holes) + self.gone


def cut_document(
    shard: Shard, number: int, spans: Iterable[Span], eod: int, bos: int | None = None
) -> CutDocument | None:
    """The document without `spans`, which may overlap; None if nothing remains but its end and begin tokens.

    Raises DataError for a span that is empty or ends after the document.
    """
    begin, end = shard.document_bounds(number)
    count = end - begin
    closes = count > 0 and int(shard.raw(end - 1, 1)[0]) == eod
    text = count - closes  # end of its tokens without the final end token
    opens = text > 0 and bos is not None and int(shard.raw(begin, 1)[0]) == bos
    kept, at, gone = list[Span](), int(opens), 0
    for first, stop in sorted(spans):
        if not 0 <= first < stop <= count:
            raise DataError(
                f"tokens {first}:{stop} of document {number} of {shard.name}, which has {count}: give first and end, "
                "counted from 0, the end behind the last one"
            )
        first, stop = max(first, at), min(stop, text)
        if first >= stop:
            continue
        if first > at:
            kept.append((at, first))
        gone += stop - first
        at = stop
    if at < text:
        kept.append((at, count))
    if not kept:
        return None
    if kept[0][0] == int(opens):
        kept[0] = 0, kept[0][1]
    low, high = shard.sequence_bounds(number)
    lengths = shard.sequence_lengths(slice(low, high)).tolist()
    stored = shard.modes(slice(low, high))
    modes = [0] * len(lengths) if stored is None else stored.tolist()
    pieces = tuple(
        _piece(first, stop, stop < count, opens and first > 0, lengths, modes) for first, stop in kept
    )
    return CutDocument(number, begin, count, pieces, (low, high), gone)


def _piece(
    first: int, end: int, closed: bool, opened: bool, lengths: Sequence[int], modes: Sequence[int]
) -> RemainingPiece:
    """Tokens [first, end) of a document with sequences of `lengths`; an empty sequence goes to the piece that it
    touches."""
    found, at = list[tuple[int, int]](), 0
    for length, mode in zip(lengths, modes, strict=True):
        inside = min(at + length, end) - max(at, first)
        if inside > 0 or (not length and inside == 0):
            found.append((inside, mode))
        at += length
    if closed:
        length, mode = found[-1]
        found[-1:] = [(length + 1, mode)] if length < LONGEST_SEQUENCE else [(length, mode), (1, mode)]
    if opened:
        length, mode = found[0]
        found[:1] = [(length + 1, mode)] if length < LONGEST_SEQUENCE else [(1, mode), (length, mode)]
    return RemainingPiece(
        first, end, closed, opened, tuple(n for n, _ in found), tuple(mode for _, mode in found)
    )


@dataclass(frozen=True)
class Gaps:
    """The removed parts of a shard: whole `documents`, ascending, int64 [n], and spans of `cuts`, also ascending; the
    sequences and tokens of both, with their replacements; closing, opening: the bytes of the tokens
    that end and begin documents."""

    documents: Int64s
    cuts: tuple[CutDocument, ...]
    sequences: Ranges
    tokens: Ranges
    closing: bytes
    opening: bytes

    @classmethod
    def of(
        cls, shard: Shard, documents: Int64s, spans: Mapping[int, Sequence[Span]] | None = None, eod: int = 0,
        bos: int | None = None,
    ) -> Gaps:  # fmt: skip
        """`documents` must exist, ascending; spans: of other documents. A document that its spans cover completely is
        removed as a whole. Reads the index in pieces; raises DataError if it is damaged, or a span does not exist."""
        cuts, covered = list[CutDocument](), list[int]()
        for number in sorted(spans or ()):
            cut = cut_document(shard, number, (spans or {})[number], eod, bos)
            if cut is None:
                covered.append(number)
            else:
                cuts.append(cut)
        if covered:
            documents = np.union1d(documents, np.array(covered, np.int64))
        parts: list[list[Int64s]] = []
        for part in chunks(shard.documents):
            low, high = np.searchsorted(documents, (part.start, part.stop)).tolist()
            if low == high:
                continue
            inside = documents[low:high] - part.start
            sequences = shard.document_sequences(part.start, part.stop - part.start)
            edges = sequences[inside], sequences[inside + 1]
            parts.append([*edges, *(shard.sequence_edges(edge) for edge in edges)])
        empty = np.empty(0, np.int64)
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)] or [empty] * 4
        replaced = [(*cut.sequences, sum(len(piece.lengths) for piece in cut.pieces)) for cut in cuts]
        holes = [(hole.first, hole.end, hole.put) for cut in cuts for hole in cut.holes]
        closing, opening = (
            np.array(token).astype(little_endian(shard.dtype)).tobytes() for token in (eod, bos or 0)
        )
        runs, stretches = _with(columns[0], columns[1], replaced), _with(columns[2], columns[3], holes)
        return cls(documents, tuple(cuts), runs, stretches, closing, opening)

    @property
    def gone(self) -> int:
        """Number of removed tokens."""
        whole = self.tokens.total - sum(hole.end - hole.first for cut in self.cuts for hole in cut.holes)
        return whole + sum(cut.gone for cut in self.cuts)

    @property
    def added(self) -> int:
        """Number of added tokens that end and begin documents."""
        return sum(cut.added for cut in self.cuts)

    @property
    def fewer(self) -> int:
        """By how many documents the shard shrinks: a document cut into several makes it longer."""
        return self.documents.size - int(self._more.sum())

    @cached_property
    def _cut(self) -> Int64s:
        return np.array([cut.number for cut in self.cuts], np.int64)

    @cached_property
    def _more(self) -> Int64s:
        return np.array([len(cut.pieces) - 1 for cut in self.cuts], np.int64)

    def renumbered(self, first: int, count: int) -> Int64s:
        """The new numbers of the documents [first, first + count), for a cut one that of its first piece: int64
        [count], -1 for removed ones."""
        new = self._at(np.arange(first, first + count))
        low, high = np.searchsorted(self.documents, (first, first + count))
        new[self.documents[low:high] - first] = -1
        return new

    def _at(self, old: Int64s) -> Int64s:
        """The new number of the first remaining document from each of `old` [n] on."""
        more = np.append(0, np.cumsum(self._more))[np.searchsorted(self._cut, old)]
        return np.asarray(old - np.searchsorted(self.documents, old) + more)

    def cut_among(self, first: int, count: int) -> tuple[CutDocument, ...]:
        """The documents of [first, first + count) that are cut."""
        low, high = np.searchsorted(self._cut, (first, first + count)).tolist()
        return self.cuts[low:high]

    def sequence_counts(self, first: int, counts: Int64s) -> Int64s:
        """Sequences of each remaining document of [first, first + n), which had `counts` int64 [n] of them."""
        copies = (self.renumbered(first, counts.size) >= 0).astype(np.int64)
        cuts = self.cut_among(first, counts.size)
        for cut in cuts:
            copies[cut.number - first] = len(cut.pieces)
        found, at = np.repeat(counts, copies), np.cumsum(copies) - copies
        for cut in cuts:
            begin = int(at[cut.number - first])
            found[begin : begin + len(cut.pieces)] = [len(piece.lengths) for piece in cut.pieces]
        return found

    def token_holes(self, itemsize: int) -> tuple[Ranges, dict[int, bytes]]:
        """Removed ranges of the .bin, in bytes, for `without`."""
        put = {
            hole.first * itemsize: self.closing * hole.closed + self.opening * hole.opened
            for cut in self.cuts for hole in cut.holes if hole.put
        }  # fmt: skip
        return self.tokens.scaled(itemsize).merged(), put

    def length_holes(self, offset: int) -> tuple[Ranges, dict[int, bytes]]:
        """Removed ranges of the lengths in the .idx, which start at byte `offset`, for `without`."""
        return self._sequence_holes(4, offset, [[piece.lengths for piece in cut.pieces] for cut in self.cuts])

    def mode_holes(self, offset: int) -> tuple[Ranges, dict[int, bytes]]:
        """Removed ranges of the modes in the .idx, which start at byte `offset`, for `without`."""
        return self._sequence_holes(1, offset, [[piece.modes for piece in cut.pieces] for cut in self.cuts])

    def _sequence_holes(
        self, size: int, offset: int, values: Sequence[Sequence[tuple[int, ...]]]
    ) -> tuple[Ranges, dict[int, bytes]]:
        put = {
            cut.sequences[0] * size + offset: np.concatenate([np.array(some, f"<i{size}") for some in new]).tobytes()
            for cut, new in zip(self.cuts, values, strict=True)
        }  # fmt: skip
        return self.sequences.scaled(size, offset).merged(), put


def _with(firsts: Int64s, ends: Int64s, more: Sequence[tuple[int, int, int]]) -> Ranges:
    """Ranges without replacement, and `more` (first, end, size of the replacement), in order."""
    if not more:
        return Ranges(firsts, ends)
    table = np.array(more, np.int64)
    firsts, ends = np.append(firsts, table[:, 0]), np.append(ends, table[:, 1])
    added = np.append(np.zeros(len(firsts) - len(table), np.int64), table[:, 2])
    order = np.lexsort((ends, firsts))
    return Ranges(firsts[order], ends[order], added[order])


def blocks(path: Path, first: int = 0, end: int | None = None) -> Iterator[tuple[int, memoryview]]:
    """Bytes [first, end) of a file: the offset of each block, and the block, valid until the next.

    Raises DataError when the disk fails or the file ends too early.
    """
    buffer = memoryview(bytearray(BLOCK))
    try:
        with path.open("rb", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size if end is None else end
            os.posix_fadvise(file.fileno(), first, end - first, os.POSIX_FADV_SEQUENTIAL)
            while first < end:
                block = buffer[: min(BLOCK, end - first)]
                done = 0
                while done < len(block):
                    got = os.preadv(file.fileno(), [block[done:]], first + done)
                    if got == 0:
                        raise DataError(f"{path} became shorter while it was read: restore it")
                    done += got
                yield first, block
                first += len(block)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def without(
    first: int, block: memoryview, gaps: Ranges, put: Mapping[int, bytes] | None = None
) -> memoryview | bytes:
    """The remainder of a block that begins at byte `first` of its file; gaps: of the file, in bytes, merged; put: the
    replacement of a gap, by its first byte."""
    end = first + len(block)
    low = int(np.searchsorted(gaps.ends, first, side="right"))
    high = int(np.searchsorted(gaps.firsts, end))
    if low >= high:
        return block
    # The edges of the remainder: the ends of the gaps and, shifted by one, their beginnings.
    begins = np.clip(np.append(first, gaps.ends[low:high]) - first, 0, len(block)).tolist()
    stops = np.clip(np.append(gaps.firsts[low:high], end) - first, 0, len(block)).tolist()
    if len(begins) <= 2 and not put:
        parts = [block[a:b] for a, b in zip(begins, stops, strict=True) if a < b]
        return parts[0] if len(parts) == 1 else b"".join(parts)
    whole = bytes(block)  # slicing bytes is several times faster than slicing a memoryview
    left = [whole[a:b] for a, b in zip(begins, stops, strict=True)]
    if put:
        # A gap from an earlier block has its replacement there.
        there = [put.get(at, b"") if at >= first else b"" for at in gaps.firsts[low:high].tolist()]
        left = [part for pair in zip(left, [*there, b""], strict=True) for part in pair]
    return b"".join(left)
