"""Read token ids of other programs as documents: datatrove's `.ds` and llm.c's `.bin`.

- datatrove (`DocumentTokenizer`): `NAME.ds` is uint16 or uint32 ids, `NAME.ds.index` the uint64 end of each document in
  tokens, `NAME.ds.metadata` the text "TOKENIZER|BYTES PER ID", then the number of tokens. `.ds.loss` holds loss masks.
- llm.c (`dev/data/data_common.py`; also modded-nanogpt): a header of 256 int32 (magic, version, tokens), then the ids:
  uint16 (GPT-2) or uint32 (Llama 3). A token precedes each document: GPT-2's end of text, Llama 3's begin of text
  (128000), and none follows it; files are cut anywhere.
- nanoGPT: bare ids. The file does not say their type.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.data.shard_format import CHUNK

Ids = npt.NDArray[np.unsignedinteger]
IdType = Literal["uint16", "uint32"]

LLM_C: dict[int, tuple[int, IdType]] = {
    20240520: (1, "uint16"),
    20240801: (7, "uint32"),
}  # magic: version, ids
_LLM_C_HEADER = 256 * 4  # bytes
_EVALUATION = 20240522  # llm.c's magic of multiple-choice questions
# Tokens: a file without an end of document among its first ones uses another token.
LONGEST_WITHOUT_END = 1 << 22


@dataclass(frozen=True)
class TokenFile:
    """Ids of one type from byte `first_byte` of a file on; `ends`: the file with the documents' ends, if any."""

    path: Path
    dtype: IdType
    first_byte: int
    tokens: int
    ends: Path | None = None
    note: str = ""  # parts of it that are not used

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def read_documents(self, eod: int) -> Iterator[Ids]:
        """The documents in their order, each 1-D; without an index they end with `eod`, except the last.

        Takes memory for the longest document. Raises DataError for an invalid index, a long file without any `eod`, and
        a failing disk.
        """
        try:
            with self.path.open("rb") as token_file:
                token_file.seek(self.first_byte)
                yield from self._by_index(token_file) if self.ends else self._by_token(token_file, eod)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error

    def _by_index(self, file: BinaryIO) -> Iterator[Ids]:
        assert self.ends is not None
        first = 0
        with self.ends.open("rb") as index_file:
            while index_block := index_file.read(8 * CHUNK):
                for end in np.frombuffer(index_block, "<u8").tolist():
                    if not first <= end <= self.tokens:
                        raise DataError(
                            f"{self.ends} is not the index of {self.path}: a document from token {first} to {end} of "
                            f"{self.tokens}; restore it"
                        )
                    yield self._read(file, end - first)
                    first = end

    def _by_token(self, file: BinaryIO, eod: int) -> Iterator[Ids]:
        rest: list[Ids] = []
        left, any_ended = self.tokens, False
        while left:
            chunk_ids = self._read(file, min(left, CHUNK))
            document_begin = 0
            for document_end in (np.flatnonzero(chunk_ids == eod) + 1).tolist():
                any_ended = True
                if document_end == 1 and left == self.tokens:
                    continue  # precedes the first document, in files where it precedes each
                yield np.concatenate([*rest, chunk_ids[document_begin:document_end]])
                rest, document_begin = [], document_end
            if document_begin < chunk_ids.size:
                rest.append(chunk_ids[document_begin:])
            left -= chunk_ids.size
            if not any_ended and self.tokens - left > LONGEST_WITHOUT_END:
                raise DataError(
                    f"{self.path} has no end-of-document token ({eod}) among its first {self.tokens - left:,}: name "
                    f"the token between its documents with --eod (it begins with token {rest[0][0]}; llm.c's files of "
                    "Llama 3 have 128000 there)"
                )
        if rest:
            yield np.concatenate(rest)

    def _read(self, file: BinaryIO, count: int) -> Ids:
        raw_bytes = file.read(count * self.itemsize)
        if len(raw_bytes) < count * self.itemsize:
            raise DataError(f"{self.path} became shorter while it was read: restore it")
        return np.frombuffer(raw_bytes, np.dtype(self.dtype).newbyteorder("<"))


def datatrove_file(path: Path) -> TokenFile:
    """`path` is NAME.ds. Raises DataError if its index is missing or contradicts it."""
    index_path, size = path.with_name(path.name + ".index"), path.stat().st_size
    if not index_path.is_file():
        raise DataError(
            f"{path} has no {index_path.name} beside it, the index of document ends: restore it, or write the file "
            "again with save_index=True"
        )
    tokens, index_size = 0, index_path.stat().st_size
    if index_size and index_size % 8 == 0:
        with index_path.open("rb") as index_file:
            index_file.seek(-8, os.SEEK_END)
            tokens = struct.unpack("<Q", index_file.read(8))[0]
    itemsize = _datatrove_itemsize(path) or (size // tokens if tokens else 0)
    if itemsize not in (2, 4) or tokens * itemsize != size:
        raise DataError(
            f"{path} has {size} bytes, but {index_path.name} tells of {tokens} tokens of {itemsize or '?'} bytes: one "
            "is truncated or of another file, restore it"
        )
    masks = path.with_name(path.name + ".loss")
    note = f"the loss masks of {masks.name} are not used: every token is trained on" if masks.exists() else ""
    return TokenFile(path, "uint16" if itemsize == 2 else "uint32", 0, tokens, index_path, note)


def _datatrove_itemsize(path: Path) -> int | None:
    """Bytes per id by the metadata; None without metadata."""
    metadata_path = path.with_name(path.name + ".metadata")
    try:
        first_line = metadata_path.read_text(encoding="utf-8").partition("\n")[0]
    except (OSError, UnicodeDecodeError):
        return None
    size_text = first_line.rpartition("|")[2]
    return int(size_text) if size_text in ("2", "4") else None


def bin_file(path: Path, raw: IdType | None) -> TokenFile:
    """`path` is llm.c's, or bare ids of the type `raw`. Raises DataError for anything else."""
    size = path.stat().st_size
    with path.open("rb") as file:
        magic_number, version, token_count = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    if magic_number in LLM_C:
        known_version, dtype = LLM_C[magic_number]
        expected_bytes = _LLM_C_HEADER + token_count * np.dtype(dtype).itemsize
        if version != known_version or size != expected_bytes:
            raise DataError(
                f"{path} has version {version} and {size} bytes, but its header (llm.c, {token_count} tokens) asks for "
                f"version {known_version} and {expected_bytes}: it is truncated or damaged, fetch it again"
            )
        return TokenFile(path, dtype, _LLM_C_HEADER, token_count)
    if magic_number == _EVALUATION:
        raise DataError(f"{path} holds llm.c's multiple-choice questions, not a corpus: move it away")
    if raw is None:
        raise DataError(
            f"{path} is of an unknown format: neither an .idx beside it (Megatron) nor llm.c's magic "
            "number; if it holds token ids alone, as nanoGPT's do, say their type with --raw uint16 (or uint32)"
        )
    itemsize = np.dtype(raw).itemsize
    if size % itemsize:
        raise DataError(
            f"{path} has {size} bytes, not a multiple of {itemsize} ({raw}): it is something else, or truncated"
        )
    return TokenFile(path, raw, 0, size // itemsize)
