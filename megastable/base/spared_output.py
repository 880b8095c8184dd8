"""Standard output and error of a process that must outlive whoever reads them.

The output of a run goes to a terminal, a pipe or a file. The terminal is closed, the reader of the pipe ends or does
not read, the disk is full: then a `print` raises or waits for ever, in whatever line of whatever library it is (rich
even turns a broken pipe into SystemExit). The training needs none of them: what cannot be written is lost, and counted.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import select
import stat
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

PATIENCE = 1.0  # seconds to wait for a reader that is slow, ...
EARNED = 1 / 600  # ... of which a second passed gives back so many
PIECE = select.PIPE_BUF  # bytes that a pipe which is ready takes at once (pipe(7))


class _Spared(io.FileIO):
    """A descriptor that takes everything: what its reader cannot take is lost, and its number of bytes told later."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._target = _without_waiting(descriptor)
        self._poll = select.poll()
        self._poll.register(self._target, select.POLLOUT)
        self._patience, self._seen = PATIENCE, time.monotonic()
        self._lost = 0

    def write(self, data: Buffer, /) -> int:
        content = memoryview(data).cast("B")
        if self._lost:
            note = (
                f"\n[{self._lost} bytes of output were lost here: their reader did not take them]\n".encode()
            )
            if self._put(memoryview(note)) == len(note):
                self._lost = 0
        if not self._lost:
            self._lost = len(content) - self._put(content)
        else:
            self._lost += len(content)
        return len(content)

    def _put(self, content: memoryview) -> int:
        """Write as much as the reader takes. Returns the number of bytes."""
        done = 0
        while done < len(content):
            try:
                if not self._ready():
                    break
                done += os.write(self._target, content[done : done + PIECE])
            except BlockingIOError:
                continue  # another process was faster
            except OSError:
                break
        return done

    def _ready(self) -> bool:
        """Whether a piece can be written now, or before the patience with this reader is over."""
        now = time.monotonic()
        self._patience = min(PATIENCE, self._patience + EARNED * (now - self._seen))
        ready = bool(self._poll.poll(1000 * self._patience))
        self._seen = time.monotonic()
        self._patience = max(0.0, self._patience - (self._seen - now))
        return ready


def _without_waiting(descriptor: int) -> int:
    """The same pipe or terminal, opened once more so that a write never waits: the flag on `descriptor` itself would
    hold for all processes that share it. What cannot be opened so (a socket, a terminal of another user) stays as it
    is, as does a file, which would be written from its beginning."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) or os.isatty(descriptor):
        with suppress(OSError):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor


def spare_output() -> None:
    """From now on this process loses output that nobody takes, instead of failing or waiting. Not where another one has
    replaced the streams, as tests do."""
    _fill_closed()
    old = sys.stdout, sys.stderr
    if sys.stdout is sys.__stdout__:
        sys.stdout = _spared(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _spared(sys.stderr, 2)
    # Libraries that are imported already, as DeepSpeed, log to the streams that they have seen then.
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for handler in [handler for one in loggers for handler in getattr(one, "handlers", ())]:
        if (
            isinstance(handler, logging.StreamHandler)
            and handler.stream is not None
            and handler.stream in old
        ):
            handler.setStream(sys.stdout if handler.stream is old[0] else sys.stderr)


def _fill_closed() -> None:
    """Open what was closed when this process started: the next file to be opened would get its number, and what a C
    library prints would land there."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(descriptor, True)


def _spared(stream: TextIO | None, descriptor: int) -> io.TextIOWrapper:
    if stream is not None:
        with suppress(OSError):
            stream.flush()
    raw = io.BufferedWriter(_Spared(descriptor))
    encoding = "utf-8" if stream is None else stream.encoding
    return io.TextIOWrapper(raw, encoding, "backslashreplace", line_buffering=True)
