"""Append-only JSON-lines files that survive a crash, used for the journal and the skip ledger."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import IO

from megastable.base.durable import sync_directory
from megastable.base.errors import DataError

PATIENCE = 10.0  # seconds to wait for another process's lock


def append(path: Path, line: str) -> None:
    """Append a line and wait until it is on disk. Raises DataError on failure.

    A torn last line (from a crash) is first moved to NAME.torn, so that the new line does not run into it. A lock
    keeps two processes from writing at once.
    """
    try:
        new = not path.exists()
        with path.open("a+b") as file:
            _lock(file)
            _mend(path, file)
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_directory(path.parent)
    except OSError as error:
        raise DataError(f"{path} could not be written: {error}") from error


def read(path: Path) -> tuple[list[bytes], bytes]:
    """(complete lines, torn rest) of a file; see `content`."""
    whole, torn = content(path)
    return whole.removesuffix(b"\n").split(b"\n") if whole else [], torn


def content(path: Path) -> tuple[bytes, bytes]:
    """(complete lines joined, torn rest) of a file; empty if it does not exist. Raises DataError if it cannot be read.

    A last line that lacks its newline but is valid JSON counts as complete.
    """
    try:
        given = path.read_bytes()
    except FileNotFoundError:
        return b"", b""
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    ended = given.rfind(b"\n") + 1
    tail = given[ended:]
    return (given, b"") if not tail or _whole(tail) else (given[:ended], tail)


def _lock(file: IO[bytes]) -> None:
    """Wait for other writers, but not forever for one that was stopped while writing. Raises OSError."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise OSError(f"another process has held it for {PATIENCE:.0f} s") from None
            time.sleep(0.01)


def _mend(path: Path, file: IO[bytes]) -> None:
    """Complete or move the torn last line of a file that is open for reading and appending."""
    size = file.seek(0, os.SEEK_END)
    # Our lines are short: the last megabyte holds the tail, without reading the whole file.
    file.seek(max(0, size - (1 << 20)))
    tail = file.read().rsplit(b"\n", 1)[-1]
    if not tail:
        return
    if _whole(tail):
        file.write(b"\n")
        return
    with path.with_name(path.name + ".torn").open("ab") as torn:
        torn.write(tail + b"\n")
        torn.flush()
        os.fsync(torn.fileno())
    file.truncate(size - len(tail))


def _whole(tail: bytes) -> bool:
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        return False
    return True
