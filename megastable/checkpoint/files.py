"""Writing and reading the files of a checkpoint: hashed on the way to the disk, and no error lost.

DeepSpeed saves collectively, with barriers inside: a rank that raised half-way would leave the others waiting.
So `Writer` keeps the first error, lets the rest of the save pass, and the caller asks all ranks afterwards.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
import xxhash
from pydantic import BaseModel, ConfigDict


class FileRecord(BaseModel):
    """A file of a checkpoint: its size in bytes and its xxh3-128."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    xxh3: str


class _Hashing:
    """A file object for torch.save: counts and hashes what goes through."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hash, self.size = file, xxhash.xxh3_128(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error  # torch's zip writer turns it into a RuntimeError that does not say why
            raise
        self.hash.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def write_file(path: Path, content: Any) -> FileRecord:
    """torch.save `content`, or write bytes; on the disk when this returns. Raises OSError, RuntimeError."""
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
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size=hashing.size, xxh3=hashing.hash.hexdigest())


def hash_file(path: Path) -> FileRecord:
    """Size and hash of a file as it lies on the disk."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size=size, xxh3=digest.hexdigest())


class Writer:
    """In place of DeepSpeed's checkpoint engine while saving. `records`: file name -> what was written."""

    name = "megastable"

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.error: str | None = None

    def save(self, state_dict: Any, path: str | Path) -> None:
        """Write one file; the first failure is kept in `error`, later files are left out."""
        if self.error is not None:
            return
        try:
            self.records[Path(path).name] = write_file(Path(path), state_dict)
        except (OSError, RuntimeError) as error:
            self.error = f"{path}: {error}".splitlines()[0]

    def load(self, path: str, map_location: Any = None) -> Any:
        # DeepSpeed's optimizer state holds its own classes; the files have been verified against the manifest.
        return torch.load(path, map_location=map_location, weights_only=False)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        # The folder exists already; where it does not, this host does not see the one that rank 0 made.
        if not os.path.isdir(path):
            self.error = (
                self.error or f"{path}: not seen by this host: run.dir must be on a shared file system"
            )

    def create(self, info: Any) -> None: ...

    def commit(self, info: Any) -> bool:
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        return False

    def set_commit_info(self, info: Any) -> None: ...

    def get_commit_info(self) -> None:
        return None

    def cleanup(self) -> None: ...

    def preserves_storage_sharing(self) -> bool:
        return True
