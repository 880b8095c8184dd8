"""Read token ids of other programs as documents: datatrove's `.ds` and llm.c's `.bin`.

- datatrove (`DocumentTokenizer`): `NAME.ds` is uint16 or uint32 ids, `NAME.ds.index` the uint64 end of each document in
  tokens, `NAME.ds.metadata` the text "TOKENIZER|BYTES PER ID", then the number of tokens. `.ds.loss` holds loss masks.
- llm.c (`dev/data/data_common.py`; also modded-nanogpt): a header of 256 int32 (magic, version, tokens), then the ids:
  uint16 (GPT-2) or uint32 (Llama 3). A token precedes each document: GPT-2's end of text, Llama 3's begin of text
  (128000), and none follows it; files are cut anywhere.
- nanoGPT: bare ids. The file does not say their type.
"""

from __future__ import annotations

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
LONGEST_WITHOUT_END = (
    1 << 22
)  # tokens: a file without an end of document among its first ones uses another token


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

    def documents(self, eod: int) -> Iterator[Ids]:
        """The documents in their order, each 1-D; without an index they end with `eod`, except the last.

        Takes memory for the longest document. Raises DataError for an invalid index, a long file without any `eod`, and
        a failing disk.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.first_byte)
                yield from self._by_index(file) if self.ends else self._by_token(file, eod)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error

    def _by_index(self, file: BinaryIO) -> Iterator[Ids]:
        assert self.ends is not None
        first = 0
        with self.ends.open("rb") as index:
            while block := index.read(8 * CHUNK):
                for end in np.frombuffer(block, "<u8").tolist():
                    if not first <= end <= self.tokens:
                        raise DataError(
                            f"{self.ends} is not the index of {self.path}: a document from token {first} to {end} of "
                            f"{self.tokens}; restore it"
                        )
                    yield self._read(file, end - first)
                    first = end

    def _by_token(self, file: BinaryIO, eod: int) -> Iterator[Ids]:
        rest: list[Ids] = []
        left, ended = self.tokens, False
        while left:
            ids = self._read(file, min(left, CHUNK))
            at = 0
            for end in (np.flatnonzero(ids == eod) + 1).tolist():
                ended = True
                if end == 1 and left == self.tokens:
                    continue  # precedes the first document, in files where it precedes each
                yield np.concatenate([*rest, ids[at:end]])
                rest, at = [], end
            if at < ids.size:
                rest.append(ids[at:])
            left -= ids.size
            if not ended and self.tokens - left > LONGEST_WITHOUT_END:
                raise DataError(
                    f"{self.path} has no end-of-document token ({eod}) among its first {self.tokens - left:,}: name "
                    f"the token between its documents with --eod (it begins with token {rest[0][0]}; llm.c's files of "
                    "Llama 3 have 128000 there)"
                )
        if rest:
            yield np.concatenate(rest)

    def _read(self, file: BinaryIO, count: int) -> Ids:
        raw = file.read(count * self.itemsize)
        if len(raw) < count * self.itemsize:
            raise DataError(f"{self.path} became shorter while it was read: restore it")
        return np.frombuffer(raw, np.dtype(self.dtype).newbyteorder("<"))


def datatrove_file(path: Path) -> TokenFile:
    """`path` is NAME.ds. Raises DataError if its index is missing or contradicts it."""
    index, size = path.with_name(path.name + ".index"), path.stat().st_size
    if not index.is_file():
        raise DataError(
            f"{path} has no {index.name} beside it, the index of document ends: restore it, or write the file "
            "again with save_index=True"
        )
    raw = index.read_bytes()[-8:] if index.stat().st_size < 8 else _tail(index)
    tokens = struct.unpack("<Q", raw)[0] if len(raw) == 8 and index.stat().st_size % 8 == 0 else 0
    itemsize = _datatrove_itemsize(path) or (size // tokens if tokens else 0)
    if itemsize not in (2, 4) or tokens * itemsize != size:
        raise DataError(
            f"{path} has {size} bytes, but {index.name} tells of {tokens} tokens of {itemsize or '?'} bytes: one "
            "is truncated or of another file, restore it"
        )
    masks = path.with_name(path.name + ".loss")
    note = f"the loss masks of {masks.name} are not used: every token is trained on" if masks.exists() else ""
    return TokenFile(path, "uint16" if itemsize == 2 else "uint32", 0, tokens, index, note)


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-8, 2)
        return file.read(8)


def _datatrove_itemsize(path: Path) -> int | None:
    """Bytes per id by the metadata; None without metadata."""
    metadata = path.with_name(path.name + ".metadata")
    try:
        first = metadata.read_text(encoding="utf-8").partition("\n")[0]
    except (OSError, UnicodeDecodeError):
        return None
    size = first.rpartition("|")[2]
    return int(size) if size in ("2", "4") else None


def bin_file(path: Path, raw: IdType | None) -> TokenFile:
    """`path` is llm.c's, or bare ids of the type `raw`. Raises DataError for anything else."""
    size = path.stat().st_size
    with path.open("rb") as file:
        magic, version, tokens = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    if magic in LLM_C:
        known, dtype = LLM_C[magic]
        expected = _LLM_C_HEADER + tokens * np.dtype(dtype).itemsize
        if version != known or size != expected:
            raise DataError(
                f"{path} has version {version} and {size} bytes, but its header (llm.c, {tokens} tokens) asks for "
                f"version {known} and {expected}: it is truncated or damaged, fetch it again"
            )
        return TokenFile(path, dtype, _LLM_C_HEADER, tokens)
    if magic == _EVALUATION:
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
