"""Follows where the time of a run goes, reading only what is new of its journal and step records."""

from __future__ import annotations

import time
from pathlib import Path

from megastable.base.errors import DataError
from megastable.base.text import count_noun
from megastable.run.directory import RunDirectory, read_object
from megastable.run.goodput.lifecycle import Lifecycle
from megastable.run.goodput.process_time import StepFiles
from megastable.run.goodput.time_account import TimeAccount
from megastable.run.run_history import HistoryReader

EASE = 30.0  # a look that took a second is repeated after so many: it must not cost the supervisor much
USUAL_PAUSE = 1.0  # seconds


class GoodputWatch:
    """Watches one run. journal: of the run, if somebody reads it already, who then looks at it."""

    def __init__(self, root: Path, journal: HistoryReader | None = None) -> None:
        self.run = RunDirectory(root)
        self._looks, self._journal = journal is None, journal or HistoryReader(self.run.journal)
        self._pending = self._journal.share_events()
        self._files = StepFiles(self.run.steps)
        self._life, self._starts = Lifecycle(), self._journal.starts
        self._account: TimeAccount | None = None
        self._due = 0.0

    def account_lately(self, alive: bool, now: float | None = None) -> TimeAccount | None:
        """As `look_again`, but what was seen a short while ago is not looked at again."""
        look_began = time.monotonic()
        if look_began >= self._due:
            self.look_again(alive, now)
            self._due = time.monotonic() + max(USUAL_PAUSE, EASE * (time.monotonic() - look_began))
        return self._account

    def look_again(self, alive: bool, now: float | None = None) -> TimeAccount | None:
        """The account up to now, if a process of the run is alive, else up to its last sign of life; None if the
        journal says nothing yet."""
        # The journal first: if it says that a process has ended, all its records are there.
        if self._looks:
            self._journal.look_again()
        self._files.look_again()
        self._account = None  # of millions of steps it is large: not two at a time
        self._account = self._look(alive, time.time() if now is None else now)
        return self._account

    def _look(self, alive: bool, now: float) -> TimeAccount | None:
        if self._journal.starts != self._starts:
            self._life, self._starts = Lifecycle(), self._journal.starts
        self._life.steps = self._files.list_steps()
        for event in self._pending:
            self._life.hear_event(event)
        self._pending.clear()
        told = read_object(self.run.progress)
        if not alive:
            steps, said = self._life.steps.time[-1:].tolist(), self._life.clocks.correct_progress(told) or 0.0
            now = max(self._life.newest, said, *steps)
        return self._life.account_until(now, told)

    @property
    def problems(self) -> list[str]:
        """What could not be read, and what becomes of it."""
        found = self._journal.problems
        if not len(self._life.steps.time) and not self._files.damaged:
            found.append(f"{self.run.steps}: no step records: what the journal does not tell is unknown time")
        if self._life.set_back:
            found.append(
                f"{self.run.journal}: it goes back in time by {self._life.set_back:,.0f} s: a clock was set back, or "
                "the clocks of hosts differ; what the run did until that time came again is lost or unknown time"
            )
        if damaged := self._files.damaged:
            file_name, why_damaged = next(iter(damaged.items()))
            found.append(
                f"{self.run.steps}: {count_noun(len(damaged), 'file')} cannot be read, the time of those steps "
                f"is unknown ({file_name}: {why_damaged})"
            )
        return found


def read_account(root: Path, alive: bool = False) -> tuple[TimeAccount, list[str]]:
    """The account of the run in a directory, and what could not be read. alive: as of `GoodputWatch.look_again`.

    Raises DataError if there is no run, or nothing that could be accounted for.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such directory: give the directory of a run, such as runs/quickstart")
    watch = GoodputWatch(root)
    account = watch.look_again(alive)
    if account is None:
        why_empty = "; ".join(watch.problems) or "it is missing or empty"
        raise DataError(
            f"{watch.run.journal}: no event of a run ({why_empty}): the account is made from the journal; restore it"
        )
    return account, watch.problems
