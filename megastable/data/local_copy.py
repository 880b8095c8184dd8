"""Atomic creation of files and directories, for data commands."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from megastable.base import durable
from megastable.base.durable import sync_directory
from megastable.base.errors import DataError


def write_file(path: Path, content: bytes) -> None:
    """Write a file durably; an older one is replaced. Raises DataError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write_file(path, content)
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
    host, _, process = staging.name.rpartition(".tmp-")[2].rpartition("-")
    if host != socket.gethostname() or not process.isdigit():
        return False
    return int(process) == os.getpid() or not psutil.pid_exists(int(process))


def _put_in_place(staging: Path, output: Path) -> None:
    old = output.with_name(staging.name.replace(".tmp-", ".old-"))
    try:
        sync_directory(staging)
        if output.exists():
            os.replace(output, old)
        try:
            os.replace(staging, output)
        except OSError:
            with suppress(OSError):
                os.replace(old, output)
            raise
        sync_directory(output.parent)
    except OSError as error:
        raise DataError(f"{staging} cannot be renamed to {output}: {error.strerror}") from error
    shutil.rmtree(old, ignore_errors=True)
