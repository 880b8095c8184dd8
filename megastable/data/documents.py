"""From positions to documents: which texts a sample was made of.

A sample is made of the documents that hold any of its own tokens [first_token, first_token + L). The one further
token that it reads, its last label, is the first of the next sequence and speaks for that one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from megastable.data.manifest import Stream
from megastable.data.source import Source


class Document(BaseModel):
    """Document number `document` of a shard: its tokens [first_token, first_token + tokens) of that shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: str
    shard: str
    document: int
    first_token: int
    tokens: int


def documents_at(source: Source, positions: npt.ArrayLike) -> list[Document]:
    """The documents at `positions`, n integers in any order: each once, in the order of the streams.

    O(n) in time but for a binary search per position, however large the corpora. Raises DataError for a position
    that cannot be and for a damaged index.
    """
    return list(dict.fromkeys(document for _, found in _walk(source, positions) for document in found))


def documents_by_position(source: Source, positions: npt.ArrayLike) -> dict[int, list[Document]]:
    """For each of `positions` its documents, in the order of its tokens. Cost and errors as `documents_at`."""
    found = dict(_walk(source, positions))
    return {position: found[position] for position in np.asarray(positions).tolist()}


def _walk(source: Source, positions: npt.ArrayLike) -> Iterator[tuple[int, list[Document]]]:
    """Every position with its documents, along the streams: so each shard is opened once."""
    where, places = np.asarray(positions), source.order.locate(positions)
    along = np.lexsort((places.first_token, places.corpus))
    for position, index, first in zip(
        where[along].tolist(),
        places.corpus[along].tolist(),
        places.first_token[along].tolist(),
        strict=True,
    ):
        name = source.order.corpora[index].name
        yield position, list(_documents(name, source.streams[index], first, source.order.sequence_length))


def _documents(corpus: str, stream: Stream, first: int, count: int) -> Iterator[Document]:
    for shard, at, length, _ in stream.pieces(first, count):
        end, document = at + length, shard.document_of(at)
        while at < end:
            begin, at = shard.document_bounds(document)
            if begin < at:  # shards of other programs may hold empty documents
                yield Document(
                    corpus=corpus, shard=shard.name, document=document, first_token=begin, tokens=at - begin
                )
            document += 1
