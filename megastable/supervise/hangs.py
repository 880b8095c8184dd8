"""Decides when a run hangs, from how long its steps usually take, and names the ranks that it is due to. Pure.

A collective ends when every member has entered it. So a rank that has entered more collectives of a group than another
member waits for that one, and is a witness; so is a stage of a pipeline that waits for another one. To blame are ranks
that others wait for, and that wait for nobody themselves: one that stands still in its own work, or is stopped, or is
gone; among them, first of all, the ones that have stopped speaking.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megastable.base.activity import EXCHANGE, STORE
from megastable.config.supervise import SuperviseConfig
from megastable.run.rank_ipc import Progress

RECENT = 64  # steps whose median is the usual time
# Times that a phase other than a step was seen from start to end, before `hang_unknown` is lowered ...
LEARNT = 3
LEAST = 300.0  # ... to this, in seconds: the work in such a phase varies
TICK = 1.0  # most seconds counted between two polls: more, and this process itself was stopped


def tolerated_seconds(phase: str, usual: float | None, config: SuperviseConfig) -> float:
    """Seconds without progress that are tolerated in a phase. usual: seconds of a step, if known."""
    if phase != "step" or usual is None:
        return config.hang_unknown
    return max(config.hang_floor, config.hang_factor * usual)


class HangDetector:
    """Fed at every poll of a run, says when it hangs. Adds up seconds poll by poll, so a clock jump does no harm."""

    def __init__(self, config: SuperviseConfig) -> None:
        self.config = config
        self.phase = "starting"  # what the run is doing
        self.waited = 0.0  # seconds since the last progress
        self._lasted = 0.0  # seconds in the current phase
        self._whole = False  # whether the start of the phase was seen
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._longest: dict[str, float] = {}
        self._times: Counter[str] = Counter()
        self._seen: Progress | None = None

    def begin_attempt(self) -> None:
        """A new attempt begins; learnt durations stay."""
        self.phase, self.waited, self._lasted, self._whole, self._seen = "starting", 0.0, 0.0, True, None

    def reset_wait(self) -> None:
        """What was waited for until now has another reason."""
        self.waited = 0.0

    def detect_hang(self, progress: Progress | None, seconds: float) -> bool:
        """Whether it hangs. progress: of the current attempt, None before its first; seconds: since the last poll."""
        passed_seconds = min(seconds, TICK)
        self.waited, self._lasted = self.waited + passed_seconds, self._lasted + passed_seconds
        if progress is not None and self._moved(progress):
            if progress.phase != self.phase:
                if self._whole and self.phase != "step":
                    self._times[self.phase] += 1
                    self._longest[self.phase] = max(self._longest.get(self.phase, 0.0), self._lasted)
                self._lasted, self._whole = 0.0, True
            if progress.phase == "step" and progress.seconds is not None:
                self._steps.append(progress.seconds)
            self._seen, self.phase, self.waited = progress, progress.phase, 0.0
        return self.waited > self.limit

    def _moved(self, new: Progress) -> bool:
        old = self._seen
        return old is None or (old.phase, old.step, old.cursor) != (new.phase, new.step, new.cursor)

    @property
    def limit(self) -> float:
        """Seconds that the current phase may take."""
        least_limit = tolerated_seconds(self.phase, median(self._steps) if self._steps else None, self.config)
        if self.phase != "step" and self._times[self.phase] >= LEARNT:
            least_limit = min(least_limit, LEAST)
        # The duration of other phases also depends on disk, cache and amount of work.
        return max(least_limit, self.config.hang_factor * self._longest.get(self.phase, 0.0))


SILENT = 5.0  # seconds without a heartbeat; one is sent every second
NAMED = 4  # ranks described in full


@dataclass(frozen=True)
class Suspects:
    """Whom a hang is due to, as far as is known. told: sentences; host, rank: if it is one."""

    told: Sequence[str] = ()
    host: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class RankView:
    """What is known of a rank. activity: what it did for `lasted` seconds at its last heartbeat, `silent` seconds ago;
    entered: collectives entered by process group. closed: its connection has ended. kernel: of a rank that does not
    answer, the kernel's view."""

    host: str
    activity: str = ""
    lasted: float = 0.0
    silent: float = 0.0
    entered: Mapping[str, int] | None = None
    closed: bool = False
    kernel: str = ""

    @property
    def mute(self) -> bool:
        return self.closed or self.silent >= SILENT


