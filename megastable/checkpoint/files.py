"""Write and read the files of a checkpoint: hashed during the write, and on disk when a call returns."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, cast

import torch
import xxhash
from pydantic import BaseModel, ConfigDict
from torch import Tensor

BLOCK = 1 << 24  # bytes written and hashed at a time
NAMES = {  # dtype names of safetensors (its README, "Format")
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


class FileRecord(BaseModel):
    """A file of a checkpoint: its size in bytes and its xxh3-128."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    xxh3: str


class _Hashing:
    """A file object for torch.save that counts and hashes the bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hash, self.size = file, xxhash.xxh3_128(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error  # torch's zip writer turns it into a RuntimeError without the reason
            raise
        self.hash.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()

    def finish(self) -> FileRecord:
        self.file.flush()
        os.fsync(self.file.fileno())
        return FileRecord(size=self.size, xxh3=self.hash.hexdigest())


def write_file(path: Path, content: Any) -> FileRecord:
    """torch.save `content`, or write bytes; on disk when this returns. Raises OSError, RuntimeError."""
    with path.open("wb") as file:
        hashing = _Hashing(file)
        if isinstance(content, bytes):
            hashing.write(content)
        else:
            try:
                torch.save(content, cast(IO[bytes], hashing))  # it only writes and flushes
            except RuntimeError:
                if hashing.error is None:
                    raise
                raise hashing.error from None
        return hashing.finish()


class TensorFile:
    """One .safetensors file, written as a stream: names, dtypes and shapes are known first, tensors come one by one.

        with TensorFile(path, [("weight", torch.float32, (2, 3))]) as file:
            file.write("weight", tensor)
        file.record  # its size and hash

    The library's own writer needs all tensors of a file in memory at once. Memory here: one block. Raises OSError.
    """

    def __init__(
        self,
        path: Path,
        entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
        metadata: dict[str, str] | None = None,
        each: Callable[[], None] = lambda: None,
    ) -> None:
        """each: called before every block; may raise to break off."""
        self.path, self._left, self._each = path, list(reversed(entries)), each
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        offset = 0
        for name, dtype, shape in entries:
            end = offset + dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        assert len(header) == len(entries) + bool(metadata), "a name occurs twice"
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligns the tensors
        self._file = path.open("wb")
        try:
            self._hashing = _Hashing(self._file)
            self._hashing.write(len(text).to_bytes(8, "little") + text)
        except BaseException:
            self._file.close()
            raise
        self._record: FileRecord | None = None

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, of its declared dtype and shape, on any device."""
        expected = self._left.pop()
        assert (name, tensor.dtype, tuple(tensor.shape)) == expected, f"{name}: expected {expected}"
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        for block in flat.split(BLOCK):
            self._each()
            self._hashing.write(block.cpu().numpy().data)

    def close(self) -> FileRecord:
        """Finish the file; on disk when this returns."""
        if self._record is None:
            assert not self._left, f"{self._left[-1][0]} was not written"
            self._record = self._hashing.finish()
            self._file.close()
        return self._record

    @property
    def record(self) -> FileRecord:
        return self.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()


def hash_file(path: Path, from_disk: bool = False) -> FileRecord:
    """Size and hash of a file. from_disk: bypass the file cache."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        if from_disk:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = memoryview(bytearray(1 << 22))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size=size, xxh3=digest.hexdigest())
