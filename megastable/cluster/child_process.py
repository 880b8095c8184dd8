"""Runs a child process in its own group: input from memory, output capped or logged, killed after a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from megastable.run.directory import RunDirectory

TAIL = 2000  # bytes of output kept by default
PIPE = 1 << 20  # capacity of a pipe in bytes (pipe(7))
LOOK = 0.02  # seconds between polls
LOW = 10  # nice value of work that is not urgent


@dataclass(frozen=True)
class Result:
    """How a child process ended. code: negative for a signal, None if it timed out and was killed. tail: the end of its
    output, if that is not logged."""

    code: int | None
    tail: str = ""


class ChildProcess:
    """Starts `words` with `given` as standard input. Raises OSError or ValueError when it cannot be started.

    seconds: allowed. log: a file that its output is added to. Without one the output is drained as it comes, so a
    process that never reads or never stops writing neither blocks us nor fills a disk; kept: how many bytes of its end
    the result has.
    """

    def __init__(
        self,
        words: Sequence[str],
        seconds: float = float("inf"),
        given: bytes = b"",
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        kept: int = TAIL,
    ) -> None:
        self._kept = kept
        self._until = time.monotonic() + seconds
        self._tail = b""
        self._result: Result | None = None
        with ExitStack() as stack:
            source = stack.enter_context(open(os.memfd_create("given", os.MFD_CLOEXEC), "w+b"))
            source.write(given)
            source.seek(0)
            output = subprocess.PIPE if log is None else stack.enter_context(log.open("ab"))
            self._process = subprocess.Popen(
                words, stdin=source, stdout=output, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True, bufsize=0,
            )  # fmt: skip
        self._output = self._process.stdout
        if self._output is not None:
            os.set_blocking(self._output.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> Result | None:
        """The result; None while it runs. Kills whatever the process left in its group."""
        if self._result is None:
            self._read()
            ended = self._ended()
            if ended or time.monotonic() >= self._until:
                self._result = self._finish(ended)
        return self._result

    def wait(self) -> Result:
        """Wait for the end and return the result."""
        while (result := self.poll()) is None:
            time.sleep(LOOK)
        return result

    def kill(self) -> None:
        """Kill the whole group; `wait` reports the end. Callable from any thread."""
        # Before the process is reaped: until then its pid cannot be reused.
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _ended(self) -> bool:
        """Whether the process has ended, without reaping it."""
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _finish(self, ended: bool) -> Result:
        self.kill()
        self._process.wait()
        self._read()
        if self._output is not None:
            self._output.close()
        tail = self._tail.decode(errors="replace").strip()
        return Result(self._process.returncode if ended else None, tail)

    def _read(self) -> None:
        """Read the available output, at most one pipe's worth: a process that left the group may write for ever."""
        if self._output is not None:
            with suppress(BlockingIOError):
                self._tail = (self._tail + os.read(self._output.fileno(), PIPE))[-self._kept :]


def background(
    run: RunDirectory, log: Path, module: str, *arguments: str, seconds: float = float("inf")
) -> ChildProcess:
    """Start a module of ours beside a run, at low priority. Raises OSError."""
    run.logs.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = ChildProcess(
        [sys.executable, "-m", module, *arguments], seconds, environment=environment, log=log
    )
    with suppress(OSError):  # it has ended already
        os.setpriority(os.PRIO_PROCESS, started.pid, LOW)
    return started
