"""Megatron's indexed dataset (`.bin` + `.idx`), read.

A shard (its bytes: `shard_format.py`, its writer: `shard_writer.py`) is one stream of tokens; token t lies at
byte t * itemsize of the `.bin`. That holds when the pointers are contiguous, which is checked at both ends on
opening, around every document that is asked for, and everywhere by `Shard.verify`.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left, bisect_right
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import xxhash

from megastable.data.shard_format import (
    HEADER,
    DType,
    ShardInfo,
    Tokens,
    chunks,
    file_sizes,
    little_endian,
    read_index_ends,
    with_suffix,
)
from megastable.data.shard_writer import ShardWriter
from megastable.errors import DataError

__all__ = ["DType", "Shard", "ShardInfo", "ShardWriter", "Tokens"]


class _Index(NamedTuple):
    """Views into a mapped `.idx`. None of them is aligned, so `np.searchsorted` would copy them whole."""

    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]


class Shard:
    """One shard, opened in O(1) time and memory, whatever its size.

    `name`, `dtype`, `tokens`, `documents`, `sequences` describe it. With `info` its sizes and counts must be
    those of the manifest; with `vocab_size` no token outside of 0..vocab_size-1 is ever returned. Tokens are
    read with `pread` instead of a mapping: a disk that fails or a file cut off under a running training is
    then an error with a message, not a SIGBUS. Safe to use from several threads.

    Raises DataError when a file is missing, foreign or truncated, or when the two files disagree.
    """

    def __init__(self, prefix: Path, info: ShardInfo | None = None, vocab_size: int | None = None) -> None:
        self.bin_path, self.idx_path = with_suffix(prefix, ".bin"), with_suffix(prefix, ".idx")
        self.name = prefix.name
        self.info = info
        self.vocab_size = vocab_size
        self.bin_bytes, self.idx_bytes = file_sizes(prefix)
        self._ends = read_index_ends(self.idx_path)
        self.dtype, self.sequences, self.documents = self._ends[:3]
        self._itemsize = little_endian(self.dtype).itemsize
        self.tokens = self.bin_bytes // self._itemsize
        self._check_ends()
        if info is not None:
            self._check_info(info)
        try:
            self._descriptor = os.open(self.bin_path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{self.bin_path} cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, first: int, count: int) -> Tokens:
        """Tokens [first, first + count) of the stream: int64 [count].

        Raises IndexError outside of the shard, DataError for an id outside of the vocabulary or a failing
        disk.
        """
        self._check_range(first, count)
        raw = np.empty(count, dtype=little_endian(self.dtype))
        view, done = raw.data.cast("B") if count else memoryview(b""), 0
        while done < len(view):
            try:
                got = os.preadv(self._descriptor, [view[done:]], first * self._itemsize + done)
            except OSError as error:
                raise DataError(
                    f"{self.bin_path} cannot be read at token {first}: {error.strerror}"
                ) from error
            if got == 0:
                raise DataError(
                    f"{self.bin_path} became shorter while it was in use: restore it, then resume"
                )
            done += got
        tokens = raw.astype(np.int64)
        self._check_ids(tokens, first)
        return tokens

    def document_of(self, token: int) -> int:
        """The document that token offset `token` belongs to."""
        self._check_range(token, 1)
        return bisect_right(range(self.documents), token, key=self._start) - 1

    def documents_before(self, token: int) -> int:
        """How many documents begin before token offset `token`; all of them for the shard's end."""
        self._check_range(token, 0)
        if token == self.tokens:
            return self.documents
        return bisect_left(range(self.documents), token, key=self._start)

    def document_bounds(self, document: int) -> tuple[int, int]:
        """Token offsets [first, end) of a document."""
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document} of {self.name}, which has {self.documents}")
        first, end = self._start(document), self._start(document + 1)
        if end < first:
            raise DataError(
                f"{self.idx_path}: document {document} ends before it begins: write the shard again"
            )
        return first, end

    def document_starts(self, first: int, count: int) -> Tokens:
        """Ascending token offsets in [first, first + count) at which a document begins: int64 [n]."""
        self._check_range(first, count)
        low, high = (
            bisect_left(range(self.documents), edge, key=self._start) for edge in (first, first + count)
        )
        sequences = self._index.documents[low:high].astype(np.int64)
        if np.any((sequences < 0) | (sequences >= self.sequences)):
            self._disordered(low)
        starts = self._index.pointers[sequences]
        before = sequences[sequences > 0] - 1
        ends = self._index.pointers[before] + self._index.lengths[before].astype(np.int64) * self._itemsize
        if np.any(starts[sequences > 0] != ends) or np.any(np.diff(starts) < 0):
            self._disordered(low)
        return np.unique(starts // self._itemsize)

    def verify(self) -> ShardInfo:
        """Read both files whole: index order, contiguous pointers, ids, and the hashes when `info` has them.

        Raises DataError for the first thing that is wrong. Returns the description with fresh hashes.
        """
        pointer = 0
        for part in chunks(self.sequences):
            lengths = self._index.lengths[part].astype(np.int64)
            ends = pointer + np.cumsum(lengths * self._itemsize)
            expected = np.concatenate(([pointer], ends[:-1]))
            wrong = np.flatnonzero((lengths < 0) | (self._index.pointers[part] != expected))
            if wrong.size:
                self._broken_pointer(part.start + int(wrong[0]))
            pointer = int(ends[-1])
        last = 0
        for part in chunks(self.documents + 1):
            indices = np.concatenate(([last], self._index.documents[part]))
            wrong = np.flatnonzero((np.diff(indices) < 0) | (indices[1:] > self.sequences))
            if wrong.size:
                self._disordered(part.start + int(wrong[0]))
            last = int(indices[-1])
        bin_hash = xxhash.xxh3_128()
        for part in chunks(self.tokens):
            tokens = self.read(part.start, part.stop - part.start)
            bin_hash.update(tokens.astype(little_endian(self.dtype)).tobytes())
        found = ShardInfo(
            name=self.name,
            dtype=self.dtype,
            tokens=self.tokens,
            documents=self.documents,
            sequences=self.sequences,
            bin_bytes=self.bin_bytes,
            idx_bytes=self.idx_bytes,
            bin_xxh3=bin_hash.hexdigest(),
            idx_xxh3=_hash_file(self.idx_path),
        )
        if self.info is not None:
            for key, path in (("bin_xxh3", self.bin_path), ("idx_xxh3", self.idx_path)):
                if getattr(found, key) != getattr(self.info, key):
                    raise DataError(
                        f"{path} is not the file that the manifest describes ({key} differs): restore it"
                    )
        return found

    @cached_property
    def _index(self) -> _Index:
        # Mapped only when a document is asked for: training on the token stream never needs it.
        try:
            raw = np.memmap(self.idx_path, dtype=np.uint8, mode="r").view(np.ndarray)
        except OSError as error:
            raise DataError(f"{self.idx_path} cannot be read: {error.strerror}") from error
        if raw.size != self.idx_bytes:
            raise DataError(f"{self.idx_path} changed its size while it was in use: restore it, then resume")
        lengths_at = HEADER.size
        pointers_at = lengths_at + 4 * self.sequences
        documents_at = pointers_at + 8 * self.sequences
        return _Index(
            raw[lengths_at:pointers_at].view("<i4"),
            raw[pointers_at:documents_at].view("<i8"),
            raw[documents_at : documents_at + 8 * (self.documents + 1)].view("<i8"),
        )

    def _start(self, document: int) -> int:
        """Token offset at which a document begins; the shard's end for document = `documents`."""
        sequence = int(self._index.documents[document])
        if sequence == self.sequences:
            return self.tokens
        if not 0 <= sequence < self.sequences:
            self._disordered(document)
        pointer, expected = int(self._index.pointers[sequence]), 0
        if sequence:
            expected = (
                int(self._index.pointers[sequence - 1])
                + int(self._index.lengths[sequence - 1]) * self._itemsize
            )
        if pointer != expected or not 0 <= pointer <= self.bin_bytes:
            self._broken_pointer(sequence)
        return pointer // self._itemsize

    def _check_ends(self) -> None:
        ends = self._ends
        if self.bin_bytes % self._itemsize:
            raise DataError(
                f"{self.bin_path} has {self.bin_bytes} bytes, not a multiple of {self._itemsize} "
                f"({self.dtype}): it is truncated, write the shard again"
            )
        if (ends.first_document, ends.last_document) != (0, self.sequences):
            raise DataError(
                f"{self.idx_path}: its document index runs from {ends.first_document} to "
                f"{ends.last_document} instead of 0 to {self.sequences}: shards were "
                "merged without merging it, merge them again"
            )
        if ends.first_pointer != 0 or ends.last_pointer < 0:
            self._broken_pointer(0 if ends.first_pointer else self.sequences - 1)
        expected = ends.last_pointer + ends.last_length * self._itemsize
        if expected != self.bin_bytes:
            raise DataError(
                f"{self.idx_path} describes a .bin of {expected} bytes, but {self.bin_path} has "
                f"{self.bin_bytes}: one is truncated, is of another shard, or its offsets overflowed; "
                "write the shard again"
            )

    def _check_info(self, info: ShardInfo) -> None:
        for key in ("dtype", "tokens", "documents", "sequences", "bin_bytes", "idx_bytes"):
            here, there = getattr(self, key), getattr(info, key)
            if here != there:
                raise DataError(
                    f"{self.idx_path.with_suffix('')}: {key} is {here}, the manifest says {there}: "
                    "the shard changed after its manifest was written, restore it or prepare the corpus again"
                )

    def _check_range(self, first: int, count: int) -> None:
        if first < 0 or count < 0 or first + count > self.tokens:
            raise IndexError(f"tokens [{first}, {first + count}) of {self.name}, which has {self.tokens}")

    def _check_ids(self, tokens: Tokens, first: int) -> None:
        if self.vocab_size is None or tokens.size == 0:
            return
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            at = int(np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[0])
            raise DataError(
                f"{self.bin_path}: token {first + at} has the id {tokens[at]}, outside of the vocabulary "
                f"0..{self.vocab_size - 1}: the shard is damaged or was made with another tokenizer"
            )

    def _broken_pointer(self, sequence: int) -> NoReturn:
        raise DataError(
            f"{self.idx_path}: the pointer of sequence {sequence} is not the end of the sequence before it "
            "(offsets overflowed, or sequences are not stored one after another): write the shard again"
        )

    def _disordered(self, document: int) -> NoReturn:
        raise DataError(
            f"{self.idx_path}: the document index is not ascending near document {document}: "
            "write the shard again"
        )


def _hash_file(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
