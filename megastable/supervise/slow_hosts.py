"""Reports hosts that are slow for long, and decides when a spare takes the place of one.

They are found from the time that every rank needs for its own work. Ranks of one pipeline stage do the same work on
equally many samples. Per block of ten steps, a rank's ratio is its own time over the median of the ranks on other
hosts, its own host left out. A rank is slow if

- its median ratio over the last `WINDOW` blocks is above `limit`, and that in `SHARE` of them above the root of it:
  neither a checkpoint nor a burst lasts so long; and
- the logarithm of that median is `SURE` times what ranks of this run differ by anyway, from one window to the next
  (1.4826 times the median deviation from the median). Where noise lasts for hundreds of steps, only this tells it from
  a fault.

A host is as slow as its slowest rank. Ranks that share every layer (tensor, context and expert parallelism) wait for
each other in the middle of their work: where such a group spans hosts, nobody is named. Ranks with other experts have
other work, as routers send them more or fewer tokens: only ranks with the same experts are compared.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from pydantic import TypeAdapter, ValidationError

from megastable.base.activity import OWN
from megastable.cluster.fleet import Attempt, Fleet
from megastable.cluster.store import MOST_WORK, Heard, Store
from megastable.config.tree import RunConfig
from megastable.run.events.supervisor_events import HostSlow
from megastable.run.rank_ipc import Progress, WorkBlock
from megastable.supervise.gathering import Gathering
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
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Another attempt begins."""
        self._found: Stragglers | None = None
        self._unread = deque[tuple[Heard, WorkBlock]](maxlen=MOST_WORK)
        self._since, self._starting, self._looked = time.monotonic(), inf, -inf

    def add_work_reports(self, reports: Iterable[tuple[Heard, WorkBlock]]) -> None:
        """What ranks say of their work, for the next look."""
        self._unread.extend(reports)

    def find_replacement(self, attempt: Attempt, progress: Progress | None) -> str:
        """Why the attempt should begin again, without a host that is slow and was left out; empty: it should not. Poll
        often."""
        limit, p = self.config.supervise.slow_host, self.config.parallel
        if limit is None or progress is None or progress.step is None:
            return ""
        if self._found is None:
            ranks = list(self.store.ranks.values())
            if len(ranks) < progress.world or progress.loss is None:
                return ""
            hosts = {heard.rank: self.fleet.name_of_host(heard.host) for heard in ranks}
            shared = p.tensor * math.lcm(p.context, p.expert)
            self._found = Stragglers(limit, hosts, p.pipeline, shared, p.tensor, p.expert)
            self._starting = time.monotonic() - self._since
        has_changed = False
        while self._unread:
            heard, work_block = self._unread.popleft()
            has_changed |= self._found.add_block(heard.rank, work_block)
        if has_changed:
            self._tell(self._found, attempt.number)
        return self._replace(self._found, attempt, progress.steps - progress.step) if self._found.slow else ""

    def _tell(self, found: Stragglers, attempt: int) -> None:
        told_hosts = set(self.journal.state.slow)
        for host, slow_host in found.slow.items():
            if host not in told_hosts:
                event = HostSlow(
                    what="begun", attempt=attempt, host=host, rank=slow_host.rank, ratio=round(slow_host.ratio, 3),
                    seconds=round(slow_host.seconds, 6), cost=round(slow_host.cost, 4),
                    parts={part_name: round(ratio, 3) for part_name, ratio in slow_host.parts.items()},
                    reason=slow_host.describe_slowness(found.alone),
                )  # fmt: skip
                self.journal.journal_event(event, say=True)
        for host in sorted(told_hosts - found.slow.keys()):
            over_text = f"host {host} is no longer slow"
            self.journal.journal_event(
                HostSlow(what="over", attempt=attempt, host=host, reason=over_text), say=True
            )
        self.journal.read_new_events()

    def _replace(self, found: Stragglers, attempt: Attempt, steps: int) -> str:
        """steps: that are left of the run."""
        least_cost, now = self.config.supervise.replace_slow, time.monotonic()
        if least_cost is None or now - self._looked < PAUSE:
            return ""
        self._looked = now
        costly_hosts = [
            slow for slow in found.slow.values()
            if slow.cost >= least_cost and steps * slow.seconds > self._starting
        ]  # fmt: skip
        spare_hosts = self.gathering.list_spares(attempt.number, attempt.names) if costly_hosts else []
        worst_hosts = sorted(costly_hosts, key=lambda slow: -slow.cost)[: len(spare_hosts)]
        if not worst_hosts:
            return ""
        for slow_host in worst_hosts:
            self.gathering.strike_host(slow_host.host, False, "slow host")
        slow_names = " and ".join(slow_host.host for slow_host in worst_hosts)
        return f"{', '.join(spare_hosts[: len(worst_hosts)])} can take the place of {slow_names}"


