"""Standard output and error of a process that must outlive a full disk.

The output of a run goes to a file beside its checkpoints. Without room there, a `print` raises, in whatever line of
whatever library it is; the training needs none of them.
"""

from __future__ import annotations

import errno
import io
import sys
from typing import TYPE_CHECKING, TextIO

from megastable.base.errors import is_full

if TYPE_CHECKING:
    from typing_extensions import Buffer

GONE = (errno.EIO, errno.ESTALE)  # of a file system that went away


class _Spared(io.FileIO):
    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not is_full(error) and error.errno not in GONE:
                raise
            return memoryview(data).nbytes  # lost


def spare_output() -> None:
    """From now on this process loses output for which there is no room, instead of failing. Not where another one has
    replaced the streams, as tests do."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout.flush()
        sys.stdout = _spared(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr.flush()
        sys.stderr = _spared(sys.stderr)


def _spared(stream: TextIO) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Spared(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)
