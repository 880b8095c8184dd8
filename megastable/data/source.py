"""Samples by position: read a run's data without a training process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.data.manifest import Stream
from megastable.data.order import Order

Int64s = npt.NDArray[np.int64]


class Source:
    """Samples by position, from an order and the streams of its corpora. `eod` ends a document in all of them."""

    def __init__(self, order: Order, streams: Sequence[Stream], eod: int) -> None:
        given = [stream.tokens for stream in streams]
        wanted = [corpus.tokens for corpus in order.corpora]
        if given != wanted:
            raise DataError(f"the order was made for corpora of {wanted} tokens, the streams have {given}")
        self.order, self.streams, self.eod = order, tuple(streams), eod

    def sample(self, position: int) -> Int64s:
        """The tokens at a position: int64 [L + 1], the inputs and, shifted by one, the labels."""
        place = self.order.locate_one(position)
        return self.streams[place.corpus].read(place.first_token, self.order.sequence_length + 1)

    def raw_sample(self, position: int) -> Int64s:
        """As `sample`, for any ids, also those outside the vocabulary."""
        return self.raw_samples(np.array([position]))[0]

    def samples(self, positions: Int64s) -> Int64s:
        """The tokens at n positions: int64 [n, L + 1]. Raises DataError as `Stream.read` does."""
        return self._rows(positions, Stream.read)

    def raw_samples(self, positions: Int64s) -> Int64s:
        """As `samples`, for any ids."""
        return self._rows(positions, _raw)

    def _rows(self, positions: Int64s, read: Callable[[Stream, int, int], Int64s]) -> Int64s:
        count = self.order.sequence_length + 1
        tokens = np.empty((len(positions), count), dtype=np.int64)
        places = self.order.locate(positions)
        for row, corpus, first in zip(
            tokens, places.corpus.tolist(), places.first_token.tolist(), strict=True
        ):
            row[:] = read(self.streams[corpus], first, count)
        return tokens


def _raw(stream: Stream, first: int, count: int) -> Int64s:
    pieces = stream.pieces(first, count)
    return np.concatenate([shard.raw(at, length) for shard, at, length, _ in pieces]).astype(np.int64)
