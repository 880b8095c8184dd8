"""Megatron's indexed dataset (`.bin` + `.idx`), written: whole or not at all, and hashed on the way."""

from __future__ import annotations

import os
from array import array
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn, Self

import numpy as np
import numpy.typing as npt
import xxhash

from megastable.data.shard_format import (
    CODES,
    HEADER,
    LONGEST_DOCUMENT,
    MAGIC,
    VERSION,
    ShardInfo,
    chunks,
    dtype_for,
    little_endian,
    with_suffix,
)
from megastable.durable import sync_directory
from megastable.errors import DataError


class _HashedFile:
    """A file that is hashed (xxh3-128) while it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)
        self._hash = xxhash.xxh3_128()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def finish(self) -> str:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        with suppress(OSError):  # a full disk refuses the buffered rest of a file that is gone already
            self._file.close()


class ShardWriter:
    """Writes PREFIX.bin and PREFIX.idx document by document; a context manager.

    Memory is 4 bytes per document. Both files carry a `.tmp` ending until they are complete and on the disk;
    the `.idx` appears last, so that an `.idx` implies a whole `.bin`. A shard of the same name is replaced.
    After an exception nothing of this shard remains.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.dtype = dtype_for(vocab_size)
        self.tokens = 0
        self._lengths = array("i")
        self._open: list[_HashedFile] = []
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

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return len(self._lengths)

    def add_document(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append one document: 1-D integer ids, 0 <= id < vocab_size, at least one of them.

        Raises DataError for anything else. An empty document is refused, not skipped: with its
        end-of-document token no document is empty, so one that is has lost its token on the way.
        """
        where = f"document {self.documents} of {self.prefix}"
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise DataError(
                f"{where} is a {tokens.ndim}-D {tokens.dtype} array: give a 1-D array of token ids"
            )
        if not 0 < tokens.size <= LONGEST_DOCUMENT:
            raise DataError(
                f"{where} has {tokens.size} tokens: between 1 and {LONGEST_DOCUMENT} can be stored"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise DataError(
                f"{where} contains the token id {low if low < 0 else high}, outside of "
                f"0..{self.vocab_size - 1}: tokenizer and vocabulary size do not belong together"
            )
        try:
            self._bin.write(tokens.astype(little_endian(self.dtype)).tobytes())
        except OSError as error:
            self._fail(error)
        self._lengths.append(tokens.size)
        self.tokens += int(tokens.size)

    def close(self) -> ShardInfo:
        """Write the index, put both files in place and return their description."""
        try:
            self._write_index()
            bin_xxh3, idx_xxh3 = self._bin.finish(), self._idx.finish()
            final_bin, final_idx = with_suffix(self.prefix, ".bin"), with_suffix(self.prefix, ".idx")
            final_idx.unlink(missing_ok=True)
            os.replace(self._bin.path, final_bin)
            os.replace(self._idx.path, final_idx)
            sync_directory(self.prefix.parent)
        except OSError as error:
            self._fail(error)
        self._open.clear()
        return ShardInfo(
            name=self.prefix.name,
            dtype=self.dtype,
            tokens=self.tokens,
            documents=self.documents,
            sequences=self.documents,
            bin_bytes=self._bin.bytes,
            idx_bytes=self._idx.bytes,
            bin_xxh3=bin_xxh3,
            idx_xxh3=idx_xxh3,
        )

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        code = next(code for code, dtype in CODES.items() if dtype == self.dtype)
        itemsize = little_endian(self.dtype).itemsize
        self._idx.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
        for part in chunks(len(lengths)):
            self._idx.write(lengths[part].astype("<i4").tobytes())
        pointer = 0
        for part in chunks(len(lengths)):
            ends = pointer + np.cumsum(lengths[part].astype(np.int64) * itemsize)
            starts = np.concatenate(([pointer], ends[:-1]))
            self._idx.write(starts.astype("<i8").tobytes())
            pointer = int(ends[-1])
        for part in chunks(len(lengths) + 1):
            self._idx.write(np.arange(part.start, part.stop, dtype="<i8").tobytes())

    def _create(self, suffix: str) -> _HashedFile:
        file = _HashedFile(with_suffix(self.prefix, suffix))
        self._open.append(file)
        return file

    def _discard(self) -> None:
        while self._open:
            self._open.pop().discard()

    def _fail(self, error: OSError) -> NoReturn:
        self._discard()
        raise DataError(f"shard {self.prefix} could not be written: {error}") from error