def take_work_reports(store: Store, attempt: int) -> list[tuple[Heard, WorkBlock]]:
    """What ranks of an attempt have said of their work since the last call."""
    work_reports = []
    while store.work:
        heard, raw_work = store.work.popleft()
        with suppress(ValidationError):  # of another version
            if heard.attempt == attempt:
                work_reports += [(heard, work_block) for work_block in BLOCKS.validate_python(raw_work)]
    return work_reports


WINDOW = 15  # blocks
SHARE = 12  # ... of which so many must be slow, or not slow any more
SURE = 3.5
KNOWN = 12  # windows from which on the spread is known
UNKNOWN = 0.042  # the spread before: a ratio of 1.16 is needed then
KEPT = 4096  # windows, of all ranks, that the spread is taken of


@dataclass(frozen=True)
class SlowHost:
    """rank: its slowest. ratio: of its own work's time to the others'; seconds: longer per step than theirs; cost: the
    share of a step that this is; parts: the ratio of every activity that takes a hundredth of a step or more."""

    host: str
    rank: int
    ratio: float
    seconds: float
    cost: float
    parts: Mapping[str, float]

    def describe_slowness(self, alone: bool = False) -> str:
        """alone: whether there is no other host, so that the rank is named."""
        subject_text = f"rank {self.rank} on {self.host} is" if alone else f"host {self.host} is"
        parts_text = ", ".join(f"{part_name} {ratio:.2f} x" for part_name, ratio in self.parts.items())
        return (
            f"{subject_text} slow: rank {self.rank} takes {self.ratio:.2f} x as long as the others for its own work, "
            f"which costs the run {self.cost:.0%} ({self.seconds:.3g} s a step); {parts_text}"
        )


