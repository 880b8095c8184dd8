"""Runs a process of ours alongside a run, restarts it: the scan ahead of the data, the evaluation of checkpoints. The
run never waits for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megastable.cluster.child_process import ChildProcess, start_in_background
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.supervise.supervisor_journal import LogTail

AGAIN = 60.0  # seconds before a failed one is restarted
TRIES = 5
LONG = 3600.0  # seconds after which a failure counts as the first one
PAUSE = 0.2  # seconds between two looks at it while somebody waits
PARTING = 5.0  # seconds in which it ends what it has started
LOOK = 0.05  # seconds between two looks whether it has


class SideProcess:
    """Runs a module of ours with `arguments`, the supervisor's process first. wanted: whether the recipe asks for it.
    what, otherwise: it is, and what its absence means, in words. say: prints a line of the supervisor."""

    def __init__(
        self, run: RunDirectory, module: str, log: Path, arguments: Sequence[str], wanted: bool, what: str,
        otherwise: str, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.run, self.say = run, say
        self._finishing = False  # whether somebody waits for it
        self._module, self._log, self._what, self._otherwise = module, log, what, otherwise
        self._output = LogTail(self._log)
        self._arguments = ["--parent", str(os.getpid()), str(run.root), *arguments]
        self._child: ChildProcess | None = None
        self._tries = TRIES if wanted else 0
        self._due = self._began = 0.0

    @property
    def unfinished(self) -> bool:
        """Whether it is at work, or about to be started again, as of the last `poll`."""
        return self._tries > 0

    def poll(self) -> None:
        """Start it, show its output, restart it after a failure. One that ends without is done."""
        if self._child is not None:
            child_result = self._child.poll()
            self._show()
            if child_result is None:
                return
            self._child = None
            if child_result.code == 0:
                self._tries = 0
            else:
                self._failed(f"ended with {child_result.code}: see {self._log}")
        if self._tries and time.monotonic() >= self._due:
            self._output, self._began = LogTail.at_end(self._log), time.monotonic()
            try:
                self._child = start_in_background(self._log, self._module, *self._arguments)
            except OSError as error:
                self._failed(f"cannot be started: {error}")

    def wait_until_done(self, meanwhile: Callable[[], None], hurry: Callable[[], bool]) -> None:
        """Wait until it is done or given up; `hurry` ends the wait. After a failure it is restarted at once."""
        self._finishing, self._due = True, 0.0
        while not hurry():
            self.poll()
            meanwhile()
            if not self.unfinished:
                return
            time.sleep(PAUSE)

    def close(self) -> None:
        """End it, and what it has started."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGTERM)
            end_time = time.monotonic() + PARTING
            while self._child.poll() is None and time.monotonic() < end_time:
                time.sleep(LOOK)
            self._child.kill()
            self._child.wait()
            self._show()
            self._child = None
        self._tries = 0

    def _failed(self, how: str) -> None:
        now = time.monotonic()
        # Failures of a run of weeks, days apart, must not add up.
        self._tries = (TRIES if now - self._began > LONG else self._tries) - 1
        self._due = now + (0.0 if self._finishing else AGAIN)
        what_follows = f"not again: {self._otherwise}"
        if self._tries:
            what_follows = "again" if self._finishing else "again in a minute"
        self.say(f"WARNING: {self._what} {how}; {what_follows}")

    def _show(self) -> None:
        if new_lines := self._output.read_new_lines():
            self.say(new_lines)


def build_look_ahead(
    config: RunConfig, run: RunDirectory, recipe: str, overrides: Sequence[str], say: Callable[[str], None]
) -> SideProcess:
    """The scan ahead of a run (forensics/prescan.py). Its ledger lines stay."""
    return SideProcess(
        run, "megastable_tools.forensics.prescan", run.logs / "look_ahead.log", [recipe, *overrides],
        config.data.look_ahead.steps > 0, "what looks ahead in the data", "what comes is trained on unseen", say,
    )  # fmt: skip


def build_evaluation(
    config: RunConfig, run: RunDirectory, recipe: str, overrides: Sequence[str], say: Callable[[str], None]
) -> SideProcess:
    """The evaluation of a run's checkpoints (downstream/evaluator.py)."""
    return SideProcess(
        run, "megastable_tools.downstream.evaluator", run.logs / "evaluation.log", [recipe, *overrides],
        config.eval.command is not None, "the evaluation of checkpoints", "no more of them are evaluated", say,
    )  # fmt: skip
