"""Megatron's indexed dataset: its format, and its writer; `shards.py` reads it.

A shard is two files. `NAME.bin` holds token ids one after another, little-endian, without any separator.
`NAME.idx` is the index: a 34-byte header (magic, version, dtype code, sequence count S, document
count D + 1), int32 lengths[S] in tokens, int64 byte pointers[S], int64 document indices[D + 1] (the first
sequence of each document, then S), and optionally int8 modes[S]. Source: Megatron-LM,
megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import os
import stat
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, NamedTuple, NoReturn, Self

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, field_validator

from megastable.base.durable import sync_directory
from megastable.base.errors import DataError

Tokens = npt.NDArray[np.int64]
DType = Literal["uint16", "int32"]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
CODES: dict[int, DType] = {4: "int32", 8: "uint16"}
SMALL_VOCABULARY = 65_500  # Megatron's rule: uint16 below, int32 from here on
LONGEST_SEQUENCE = 2**31 - 1  # lengths are int32
REMOTE = "remote.json"  # in the folder of a corpus in an object store (remote_shards.py)
CHUNK = 1 << 20  # entries per step when a whole file is written or read


class ShardInfo(BaseModel):
    """A manifest's record of a shard: counts, sizes in bytes, xxh3-128 hashes (hex) of both files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: DType
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    sequences: int = Field(ge=0)
    bin_bytes: int = Field(ge=0)
    idx_bytes: int = Field(ge=0)
    bin_xxh3: str
    idx_xxh3: str

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise ValueError("a shard's name is a plain file name without a folder")
        return name


def dtype_for(vocab_size: int) -> DType:
    """The token type for `vocab_size` ids: uint16 below 65,500, else int32."""
    if not 0 < vocab_size <= 2**31:
        raise DataError(f"a vocabulary of {vocab_size} tokens cannot be stored: ids are int32")
    return "uint16" if vocab_size < SMALL_VOCABULARY else "int32"


def little_endian(dtype: DType) -> np.dtype[np.integer]:
    """The numpy type of the tokens in a `.bin`."""
    return np.dtype("<u2" if dtype == "uint16" else "<i4")


def with_suffix(prefix: Path, suffix: str) -> Path:
    """PREFIX + suffix; `Path.with_suffix` would drop the ending of a name such as `books.v2`."""
    return prefix.with_name(prefix.name + suffix)


class IndexEnds(NamedTuple):
    """The header of an `.idx` and the first and last entries of its arrays (0 if they are empty).

    modes: every sequence has one.
    """

    dtype: DType
    sequences: int
    documents: int
    first_pointer: int
    last_pointer: int
    last_length: int
    first_document: int
    last_document: int
    modes: bool


def read_index_ends(path: Path) -> IndexEnds:
    """Read a few bytes of an `.idx` of any size. Raises DataError for a foreign or truncated one."""
    try:
        with path.open("rb") as index_file:
            file_size = os.fstat(index_file.fileno()).st_size
            sequence_count, entry_count, dtype = _read_header(path, index_file.read(HEADER.size), file_size)

            def entry(kind: str, offset: int) -> int:
                index_file.seek(offset)
                return int(struct.unpack(kind, index_file.read(struct.calcsize(kind)))[0])

            pointers_at = HEADER.size + 4 * sequence_count
            documents_at = pointers_at + 8 * sequence_count
            return IndexEnds(
                dtype=dtype,
                sequences=sequence_count,
                documents=entry_count - 1,
                first_pointer=entry("<q", pointers_at) if sequence_count else 0,
                last_pointer=entry("<q", documents_at - 8) if sequence_count else 0,
                last_length=entry("<i", pointers_at - 4) if sequence_count else 0,
                first_document=entry("<q", documents_at),
                last_document=entry("<q", documents_at + 8 * (entry_count - 1)),
                modes=sequence_count > 0 and file_size == documents_at + 8 * entry_count + sequence_count,
            )
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except struct.error as error:  # truncated since its size was read
        raise DataError(f"{path} became shorter while it was read: restore it") from error


def _read_header(path: Path, header: bytes, size: int) -> tuple[int, int, DType]:
    if header[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path} is not a Megatron index (it begins with {header[: len(MAGIC)]!r}): give another file, or write "
            "the shard again"
        )
    if len(header) < HEADER.size:
        raise DataError(f"{path} ends inside its header: it is truncated, write the shard again")
    _, version, type_code, sequence_count, entry_count = HEADER.unpack(header)
    if version != VERSION:
        raise DataError(
            f"{path} has format version {version}, only {VERSION} is known: write the shard again"
        )
    if type_code not in CODES:
        known = " and ".join(f"{type_code} ({dtype})" for type_code, dtype in sorted(CODES.items()))
        raise DataError(
            f"{path} says its tokens have type code {type_code}: only {known} mean the same to all programs, "
            "write the shard again with one of them"
        )
    expected_bytes = HEADER.size + 12 * sequence_count + 8 * entry_count
    if entry_count < 1 or size not in (expected_bytes, expected_bytes + sequence_count):
        raise DataError(
            f"{path} has {size} bytes, but its header ({sequence_count} sequences, {entry_count} document entries) "
            f"asks for {expected_bytes}: it is truncated or damaged, write the shard again"
        )
    return sequence_count, entry_count, CODES[type_code]


