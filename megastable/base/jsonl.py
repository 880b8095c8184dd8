"""Append-only files of JSON lines that survive a crash: the journal and the skip ledger are kept in them."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import IO

from megastable.base.durable import sync_directory
from megastable.base.errors import DataError

PATIENCE = 10.0  # seconds that another process may take for its line


def append(path: Path, line: str) -> None:
    """Add a line and wait until it is on the disk. Raises DataError when that fails.

    A last line that a crash has torn is moved to NAME.torn first, so that it does not run into this one. A
    lock keeps two processes from writing at once.
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
    """(whole lines, torn rest) of a file; see `content`."""
    whole, torn = content(path)
    return whole.removesuffix(b"\n").split(b"\n") if whole else [], torn


def content(path: Path) -> tuple[bytes, bytes]:
    """(whole lines in one, torn rest) of a file; nothing when there is none. Raises DataError when it cannot be read.

    A last line without a newline that is valid JSON all the same counts as whole.
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
    """Wait for others that write, but not for one that was stopped in the middle. Raises OSError."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise OSError(f"another process has held it for {PATIENCE:.0f} s") from None
            time.sleep(0.01)


def _mend(path: Path, file: IO[bytes]) -> None:
    """Give the file, open for reading and appending, a last line that ends."""
    size = file.seek(0, os.SEEK_END)
    # A line of ours is short: the tail is found in the last megabyte without reading the whole file.
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
