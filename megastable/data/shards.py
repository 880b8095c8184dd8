"""Read Megatron's indexed dataset (`.bin` + `.idx`).

A shard (format and writer: `shard_format.py`) is one stream of tokens; token t lies at byte
t * itemsize of the `.bin`. That requires contiguous pointers, which are checked at both ends on opening, around every
requested document, and everywhere by `Shard.verify_shard`.

Both files are read with `pread`, never mapped: a failing disk or a file truncated during training then raises an error
with a message instead of a SIGBUS.
"""

from __future__ import annotations

import os
import struct
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import xxhash

from megastable.base.errors import DataError
from megastable.data.shard_format import (
    CHUNK,
    HEADER,
    DType,
    ShardInfo,
    ShardWriter,
    Tokens,
    chunk_slices,
    file_sizes,
    fill_array,
    hash_file,
    little_endian,
    raise_shorter,
    read_index_ends,
    with_suffix,
)

__all__ = ["DType", "Shard", "ShardInfo", "ShardWriter", "Tokens", "hash_file"]

COUNTED = (
    "dtype",
    "tokens",
    "documents",
    "sequences",
    "bin_bytes",
    "idx_bytes",
)  # what a manifest says of a shard
_INT32, _INT64, _TWO_INT64 = struct.Struct("<i"), struct.Struct("<q"), struct.Struct("<qq")


class _Index(NamedTuple):
    """An open `.idx` and the byte offsets of its arrays."""

    descriptor: int
    lengths: int
    pointers: int
    documents: int
    modes: int


