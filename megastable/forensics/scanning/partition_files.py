"""Partition records into files on disk, so that related records can be loaded together."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn, Self

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError

PARTITION = 1 << 26  # approximate bytes of a partition
MOST = 256  # partitions, and files open at once
BUFFER = 1 << 16

Records = npt.NDArray[Any]


def partitions_for(size: int) -> int:
    """Number of partitions for `size` bytes."""
    return min(max(1, -(-size // PARTITION)), MOST)


class Spool:
    """Partitions 0 .. count - 1 of records of one dtype, in a folder of its own; a context manager that removes it.

    Memory is `BUFFER` bytes per partition for writing, and one partition for reading. Raises DataError if the disk
    fails.
    """

    def __init__(self, folder: Path, count: int, dtype: npt.DTypeLike) -> None:
        self.folder, self.count, self.dtype = folder, count, np.dtype(dtype)
        self._files: dict[int, BinaryIO] = {}
        try:
            shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
            folder.mkdir(parents=True)
        except OSError as error:
            self._fail(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            try:
                file.close()
            except OSError:  # a full disk refuses the buffered rest; the folder is removed anyway
                continue
        self._files.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, records: Records, partition: npt.NDArray[np.integer]) -> None:
        """Append `records` [n], each to its partition [n]."""
        if not len(records):
            return
        order = np.argsort(partition, kind="stable")
        placed, chosen = partition[order], records[order]
        cuts = np.flatnonzero(np.diff(placed)) + 1
        try:
            for part, number in zip(np.split(chosen, cuts), placed[np.append(0, cuts)].tolist(), strict=True):
                self._file(number).write(part.tobytes())
        except OSError as error:
            self._fail(error)

    def read(self, partition: int) -> Records:
        """All records of a partition, in the order in which they were added."""
        try:
            if partition in self._files:
                self._files[partition].flush()
            path = self.folder / str(partition)
            return np.fromfile(path, dtype=self.dtype) if path.exists() else np.empty(0, self.dtype)
        except OSError as error:
            self._fail(error)

    def __iter__(self) -> Iterator[Records]:
        return map(self.read, range(self.count))

    def _file(self, partition: int) -> BinaryIO:
        if partition not in self._files:
            self._files[partition] = (self.folder / str(partition)).open("ab", buffering=BUFFER)
        return self._files[partition]

    def _fail(self, error: OSError) -> NoReturn:
        raise DataError(
            f"{self.folder} cannot be used: {error.strerror or error}; make room or choose another folder, "
            "then start again: finished parts are kept"
        ) from error
