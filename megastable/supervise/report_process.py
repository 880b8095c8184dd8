"""The process that writes incidents/ (report/postmortem): whatever it meets, the supervisor goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from megastable.run.directory import RunDirectory
from megastable.supervise.child_process import ChildProcess, background

SECONDS = 300.0  # that the files of the incidents may take
PAUSE = 5.0  # seconds from one start to the next: an incident is told in several events within a second


class ReportProcess:
    """Started again whenever there is something new. say: the supervisor's own lines."""

    def __init__(self, run: RunDirectory, say: Callable[[str], None]) -> None:
        self.run, self.say = run, say
        self._log = run.logs / "reports.log"
        self._due, self._began = True, -PAUSE
        self._child: ChildProcess | None = None

    def due(self) -> None:
        """There is something new."""
        self._due = True

    def poll(self, at_once: bool = False) -> bool:
        """Begin, or look whether it is done. Whether all is written. at_once: without a pause after the last time."""
        if self._child is not None:
            if (result := self._child.poll()) is None:
                return False
            self._child = None
            if result.code:
                self._failed(f"code {result.code}")
            elif result.code is None:
                self._failed(f"not done after {SECONDS:.0f} s")
        if not self._due or not self.run.journal.exists():
            return True
        if not at_once and time.monotonic() - self._began < PAUSE:
            return False
        self._due, self._began = False, time.monotonic()
        if self._has_incidents():
            with suppress(OSError):
                self._child = background(
                    self.run, self._log, "megastable.report.postmortem", str(self.run.root), seconds=SECONDS
                )
        return self._child is None

    def finish(self) -> None:
        """Wait until all is written."""
        while not self.poll(at_once=True):
            time.sleep(0.05)

    def _failed(self, why: str) -> None:
        self.say(f"WARNING: the incidents' files could not be written ({why}): see {self._log}")

    def _has_incidents(self) -> bool:
        """Most runs have none for long. Of the bytes: what is wrong with a journal is the other process's to say."""
        try:
            return b'"incident"' in self.run.journal.read_bytes()
        except OSError:
            return True
