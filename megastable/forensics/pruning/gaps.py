"""What of a shard is left when some of its documents are gone: as ranges of documents, sequences and tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.data.shard_format import chunks
from megastable.data.shards import Shard
from megastable.errors import DataError

BLOCK = 1 << 20  # bytes of a file in memory at a time: few enough to stay in the cache between two hashes

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ranges:
    """Ascending ranges [first, end) that do not overlap, int64 [n] each; some may be empty."""

    firsts: Int64s
    ends: Int64s

    @property
    def total(self) -> int:
        return int((self.ends - self.firsts).sum())

    def before(self, edges: Int64s) -> Int64s:
        """How much of the ranges lies before each of `edges` [k], none of which is inside a range: int64 [k]."""
        sums = np.append(0, np.cumsum(self.ends - self.firsts))
        return sums[np.searchsorted(self.firsts, edges)]

    def inside(self, edge: int) -> bool:
        """Whether a range begins before `edge` and ends behind it."""
        number = int(np.searchsorted(self.firsts, edge)) - 1
        return number >= 0 and edge < int(self.ends[number])

    def merged(self) -> Ranges:
        """The same without empty ranges and without ranges that touch."""
        full = self.ends > self.firsts
        if not full.any():
            return Ranges(self.firsts[full], self.ends[full])
        firsts, ends = self.firsts[full], self.ends[full]
        apart = firsts[1:] != ends[:-1]
        return Ranges(firsts[np.append(True, apart)], ends[np.append(apart, True)])

    def scaled(self, size: int, offset: int = 0) -> Ranges:
        """In bytes of a file, where one takes `size` and the first lies at `offset`."""
        return Ranges(self.firsts * size + offset, self.ends * size + offset)


@dataclass(frozen=True)
class Gaps:
    """`documents` of a shard, ascending, int64 [n], and the sequences and tokens of each."""

    documents: Int64s
    sequences: Ranges
    tokens: Ranges

    @classmethod
    def of(cls, shard: Shard, documents: Int64s) -> Gaps:
        """`documents` are ascending and all there. Reads the index a piece at a time; raises DataError where it is
        damaged."""
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
        return cls(documents, Ranges(columns[0], columns[1]), Ranges(columns[2], columns[3]))

    def renumbered(self, first: int, count: int) -> Int64s:
        """The new numbers of the documents [first, first + count): int64 [count], -1 for those that are gone."""
        old = np.arange(first, first + count)
        before = np.searchsorted(self.documents, old)
        new = old - before
        low, high = np.searchsorted(self.documents, (first, first + count))
        new[self.documents[low:high] - first] = -1
        return new

    def original(self, new: int) -> int:
        """The old number of a document that is left."""
        return new + int(np.searchsorted(self.documents - np.arange(self.documents.size), new, side="right"))


def blocks(path: Path, first: int = 0, end: int | None = None) -> Iterator[tuple[int, memoryview]]:
    """Bytes [first, end) of a file: where a block begins, and the block, valid until the next.

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


def without(first: int, block: memoryview, gaps: Ranges) -> memoryview | bytes:
    """What is left of a block that begins at byte `first` of its file; gaps: of the file, in bytes, merged."""
    end = first + len(block)
    low = int(np.searchsorted(gaps.ends, first, side="right"))
    high = int(np.searchsorted(gaps.firsts, end))
    if low >= high:
        return block
    # The edges of what is left: the ends of the gaps and, shifted by one, their beginnings.
    begins = np.clip(np.append(first, gaps.ends[low:high]) - first, 0, len(block)).tolist()
    stops = np.clip(np.append(gaps.firsts[low:high], end) - first, 0, len(block)).tolist()
    if len(begins) <= 2:
        parts = [block[a:b] for a, b in zip(begins, stops, strict=True) if a < b]
        return parts[0] if len(parts) == 1 else b"".join(parts)
    whole = bytes(block)  # many pieces of it are several times faster to make than of a memoryview
    return b"".join([whole[a:b] for a, b in zip(begins, stops, strict=True)])