def find_waiting_for_store(ranks: Mapping[int, RankView]) -> int | None:
    """The first rank that waits for data from an object store, and says so still; the others wait for it."""
    waiting_ranks = [rank for rank, view in ranks.items() if view.activity == STORE and not view.mute]
    return min(waiting_ranks, default=None)


def find_suspects(ranks: Mapping[int, RankView]) -> Suspects:
    """ranks: all that anything is known of."""
    entered = {rank: view.entered for rank, view in ranks.items() if view.entered is not None}
    ranks_behind = find_awaited_ranks(entered)
    # No count tells a stage of a pipeline that waits for another one.
    at_work = [rank for rank, rank_view in sorted(ranks.items()) if rank_view.activity not in ("", EXCHANGE)]
    if any(rank_view.activity == EXCHANGE for rank_view in ranks.values()):
        ranks_behind = [rank for rank in ranks_behind if rank in at_work] or ranks_behind or at_work
    mute_ranks = sorted(rank for rank, rank_view in ranks.items() if rank_view.mute)
    stopped_ranks = sorted(rank for rank, rank_view in ranks.items() if rank_view.kernel)
    mute_behind = [rank for rank in ranks_behind if rank in mute_ranks]
    blamed_ranks = mute_behind or ranks_behind or mute_ranks or stopped_ranks
    blamed_hosts = {ranks[blamed_rank].host for blamed_rank in blamed_ranks}
    return Suspects(
        told=_told(ranks, blamed_ranks, ranks_behind),
        host=blamed_hosts.pop() if len(blamed_hosts) == 1 else None,
        rank=blamed_ranks[0] if len(blamed_ranks) == 1 else None,
    )


def _told(ranks: Mapping[int, RankView], blamed: Sequence[int], behind: Sequence[int]) -> list[str]:
    found = []
    for rank in blamed[:NAMED]:
        view = ranks[rank]
        sentence_parts = []
        if rank in behind:
            sentence_parts.append("the others wait for it")
        if view.activity:
            sentence_parts.append(f"in {view.activity!r} for {view.lasted + view.silent:.0f} s")
        if view.closed:
            sentence_parts.append("its connection has ended")
        elif view.mute:
            sentence_parts.append(f"silent for {view.silent:.0f} s")
        if view.kernel:
            sentence_parts.append(view.kernel)
        found.append(f"rank {rank} on {view.host}: " + ", ".join(sentence_parts))
    if len(blamed) > NAMED:
        found.append(f"and {len(blamed) - NAMED} other ranks")
    if not blamed and ranks:
        found.append("every rank is in the same collective, or none could be told apart: see the stacks")
    return found


Entered = Mapping[str, int]  # collectives entered, by process group


def build_wait_graph(entered: Mapping[int, Entered]) -> dict[int, set[int]]:
    """For every rank, those it waits for. entered: of each rank, in the groups it belongs to."""
    counts_by_group = defaultdict[str, dict[int, int]](dict)
    for rank, group_counts in entered.items():
        for group, own_count in group_counts.items():
            counts_by_group[group][rank] = own_count
    awaited_by_rank: dict[int, set[int]] = {rank: set() for rank in entered}
    for member_counts in counts_by_group.values():
        for rank, own_count in member_counts.items():
            awaited_by_rank[rank] |= {other for other, count in member_counts.items() if count < own_count}
    return awaited_by_rank


def find_awaited_ranks(entered: Mapping[int, Entered]) -> list[int]:
    """The ranks that others wait for, and that wait for nobody; empty if all are equally far, as when the network
    fails within a collective."""
    wait_graph = build_wait_graph(entered)
    awaited_ranks = set().union(*wait_graph.values()) if wait_graph else set()
    return sorted(awaited_rank for awaited_rank in awaited_ranks if not wait_graph[awaited_rank])
