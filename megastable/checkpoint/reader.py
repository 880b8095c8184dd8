"""Read .safetensors files piece by piece, without mapping them.

The library maps a file as if it were to be written to. Linux refuses that for a file larger than the machine's memory,
and a failing disk under a mapping ends the process with a signal. Here only the requested bytes are read, and a failure
is an error. The format: github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megastable.base.errors import CheckpointError
from megastable.base.text import visible
from megastable.checkpoint.files import NAMES

LONGEST = 100_000_000  # bytes of a header, as in the library
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """kind: the dtype as the file names it; begin, end: in bytes of the file."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Reader:
    """One file. entries: by name, in the header's order. Raises CheckpointError if it is damaged or truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        self.entries = self._header()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Raises CheckpointError for a dtype that is not supported."""
        kind = self.entries[name].kind
        if kind not in DTYPES:
            raise CheckpointError(
                f"{self.path}: {visible(name, 200)} is {visible(kind, 20)}, which is not read here"
            )
        return DTYPES[kind]

    def tensor(self, name: str) -> Tensor:
        """The whole tensor."""
        entry = self.entries[name]
        return self.flat(name, 0, math.prod(entry.shape)).view(entry.shape)

    def flat(self, name: str, start: int, end: int) -> Tensor:
        """Elements [start, end) of the flattened tensor. Raises CheckpointError."""
        entry, dtype = self.entries[name], self.dtype(name)
        assert 0 <= start <= end <= math.prod(entry.shape)
        tensor = torch.empty(end - start, dtype=dtype)
        self._read(entry.begin + start * dtype.itemsize, tensor.view(torch.uint8).numpy().data)
        return tensor

    def _read(self, at: int, into: memoryview) -> None:
        done = 0
        while done < len(into):  # Linux reads no more than 2 GiB at once
            try:
                count = os.preadv(self._file.fileno(), [into[done:]], at + done)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
            if not count:
                raise self._damaged(f"it ends at byte {at + done:,}")
            done += count

    def _header(self) -> dict[str, TensorEntry]:
        size = os.fstat(self._file.fileno()).st_size
        if size < 8:
            raise self._damaged("it is too short")
        start = bytearray(8)
        self._read(0, memoryview(start))
        length = int.from_bytes(start, "little")
        if length > min(LONGEST, size - 8):
            raise self._damaged(f"its header would be {length:,} bytes long")
        text = bytearray(length)
        self._read(8, memoryview(text))
        try:
            content: Any = json.loads(text.decode())
            entries = {
                name: _entry(told, 8 + length) for name, told in content.items() if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(f"its header is invalid ({type(error).__name__})") from None
        at = 8 + length
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != at:
                raise self._damaged(f"{visible(name, 200)} does not begin where the one before it ends")
            at = entry.end
            if entry.kind in DTYPES:
                wanted = DTYPES[entry.kind].itemsize * math.prod(entry.shape)
                if entry.end - entry.begin != wanted:
                    raise self._damaged(
                        f"{visible(name, 200)} has {entry.end - entry.begin} bytes, not {wanted}"
                    )
        if at != size:
            raise self._damaged(f"it has {size:,} bytes, its header says {at:,}")
        return entries

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged or incomplete: {why}")


def _entry(told: Any, offset: int) -> TensorEntry:
    begin, end = told["data_offsets"]
    kind, shape = told["dtype"], told["shape"]
    numbers = [begin, end, *shape]
    if (
        not isinstance(kind, str)
        or any(type(n) is not int or not 0 <= n < 2**62 for n in numbers)
        or end < begin
    ):
        raise ValueError
    return TensorEntry(kind, tuple(shape), offset + begin, offset + end)
