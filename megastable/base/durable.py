"""Files that survive a crash: each is complete or absent, and on disk when the call returns. Lines that are appended to
the journal or a ledger are whole or moved aside."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from megastable.base.errors import DataError


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


def write_data_file(path: Path, content: bytes) -> None:
    """Write a file durably; an older one is replaced. Raises DataError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
    except OSError as error:
        raise DataError(f"{path} could not be written: {error.strerror}") from error


@contextmanager
def staged_directory(output: Path) -> Iterator[Path]:
    """A fresh directory beside `output` that replaces it when the block ends without an exception.

    An older `output` stays until the new one is complete. After an exception nothing of the new one remains; leftovers
    of a killed process of this host are removed by the next one. Raises DataError if the disk fails.
    """
    output = output.resolve()
    staging = staging_of(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(output)
        staging.mkdir()
    except OSError as error:
        raise DataError(f"{staging} cannot be made: {error.strerror}") from error
    try:
        yield staging
        _put_in_place(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def staging_of(output: Path) -> Path:
    """The temporary path at which this process writes `output`."""
    return output.with_name(f"{output.name}.tmp-{socket.gethostname()}-{os.getpid()}")


def remove_abandoned(output: Path) -> None:
    """Remove leftovers of killed processes of this host beside `output`, files or directories. Raises OSError."""
    for path in list(output.parent.iterdir()):
        if not path.name.startswith(f"{output.name}.tmp-") or not _is_abandoned(path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _is_abandoned(staging: Path) -> bool:
    host_name, _, process_id = staging.name.rpartition(".tmp-")[2].rpartition("-")
    if host_name != socket.gethostname() or not process_id.isdigit():
        return False
    return int(process_id) == os.getpid() or not psutil.pid_exists(int(process_id))


def _put_in_place(staging: Path, output: Path) -> None:
    old_output = output.with_name(staging.name.replace(".tmp-", ".old-"))
    try:
        sync_directory(staging)
        if output.exists():
            os.replace(output, old_output)
        try:
            os.replace(staging, output)
        except OSError:
            with suppress(OSError):
                os.replace(old_output, output)
            raise
        sync_directory(output.parent)
    except OSError as error:
        raise DataError(f"{staging} cannot be renamed to {output}: {error.strerror}") from error
    shutil.rmtree(old_output, ignore_errors=True)


RECENT = 3.0  # seconds: times of some file systems tick every second or two


def folder_stamp(folder: Path) -> int | None:
    """The time of a folder's last change, to compare with that of a later call. None while it is so recent that another
    change may get the same time: list it again then. Take it before the listing. Raises OSError."""
    changed_ns = folder.stat().st_mtime_ns
    return changed_ns if time.time() - changed_ns / 1e9 > RECENT else None


PATIENCE = 10.0  # seconds to wait for another process's lock


def append_line(path: Path, line: str) -> None:
    """Append a line and wait until it is on disk. Raises DataError on failure.

    A torn last line (from a crash) is first moved to NAME.torn, so that the new line does not run into it. A lock
    keeps two processes from writing at once.
    """
    try:
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
    except OSError as error:
        raise DataError(f"{path} could not be written: {error}") from error


def read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """(complete lines, torn rest) of a file; see `read_content`."""
    whole_content, torn_rest = read_content(path)
    return whole_content.removesuffix(b"\n").split(b"\n") if whole_content else [], torn_rest


def read_content(path: Path) -> tuple[bytes, bytes]:
    """(complete lines joined, torn rest) of a file; empty if it does not exist. Raises DataError if it cannot be read.

    A last line that lacks its newline but is valid JSON counts as complete.
    """
    try:
        file_content = path.read_bytes()
    except FileNotFoundError:
        return b"", b""
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    end_of_lines = file_content.rfind(b"\n") + 1
    last_line = file_content[end_of_lines:]
    if not last_line or _whole(last_line):
        return file_content, b""
    return file_content[:end_of_lines], last_line


def _mend(path: Path, file: IO[bytes]) -> None:
    """Complete or move the torn last line of a file that is open for reading and appending."""
    file_size = file.seek(0, os.SEEK_END)
    # Our lines are short: the last megabyte holds the tail, without reading the whole file.
    file.seek(max(0, file_size - (1 << 20)))
    last_line = file.read().rsplit(b"\n", 1)[-1]
    if not last_line:
        return
    if _whole(last_line):
        file.write(b"\n")
        return
    with path.with_name(path.name + ".torn").open("ab") as torn_file:
        torn_file.write(last_line + b"\n")
        torn_file.flush()
        os.fsync(torn_file.fileno())
    file.truncate(file_size - len(last_line))


def _whole(tail: bytes) -> bool:
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        return False
    return True
