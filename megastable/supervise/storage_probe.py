"""Finds out whether the file system of a run answers, without ever waiting for it: a stall looks like a hang of the
ranks, which write there, too."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

ANSWERS = 5.0  # seconds within which a small file is written


class StorageProbe:
    """path: of a file to write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing: threading.Thread | None = None
        self._began = 0.0

    def stalled(self) -> float | None:
        """For how many seconds a write has not come back; None if writes do. Blocks for at most `ANSWERS`. A write that
        fails, as on a full disk, has come back."""
        if self._writing is None or not self._writing.is_alive():
            self._began = time.monotonic()
            self._writing = threading.Thread(target=self._write, name="storage", daemon=True)
            self._writing.start()
        self._writing.join(max(0.0, self._began + ANSWERS - time.monotonic()))
        return time.monotonic() - self._began if self._writing.is_alive() else None

    def _write(self) -> None:
        with suppress(OSError), self.path.open("w") as file:
            file.write(str(time.time()))
            file.flush()
            os.fsync(file.fileno())
