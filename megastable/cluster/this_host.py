"""This host alone: an attempt's processes, found again by a mark in their arguments, and its own state.

A driver that hangs holds up nobody: it is asked by a process of its own with a time limit (gpu_health.py), and after a
failure the thread that watches waits twice as long as before.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from megastable.base import free_memory
from megastable.base.errors import ConfigError
from megastable.base.process import STOPS, hold_stops, release_stops
from megastable.cluster.fleet import Attempt, Fate, Fleet, KernelView
from megastable.cluster.gpu_health import NO_DRIVER, read_gpus
from megastable.cluster.launcher import TrainingCommand, build_attempt_command
from megastable.run.directory import RunDirectory
from megastable.run.machine_state import HostReading, host_reading
from megastable.run.rank_ipc import FLAG, log_of, make_mark

STOPPED = "stopped by a signal"  # of a rank's state
SCAN = 2.0  # seconds between two scans of all processes of the host


class LocalAttempt:
    """One start of the launcher, on this host; also one that an earlier supervisor or agent started (`found`).

    code: the launcher's exit code, once it has ended, if we started it. fates: how ranks of this host ended, by rank.
    asked: whether a signal to the launcher, which never takes it, has asked for a stop.
    """

    def __init__(
        self, run: RunDirectory, number: int, launcher: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.run, self.number, self._launcher = run, number, launcher
        self.host = socket.gethostname()
        self.names: Sequence[str] = (self.host,)
        self._ranks: dict[int, int] = {}  # by process
        self._launchers = [] if launcher is None else [launcher.pid]
        self.asked = False
        self._scanned = -SCAN
        self._others = False
        self.fates: dict[int, Fate] = {}
        self.gone: dict[str, str] = {}  # this host is here
        self.code: int | None = None

    @classmethod
    def start_launcher(
        cls,
        run: RunDirectory,
        number: int,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> LocalAttempt:
        """Start `command`. Its output goes to a file, so that it outlives this process. environment: instead of ours.
        Raises ConfigError."""
        # The launcher inherits what is held: by itself it would kill each rank 30 seconds after a signal that asks for
        # a stop, saved or not. Ranks hold it until they can stop anyway.
        hold_stops()
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as log_file:
                launcher = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log_file, stderr=subprocess.STDOUT,
                    start_new_session=True, env=environment,
                )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"{command[0]} could not be started: {error}") from None
        finally:
            release_stops()
        return cls(run, number, launcher)

    @classmethod
    def find_running(cls, run: RunDirectory) -> LocalAttempt | None:
        """The newest attempt that runs here already; older ones are killed."""
        running_attempts = list_attempts_here(run)
        for attempt_number in running_attempts[:-1]:
            cls(run, attempt_number).kill_all()
        return cls(run, running_attempts[-1]) if running_attempts else None

    def poll_processes(self) -> bool:
        """Whether anything of it runs here. Poll often: how a rank ended is known only until its parent reaps it."""
        if self._launcher is not None:
            self.code = self._launcher.poll()
        for pid, rank in self._ranks.items():
            if rank not in self.fates and (rank_fate := _fate(pid)) is not None:
                self.fates[rank] = replace(rank_fate, host=self.host)
        self.asked = self.asked or any(map(_was_asked, self._launchers))
        launcher_runs = self._launcher is not None and self.code is None
        if not launcher_runs or time.monotonic() - self._scanned >= SCAN:
            self._scan()
        return launcher_runs or self._others

    def _scan(self) -> dict[int, psutil.Process]:
        """Scan the arguments of every process of the host; too slow for every poll. The ranks found."""
        processes = self._processes()
        self._scanned, self._others = time.monotonic(), bool(processes)
        process_by_rank = {rank: process for process, rank in _ranks(processes)}
        self._ranks |= {process.pid: rank for rank, process in process_by_rank.items()}
        self._launchers = [process.pid for process in processes if not _is_rank(process)]
        return process_by_rank

    def find_failed_log(self) -> tuple[str, Path]:
        return self.host, log_of(self.run, self.number)

    def kill_all(self) -> None:
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

    def read_kernel_views(self) -> dict[int, KernelView]:
        return {rank: KernelView(None, _describe(process)) for rank, process in self._scan().items()}

    def _processes(self) -> list[psutil.Process]:
        return [process for process, attempt_number in _marked(self.run) if attempt_number == self.number]


def list_attempts_here(run: RunDirectory) -> list[int]:
    """The attempts of which processes run on this host, the oldest first."""
    return sorted({attempt_number for _, attempt_number in _marked(run)})


def _marked(run: RunDirectory) -> Iterator[tuple[psutil.Process, int]]:
    """Processes of this host whose arguments carry the mark of an attempt of `run`."""
    own_mark = make_mark(run, 0).partition("@")[2]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            for argument in process.cmdline():  # empty for a zombie
                mark_match = re.fullmatch(rf"{re.escape(FLAG)}=(\d+)@{re.escape(own_mark)}", argument)
                # Other users can write a mark into arguments of theirs.
                if mark_match is not None and process.uids().real == os.getuid():
                    yield process, int(mark_match[1])


def _ranks(processes: Sequence[psutil.Process]) -> Iterator[tuple[psutil.Process, int]]:
    """The ranks among them, with their numbers: no launchers, no forks of a rank."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if _is_rank(process):
                found[process.pid] = process, int(process.environ()["RANK"]), process.ppid()
    return ((process, rank) for process, rank, parent in found.values() if parent not in found)


