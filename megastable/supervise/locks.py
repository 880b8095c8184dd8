"""Takes and tests the locks of a run directory, which show the processes at work and keep others out."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megastable.base import durable
from megastable.base.errors import ConfigError, UnstableError
from megastable.run.directory import RunDirectory

SUPERVISOR = ".supervisor.lock"
TRAINING = ".lock"  # rank 0 holds it (run/directory.py)


@contextmanager
def only_supervisor(run: RunDirectory, host: str) -> Iterator[None]:
    """Keep other supervisors out. Raises ConfigError if there is one."""
    lock_path = run.root / SUPERVISOR
    held_lock = take_lock(lock_path)
    try:
        if held_lock is None:
            raise ConfigError(
                f"run.dir={run.root}: another supervisor watches this run: `megastable status "
                f"{run.root}` tells which, and how it stands"
            )
        held_lock.truncate(0)
        held_lock.write(json.dumps({"pid": os.getpid(), "host": host}))
        held_lock.flush()
    except OSError as error:
        raise ConfigError(f"{lock_path} cannot be written to: {error}") from None
    with held_lock:
        yield


def nobody_trains(run: RunDirectory) -> bool:
    """Whether no process trains here, on any host. Raises ConfigError if that cannot be determined."""
    if (free_lock := take_lock(run.root / TRAINING)) is None:
        return False
    free_lock.close()
    return True


def nobody_works(run: RunDirectory) -> bool:
    """Whether no process trains here, and no supervisor is there that would start one. Raises ConfigError if that
    cannot be determined."""
    return not is_held(run.root / SUPERVISOR) and nobody_trains(run)


def wait_until_nobody_trains(run: RunDirectory, seconds: float, hurry: Callable[[], bool]) -> None:
    """Wait until no process of an earlier attempt trains here: those on other hosts end by themselves. hurry: whether
    to stop waiting. Raises UnstableError if one still trains after `seconds`."""
    end_time = time.monotonic() + seconds
    while not nobody_trains(run):
        if hurry():
            return
        if time.monotonic() > end_time:
            raise UnstableError(
                f"run.dir={run.root}: a process that this supervisor cannot reach still holds {run.root / TRAINING}: "
                "end it"
            )


def take_lock(path: Path) -> IO[str] | None:
    """The file, locked as long as it stays open; None if another process holds the lock. Raises ConfigError."""
    try:
        return durable.lock_file(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be locked: {error}") from None


def is_held(path: Path) -> bool | None:
    """Whether a process holds the lock, tested by taking it for an instant; None = cannot be determined."""
    try:
        with path.open("rb") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False
