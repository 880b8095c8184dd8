"""A command in a process group of its own: fed from memory, its output cut or kept in a log, ended in time."""

from __future__ import annotations

import os
import select
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
LAST_PIECES = 16  # of 64 KiB, that may be left in a pipe; who left the group may write for ever
LOW = 10  # priority of what is not urgent


@dataclass(frozen=True)
class Result:
    """How a command ended. code: negative for a signal, None where it took too long and was killed. tail: the end of
    its output, where that has no log."""

    code: int | None
    tail: str = ""


class Command:
    """Starts `words` with `given` as standard input. Raises OSError or ValueError when it cannot be started.

    seconds: that it may take. log: a file that its output is added to. Without one the output is read as it comes: a
    command that reads nothing, or writes for ever, blocks nobody and fills nothing.
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
            ended = self._ended()
            if ended or time.monotonic() >= self._until:
                self._result = self._finish(ended)
            else:
                self._read()
        return self._result

    def wait(self) -> Result:
        """How it ended, when it has."""
        while (result := self.poll()) is None:
            left = max(0.0, min(0.05, self._until - time.monotonic()))
            if self._output is None:
                time.sleep(left)
            elif select.select([self._output], [], [], left)[0] and not self._read():
                time.sleep(min(left, 0.01))  # it has closed its output and runs on
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
        if self._output is not None:
            with self._output:
                for _ in range(LAST_PIECES):
                    self._read()
        tail = self._tail.decode(errors="replace").strip()
        return Result(self._process.returncode if ended else None, tail)

    def _read(self) -> bool:
        """Take what there is of the output; whether there was any."""
        with suppress(BlockingIOError):
            if self._output is not None and (piece := os.read(self._output.fileno(), 65536)):
                self._tail = (self._tail + piece)[-TAIL:]
                return True
        return False


def background(
    run: RunDirectory, log: Path, module: str, *arguments: str, seconds: float = float("inf")
) -> Command:
    """Start a module of ours beside a run, at low priority. Raises OSError."""
    run.logs.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = Command([sys.executable, "-m", module, *arguments], seconds, environment=environment, log=log)
    with suppress(OSError):  # it has ended already
        os.setpriority(os.PRIO_PROCESS, started.pid, LOW)
    return started