class Stragglers:
    """Of one attempt. limit: the ratio from which a rank is slow; hosts: by rank, of all ranks; stages: of the
    pipeline; shared: neighbouring ranks that share every layer; tensor: of a tensor group; expert: data ranks that
    share out experts.

    slow: the hosts that are slow now.
    """

    def __init__(
        self, limit: float, hosts: Mapping[int, str], stages: int = 1, shared: int = 1, tensor: int = 1,
        expert: int = 1,
    ) -> None:  # fmt: skip
        self.hosts, self._limit = hosts, math.log(limit)
        self.slow: dict[str, SlowHost] = {}
        self.alone = len(set(hosts.values())) == 1
        hosts_by_group = defaultdict[int, set[str]](set)
        for host_rank, host in hosts.items():
            hosts_by_group[host_rank // shared].add(host)
        self.blind = any(len(group_hosts) > 1 for group_hosts in hosts_by_group.values())
        stage_size = max(1, len(hosts) // stages)
        # Stage and experts of every rank: what it is compared by.
        self._work = {rank: (rank // stage_size, rank // tensor % expert) for rank in hosts}
        self._pending: dict[int, dict[int, WorkBlock]] = {}
        self._last = dict.fromkeys(hosts, -1)  # block, by rank
        self._awaited = -1, set[int]()  # the oldest pending block, and the ranks that have not got to its end
        self._judged: deque[dict[int, WorkBlock]] = deque(maxlen=WINDOW)
        self._ratios = {rank: deque[float](maxlen=WINDOW) for rank in hosts}
        self._windows: deque[float] = deque(maxlen=KEPT)
        self._since = 0  # blocks since the last window
        self._spread = UNKNOWN

    def add_block(self, rank: int, block: WorkBlock) -> bool:
        """Whether `slow` has other hosts now."""
        if self.blind or rank not in self.hosts or not 0 < block.own < math.inf:
            return False
        if block.block <= self._last[rank]:  # the training went back
            self._pending = {number: of for number, of in self._pending.items() if number <= block.block}
        self._last[rank] = block.block
        self._pending.setdefault(block.block, {})[rank] = block
        changed = False
        while self._pending:
            oldest = min(self._pending)
            if oldest != self._awaited[0]:
                self._awaited = oldest, {rank for rank, last in self._last.items() if last < oldest}
            if self._last[rank] >= oldest:
                self._awaited[1].discard(rank)
            if self._awaited[1]:
                break
            told = self._pending.pop(oldest)
            if 2 * len(told) > len(self.hosts):
                changed |= self._judge(told)
        return changed

    def _judge(self, told: dict[int, WorkBlock]) -> bool:
        self._judged.append(told)
        own_seconds = {rank: block.own for rank, block in told.items()}
        others_seconds = self._others(own_seconds)
        for rank, seconds in own_seconds.items():
            if rank in others_seconds:
                self._ratios[rank].append(math.log(seconds / others_seconds[rank]))
        self._learn()
        slow_before = set(self.slow)
        slowest_ranks: dict[str, int] = {}
        for rank, rank_ratios in self._ratios.items():
            host = self.hosts[rank]
            if self._is_slow(rank_ratios) and not (
                host in slowest_ranks
                and statistics.median(self._ratios[slowest_ranks[host]]) > statistics.median(rank_ratios)
            ):
                slowest_ranks[host] = rank
        for host, rank in slowest_ranks.items():
            self.slow[host] = self._told(host, rank)
        for host in self.slow.keys() - slowest_ranks.keys():
            ratios_there = [ratios for rank, ratios in self._ratios.items() if self.hosts[rank] == host]
            if all(sum(ratio <= self._limit for ratio in ratios) >= SHARE for ratios in ratios_there):
                del self.slow[host]
        return set(self.slow) != slow_before

    def _is_slow(self, ratios: Sequence[float]) -> bool:
        if len(ratios) < WINDOW or ratios[-1] <= self._limit / 2:
            return False
        often_enough = sum(ratio > self._limit / 2 for ratio in ratios) >= SHARE
        return often_enough and statistics.median(ratios) > max(self._limit, SURE * self._spread)

    def _learn(self) -> None:
        """How far windows are apart, while nobody is slow."""
        self._since += 1
        if self._since < WINDOW or self.slow:
            return
        self._since = 0
        self._windows.extend(statistics.median(of) for of in self._ratios.values() if len(of) == WINDOW)
        if len(self._windows) >= KNOWN:
            middle = statistics.median(self._windows)
            self._spread = 1.4826 * statistics.median(abs(x - middle) for x in self._windows)

    def _others(self, values: Mapping[int, float]) -> dict[int, float]:
        """By rank, the median of the ranks with its layers and experts on other hosts; where all are on one, of the
        other ranks. Of two in the middle the larger: one that is fast makes nobody slow. Ranks without others are left
        out."""
        ranks_by_work = defaultdict[tuple[int, int], list[int]](list)
        for rank in values:
            ranks_by_work[self._work[rank]].append(rank)
        others_seconds: dict[int, float] = {}
        for alike_ranks in ranks_by_work.values():
            ordered_values = sorted(values[alike_rank] for alike_rank in alike_ranks)
            ranks_by_team = defaultdict[object, list[int]](list)
            on_one_host = len({self.hosts[rank] for rank in alike_ranks}) == 1
            for rank in alike_ranks:
                ranks_by_team[rank if on_one_host else self.hosts[rank]].append(rank)
            for team_ranks in ranks_by_team.values():
                if (others_count := len(ordered_values) - len(team_ranks)) > 0:
                    others_median = _without(
                        ordered_values,
                        sorted(values[team_rank] for team_rank in team_ranks),
                        others_count // 2,
                    )
                    others_seconds |= dict.fromkeys(team_ranks, others_median)
        return others_seconds

    def _told(self, host: str, rank: int) -> SlowHost:
        rank_blocks = [judged_block for judged_block in self._judged if rank in judged_block]
        differences = []
        for judged_block in rank_blocks:
            others_seconds = self._others({other: block.own for other, block in judged_block.items()})
            if rank in others_seconds:
                differences.append(judged_block[rank].own - others_seconds[rank])
        lost_seconds = statistics.median(differences)
        step_seconds = statistics.median(judged_block[rank].step for judged_block in rank_blocks)
        part_ratios = {}
        for part_index, part_name in enumerate(OWN):
            own_part = statistics.median(judged_block[rank].parts[part_index] for judged_block in rank_blocks)
            others_part = statistics.median(
                self._others({other: block.parts[part_index] for other, block in rank_block.items()}).get(
                    rank, 0.0
                )
                for rank_block in rank_blocks
            )
            if max(own_part, others_part) >= step_seconds / 100 and others_part > 0:
                part_ratios[part_name] = own_part / others_part
        ratio = math.exp(statistics.median(self._ratios[rank]))
        cost_share = max(0.0, min(1.0, lost_seconds / step_seconds)) if step_seconds else 0.0
        return SlowHost(host, rank, ratio, lost_seconds, cost_share, part_ratios)


def _without(ordered: Sequence[float], team: Sequence[float], index: int) -> float:
    """The `index`-th of the ordered values, those of the team left out."""
    taken_count = 0
    for team_index, value in enumerate(team):
        # Of equal values it does not matter which one is left out.
        value_place = bisect_left(ordered, value) + (team_index - bisect_left(team, value))
        if value_place <= index + taken_count:
            taken_count += 1
    return ordered[index + taken_count]
