"""An attempt on this host: starts its processes, finds them again by a mark in their arguments, polls and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil

from megastable.base.errors import ConfigError
from megastable.run.directory import RunDirectory
from megastable.run.rank_ipc import FLAG, log_of, mark

STOPPED = "stopped by a signal"  # of a rank's state
SCAN = 2.0  # seconds between two scans of all processes of the host


@dataclass(frozen=True)
class Fate:
    """How a process ended: by exit code or signal; neither if unknown. host: where it ran."""

    code: int | None = None
    signal: int | None = None
    host: str = ""


class KernelView(NamedTuple):
    """What the kernel says of a process; host: None = this one."""

    host: str | None
    text: str


class LocalAttempt:
    """One start of the launcher, on this host; also one that an earlier supervisor or agent started (`found`).

    code: the launcher's exit code, once it has ended, if we started it. fates: how ranks of this host ended, by rank.
    """

    def __init__(
        self, run: RunDirectory, number: int, launcher: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.run, self.number, self._launcher = run, number, launcher
        self.host = socket.gethostname()
        self.names: Sequence[str] = (self.host,)
        self._ranks: dict[int, int] = {}  # by process
        self._scanned = -SCAN
        self._others = False
        self.fates: dict[int, Fate] = {}
        self.gone: dict[str, str] = {}  # this host is here
        self.code: int | None = None

    @classmethod
    def start(
        cls,
        run: RunDirectory,
        number: int,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> LocalAttempt:
        """Start `command`. Its output goes to a file, so that it outlives this process. environment: instead of ours.
        Raises ConfigError."""
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                launcher = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True, env=environment,
                )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"{command[0]} could not be started: {error}") from None
        return cls(run, number, launcher)

    @classmethod
    def found(cls, run: RunDirectory) -> LocalAttempt | None:
        """The newest attempt that runs here already; older ones are killed."""
        alive = alive_here(run)
        for number in alive[:-1]:
            cls(run, number).end()
        return cls(run, alive[-1]) if alive else None

    def look(self) -> bool:
        """Whether anything of it runs here. Poll often: how a rank ended is known only until its parent reaps it."""
        if self._launcher is not None:
            self.code = self._launcher.poll()
        for pid, rank in self._ranks.items():
            if rank not in self.fates and (fate := _fate(pid)) is not None:
                self.fates[rank] = replace(fate, host=self.host)
        running = self._launcher is not None and self.code is None
        if not running or time.monotonic() - self._scanned >= SCAN:
            self._scan()
        return running or self._others

    def _scan(self) -> dict[int, psutil.Process]:
        """Scan the arguments of every process of the host; too slow for every poll. The ranks found."""
        processes = self._processes()
        self._scanned, self._others = time.monotonic(), bool(processes)
        found = {rank: process for process, rank in _ranks(processes)}
        self._ranks |= {process.pid: rank for rank, process in found.items()}
        return found

    def witness(self) -> tuple[str, Path]:
        """This host, and the attempt's log."""
        return self.host, log_of(self.run, self.number)

    def end(self) -> None:
        """Kill everything at once: ranks stuck in a collective do not react to softer signals."""
        if self._launcher is not None:
            self.code = self._launcher.poll()  # after the kill it would only say so
        for _ in range(100):
            processes = self._processes()
            if self._launcher is not None and self._launcher.poll() is None:
                _kill_group(self._launcher.pid)
            for process in processes:
                _kill_group(process.pid)
            if not processes:
                break
            time.sleep(0.1)
        if self._launcher is not None:
            self._launcher.wait()

    def states(self) -> dict[int, KernelView]:
        """The kernel's view of the ranks running here, by rank."""
        return {rank: KernelView(None, _describe(process)) for rank, process in self._scan().items()}

    def _processes(self) -> list[psutil.Process]:
        return [process for process, number in _marked(self.run) if number == self.number]


def alive_here(run: RunDirectory) -> list[int]:
    """The attempts of which processes run on this host, the oldest first."""
    return sorted({number for _, number in _marked(run)})


def _marked(run: RunDirectory) -> Iterator[tuple[psutil.Process, int]]:
    """Processes of this host whose arguments carry the mark of an attempt of `run`."""
    where = mark(run, 0).partition("@")[2]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            for argument in process.cmdline():  # empty for a zombie
                number, at, rest = argument.removeprefix(f"{FLAG}=").partition("@")
                marked = argument.startswith(f"{FLAG}=") and at and number.isdecimal() and rest == where
                # Other users can write a mark into arguments of theirs.
                if marked and process.uids().real == os.getuid():
                    yield process, int(number)


def _ranks(processes: Sequence[psutil.Process]) -> Iterator[tuple[psutil.Process, int]]:
    """The ranks among them, with their numbers: no launchers, no forks of a rank."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if any(argument.startswith("--local_rank") for argument in process.cmdline()):
                found[process.pid] = process, int(process.environ()["RANK"]), process.ppid()
    return ((process, rank) for process, rank, parent in found.values() if parent not in found)


def _kill_group(pid: int) -> None:
    """Kill a group, with its children that carry no mark, such as ssh to other hosts."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if (group := os.getpgid(pid)) != os.getpgrp():
            os.killpg(group, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def _describe(process: psutil.Process) -> str:
    """The kernel's view of a process."""
    try:
        state = process.status()
        return f"process {process.pid}, {STOPPED if state == psutil.STATUS_STOPPED else state}"
    except psutil.Error:
        return f"process {process.pid}, gone"


def _fate(pid: int) -> Fate | None:
    """How process `pid` ended, while it is a zombie: field 52 of /proc/PID/stat (proc(5))."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Fate()  # reaped: unknown
    if fields[0] not in "ZX":
        return None
    status = int(fields[49])
    if os.WIFSIGNALED(status):
        return Fate(signal=os.WTERMSIG(status))
    return Fate(code=os.WEXITSTATUS(status))
