"""Write Megatron's indexed dataset (`.bin` + `.idx`) atomically, hashing it on the way."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn, Self

import numpy as np
import numpy.typing as npt
import xxhash

from megastable.base.durable import sync_directory
from megastable.base.errors import DataError
from megastable.data.shard_format import (
    CODES,
    HEADER,
    LONGEST_SEQUENCE,
    MAGIC,
    VERSION,
    DType,
    ShardInfo,
    chunks,
    dtype_for,
    little_endian,
    with_suffix,
)


class HashedFile:
    """A file that is hashed (xxh3-128) while it is written. path: None to hash only."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.bytes = 0
        self._file: BinaryIO | None = None if path is None else path.open("wb", buffering=1 << 20)
        self._hash = xxhash.xxh3_128()

    def write(self, data: bytes | memoryview) -> None:
        if self._file is not None:
            self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def finish(self) -> str:
        """Flush it to disk. Returns the hash."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._hash.hexdigest()

    def discard(self) -> None:
        if self._file is None or self.path is None:
            return
        self.path.unlink(missing_ok=True)
        with suppress(OSError):  # on a full disk the buffered rest fails, but the file is gone already
            self._file.close()


class ShardWriter:
    """Writes PREFIX.bin and PREFIX.idx document by document; a context manager.

    Memory is 4 bytes per sequence, plus 4 per document if any has several. modes: every sequence has one (an int8;
    what Megatron calls multimodal). Both files have a `.tmp` ending until they are complete and on disk; the `.idx`
    appears last, so that an `.idx` implies a complete `.bin`. A shard of the same name is replaced.
    """

    def __init__(
        self,
        prefix: Path,
        vocab_size: int,
        modes: bool = False,
        dtype: DType | None = None,
        hash_only: bool = False,
    ) -> None:
        """dtype: if it is not the one that `vocab_size` asks for. hash_only: write no file."""
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.dtype = dtype or dtype_for(vocab_size)
        self._hash_only = hash_only
        self.tokens = 0
        self.documents = 0  # written so far
        self._lengths = array("i")
        self._counts: array[int] | None = None  # sequences per document, None while each has one
        self._modes = array("b") if modes else None
        self._open: list[HashedFile] = []
        try:
            self._bin = self._create(".bin.tmp")
            self._idx = self._create(".idx.tmp")
        except OSError as error:
            self._fail(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
        elif self._open:
            self.close()

    def add_document(
        self,
        tokens: npt.NDArray[np.integer],
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] | None = None,
    ) -> None:
        """Append one document: 1-D integer ids, 0 <= id < vocab_size, at least one of them.

        lengths: of its sequences, in tokens, each 0 or more, together the whole document; default: one sequence.
        modes: of each sequence, -128 to 127; default: all 0. Raises DataError for anything else. An empty document
        is refused, not skipped: with its end-of-document token no document is empty, so an empty one has lost it on the
        way.
        """
        where = f"document {self.documents} of {self.prefix}"
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise DataError(
                f"{where} is a {tokens.ndim}-D {tokens.dtype} array: give a 1-D array of token ids"
            )
        if tokens.size == 0 or (lengths is None and tokens.size > LONGEST_SEQUENCE):
            raise DataError(
                f"{where} has {tokens.size} tokens: between 1 and {LONGEST_SEQUENCE} can be stored in a sequence"
            )
        lengths = [tokens.size] if lengths is None else lengths
        if sum(lengths) != tokens.size or not all(0 <= length <= LONGEST_SEQUENCE for length in lengths):
            raise DataError(
                f"{where} has {tokens.size} tokens, its sequences {sum(lengths)}: give the length of each, 0 to "
                f"{LONGEST_SEQUENCE}"
            )
        modes = [0] * len(lengths) if modes is None and self._modes is not None else modes
        if modes is not None and (self._modes is None or len(modes) != len(lengths)):
            raise DataError(
                f"{where} has {len(lengths)} sequences and {len(modes)} modes: one for each, in a shard with modes"
            )
        if modes is not None and not all(-128 <= mode <= 127 for mode in modes):
            raise DataError(f"{where}: modes are int8, -128 to 127")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise DataError(
                f"{where} contains the token id {low if low < 0 else high}, outside of "
                f"0..{self.vocab_size - 1}: tokenizer and vocabulary size do not belong together"
            )
        self.add_documents(
            tokens,
            np.array(lengths, np.int32),
            np.array(modes or [0] * len(lengths), np.int8),
            np.array([len(lengths)]),
        )

    def add_documents(
        self,
        tokens: npt.NDArray[np.integer],
        lengths: npt.NDArray[np.int32],
        modes: npt.NDArray[np.int8],
        counts: npt.NDArray[np.int64],
    ) -> None:
        """Append d documents of another shard, which may be empty, as they are.

        Args:
            tokens: Of all documents [n].
            lengths: Of their sequences, int32 [s].
            modes: Of their sequences, int8 [s]; without effect in a shard without modes.
            counts: How many sequences each has, int64 [d].
        """
        try:
            self._bin.write(np.ascontiguousarray(tokens, little_endian(self.dtype)).data.cast("B"))
        except OSError as error:
            self._fail(error)
        if self._counts is None and (counts != 1).any():
            self._counts = array("i", [1]) * self.documents
        if self._counts is not None:
            self._counts.frombytes(counts.astype(np.int32).tobytes())
        if self._modes is not None:
            self._modes.frombytes(modes.tobytes())
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self.documents += len(counts)
        self.tokens += int(tokens.size)

    def close(self) -> ShardInfo:
        """Write the index, move both files into place and return their description."""
        try:
            self._write_index()
            bin_xxh3, idx_xxh3 = self._bin.finish(), self._idx.finish()
            if not self._hash_only:
                final_bin, final_idx = with_suffix(self.prefix, ".bin"), with_suffix(self.prefix, ".idx")
                final_idx.unlink(missing_ok=True)
                os.replace(with_suffix(self.prefix, ".bin.tmp"), final_bin)
                os.replace(with_suffix(self.prefix, ".idx.tmp"), final_idx)
                sync_directory(self.prefix.parent)
        except OSError as error:
            self._fail(error)
        self._open.clear()
        return ShardInfo(
            name=self.prefix.name,
            dtype=self.dtype,
            tokens=self.tokens,
            documents=self.documents,
            sequences=len(self._lengths),
            bin_bytes=self._bin.bytes,
            idx_bytes=self._idx.bytes,
            bin_xxh3=bin_xxh3,
            idx_xxh3=idx_xxh3,
        )

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        write = self._idx.write
        write(_index_header(self.dtype, len(lengths), self.documents))
        parts = [lengths[part] for part in chunks(len(lengths))]
        for part in parts:
            write(part.astype("<i4").tobytes())
        for pointers in _pointers_of(parts, self.dtype):
            write(pointers)
        sequence = 0
        write(np.zeros(1, "<i8").tobytes())
        for some in chunks(self.documents):
            if self._counts is None:
                write(np.arange(some.start + 1, some.stop + 1, dtype="<i8").tobytes())
            else:
                ends = sequence + np.cumsum(self._counts[some], dtype="<i8")
                write(ends.tobytes())
                sequence = int(ends[-1])
        if self._modes is not None:
            write(self._modes.tobytes())

    def _create(self, suffix: str) -> HashedFile:
        file = HashedFile(None if self._hash_only else with_suffix(self.prefix, suffix))
        self._open.append(file)
        return file

    def _discard(self) -> None:
        while self._open:
            self._open.pop().discard()

    def _fail(self, error: OSError) -> NoReturn:
        self._discard()
        raise DataError(f"shard {self.prefix} could not be written: {error}") from error


def _index_header(dtype: DType, sequences: int, documents: int) -> bytes:
    """The first 34 bytes of an `.idx`."""
    code = next(code for code, known in CODES.items() if known == dtype)
    return HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1)


def _pointers_of(lengths: Iterable[npt.NDArray[np.int32]], dtype: DType) -> Iterator[bytes]:
    """The stored pointers of sequences, part by part as their lengths come."""
    pointer, itemsize = 0, little_endian(dtype).itemsize
    for part in lengths:
        ends = pointer + np.cumsum(part, dtype=np.int64) * itemsize
        yield np.append(pointer, ends[:-1]).astype("<i8").tobytes() if part.size else b""
        pointer = int(ends[-1]) if part.size else pointer
