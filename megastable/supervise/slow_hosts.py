"""Reports hosts that are slow for long, and decides when a spare takes the place of one (straggler.py finds them)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from math import inf
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megastable.cluster.fleet import Attempt, Fleet
from megastable.cluster.store import MOST_WORK, Heard, Store
from megastable.config.tree import RunConfig
from megastable.run.events.supervisor_events import HostSlow
from megastable.run.rank_ipc import Progress, WorkBlock
from megastable.supervise.gathering import Gathering
from megastable.supervise.straggler import SlowHost, Stragglers
from megastable.supervise.supervisor_journal import SupervisorJournal

PAUSE = 5.0  # seconds between two looks for a spare
BLOCKS = TypeAdapter(list[WorkBlock])


class SlowHosts:
    """Of one run."""

    def __init__(
        self, config: RunConfig, store: Store, fleet: Fleet, journal: SupervisorJournal, gathering: Gathering
    ) -> None:
        self.config, self.store, self.fleet = config, store, fleet
        self.journal, self.gathering = journal, gathering
        self.began()

    def began(self) -> None:
        """Another attempt begins."""
        self._found: Stragglers | None = None
        self._unread = deque[tuple[Heard, WorkBlock]](maxlen=MOST_WORK)
        self._since, self._starting, self._looked = time.monotonic(), inf, -inf

    def hear(self, reports: Iterable[tuple[Heard, WorkBlock]]) -> None:
        """What ranks say of their work, for the next look."""
        self._unread.extend(reports)

    def look(self, attempt: Attempt, progress: Progress | None) -> str:
        """Why the attempt should begin again, without a host that is slow and was left out; empty: it should not. Poll
        often."""
        limit, p = self.config.supervise.slow_host, self.config.parallel
        if limit is None or progress is None or progress.step is None:
            return ""
        if self._found is None:
            ranks = list(self.store.ranks.values())
            if len(ranks) < progress.world or progress.loss is None:
                return ""
            hosts = {heard.rank: self.fleet.called(heard.host) for heard in ranks}
            self._found = Stragglers(limit, hosts, p.pipeline, p.tensor * p.context)
            self._starting = time.monotonic() - self._since
        if self._read(self._found):
            self._tell(self._found, attempt.number)
        return self._replace(self._found, attempt, progress.steps - progress.step) if self._found.slow else ""

    def _read(self, found: Stragglers) -> bool:
        changed = False
        while self._unread:
            heard, block = self._unread.popleft()
            changed |= found.add(heard.rank, block)
        return changed

    def _tell(self, found: Stragglers, attempt: int) -> None:
        told = set(self.journal.state.slow)
        for host, slow in found.slow.items():
            if host not in told:
                event = HostSlow(
                    what="begun", attempt=attempt, host=host, rank=slow.rank, ratio=round(slow.ratio, 3),
                    seconds=round(slow.seconds, 6), cost=round(slow.cost, 4),
                    parts={name: round(ratio, 3) for name, ratio in slow.parts.items()},
                    reason=slow.words(found.alone),
                )  # fmt: skip
                self.journal.emit(event, say=True)
        for host in sorted(told - found.slow.keys()):
            text = f"host {host} is no longer slow"
            self.journal.emit(HostSlow(what="over", attempt=attempt, host=host, reason=text), say=True)
        self.journal.listen()

    def _replace(self, found: Stragglers, attempt: Attempt, steps: int) -> str:
        """steps: that are left of the run."""
        least, now = self.config.supervise.replace_slow, time.monotonic()
        if least is None or now - self._looked < PAUSE:
            return ""
        self._looked = now
        worth = [
            slow
            for slow in found.slow.values()
            if slow.cost >= least and steps * slow.seconds > self._starting
        ]
        spares = self.gathering.spares(attempt.number, attempt.names) if worth else []
        worst = sorted(worth, key=lambda slow: -slow.cost)[: len(spares)]
        for slow in worst:
            self._leave_out(slow)
        names = " and ".join(slow.host for slow in worst)
        return f"{', '.join(spares[: len(worst)])} can take the place of {names}" if worst else ""

    def _leave_out(self, slow: SlowHost) -> None:
        self.gathering.strike(slow.host, False, "slow host")


def reported(store: Store, attempt: int) -> list[tuple[Heard, WorkBlock]]:
    """What ranks of an attempt have said of their work since the last call."""
    found = []
    while store.work:
        heard, work = store.work.popleft()
        found += [(heard, block) for block in _blocks(heard, work, attempt)]
    return found


def _blocks(heard: Heard, work: Any, attempt: int) -> list[WorkBlock]:
    try:
        return BLOCKS.validate_python(work) if heard.attempt == attempt else []
    except ValidationError:
        return []  # of another version
