"""Samples by position, without a training process: their tokens, the documents that they consist of, their entropy.

A sample consists of the documents that hold any of its own tokens [first_token, first_token + L). Its last label, one
token further, is the first token of the next sequence and counts for that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from megastable.base.errors import DataError
from megastable.data.manifest import Stream
from megastable.data.order import Order
from megastable.data.shard_format import little_endian

Int64s = npt.NDArray[np.int64]


class Source:
    """Samples by position, from an order and the streams of its corpora. `eod` ends a document in all of them."""

    def __init__(self, order: Order, streams: Sequence[Stream], eod: int) -> None:
        given = [stream.tokens for stream in streams]
        wanted = [ordered_corpus.tokens for ordered_corpus in order.corpora]
        if given != wanted:
            raise DataError(f"the order was made for corpora of {wanted} tokens, the streams have {given}")
        self.order, self.streams, self.eod = order, tuple(streams), eod

    def read_sample(self, position: int) -> Int64s:
        """The tokens at a position: int64 [L + 1], the inputs and, shifted by one, the labels."""
        place = self.order.locate_sample(position)
        return self.streams[place.corpus].read_tokens(place.first_token, self.order.sequence_length + 1)

    def read_raw_sample(self, position: int) -> Int64s:
        """As `read_sample`, for any ids, also those outside the vocabulary."""
        return self.read_raw_samples(np.array([position]))[0]

    def read_samples(self, positions: Int64s) -> Int64s:
        """The tokens at n positions: int64 [n, L + 1]. Raises DataError as `Stream.read_tokens` does."""
        return self._rows(positions, Stream.read_tokens)

    def read_raw_samples(self, positions: Int64s) -> Int64s:
        """As `read_samples`, for any ids."""

        def read_raw(stream: Stream, first: int, count: int) -> Int64s:
            pieces = stream.split_range(first, count)
            raw_pieces = [shard.read_raw(at, length) for shard, at, length, _ in pieces]
            return np.concatenate(raw_pieces).astype(np.int64)

        return self._rows(positions, read_raw)

    def _rows(self, positions: Int64s, read: Callable[[Stream, int, int], Int64s]) -> Int64s:
        token_count = self.order.sequence_length + 1
        tokens = np.empty((len(positions), token_count), dtype=np.int64)
        places = self.order.locate_samples(positions)
        for row, (corpus, first_token) in enumerate(zip(places.corpus, places.first_token, strict=True)):
            tokens[row] = read(self.streams[corpus], int(first_token), token_count)
        return tokens


class Document(BaseModel):
    """Document number `document` of a shard: its tokens [first_token, first_token + tokens) of that shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: str
    shard: str
    document: int
    first_token: int
    tokens: int


class DocumentPart(NamedTuple):
    """A sample's part of a document: tokens [first_token, first_token + tokens) of the shard, at `offset` in the
    sample, and `bytes` bytes from `first_byte` on in the shard's .bin."""

    document: Document
    first_token: int
    tokens: int
    offset: int
    first_byte: int
    bytes: int

    @property
    def own_span(self) -> tuple[int, int]:
        """Its tokens [first, end), counted in the document: as lists and plans of bad spans count."""
        first_token = self.first_token - self.document.first_token
        return first_token, first_token + self.tokens

    @property
    def ends(self) -> bool:
        """Whether the document ends in this sample."""
        return self.first_token + self.tokens == self.document.first_token + self.document.tokens


def documents_at(source: Source, positions: npt.ArrayLike) -> list[Document]:
    """The documents at `positions`, n integers in any order: each once, in the order of the streams.

    O(n) time plus a binary search per position, for corpora of any size. Raises DataError for an invalid position and
    for a damaged index.
    """
    return list(dict.fromkeys(part.document for _, found in _walk(source, positions) for part in found))


def documents_by_position(source: Source, positions: npt.ArrayLike) -> dict[int, list[Document]]:
    """The documents of each of `positions`, in the order of its tokens. Cost and errors as for `documents_at`."""
    found_parts = parts_by_position(source, positions)
    return {part_position: [part.document for part in parts] for part_position, parts in found_parts.items()}


def parts_by_position(source: Source, positions: npt.ArrayLike) -> dict[int, list[DocumentPart]]:
    """The document parts of each of `positions`, in the order of its tokens. Otherwise as `documents_at`."""
    parts_found = dict(_walk(source, positions))
    return {position: parts_found[position] for position in np.asarray(positions).tolist()}


def _walk(source: Source, positions: npt.ArrayLike) -> Iterator[tuple[int, list[DocumentPart]]]:
    """Every position with its parts, in stream order, so that each shard is opened once."""
    order, places = source.order, source.order.locate_samples(positions)
    given_positions = np.asarray(positions, dtype=np.int64)
    position_columns = np.column_stack([given_positions, places.corpus, places.first_token])
    stream_order = np.lexsort((places.first_token, places.corpus))
    for position, index, first_token in position_columns[stream_order].tolist():
        corpus_name, stream = order.corpora[index].name, source.streams[index]
        yield position, list(_parts(corpus_name, stream, first_token, order.sequence_length))


def _parts(corpus: str, stream: Stream, first: int, count: int) -> Iterator[DocumentPart]:
    for shard, token_at, length, offset in stream.split_range(first, count):
        end_token, document = token_at + length, shard.document_of(token_at)
        while token_at < end_token:
            begin, stop = shard.document_bounds(document)
            if begin < stop:  # shards of other programs may hold empty documents
                found_document = Document(
                    corpus=corpus, shard=shard.name, document=document, first_token=begin, tokens=stop - begin
                )
                tokens, size = min(stop, end_token) - token_at, little_endian(shard.dtype).itemsize
                yield DocumentPart(
                    found_document, token_at, tokens, offset - first, token_at * size, tokens * size
                )
                token_at, offset = token_at + tokens, offset + tokens
            document += 1


CHUNK = 1 << 20  # tokens read at a time


def token_counts(stream: Stream, vocab_size: int, limit: int | None = None) -> npt.NDArray[np.int64]:
    """Counts of each token in a stream, or in its first `limit` tokens: int64 [vocab_size]. Reads in chunks."""
    counts_by_token = np.zeros(vocab_size, dtype=np.int64)
    token_limit = min(stream.tokens, stream.tokens if limit is None else limit)
    for first_token in range(0, token_limit, CHUNK):
        tokens = stream.read_tokens(first_token, min(CHUNK, token_limit - first_token))
        counts_by_token += np.bincount(tokens, minlength=vocab_size)
    return counts_by_token


def sample_entropy(source: Source, tokens: int, vocab_size: int) -> float:
    """The unigram entropy, nats per token, of about `tokens` tokens from the beginning of a run's order, drawn from its
    corpora as blended. Ids outside the vocabulary are left out; nan if a shard cannot be read.
    """
    positions = np.arange(max(1, tokens // source.order.sequence_length))
    try:
        ids = source.read_raw_samples(positions)[:, :-1].ravel()
    except DataError:
        return float("nan")
    return unigram_entropy(np.bincount(ids[(ids >= 0) & (ids < vocab_size)], minlength=vocab_size))


def unigram_entropy(counts: npt.NDArray[np.integer]) -> float:
    """Entropy in nats per token of the distribution that `counts` [vocab_size] describe; 0.0 for no tokens.

    It is the loss of the best model without context on the counted text itself: a lower loss on that text
    proves use of the context.
    """
    seen_counts = counts[counts > 0].astype(np.float64)
    token_shares = seen_counts / seen_counts.sum()
    return float(abs(-(token_shares * np.log(token_shares)).sum()))
