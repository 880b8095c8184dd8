"""What every process of ours does first: hold signals that ask it to stop, and make its output one that outlives
whoever reads it. And where megastable lies, and who runs it. It imports nothing heavy.

The output of a run goes to a terminal, a pipe or a file. The terminal is closed, the reader of the pipe ends or does
not read, the disk is full: then a `print` raises or waits for ever, in whatever line of whatever library it is (rich
even turns a broken pipe into SystemExit). The training needs none of them: what cannot be written is lost, and counted.
"""

from __future__ import annotations

import errno
import getpass
import io
import logging
import os
import select
import signal
import stat
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

STOPS = (signal.SIGTERM, signal.SIGINT)
# Seconds within which several signals count as one: a scheduler that ends a job, and a terminal, may send the same
# signal to every process and to their parent, which passes it on.
SAME = 1.0


def hold_stops() -> None:
    """Call first in a process: a signal that comes from now on waits for `release_stops`, instead of ending it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def release_stops() -> None:
    """Call when the handlers are set, or where nothing is left to be stopped: a signal that waits takes effect now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


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
        given_bytes = memoryview(data).cast("B")
        if self._lost:
            loss_note = f"\n[{self._lost} bytes of output were lost here: their reader did not take them]\n"
            if self._put(memoryview(loss_note.encode())) == len(loss_note):
                self._lost = 0
        self._lost += len(given_bytes) if self._lost else len(given_bytes) - self._put(given_bytes)
        return len(given_bytes)

    def _put(self, content: memoryview) -> int:
        """Write as much as the reader takes. Returns the number of bytes."""
        bytes_done = 0
        while bytes_done < len(content):
            try:
                if not self._ready():
                    break
                bytes_done += os.write(self._target, content[bytes_done : bytes_done + PIECE])
            except BlockingIOError:
                continue  # another process was faster
            except OSError:
                break
        return bytes_done

    def _ready(self) -> bool:
        """Whether a piece can be written now, or before the patience with this reader is over."""
        current_time = time.monotonic()
        self._patience = min(PATIENCE, self._patience + EARNED * (current_time - self._seen))
        is_ready = bool(self._poll.poll(1000 * self._patience))
        self._seen = time.monotonic()
        self._patience = max(0.0, self._patience - (self._seen - current_time))
        return is_ready


def _without_waiting(descriptor: int) -> int:
    """The same pipe or terminal, opened once more so that a write never waits: the flag on `descriptor` itself would
    hold for all processes that share it. What cannot be opened so (a socket, a terminal of another user) stays as it
    is, as does a file, which would be written from its beginning."""
    file_mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(file_mode) or os.isatty(descriptor):
        with suppress(OSError):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor


def spare_output() -> None:
    """From now on this process loses output that nobody takes, instead of failing or waiting. Not where another one has
    replaced the streams, as tests do."""
    _fill_closed()
    old_streams = sys.stdout, sys.stderr
    if sys.stdout is sys.__stdout__:
        sys.stdout = _spared(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _spared(sys.stderr, 2)
    # Libraries that are imported already, as DeepSpeed, log to the streams that they have seen then.
    for some_logger in [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]:
        for handler in getattr(some_logger, "handlers", ()):
            stream = handler.stream if isinstance(handler, logging.StreamHandler) else None
            if stream is not None and stream in old_streams:
                handler.setStream(sys.stdout if stream is old_streams[0] else sys.stderr)


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
    raw_writer = io.BufferedWriter(_Spared(descriptor))
    encoding = "utf-8" if stream is None else stream.encoding
    return io.TextIOWrapper(raw_writer, encoding, "backslashreplace", line_buffering=True)


ROOT = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (ROOT / "pyproject.toml").is_file()
PACKAGES = ("megastable", "megastable_guard", "megastable_tools")


def package_folders() -> list[Path]:
    """The folders of our packages, as far as they are there."""
    origins = [spec.origin for spec in map(find_spec, PACKAGES) if spec is not None]
    return [Path(origin).absolute().parent for origin in origins if origin is not None]


def install_command(extra: str = "") -> str:
    """The command that installs megastable's dependencies here, and those of an extra of pyproject.toml."""
    if IS_CHECKOUT:
        return f"bash launch/install.sh {extra}".rstrip()
    return f"pip install 'megastable[{extra}]'" if extra else "pip install megastable"


def login_name() -> str:
    """Their login name; "somebody" where the system knows none, as in containers with a bare user id."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # Python 3.13 raises OSError alone
        return "somebody"