def file_sizes(prefix: Path) -> tuple[int, int]:
    """Bytes of PREFIX.bin and PREFIX.idx. Raises DataError naming the one that is missing."""
    bytes_by_suffix = []
    for suffix in (".bin", ".idx"):
        path = with_suffix(prefix, suffix)
        try:
            file_status = path.stat()
        except OSError as error:
            if (path.parent / REMOTE).exists():
                raise DataError(
                    f"{path} is not fetched: its corpus is in an object store, {path.parent / REMOTE} says which: "
                    "this reads files of a folder: copy all of it from there, and name the copy"
                ) from None
            raise DataError(
                f"{path} is not there ({error.strerror}): a shard is a .bin and an .idx file; restore it, or "
                "correct the path"
            ) from error
        if not stat.S_ISREG(file_status.st_mode):
            raise DataError(f"{path} is not a plain file: a shard is a .bin and an .idx file, restore it")
        bytes_by_suffix.append(file_status.st_size)
    return bytes_by_suffix[0], bytes_by_suffix[1]


def chunk_slices(count: int) -> Iterator[slice]:
    """Slices that cover `count` entries, `CHUNK` at a time."""
    return (slice(first_entry, min(first_entry + CHUNK, count)) for first_entry in range(0, count, CHUNK))


def fill_array(path: Path, descriptor: int, into: npt.NDArray[Any], at: int) -> None:
    """Read an array from byte `at` of a file. Raises DataError if the disk fails or the file ends too early."""
    byte_view, bytes_done = into.data.cast("B") if into.size else memoryview(b""), 0
    while bytes_done < len(byte_view):
        try:
            bytes_read = os.preadv(descriptor, [byte_view[bytes_done:]], at + bytes_done)
        except OSError as error:
            raise DataError(f"{path} cannot be read at byte {at + bytes_done}: {error.strerror}") from error
        if bytes_read == 0:
            raise_shorter(path)
        bytes_done += bytes_read


def raise_shorter(path: Path) -> NoReturn:
    """Raise the error for a file that has ended too early."""
    raise DataError(f"{path} became shorter while it was in use: restore it, then resume")


def hash_file(path: Path) -> str:
    """xxh3-128 (hex) of a file. Raises DataError when it cannot be read."""
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while file_block := file.read(1 << 20):
                digest.update(file_block)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


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
        self, prefix: Path, vocab_size: int, modes: bool = False, dtype: DType | None = None,
        hash_only: bool = False,
    ) -> None:  # fmt: skip
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
        lowest_id, highest_id = int(tokens.min()), int(tokens.max())
        if lowest_id < 0 or highest_id >= self.vocab_size:
            raise DataError(
                f"{where} contains the token id {lowest_id if lowest_id < 0 else highest_id}, outside of "
                f"0..{self.vocab_size - 1}: tokenizer and vocabulary size do not belong together"
            )
        mode_array = np.array(modes or [0] * len(lengths), np.int8)
        self.add_documents(tokens, np.array(lengths, np.int32), mode_array, np.array([len(lengths)]))

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
            name=self.prefix.name, dtype=self.dtype, tokens=self.tokens, documents=self.documents,
            sequences=len(self._lengths), bin_bytes=self._bin.bytes, idx_bytes=self._idx.bytes, bin_xxh3=bin_xxh3,
            idx_xxh3=idx_xxh3,
        )  # fmt: skip

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        write = self._idx.write
        type_code = next(type_code for type_code, known in CODES.items() if known == self.dtype)
        write(HEADER.pack(MAGIC, VERSION, type_code, len(lengths), self.documents + 1))
        for part in chunk_slices(len(lengths)):
            write(lengths[part].astype("<i4").tobytes())
        pointer, itemsize = 0, little_endian(self.dtype).itemsize
        for part in chunk_slices(len(lengths)):
            sequence_ends = pointer + np.cumsum(lengths[part], dtype=np.int64) * itemsize
            write(np.append(pointer, sequence_ends[:-1]).astype("<i8").tobytes())
            pointer = int(sequence_ends[-1])
        sequence_count = 0
        write(np.zeros(1, "<i8").tobytes())
        for document_slice in chunk_slices(self.documents):
            if self._counts is None:
                write(np.arange(document_slice.start + 1, document_slice.stop + 1, dtype="<i8").tobytes())
            else:
                document_ends = sequence_count + np.cumsum(self._counts[document_slice], dtype="<i8")
                write(document_ends.tobytes())
                sequence_count = int(document_ends[-1])
        if self._modes is not None:
            write(self._modes.tobytes())

    def _create(self, suffix: str) -> HashedFile:
        hashed_file = HashedFile(None if self._hash_only else with_suffix(self.prefix, suffix))
        self._open.append(hashed_file)
        return hashed_file

    def _discard(self) -> None:
        while self._open:
            self._open.pop().discard()

    def _fail(self, error: OSError) -> NoReturn:
        self._discard()
        raise DataError(f"shard {self.prefix} could not be written: {error}") from error
