"""Asks a forked child, or a module, with a time limit: a file system or a driver that stalls cannot hang the caller.

A process that waits for a stalled file system cannot be killed, and a thread that does keeps its process, and the pipes
to whoever waits for it, open. So the child holds none of our files and is left behind; it ends when the file system
answers. Standard library only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

KILL = 1.0  # seconds for a killed process to end: one that waits for a dead device or disk never does


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


def answer_of(what: str, module: str, *arguments: str, seconds: float) -> dict[str, Any] | str:
    """The JSON object that a module of ours prints last, or why there is none. It ends with whoever asked for it."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    until, parent = time.monotonic() + seconds, os.getppid()
    while True:
        try:
            output, errors = process.communicate(timeout=min(1.0, max(0.0, until - time.monotonic())))
            return dict(json.loads(output.splitlines()[-1]))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= until or os.getppid() != parent:
                os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(KILL)
                return f"{what} did not end within {seconds:.0f} s"
        except (ValueError, IndexError, TypeError):
            return f"{what} ended with code {process.returncode}: {errors.strip()[-300:]}"
