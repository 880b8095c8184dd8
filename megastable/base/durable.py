"""Files that survive a crash: each is complete or absent, and on disk when the call returns. Lines that are appended to
the journal or a ledger are whole or moved aside."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from megastable.base.errors import DataError
from megastable_guard import durable_files
from megastable_guard.durable_files import is_whole_line

# The guard writes run directories, too.
lock_file, sync_directory = durable_files.lock_file, durable_files.sync_directory
write_file = durable_files.write_file


def sync_file(path: Path) -> None:
    """Make the content of a file survive a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


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


def append_line(path: Path, line: str) -> None:
    """As `durable_files.append_line`. Raises DataError."""
    try:
        durable_files.append_line(path, line)
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
    if not last_line or is_whole_line(last_line):
        return file_content, b""
    return file_content[:end_of_lines], last_line
