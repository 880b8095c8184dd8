"""File format of Megatron's indexed dataset, read by `shards.py` and written by `shard_writer.py`.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, field_validator

from megastable.base.errors import DataError

Tokens = npt.NDArray[np.int64]
DType = Literal["uint16", "int32"]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
CODES: dict[int, DType] = {4: "int32", 8: "uint16"}
SMALL_VOCABULARY = 65_500  # Megatron's rule: uint16 below, int32 from here on
LONGEST_SEQUENCE = 2**31 - 1  # lengths are int32
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
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            sequences, entries, dtype = _read_header(path, file.read(HEADER.size), size)

            def entry(kind: str, offset: int) -> int:
                file.seek(offset)
                return int(struct.unpack(kind, file.read(struct.calcsize(kind)))[0])

            pointers_at = HEADER.size + 4 * sequences
            documents_at = pointers_at + 8 * sequences
            return IndexEnds(
                dtype=dtype,
                sequences=sequences,
                documents=entries - 1,
                first_pointer=entry("<q", pointers_at) if sequences else 0,
                last_pointer=entry("<q", documents_at - 8) if sequences else 0,
                last_length=entry("<i", pointers_at - 4) if sequences else 0,
                first_document=entry("<q", documents_at),
                last_document=entry("<q", documents_at + 8 * (entries - 1)),
                modes=sequences > 0 and size == documents_at + 8 * entries + sequences,
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
    _, version, code, sequences, entries = HEADER.unpack(header)
    if version != VERSION:
        raise DataError(
            f"{path} has format version {version}, only {VERSION} is known: write the shard again"
        )
    if code not in CODES:
        known = " and ".join(f"{code} ({dtype})" for code, dtype in sorted(CODES.items()))
        raise DataError(
            f"{path} says its tokens have type code {code}: only {known} mean the same to all programs, "
            "write the shard again with one of them"
        )
    expected = HEADER.size + 12 * sequences + 8 * entries
    if entries < 1 or size not in (expected, expected + sequences):
        raise DataError(
            f"{path} has {size} bytes, but its header ({sequences} sequences, {entries} document entries) "
            f"asks for {expected}: it is truncated or damaged, write the shard again"
        )
    return sequences, entries, CODES[code]


def file_sizes(prefix: Path) -> tuple[int, int]:
    """Bytes of PREFIX.bin and PREFIX.idx. Raises DataError naming the one that is missing."""
    sizes = []
    for suffix in (".bin", ".idx"):
        path = with_suffix(prefix, suffix)
        try:
            found = path.stat()
        except OSError as error:
            raise DataError(
                f"{path} is not there ({error.strerror}): a shard is a .bin and an .idx file; restore it, or "
                "correct the path"
            ) from error
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{path} is not a plain file: a shard is a .bin and an .idx file, restore it")
        sizes.append(found.st_size)
    return sizes[0], sizes[1]


def chunks(count: int) -> Iterator[slice]:
    """Slices that cover `count` entries, `CHUNK` at a time."""
    return (slice(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK))


def fill(path: Path, descriptor: int, into: npt.NDArray[Any], at: int) -> None:
    """Read an array from byte `at` of a file. Raises DataError if the disk fails or the file ends too early."""
    view = into.data.cast("B") if into.size else memoryview(b"")
    done = 0
    while done < len(view):
        try:
            got = os.preadv(descriptor, [view[done:]], at + done)
        except OSError as error:
            raise DataError(f"{path} cannot be read at byte {at + done}: {error.strerror}") from error
        if got == 0:
            shorter(path)
        done += got


def shorter(path: Path) -> NoReturn:
    """Raise the error for a file that has ended too early."""
    raise DataError(f"{path} became shorter while it was in use: restore it, then resume")


def hash_file(path: Path) -> str:
    """xxh3-128 (hex) of a file. Raises DataError when it cannot be read."""
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()
