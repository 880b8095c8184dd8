"""A child process in a group of its own: fed from memory, its output cut or kept in a log, ended in time."""

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

TAIL = 2000  # bytes of the output that are kept
PIPE = 1 << 20  # bytes that a pipe holds at most (pipe(7))
LOOK = 0.02  # seconds between two looks
LOW = 10  # priority of what is not urgent


@dataclass(frozen=True)
class Result:
    """How a child process ended. code: negative for a signal, None where it took too long and was killed. tail: the end
    of its output, where that has no log."""

    code: int | None
    tail: str = ""


class ChildProcess:
    """Starts `words` with `given` as standard input. Raises OSError or ValueError when it cannot be started.

    seconds: that it may take. log: a file that its output is added to. Without one the output is read as it comes: a
    process that reads nothing, or writes for ever, blocks nobody and fills nothing.
    """

    def __init__(
        self,
        words: Sequence[str],
        seconds: float = float("inf"),
        given: bytes = b"",
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
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
        """How it ended; None while it runs. Whatever it started ends with it."""
        if self._result is None:
            self._read()
            ended = self._ended()
            if ended or time.monotonic() >= self._until:
                self._result = self._finish(ended)
        return self._result

    def wait(self) -> Result:
        """How it ended, when it has."""
        while (result := self.poll()) is None:
            time.sleep(LOOK)
        return result

    def kill(self) -> None:
        """End the whole group; `wait` tells when it has ended. Any thread may do so."""
        # Before the process is reaped: until then its number is nobody else's.
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _ended(self) -> bool:
        """Whether the process itself has ended; it is not reaped."""
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
        """Take what there is of the output, but no more than a pipe holds: who left the group may write for ever."""
        if self._output is not None:
            with suppress(BlockingIOError):
                self._tail = (self._tail + os.read(self._output.fileno(), PIPE))[-TAIL:]


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