def _is_rank(process: psutil.Process) -> bool:
    """Or a fork of one; what has ended is none, as it is no launcher either."""
    with contextlib.suppress(psutil.Error):
        return any(argument.startswith("--local_rank") for argument in process.cmdline())
    return True


def _was_asked(pid: int) -> bool:
    """Whether a signal that asks for a stop waits for process `pid`, which holds it (proc(5): ShdPnd)."""
    with suppress(OSError):
        process_status = Path(f"/proc/{pid}/status").read_text()
        pending_mask = int(process_status.partition("ShdPnd:")[2].split()[0], 16)
        return any(pending_mask & 1 << (number - 1) for number in STOPS)
    return False


def _kill_group(pid: int) -> None:
    """Kill a group, with its children that carry no mark, such as ssh to other hosts."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if (process_group := os.getpgid(pid)) != os.getpgrp():
            os.killpg(process_group, signal.SIGKILL)
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
        stat_fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Fate()  # reaped: unknown
    if stat_fields[0] not in "ZX":
        return None
    exit_status = int(stat_fields[49])
    if os.WIFSIGNALED(exit_status):
        return Fate(signal=os.WTERMSIG(exit_status))
    return Fate(code=os.WEXITSTATUS(exit_status))


SECONDS = 15.0  # between two readings
LONGEST = 3600.0  # ... of GPUs, while they cannot be read


class HostWatch:
    """Of this host; begins with the first question."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._latest: HostReading | None = None
        self._thread: threading.Thread | None = None

    def latest_reading(self) -> HostReading | None:
        """The newest reading; None until there is one. Returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="host watch", daemon=True)
            self._thread.start()
        return self._latest

    def _follow(self) -> None:
        pause_event = threading.Event()
        unknown_reason, gpu_pause, seconds_left = "", self.seconds, 0.0
        while True:
            gpu_readings = None
            if seconds_left <= 0:
                try:
                    gpu_readings, read_problem = read_gpus()
                except (OSError, ValueError) as error:  # such as a /proc that is hidden from this user
                    read_problem = str(error)
                unknown_reason = "" if read_problem is None or NO_DRIVER in read_problem else read_problem
                gpu_pause = self.seconds if read_problem is None else min(LONGEST, 2 * gpu_pause)
                seconds_left = gpu_pause
            with suppress(OSError, ValueError):
                total_bytes, free_bytes = free_memory.total_bytes(), free_memory.free_bytes()
                load = os.getloadavg()[0]
                self._latest = host_reading(total_bytes, free_bytes, load, gpu_readings or [], unknown_reason)
            pause_event.wait(self.seconds)
            seconds_left -= self.seconds


class Here(Fleet):
    """This host alone, without an agent."""

    def __init__(self, run: RunDirectory, training: TrainingCommand) -> None:
        self.run, self.training = run, training
        self.names = [socket.gethostname()]
        self.watch = HostWatch()

    def find_running_attempt(self, names: Sequence[str]) -> Attempt | None:
        return LocalAttempt.find_running(self.run)

    def find_ended_attempt(self, number: int, names: Sequence[str]) -> Attempt:
        return LocalAttempt(self.run, number)

    def start_attempt(self, number: int, names: Sequence[str]) -> Attempt:
        launcher_words = build_attempt_command(self.run, number, self.training)
        return LocalAttempt.start_launcher(self.run, number, launcher_words, log_of(self.run, number))

    def latest_readings(self) -> Mapping[str, HostReading]:
        host_reading = self.watch.latest_reading()
        return {} if host_reading is None else {self.names[0]: host_reading}
