"""A short-lived process that cannot do harm: in a group of its own, fed from memory, its output cut, ended in time."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

TAIL = 2000  # bytes of the output that are kept
LAST_PIECES = 16  # of 64 KiB, that may be left in a pipe; who left the group may write for ever


class Child:
    """Starts `words` with `given` as standard input. Raises OSError or ValueError when it cannot be started.

    tail: the end of what it has put out. Input comes from memory and output is read as it comes, so that a process that
    reads nothing, or writes for ever, blocks nobody and fills nothing.
    """

    def __init__(self, words: Sequence[str], given: bytes, environment: Mapping[str, str]) -> None:
        self._tail = b""
        source = os.memfd_create("hook", os.MFD_CLOEXEC)
        try:
            with open(source, "wb", closefd=False) as file:
                file.write(given)
            os.lseek(source, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                words, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True, bufsize=0,
            )  # fmt: skip
        finally:
            os.close(source)

    @property
    def tail(self) -> str:
        return self._tail.decode(errors="replace").strip()

    def wait(self, timeout: float) -> int | None:
        """The exit code, negative for a signal; None when it had to be ended. Whatever it started ends with it."""
        until = time.monotonic() + timeout
        output = self._process.stdout
        assert output is not None
        with output:
            os.set_blocking(output.fileno(), False)
            ended = self._ended()
            while not ended and (left := until - time.monotonic()) > 0:
                if select.select([output], [], [], min(left, 0.05))[0] and not self._read():
                    time.sleep(min(left, 0.01))  # it has closed its output and runs on
                ended = self._ended()
            self.kill()
            self._process.wait()
            for _ in range(LAST_PIECES):
                self._read()
        return self._process.returncode if ended else None

    def kill(self) -> None:
        """End the whole group. Before the first one is waited for: until then its number is nobody else's."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _ended(self) -> bool:
        """Whether the process itself has ended; it is not waited for."""
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _read(self) -> bool:
        """Take what there is of the output; whether there was any."""
        output = self._process.stdout
        assert output is not None
        with suppress(BlockingIOError):
            if piece := os.read(output.fileno(), 65536):
                self._tail = (self._tail + piece)[-TAIL:]
                return True
        return False
