"""Map positions to documents: the texts that a sample consists of.

A sample consists of the documents that hold any of its own tokens [first_token, first_token + L). Its last label, one
token further, is the first token of the next sequence and counts for that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from megastable.data.manifest import Stream
from megastable.data.shard_format import little_endian
from megastable.data.source import Source


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
        first = self.first_token - self.document.first_token
        return first, first + self.tokens

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
    return {
        position: [p.document for p in found]
        for position, found in parts_by_position(source, positions).items()
    }


def parts_by_position(source: Source, positions: npt.ArrayLike) -> dict[int, list[DocumentPart]]:
    """The document parts of each of `positions`, in the order of its tokens. Otherwise as `documents_at`."""
    found = dict(_walk(source, positions))
    return {position: found[position] for position in np.asarray(positions).tolist()}


def _walk(source: Source, positions: npt.ArrayLike) -> Iterator[tuple[int, list[DocumentPart]]]:
    """Every position with its parts, in stream order, so that each shard is opened once."""
    where, places = np.asarray(positions), source.order.locate(positions)
    along = np.lexsort((places.first_token, places.corpus))
    for position, index, first in zip(
        where[along].tolist(),
        places.corpus[along].tolist(),
        places.first_token[along].tolist(),
        strict=True,
    ):
        name = source.order.corpora[index].name
        yield position, list(_parts(name, source.streams[index], first, source.order.sequence_length))


def _parts(corpus: str, stream: Stream, first: int, count: int) -> Iterator[DocumentPart]:
    for shard, at, length, offset in stream.pieces(first, count):
        end, document = at + length, shard.document_of(at)
        while at < end:
            begin, stop = shard.document_bounds(document)
            if begin < stop:  # shards of other programs may hold empty documents
                of = Document(
                    corpus=corpus, shard=shard.name, document=document, first_token=begin, tokens=stop - begin
                )
                tokens = min(stop, end) - at
                width = little_endian(shard.dtype).itemsize
                yield DocumentPart(of, at, tokens, offset - first, at * width, tokens * width)
                at, offset = at + tokens, offset + tokens
            document += 1