class Shard:
    """One shard, opened in O(1) time and memory for any size.

    `name`, `dtype`, `tokens`, `documents`, `sequences` describe it; `has_modes`: each sequence has a mode (an int8,
    what Megatron calls multimodal). With `info` its sizes and counts must match the manifest; with
    `vocab_size` no token outside 0..vocab_size-1 is ever returned. Thread-safe.

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
        self.has_modes = self._ends.modes
        self._check_ends()
        if info is not None:
            self._check_info(info)
        try:
            self._descriptor = os.open(self.bin_path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{self.bin_path} cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)

    def read_tokens(self, first: int, count: int) -> Tokens:
        """Tokens [first, first + count) of the stream: int64 [count].

        Raises IndexError outside the shard, DataError for an id outside the vocabulary or a failing
        disk.
        """
        read_ids = self.read_raw(first, count).astype(np.int64)
        self._check_ids(read_ids, first)
        return read_ids

    def read_raw(self, first: int, count: int) -> npt.NDArray[np.integer]:
        """As `read_tokens`, but in the stored type, uint16 or int32 [count], for any vocabulary."""
        self._check_range(first, count)
        raw_tokens = np.empty(count, dtype=little_endian(self.dtype))
        fill_array(self.bin_path, self._descriptor, raw_tokens, first * self._itemsize)
        return raw_tokens

    def document_of(self, token: int) -> int:
        """The document of the token at offset `token`."""
        self._check_range(token, 1)
        document = bisect_right(range(self.documents), token, key=self._start) - 1
        if document < 0 or not self._start(document) <= token < self._start(document + 1):
            self._disordered(max(document, 0))
        return document

    def documents_before(self, token: int) -> int:
        """Number of documents that begin before token offset `token`; all of them for the shard's end."""
        self._check_range(token, 0)
        if token == self.tokens:
            return self.documents
        return bisect_left(range(self.documents), token, key=self._start)

    def document_bounds(self, document: int) -> tuple[int, int]:
        """Token offsets [first, end) of a document."""
        self._check_document(document)
        first_token, end_token = self._start(document), self._start(document + 1)
        if end_token < first_token:
            raise DataError(
                f"{self.idx_path}: document {document} ends before it begins: write the shard again"
            )
        return first_token, end_token

    def document_starts(self, first: int, count: int) -> Tokens:
        """Ascending token offsets in [first, first + count) at which a document begins: int64 [n]."""
        self._check_range(first, count)
        first_document, last_document = (
            bisect_left(range(self.documents), edge, key=self._start) for edge in (first, first + count)
        )
        if first_document > last_document:
            self._disordered(first_document)
        found_starts = [
            self.document_edges(first_document + part.start, part.stop - part.start)[:-1]
            for part in chunk_slices(last_document - first_document)
        ]
        unique_starts = np.unique(np.concatenate([np.empty(0, np.int64), *found_starts]))
        if unique_starts.size and not first <= unique_starts[0] <= unique_starts[-1] < first + count:
            self._disordered(first_document)
        return unique_starts

    def sequence_bounds(self, document: int) -> tuple[int, int]:
        """The sequences [first, end) of a document."""
        self._check_document(document)
        first_sequence, end_sequence = self.document_sequences(document, 1).tolist()
        return first_sequence, end_sequence

    def document_edges(self, first: int, count: int) -> Tokens:
        """Token offsets at which the documents [first, first + count) begin, then the end of the last: int64 [count +
        1].

        As `document_bounds` for each; equal edges are a document without tokens.
        """
        return self.sequence_edges(self.document_sequences(first, count))

    def document_sequences(self, first: int, count: int) -> Tokens:
        """The first sequences of the documents [first, first + count), then the end of the last: int64 [count + 1].

        Raises IndexError outside the shard, DataError if they do not ascend.
        """
        if first < 0 or count < 0 or first + count > self.documents:
            raise IndexError(
                f"documents [{first}, {first + count}) of {self.name}, which has {self.documents}"
            )
        sequence_edges = self._entries("<i8", self._index.documents + 8 * first, count + 1)
        if not 0 <= sequence_edges[0] <= self.sequences:
            self._disordered(first)
        wrong_indexes = np.flatnonzero((np.diff(sequence_edges) < 0) | (sequence_edges[1:] > self.sequences))
        if wrong_indexes.size:
            self._disordered(first + int(wrong_indexes[0]))
        return sequence_edges

    def sequence_edges(self, sequences: Tokens) -> Tokens:
        """Token offsets at which ascending `sequences` [n] begin; the shard's end for `sequences` itself: int64 [n].

        Raises DataError for one that differs from the end of the sequence before it.
        """
        byte_edges = np.empty(sequences.size, dtype=np.int64)
        byte_edges[sequences == self.sequences] = self.bin_bytes
        edges_inside = int(np.searchsorted(sequences, self.sequences))
        edges_done = 0
        # The index may be far larger than the request: read a window at a time.
        while edges_done < edges_inside:
            # Also the sequence before the first, which ends where the first begins, unless the first is the shard's
            # first.
            window_begin = max(int(sequences[edges_done]) - 1, 0)
            window_end = int(np.searchsorted(sequences[:edges_inside], window_begin + CHUNK))
            window = slice(window_begin, int(sequences[window_end - 1]) + 1)
            pointers, lengths = self._pointers(window), self.sequence_lengths(window).astype(np.int64)
            ends = np.append(0, pointers[:-1] + lengths[:-1] * self._itemsize)
            at = sequences[edges_done:window_end] - window_begin
            found = pointers[at]
            is_wrong = (
                (found != ends[at]) | (found < 0) | (found > self.bin_bytes) | (found % self._itemsize != 0)
            )
            if is_wrong.any():
                self._broken_pointer(int(sequences[edges_done + int(np.argmax(is_wrong))]))
            byte_edges[edges_done:window_end] = found
            edges_done = window_end
        if np.any(np.diff(byte_edges) < 0):
            self._broken_pointer(int(sequences[int(np.argmax(np.diff(byte_edges) < 0)) + 1]))
        return byte_edges // self._itemsize

    def sequence_lengths(self, sequences: slice) -> npt.NDArray[np.int32]:
        """Tokens of each sequence of a slice [a, b): int32 [b - a]. Raises DataError for a negative one."""
        byte_offset = self._index.lengths + 4 * sequences.start
        lengths = self._entries("<i4", byte_offset, sequences.stop - sequences.start)
        if lengths.size and int(lengths.min()) < 0:
            self._broken_pointer(sequences.start + int(np.argmin(lengths)))
        return lengths

    def sequence_modes(self, sequences: slice) -> npt.NDArray[np.int8] | None:
        """The mode of each sequence of a slice [a, b): int8 [b - a]; None for a shard without modes."""
        if not self.has_modes:
            return None
        return self._entries("i1", self._index.modes + sequences.start, sequences.stop - sequences.start)

    def verify_shard(self, seen: Callable[[Shard, int, Tokens], None] | None = None) -> ShardInfo:
        """Read both files in full: index order, contiguous pointers, ids, and the hashes if `info` has them.

        `seen` gets every token once, in order: this shard, the offset of a part, and the part, int64 [n].
        Raises DataError for the first problem. Returns the description with fresh hashes.
        """
        self.verify_index()
        bin_hash = xxhash.xxh3_128()
        for token_slice in chunk_slices(self.tokens):
            tokens = self.read_tokens(token_slice.start, token_slice.stop - token_slice.start)
            bin_hash.update(tokens.astype(little_endian(self.dtype)).tobytes())
            if seen is not None:
                seen(self, token_slice.start, tokens)
        counts = {key: getattr(self, key) for key in COUNTED}
        fresh_info = ShardInfo(
            name=self.name, **counts, bin_xxh3=bin_hash.hexdigest(), idx_xxh3=hash_file(self.idx_path)
        )
        for key, path in (("bin_xxh3", self.bin_path), ("idx_xxh3", self.idx_path)):
            if self.info is not None and getattr(fresh_info, key) != getattr(self.info, key):
                raise DataError(
                    f"{path} is not the file that the manifest describes ({key} differs): restore it"
                )
        return fresh_info

    def verify_index(self) -> None:
        """Read the `.idx` in full: the document index ascends, every pointer is the end of the sequence before it.

        Raises DataError for the first wrong entry.
        """
        pointer = 0
        for part in chunk_slices(self.sequences):
            lengths = self.sequence_lengths(part).astype(np.int64)
            sequence_ends = pointer + np.cumsum(lengths * self._itemsize)
            expected_pointers = np.concatenate(([pointer], sequence_ends[:-1]))
            wrong_indexes = np.flatnonzero(
                (self._pointers(part) != expected_pointers) | (sequence_ends > self.bin_bytes)
            )
            if wrong_indexes.size:
                self._broken_pointer(part.start + int(wrong_indexes[0]))
            pointer = int(sequence_ends[-1])
        if pointer != self.bin_bytes:  # the ends have changed since opening
            self._broken_pointer(self.sequences - 1)
        last_index = 0
        for part in chunk_slices(self.documents):
            indices = self.document_sequences(part.start, part.stop - part.start)
            if int(indices[0]) != last_index:
                self._disordered(part.start)
            last_index = int(indices[-1])
        if last_index != self.sequences:
            self._disordered(self.documents)

    @cached_property
    def _index(self) -> _Index:
        # Opened on the first request for a document: training on the token stream never needs it.
        try:
            descriptor = os.open(self.idx_path, os.O_RDONLY)
            weakref.finalize(self, os.close, descriptor)
            size = os.fstat(descriptor).st_size
        except OSError as error:
            raise DataError(f"{self.idx_path} cannot be read: {error.strerror}") from error
        if size != self.idx_bytes:
            raise DataError(f"{self.idx_path} changed its size while it was in use: restore it, then resume")
        pointers_at = HEADER.size + 4 * self.sequences
        documents = pointers_at + 8 * self.sequences
        return _Index(descriptor, HEADER.size, pointers_at, documents, documents + 8 * (self.documents + 1))

    def _entries(self, kind: str, at: int, count: int) -> npt.NDArray[Any]:
        entries = np.empty(count, dtype=kind)
        fill_array(self.idx_path, self._index.descriptor, entries, at)
        return entries

    def _numbers(self, kind: struct.Struct, at: int) -> tuple[int, ...]:
        """A few numbers of the index, four times faster than `_entries`."""
        try:
            entry_bytes = os.pread(self._index.descriptor, kind.size, at)
        except OSError as error:
            raise DataError(f"{self.idx_path} cannot be read: {error.strerror}") from error
        if len(entry_bytes) < kind.size:
            raise_shorter(self.idx_path)
        return kind.unpack(entry_bytes)

    def _pointers(self, sequences: slice) -> Tokens:
        byte_offset = self._index.pointers + 8 * sequences.start
        return self._entries("<i8", byte_offset, sequences.stop - sequences.start)

    def _start(self, document: int) -> int:
        """Token offset at which a document begins; the shard's end for document = `documents`."""
        index = self._index
        (sequence,) = self._numbers(_INT64, index.documents + 8 * document)
        if sequence == self.sequences:
            return self.tokens
        if not 0 <= sequence < self.sequences:
            self._disordered(document)
        expected_pointer = 0
        if sequence:
            previous_pointer, pointer = self._numbers(_TWO_INT64, index.pointers + 8 * (sequence - 1))
            (length,) = self._numbers(_INT32, index.lengths + 4 * (sequence - 1))
            expected_pointer = previous_pointer + length * self._itemsize
        else:
            (pointer,) = self._numbers(_INT64, index.pointers)
        if pointer != expected_pointer or not 0 <= pointer <= self.bin_bytes or pointer % self._itemsize:
            self._broken_pointer(sequence)
        return pointer // self._itemsize

    def _check_ends(self) -> None:
        index_ends = self._ends
        if self.bin_bytes % self._itemsize:
            raise DataError(
                f"{self.bin_path} has {self.bin_bytes} bytes, not a multiple of {self._itemsize} "
                f"({self.dtype}): it is truncated, write the shard again"
            )
        if (index_ends.first_document, index_ends.last_document) != (0, self.sequences):
            raise DataError(
                f"{self.idx_path}: its document index runs from {index_ends.first_document} to "
                f"{index_ends.last_document} instead of 0 to {self.sequences}: shards were "
                "merged without merging it, merge them again"
            )
        if index_ends.first_pointer != 0 or index_ends.last_pointer < 0:
            self._broken_pointer(0 if index_ends.first_pointer else self.sequences - 1)
        expected_bytes = index_ends.last_pointer + index_ends.last_length * self._itemsize
        if expected_bytes != self.bin_bytes:
            raise DataError(
                f"{self.idx_path} describes a .bin of {expected_bytes} bytes, but {self.bin_path} has "
                f"{self.bin_bytes}: one is truncated, is of another shard, or its offsets overflowed; "
                "write the shard again"
            )

    def _check_info(self, info: ShardInfo) -> None:
        for key in COUNTED:
            actual_value, manifest_value = getattr(self, key), getattr(info, key)
            if actual_value != manifest_value:
                raise DataError(
                    f"{self.idx_path.with_suffix('')}: {key} is {actual_value}, the manifest says {manifest_value}: "
                    "the shard changed after its manifest was written, restore it or prepare the corpus again"
                )

    def _check_document(self, document: int) -> None:
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document} of {self.name}, which has {self.documents}")

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
                f"0..{self.vocab_size - 1}: the shard is damaged or was made with another "
                "tokenizer, restore it or write it again"
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
