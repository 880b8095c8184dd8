"""Calls a function in a forked child with a time limit, so that a stalled file system cannot hang the caller.

A process that waits for a stalled file system cannot be killed, and a thread that does keeps its process, and the pipes
to whoever waits for it, open. So the child holds none of our files and is left behind; it ends when the file system
answers. Standard library only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any


class TimedProbe:
    """Starts `look` at once. Its answer must be JSON. No other thread of ours runs in the child: `look` must not need
    one, or its locks."""

    def __init__(self, look: Callable[[], Any], seconds: float) -> None:
        self._until, self._seconds = time.monotonic() + seconds, seconds
        self._read, write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _answer(look, write)
        os.close(write)

    def result(self) -> tuple[Any, str | None]:
        """(answer, None), or (None, why there is none). Call once."""
        content = b""
        try:
            while select.select([self._read], [], [], max(0.0, self._until - time.monotonic()))[0]:
                part = os.read(self._read, 1 << 16)
                if not part:
                    os.waitpid(self._pid, 0)
                    return _parsed(content)
                content += part
        finally:
            os.close(self._read)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, os.WNOHANG)
        return None, f"no answer within {self._seconds:.0f} s"


def _answer(look: Callable[[], Any], write: int) -> None:
    """The child: answer and end, without running any of the caller's clean-up."""
    try:
        # Whoever waits for the end of our output must not wait for this child.
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        limit = os.sysconf("SC_OPEN_MAX")
        os.closerange(3, write)
        os.closerange(write + 1, min(limit, 1 << 16))
        try:
            told = {"answer": look()}
        except Exception as error:
            told = {"why": _reason(error)}
        content = json.dumps(told).encode()
        while content:
            content = content[os.write(write, content) :]
    finally:
        os._exit(0)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _parsed(content: bytes) -> tuple[Any, str | None]:
    try:
        told = json.loads(content)
    except ValueError:
        return None, "the probe was killed"
    return told.get("answer"), told.get("why")
