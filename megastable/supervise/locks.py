"""The locks of a run directory: they tell which processes are at work there, and keep others out."""

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
    """Keep every other supervisor out. Raises ConfigError when there is one."""
    path = run.root / SUPERVISOR
    held = lock(path)
    try:
        if held is None:
            raise ConfigError(
                f"run.dir={run.root}: another supervisor watches this run: `python launch/supervise.py status "
                f"{run.root}` tells which, and how it stands"
            )
        held.truncate(0)
        held.write(json.dumps({"pid": os.getpid(), "host": host}))
        held.flush()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written to: {error}") from None
    with held:
        yield


def nobody_trains(run: RunDirectory) -> bool:
    """Whether no process trains here, on any host. Raises ConfigError when that cannot be told."""
    if (free := lock(run.root / TRAINING)) is None:
        return False
    free.close()
    return True


def wait_until_nobody_trains(run: RunDirectory, seconds: float, hurry: Callable[[], bool]) -> None:
    """Until no process of an attempt of before trains here: on other hosts they notice by themselves. hurry: whether to
    wait no more. Raises UnstableError when one still does after `seconds`."""
    until = time.monotonic() + seconds
    while not nobody_trains(run):
        if hurry():
            return
        if time.monotonic() > until:
            raise UnstableError(
                f"run.dir={run.root}: a process that this supervisor cannot reach still holds {run.root / TRAINING}: "
                "end it"
            )


def lock(path: Path) -> IO[str] | None:
    """The file, locked for as long as it stays open; None when another process holds it. Raises ConfigError."""
    try:
        return durable.hold(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be locked: {error}") from None


def is_held(path: Path) -> bool | None:
    """Whether somebody holds a lock. Tried for an instant; None = cannot be told."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False
