"""Files that survive a crash: complete or absent, and on disk when a call returns; lines that are whole or moved aside.
megastable writes its run directories by these, too."""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any


def sync_directory(directory: Path) -> None:
    """Make renames inside `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(path: Path, seconds: float = 1.0) -> IO[str] | None:
    """The file at `path`, locked for as long as it stays open; None when another process holds it for all of `seconds`.

    A process that only checks the lock (a status command) holds it for an instant. Raises OSError.
    """
    lock_file = path.open("a+")
    is_locked = False
    try:
        is_locked = _lock(lock_file, seconds)
    finally:
        if not is_locked:
            lock_file.close()
    return lock_file if is_locked else None


def _lock(file: IO[Any], seconds: float) -> bool:
    """Wait for other holders, but not forever for one that was stopped; whether it is locked. Raises OSError."""
    wait_until, pause = time.monotonic() + seconds, 0.01
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > wait_until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.1)  # each try is a message to the server of a shared file system


def write_file(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write a file under a temporary name, then rename it over an older one. mode: file permissions, None = by the
    umask. Raises OSError."""
    temporary_path = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary_path.open("wb") as temporary_file:
            if mode is not None:
                os.fchmod(temporary_file.fileno(), mode)
            temporary_file.write(content)
            temporary_file.flush()
            os.fsync(temporary_file.fileno())
        os.replace(temporary_path, path)
        sync_directory(path.parent)
    finally:
        with suppress(OSError):
            temporary_path.unlink(missing_ok=True)


PATIENCE = 10.0  # seconds to wait for another process's lock


def append_line(path: Path, line: str) -> None:
    """Append a line and wait until it is on disk. Raises OSError.

    A torn last line (from a crash) is first moved to NAME.torn, so that the new line does not run into it. A lock
    keeps two processes from writing at once.
    """
    is_new = not path.exists()
    with path.open("a+b") as line_file:
        if not _lock(line_file, PATIENCE):
            raise OSError(f"another process has held it for {PATIENCE:.0f} s")
        _mend(path, line_file)
        line_file.write(line.encode() + b"\n")
        line_file.flush()
        os.fsync(line_file.fileno())
    if is_new:
        sync_directory(path.parent)


def _mend(path: Path, file: IO[bytes]) -> None:
    """Complete or move the torn last line of a file that is open for reading and appending."""
    file_size = file.seek(0, os.SEEK_END)
    # Our lines are short: the last megabyte holds the tail, without reading the whole file.
    file.seek(max(0, file_size - (1 << 20)))
    last_line = file.read().rsplit(b"\n", 1)[-1]
    if not last_line:
        return
    if is_whole_line(last_line):
        file.write(b"\n")
        return
    with path.with_name(path.name + ".torn").open("ab") as torn_file:
        torn_file.write(last_line + b"\n")
        torn_file.flush()
        os.fsync(torn_file.fileno())
    file.truncate(file_size - len(last_line))


def is_whole_line(tail: bytes) -> bool:
    """Whether it is JSON: what a crash has torn is not."""
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        return False
    return True
