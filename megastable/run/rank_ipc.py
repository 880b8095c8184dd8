"""Defines the messages between ranks and supervisor: files of the run directory, and heartbeats (wire.py)."""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from megastable.run.directory import RunDirectory

# What a rank reports when another one is gone; and after a timeout, which may also be its own fault.
LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|closed by peer|remote process exited|socket closed",
    re.IGNORECASE,
)
BEREFT = re.compile(f"{LOST.pattern}|DistBackendError|socket timeout|timed out|timeout", re.IGNORECASE)


HOST = "MEGASTABLE_HOST"  # a variable of ranks that an agent started: their host's name in the host file
FLAG = "--supervised"  # the argument of a rank that holds its mark


OTHERS = 2.0  # seconds, at least, between two looks at control.json; not of rank 0


def pause_of(world: int) -> float:
    """Seconds between two looks of a rank other than 0 at control.json: many ranks must not load the file system."""
    return max(OTHERS, world / 500)


class Control(BaseModel):
    """control.json: what the supervisor wants of all ranks. dump: how many stack dumps it has requested. again: why
    they are to stop, if the next attempt begins at once."""

    model_config = ConfigDict(extra="ignore")

    attempt: int
    stop: bool = False
    dump: int = 0
    again: str = ""


class LastWords(BaseModel):
    """logs/attempt-N/rank-R.json: the error that ended a rank. where: the innermost line of our code; trace: the whole
    stack, if it is not in the log; alone: other ranks may have continued."""

    model_config = ConfigDict(extra="ignore")

    rank: int
    host: str
    pid: int
    time: float
    step: int | None
    cursor: int | None
    code: int
    error: str
    where: str
    trace: str = ""
    alone: bool


class Progress(BaseModel):
    """progress.json, from rank 0: where the run stands. phase: starting, step, evaluate, checkpoint, rewind or ended.

    step: steps done; cursor: the next data position; tokens: of the steps done. The others are of the last step: None
    before it; "nan" or "inf" in the file if not finite. That is `measured_step`, which is not `step` while its outcome
    is open and after a rewind; measured_cursor: the data position after it. stepped: when this process ended it, unix
    seconds.
    """

    model_config = ConfigDict(extra="ignore")

    attempt: int | None = None
    pid: int
    host: str
    time: float
    phase: str
    world: int
    steps: int
    step: int | None = None
    cursor: int | None = None
    tokens: int | None = None
    measured_step: int | None = None
    measured_cursor: int | None = None
    stepped: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    applied: bool | None = None


class WorkBlock(BaseModel):
    """Means over the steps of a block, the `block`-th ten of the run. [seconds]

    step: of the whole step; own: of what the rank does itself, without waits for others; parts: of that, in the order
    of `activity.OWN`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    block: int
    step: float
    own: float
    parts: Sequence[float]


class Beat(BaseModel):
    """A heartbeat of a rank, over the network (wire.py). activity: what it does (base/activity.py), for `lasted`
    seconds; step: steps done; entered: collectives entered, by process group; time: by its own clock; work: what is
    new."""

    model_config = ConfigDict(extra="ignore")

    time: float
    activity: str
    lasted: float
    step: int | None = None
    entered: dict[str, int] = {}
    work: Sequence[WorkBlock] = ()


def host_name() -> str:
    """This host's name in the host file; without an agent its own. Two hosts may give themselves the same."""
    return os.environ.get(HOST) or socket.gethostname()


def make_mark(run: RunDirectory, attempt: int) -> str:
    """An argument of an attempt's processes, by which they are found again."""
    return f"{attempt}@{run.root.resolve()}"


def attempt_of(mark: str | None) -> int | None:
    """The attempt number in a mark."""
    return None if mark is None else int(mark.partition("@")[0])


def run_of(mark: str) -> Path:
    """The run directory in a mark."""
    return Path(mark.partition("@")[2])


def folder_of(run: RunDirectory, attempt: int) -> Path:
    """The folder for last words and stacks of an attempt's ranks; its output is beside it, as NAME.log."""
    return run.logs / f"attempt-{attempt:04d}"


def log_of(run: RunDirectory, attempt: int, host: str = "") -> Path:
    """The file with the output of an attempt's launcher and ranks; host: of another than the first one."""
    folder = folder_of(run, attempt)
    return folder.with_name(f"{folder.name}-{host}.log" if host else f"{folder.name}.log")


def parse_arguments(
    module: str, about: str | None, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Read the arguments of a process that the supervisor runs alongside a run (supervise/side_process.py).

    Returns:
        parent: the process that it ends with; run, recipe, overrides.
    """
    argument_parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    argument_parser.add_argument("--parent", type=int, default=os.getppid(), help="process that it ends with")
    argument_parser.add_argument("run", type=Path)
    argument_parser.add_argument("recipe")
    argument_parser.add_argument("overrides", nargs="*")
    return argument_parser.parse_intermixed_args(arguments)
