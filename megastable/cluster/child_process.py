"""Runs child processes: killed after a time limit, with their group; also looks at what may hang, from a child.

A process that waits for a stalled file system cannot be killed, and a thread that does keeps its process, and the pipes
to whoever waits for it, open. So the child of a `TimedProbe` holds none of our files and is left behind; it ends when
the file system answers. Standard library only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAIL = 2000  # bytes of output kept by default
PIPE = 1 << 20  # capacity of a pipe in bytes (pipe(7))
LOOK = 0.02  # seconds between polls
LOW = 10  # nice value of work that is not urgent


@dataclass(frozen=True)
class ChildResult:
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
        self._result: ChildResult | None = None
        with ExitStack() as exit_stack:
            input_file = exit_stack.enter_context(open(os.memfd_create("given", os.MFD_CLOEXEC), "w+b"))
            input_file.write(given)
            input_file.seek(0)
            output = subprocess.PIPE if log is None else exit_stack.enter_context(log.open("ab"))
            self._process = subprocess.Popen(
                words, stdin=input_file, stdout=output, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True, bufsize=0,
            )  # fmt: skip
        self._output = self._process.stdout
        if self._output is not None:
            os.set_blocking(self._output.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> ChildResult | None:
        """The result; None while it runs. Kills whatever the process left in its group."""
        if self._result is not None:
            return self._result
        self._read()
        try:  # without reaping it
            has_ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            has_ended = True
        if has_ended or time.monotonic() >= self._until:
            self.kill()
            self._process.wait()
            self._read()
            if self._output is not None:
                self._output.close()
            output_tail = self._tail.decode(errors="replace").strip()
            self._result = ChildResult(self._process.returncode if has_ended else None, output_tail)
        return self._result

    def wait(self) -> ChildResult:
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

    def _read(self) -> None:
        """Read the available output, at most one pipe's worth: a process that left the group may write for ever."""
        if self._output is not None:
            with suppress(BlockingIOError):
                self._tail = (self._tail + os.read(self._output.fileno(), PIPE))[-self._kept :]


def start_in_background(
    log: Path, module: str, *arguments: str, seconds: float = float("inf")
) -> ChildProcess:
    """Start a module of ours alongside a run, at low priority. Raises OSError."""
    log.parent.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", module, *arguments]
    child_process = ChildProcess(words, seconds, environment=environment, log=log)
    with suppress(OSError):  # it has ended already
        os.setpriority(os.PRIO_PROCESS, child_process.pid, LOW)
    return child_process


KILL = 1.0  # seconds for a killed process to end: one that waits for a dead device or disk never does


class TimedProbe:
    """Starts `look` at once. Its answer must be JSON. No other thread of ours runs in the child: `look` must not need
    one, or its locks."""

    def __init__(self, look: Callable[[], Any], seconds: float) -> None:
        self._until, self._seconds = time.monotonic() + seconds, seconds
        self._read, write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _answer(look, write_end)
        os.close(write_end)

    def read_answer(self) -> tuple[Any, str | None]:
        """(answer, None), or (None, why there is none). Call once."""
        content, poll = b"", select.poll()  # unlike select.select, it takes descriptors of 1,024 and above
        poll.register(self._read, select.POLLIN)
        try:
            while poll.poll(max(0.0, self._until - time.monotonic()) * 1000):
                content_part = os.read(self._read, 1 << 16)
                if not content_part:
                    os.waitpid(self._pid, 0)
                    try:
                        answer_fields = json.loads(content)
                    except ValueError:
                        return None, "the probe was killed"
                    return answer_fields.get("answer"), answer_fields.get("why")
                content += content_part
        finally:
            os.close(self._read)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, os.WNOHANG)
        return None, f"no answer within {self._seconds:.0f} s"


def _answer(look: Callable[[], Any], write: int) -> None:
    """The child: answer and end, without running any of the caller's clean-up."""
    try:
        # Whoever waits for the end of our output must not wait for this child.
        null_device = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null_device, stream)
        file_limit = os.sysconf("SC_OPEN_MAX")
        os.closerange(3, write)
        os.closerange(write + 1, min(file_limit, 1 << 16))
        try:
            answer_fields = {"answer": look()}
        except Exception as error:
            answer_fields = {"why": _reason(error)}
        content = json.dumps(answer_fields).encode()
        while content:
            content = content[os.write(write, content) :]
    finally:
        os._exit(0)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def ask_module(what: str, module: str, *arguments: str, seconds: float) -> dict[str, Any] | str:
    """The JSON object that a module of ours prints last, or why there is none. It ends with whoever asked for it."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    end_time, parent_pid = time.monotonic() + seconds, os.getppid()
    while True:
        try:
            output, errors = process.communicate(timeout=min(1.0, max(0.0, end_time - time.monotonic())))
            return dict(json.loads(output.splitlines()[-1]))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end_time or os.getppid() != parent_pid:
                os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(KILL)
                return f"{what} did not end within {seconds:.0f} s"
        except (ValueError, IndexError, TypeError):
            return f"{what} ended with code {process.returncode}: {errors.strip()[-300:]}"
