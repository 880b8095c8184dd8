"""The folder of a scan: its settings and finished parts, locked against other processes.

begun.json         settings of the scan: it resumes only with the same ones
yardstick.npz      the baseline; reference.json: results of its own sample by it
parts/N.parquet    the rows of unit N, complete when it has its name
near/N.npy         signatures of its documents, for near duplicates
duplicates.parquet copies, ascending
scan.json          the result: the scan is complete when it exists
"""

from __future__ import annotations

import fcntl
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megastable.base.durable import hold
from megastable.base.errors import DataError
from megastable.data.local_copy import write_file

BEGUN, RESULT, YARDSTICK, REFERENCE = "begun.json", "scan.json", "yardstick.npz", "reference.json"
SCORES = "scores.json"  # the result in a folder of scores
DUPLICATES, PARTS, NEAR, SPOOL, LOCK = "duplicates.parquet", "parts", "near", "spool", ".lock"
NAMES = {
    "fingerprint": "the shards",
    "files": "the shards or the reference, whose files changed",
    "tokenizer": "the tokenizer",
    "against": "the reference",
    "format": "the version",
    "checkpoint": "the checkpoint",
    "documents": "the choice of documents",
    "precision": "the precision, see --exact",
    "gradients": "--gradients",
}


def part(folder: Path, number: int) -> Path:
    """The file of the rows of unit `number`."""
    return folder / PARTS / f"{number:06d}.parquet"


def near_part(folder: Path, number: int) -> Path:
    """The file of the signatures of unit `number`."""
    return folder / NEAR / f"{number:06d}.npy"


@contextmanager
def occupied(folder: Path, asked: dict[str, Any], again: bool) -> Iterator[None]:
    """Lock the folder for a scan with the settings `asked`: an earlier one is resumed, or removed (again).

    Raises DataError for a folder with other content, in use by another process, or not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = [path.name for path in folder.iterdir() if path.name != LOCK]
        if others and BEGUN not in others:
            raise DataError(
                f"{folder} is not the folder of a scan, {others[0]} is in it: choose another --keep"
            )
        lock = hold(folder / LOCK)
        if lock is None:
            raise DataError(f"{folder}: another process scans into it: wait for it, or choose another --keep")
        with lock:
            try:
                _begin(folder, asked, again)
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)
    except OSError as error:
        raise DataError(f"{folder} cannot be used: {error.strerror or error}") from error


def _begin(folder: Path, asked: dict[str, Any], again: bool) -> None:
    path = folder / BEGUN
    if path.exists() and not again:
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path} cannot be read ({error}): start over with --again") from error
        if there == asked:
            return
        keys = [key for key in asked if not isinstance(there, dict) or there.get(key) != asked[key]]
        what = ", ".join(dict.fromkeys(NAMES.get(key, key) for key in keys))
        raise DataError(
            f"{folder} holds the results of something else (other: {what}): choose another --keep, or replace "
            "them with --again"
        )
    # The settings are removed last: a half-cleared folder is still recognised.
    for name in (RESULT, SCORES, YARDSTICK, REFERENCE, DUPLICATES):
        (folder / name).unlink(missing_ok=True)
    for name in (PARTS, NEAR, SPOOL):
        shutil.rmtree(folder / name, ignore_errors=True)
    write_file(path, (json.dumps(asked, indent=1) + "\n").encode())
    for name in (PARTS, NEAR):
        (folder / name).mkdir(exist_ok=True)


def write_rows(path: Path, rows: pa.Table) -> None:
    """Write a part atomically. Raises DataError if the disk fails."""
    content = io.BytesIO()
    pq.write_table(rows, content, compression="zstd", compression_level=1)
    write_file(path, content.getvalue())


def read_rows(path: Path, columns: list[str] | None = None) -> pa.Table | None:
    """The rows of a part; None when it is missing or damaged. Raises DataError when it cannot be read."""
    try:
        return pq.read_table(path, columns=columns, memory_map=False, partitioning=None)
    except (FileNotFoundError, pa.ArrowException):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
