"""Runs the process that scans ahead of a run (forensics/prescan.py) and restarts it; the run never waits for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from megastable.cluster.child_process import ChildProcess, background
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.supervise.log_tail import LogTail

AGAIN = 60.0  # seconds before a failed one is restarted
TRIES = 5


class PrescanProcess:
    """Does nothing unless the recipe asks for it. say: prints a line of the supervisor."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        recipe: str,
        overrides: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self.run, self.say = run, say
        self._log = run.logs / "look_ahead.log"
        self._output = LogTail(self._log)
        self._arguments = ["--parent", str(os.getpid()), str(run.root), recipe, *overrides]
        self._child: ChildProcess | None = None
        self._tries = TRIES if config.data.look_ahead.steps else 0
        self._due = 0.0

    def poll(self) -> None:
        """Start it, show its output, restart it after a failure."""
        if self._child is not None:
            result = self._child.poll()
            self._show()
            if result is None:
                return
            self._child = None
            self._tries -= 1
            self._due = time.monotonic() + AGAIN
            more = "again in a minute" if self._tries else "not again: what comes is trained on unseen"
            self.say(
                f"WARNING: what looks ahead in the data ended with {result.code}: see {self._log}; {more}"
            )
        if self._tries and time.monotonic() >= self._due:
            self._output = LogTail.at_end(self._log)
            with suppress(OSError):
                self._child = background(
                    self.run, self._log, "megastable.forensics.prescan", *self._arguments
                )

    def close(self) -> None:
        """End it. Its ledger lines stay."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._show()
            self._child = None
        self._tries = 0

    def _show(self) -> None:
        if text := self._output.new():
            self.say(text)
