"""Runs the process that writes incidents/ (report/postmortem); its failures never stop the supervisor."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from megastable.cluster.child_process import ChildProcess, background
from megastable.run.directory import RunDirectory

SECONDS = 300.0  # time limit for writing the incident files
PAUSE = 5.0  # seconds between two starts: an incident has several events within a second


class ReportProcess:
    """Started again whenever there is something new. say: prints a line of the supervisor."""

    def __init__(self, run: RunDirectory, say: Callable[[str], None]) -> None:
        self.run, self.say = run, say
        self._log = run.logs / "reports.log"
        self._due, self._began = True, -PAUSE
        self._child: ChildProcess | None = None

    def due(self) -> None:
        """There is something new to write."""
        self._due = True

    def poll(self, at_once: bool = False) -> bool:
        """Start it, or check whether it has ended. Returns whether all is written. at_once: skip the pause."""
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
        """Whether the journal has any. A search of bytes: the other process reports a broken journal."""
        try:
            return b'"incident"' in self.run.journal.read_bytes()
        except OSError:
            return True
