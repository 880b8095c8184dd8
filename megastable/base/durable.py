"""Atomic, durable file writes: a file is complete or absent, and on disk when the call returns."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from megastable.base.errors import DataError


def sync_directory(directory: Path) -> None:
    """Make renames inside `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hold(path: Path, seconds: float = 1.0) -> IO[str] | None:
    """The file at `path`, locked for as long as it stays open; None when another process holds it for all of `seconds`.

    A process that only checks the lock (a status command) holds it for an instant. Raises OSError.
    """
    until = time.monotonic() + seconds
    file = path.open("a+")
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > until:
                file.close()
                return None
            time.sleep(0.05)
        except OSError:
            file.close()
            raise


def write_output(path: Path, text: str) -> None:
    """Write a tool's output: a regular file atomically, anything else (a pipe, a device) directly.

    A symbolic link stays and its target is written. Raises DataError.
    """
    try:
        # /dev/stdout may be a regular file: a rename would replace the device for every process.
        if path.absolute().parts[1:2] in (("dev",), ("proc",)) or (path.exists() and not path.is_file()):
            with path.open("a", encoding="utf-8") as stream:
                stream.write(text)
        else:
            write_file(path.resolve(), text.encode())
    except BrokenPipeError:
        raise  # the reader has closed the pipe
    except OSError as error:
        raise DataError(f"{path} could not be written: {error.strerror or error}") from None


def write_file(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write a file under a temporary name, then rename it over an older one. mode: file permissions, None = by the
    umask. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
