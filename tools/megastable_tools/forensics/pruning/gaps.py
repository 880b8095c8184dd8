"""Compute the remainder of a shard without some documents, and without spans of others: documents, sequences, tokens.

A document with a span cut from its middle becomes several: the piece before the span gets an end-of-document token,
whether or not the document itself ends with one, and the piece after it is a document of its own. It
begins with the begin-of-document token if the document itself does. So no sample contains neighbours joined by a cut.
These two tokens of a document are never cut out themselves: they frame its remainder, and go only with the whole
document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.data.shard_format import LONGEST_SEQUENCE, chunk_slices
from megastable.data.shards import Shard
from megastable_tools.forensics.scanning.units import split_into_units

RUN = 1 << 20  # tokens of the original in memory at a time; a longer document is whole

Int64s = npt.NDArray[np.int64]
Span = tuple[int, int]  # tokens [first, end) of a document


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


@dataclass(frozen=True)
class CutDocument:
    """A partly removed document. pieces: at least one, ascending; gone: removed tokens, never including those that end
    and begin the document."""

    number: int
    tokens: int
    pieces: tuple[RemainingPiece, ...]
    gone: int

    @property
    def spans(self) -> list[Span]:
        """Its removed tokens, as [first, end) of the document."""
        edges = [0, *(edge for piece in self.pieces for edge in (piece.first, piece.end)), self.tokens]
        return [
            (range_first, range_end)
            for range_first, range_end in zip(edges[::2], edges[1::2], strict=True)
            if range_first < range_end
        ]

    @property
    def left(self) -> int:
        """Number of tokens of its pieces."""
        return sum(sum(piece.lengths) for piece in self.pieces)

    @property
    def added(self) -> int:
        """Number of added end and begin tokens: its own still end its last piece and begin its first."""
        return self.left + self.gone - self.tokens


def cut_document(
    shard: Shard, number: int, spans: Iterable[Span], eod: int, bos: int | None = None
) -> CutDocument | None:
    """The document without `spans`, which may overlap; None if nothing remains but its end and begin tokens.

    Raises DataError for a span that is empty or ends after the document.
    """
    begin, end = shard.document_bounds(number)
    count = end - begin
    closes = count > 0 and int(shard.read_raw(end - 1, 1)[0]) == eod
    text = count - closes  # end of its tokens without the final end token
    opens = text > 0 and bos is not None and int(shard.read_raw(begin, 1)[0]) == bos
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
    stored = shard.sequence_modes(slice(low, high))
    modes = [0] * len(lengths) if stored is None else stored.tolist()
    pieces = [_piece(first, stop, stop < count, opens and first > 0, lengths, modes) for first, stop in kept]
    return CutDocument(number, count, tuple(pieces), gone)


def _piece(
    first: int, end: int, closed: bool, opened: bool, lengths: Sequence[int], modes: Sequence[int]
) -> RemainingPiece:
    """Tokens [first, end) of a document with sequences of `lengths`; an empty sequence goes to the piece that it
    touches."""
    found, tokens_before = list[tuple[int, int]](), 0
    for length, mode in zip(lengths, modes, strict=True):
        tokens_inside = min(tokens_before + length, end) - max(tokens_before, first)
        if tokens_inside > 0 or (not length and tokens_inside == 0):
            found.append((tokens_inside, mode))
        tokens_before += length
    if closed:
        length, mode = found[-1]
        found[-1:] = [(length + 1, mode)] if length < LONGEST_SEQUENCE else [(length, mode), (1, mode)]
    if opened:
        length, mode = found[0]
        found[:1] = [(length + 1, mode)] if length < LONGEST_SEQUENCE else [(1, mode), (length, mode)]
    found_lengths, found_modes = zip(*found, strict=True)
    return RemainingPiece(first, end, closed, opened, found_lengths, found_modes)


class RemainingRun(NamedTuple):
    """Documents that remain: their tokens [n], as stored; the lengths and modes of their sequences, int32 and int8 [s];
    and how many sequences each document has, int64 [d]."""

    tokens: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.int32]
    modes: npt.NDArray[np.int8]
    counts: Int64s


@dataclass(frozen=True)
class Gaps:
    """The removed parts of a shard: whole `documents`, ascending, int64 [n], with their `tokens` [n], and spans of
    `cuts`, also ascending; eod, bos: the tokens that end and begin the pieces of these."""

    documents: Int64s
    tokens: Int64s
    cuts: tuple[CutDocument, ...]
    eod: int
    bos: int | None

    @classmethod
    def of_shard(
        cls, shard: Shard, documents: Int64s, spans: Mapping[int, Sequence[Span]] | None = None, eod: int = 0,
        bos: int | None = None,
    ) -> Gaps:  # fmt: skip
        """`documents` must exist, ascending; spans: of other documents. A document that its spans cover completely is
        removed as a whole. Reads the index in pieces; raises DataError if it is damaged, or a span does not exist."""
        document_cuts, covered_documents = list[CutDocument](), list[int]()
        for document_number in sorted(spans or ()):
            document_cut = cut_document(shard, document_number, (spans or {})[document_number], eod, bos)
            if document_cut is None:
                covered_documents.append(document_number)
            else:
                document_cuts.append(document_cut)
        if covered_documents:
            documents = np.union1d(documents, np.array(covered_documents, np.int64))
        token_parts = [np.empty(0, np.int64)]
        for part in chunk_slices(shard.documents):
            low_index, high_index = np.searchsorted(documents, (part.start, part.stop)).tolist()
            if low_index < high_index:
                document_lengths = np.diff(shard.document_edges(part.start, part.stop - part.start))
                token_parts.append(document_lengths[documents[low_index:high_index] - part.start])
        return cls(documents, np.concatenate(token_parts), tuple(document_cuts), eod, bos)

    @property
    def gone(self) -> int:
        """Number of removed tokens."""
        return int(self.tokens.sum()) + sum(document_cut.gone for document_cut in self.cuts)

    @property
    def added(self) -> int:
        """Number of added tokens that end and begin documents."""
        return sum(document_cut.added for document_cut in self.cuts)

    @cached_property
    def _cut(self) -> Int64s:
        return np.array([document_cut.number for document_cut in self.cuts], np.int64)

    @cached_property
    def _more(self) -> Int64s:
        return np.array([len(document_cut.pieces) - 1 for document_cut in self.cuts], np.int64)

    def tokens_lost_before(self, document: int) -> int:
        """How many tokens nearer to the beginning a document lies without what is removed before it."""
        whole_tokens = self.tokens[: np.searchsorted(self.documents, document)].sum()
        earlier_cuts = self.cuts[: np.searchsorted(self._cut, document)]
        return int(whole_tokens) + sum(earlier_cut.tokens - earlier_cut.left for earlier_cut in earlier_cuts)

    def renumber_documents(self, first: int, count: int) -> Int64s:
        """The new numbers of the documents [first, first + count), for a cut one that of its first piece: int64
        [count], -1 for removed ones."""
        old_numbers = np.arange(first, first + count)
        pieces_before = np.append(0, np.cumsum(self._more))[np.searchsorted(self._cut, old_numbers)]
        new_numbers = np.asarray(old_numbers - np.searchsorted(self.documents, old_numbers) + pieces_before)
        low_index, high_index = np.searchsorted(self.documents, (first, first + count))
        new_numbers[self.documents[low_index:high_index] - first] = -1
        return new_numbers

    def cut_among(self, first: int, count: int) -> tuple[CutDocument, ...]:
        """The documents of [first, first + count) that are cut."""
        low_index, high_index = np.searchsorted(self._cut, (first, first + count)).tolist()
        return self.cuts[low_index:high_index]


def remaining_runs(shard: Shard, gaps: Gaps) -> Iterator[tuple[npt.NDArray[np.integer], list[RemainingRun]]]:
    """What is left of a shard, in order: for every run of its documents the tokens as they were, and the remainder."""
    for unit in split_into_units([shard], RUN):
        first, count = unit.first_document, unit.documents
        edges, sequences = shard.document_edges(first, count), shard.document_sequences(first, count)
        tokens = shard.read_raw(unit.first_token, unit.tokens)
        sequence_slice = slice(int(sequences[0]), int(sequences[-1]))
        lengths, modes = shard.sequence_lengths(sequence_slice), shard.sequence_modes(sequence_slice)
        modes = np.zeros(len(lengths), np.int8) if modes is None else modes
        whole_run = RemainingRun(tokens, lengths, modes, np.diff(sequences))
        is_kept = gaps.renumber_documents(first, count) >= 0
        edges, sequences, done, found = edges - edges[0], sequences - sequences[0], 0, list[RemainingRun]()
        for document_cut in (*gaps.cut_among(first, count), None):
            document_end = count if document_cut is None else document_cut.number - first
            found.append(_without(whole_run, slice(done, document_end), edges, sequences, is_kept))
            if document_cut is not None:
                own_tokens = tokens[edges[document_end] : edges[document_end + 1]]
                found += [_run_of_piece(piece, own_tokens, gaps) for piece in document_cut.pieces]
            done = document_end + 1
        yield tokens, found


def _without(
    whole: RemainingRun, documents: slice, edges: Int64s, sequences: Int64s, kept: npt.NDArray[np.bool_]
) -> RemainingRun:
    """Those of some `documents` of a run that are `kept`, bool [d]; edges, sequences: where each begins in it, int64
    [d + 1]."""
    kept_some, begin, end = kept[documents], documents.start, documents.stop
    tokens = whole.tokens[edges[begin] : edges[end]]
    parts = slice(sequences[begin], sequences[end])
    run = RemainingRun(tokens, whole.lengths[parts], whole.modes[parts], whole.counts[documents])
    if kept_some.all():
        return run
    of_token = np.repeat(kept_some, np.diff(edges[begin : end + 1]))
    of_part = np.repeat(kept_some, run.counts)
    return RemainingRun(run.tokens[of_token], run.lengths[of_part], run.modes[of_part], run.counts[kept_some])


def _run_of_piece(piece: RemainingPiece, tokens: npt.NDArray[np.integer], gaps: Gaps) -> RemainingRun:
    """A piece of a document with these tokens."""
    opening_ids = [gaps.bos] if piece.opened and gaps.bos is not None else []
    closing_ids = [gaps.eod] if piece.closed else []
    framed_parts = (opening_ids, tokens[piece.first : piece.end], closing_ids)
    framed_tokens = np.concatenate([np.array(framed_part, tokens.dtype) for framed_part in framed_parts])
    lengths, modes = np.array(piece.lengths, np.int32), np.array(piece.modes, np.int8)
    return RemainingRun(framed_tokens, lengths, modes, np.array([len(piece.lengths)]))
