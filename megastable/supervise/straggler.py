"""Finds hosts that are slow for long, from the time that every rank needs for its own work. Pure.

Ranks of one pipeline stage do the same work on equally many samples. Per block of ten steps, a rank's ratio is its own
time over the median of the ranks on other hosts, its own host left out. A rank is slow if

- its median ratio over the last `WINDOW` blocks is above `limit`, and that in `SHARE` of them above the root of it:
  neither a checkpoint nor a burst lasts so long; and
- the logarithm of that median is `SURE` times what ranks of this run differ by anyway, from one window to the next
  (1.4826 times the median deviation from the median). Where noise lasts for hundreds of steps, only this tells it from
  a fault.

A host is as slow as its slowest rank. Ranks that share every layer (tensor and context parallelism) wait for each other
in the middle of their work: where such a group spans hosts, nobody is named.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megastable.base.activity import OWN
from megastable.run.rank_ipc import WorkBlock

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

    def words(self, alone: bool = False) -> str:
        """alone: whether there is no other host, so that the rank is named."""
        who = f"rank {self.rank} on {self.host} is" if alone else f"host {self.host} is"
        parts = ", ".join(f"{name} {ratio:.2f} x" for name, ratio in self.parts.items())
        return (
            f"{who} slow: rank {self.rank} takes {self.ratio:.2f} x as long as the others for its own work, which "
            f"costs the run {self.cost:.0%} ({self.seconds:.3g} s a step); {parts}"
        )


class Stragglers:
    """Of one attempt. limit: the ratio from which a rank is slow; hosts: by rank, of all ranks; stages: of the
    pipeline; shared: neighbouring ranks that share every layer.

    slow: the hosts that are slow now.
    """

    def __init__(self, limit: float, hosts: Mapping[int, str], stages: int = 1, shared: int = 1) -> None:
        self.hosts, self._limit = hosts, math.log(limit)
        self.slow: dict[str, SlowHost] = {}
        self.alone = len(set(hosts.values())) == 1
        groups = defaultdict[int, set[str]](set)
        for rank, host in hosts.items():
            groups[rank // shared].add(host)
        self.blind = any(len(of) > 1 for of in groups.values())
        size = max(1, len(hosts) // stages)
        self._stage = {rank: rank // size for rank in hosts}
        self._pending: dict[int, dict[int, WorkBlock]] = {}
        self._last = dict.fromkeys(hosts, -1)  # block, by rank
        self._awaited = -1, set[int]()  # the oldest pending block, and the ranks that have not got to its end
        self._judged: deque[dict[int, WorkBlock]] = deque(maxlen=WINDOW)
        self._ratios = {rank: deque[float](maxlen=WINDOW) for rank in hosts}
        self._windows: deque[float] = deque(maxlen=KEPT)
        self._since = 0  # blocks since the last window
        self._spread = UNKNOWN

    def add(self, rank: int, block: WorkBlock) -> bool:
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
        own = {rank: block.own for rank, block in told.items()}
        others = self._others(own)
        for rank, seconds in own.items():
            if rank in others:
                self._ratios[rank].append(math.log(seconds / others[rank]))
        self._learn()
        before = set(self.slow)
        slowest: dict[str, int] = {}
        for rank, ratios in self._ratios.items():
            host = self.hosts[rank]
            if self._is_slow(ratios) and not (
                host in slowest and statistics.median(self._ratios[slowest[host]]) > statistics.median(ratios)
            ):
                slowest[host] = rank
        for host, rank in slowest.items():
            self.slow[host] = self._told(host, rank)
        for host in self.slow.keys() - slowest.keys():
            if all(
                self._is_over(ratios) for rank, ratios in self._ratios.items() if self.hosts[rank] == host
            ):
                del self.slow[host]
        return set(self.slow) != before

    def _is_slow(self, ratios: Sequence[float]) -> bool:
        if len(ratios) < WINDOW or ratios[-1] <= self._limit / 2:
            return False
        enough = sum(ratio > self._limit / 2 for ratio in ratios) >= SHARE
        return enough and statistics.median(ratios) > max(self._limit, SURE * self._spread)

    def _is_over(self, ratios: Sequence[float]) -> bool:
        return sum(ratio <= self._limit for ratio in ratios) >= SHARE

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
        """By rank, the median of the ranks of its stage on other hosts; where all are on one, of the other ranks. Of
        two in the middle the larger: one that is fast makes nobody slow. Ranks without others are left out."""
        stages = defaultdict[int, list[int]](list)
        for rank in values:
            stages[self._stage[rank]].append(rank)
        found: dict[int, float] = {}
        for ranks in stages.values():
            ordered = sorted(values[rank] for rank in ranks)
            teams = defaultdict[object, list[int]](list)
            together = len({self.hosts[rank] for rank in ranks}) == 1
            for rank in ranks:
                teams[rank if together else self.hosts[rank]].append(rank)
            for team in teams.values():
                if (left := len(ordered) - len(team)) > 0:
                    middle = _without(ordered, sorted(values[rank] for rank in team), left // 2)
                    found |= dict.fromkeys(team, middle)
        return found

    def _told(self, host: str, rank: int) -> SlowHost:
        blocks = [told for told in self._judged if rank in told]
        base = [self._others({r: block.own for r, block in told.items()}).get(rank) for told in blocks]
        pairs = [
            (told[rank].own, value) for told, value in zip(blocks, base, strict=True) if value is not None
        ]
        seconds = statistics.median(own - value for own, value in pairs)
        step = statistics.median(told[rank].step for told in blocks)
        parts = {}
        for index, name in enumerate(OWN):
            mine = statistics.median(told[rank].parts[index] for told in blocks)
            theirs = statistics.median(
                self._others({r: block.parts[index] for r, block in told.items()}).get(rank, 0.0)
                for told in blocks
            )
            if max(mine, theirs) >= step / 100 and theirs > 0:
                parts[name] = mine / theirs
        ratio = math.exp(statistics.median(self._ratios[rank]))
        return SlowHost(
            host, rank, ratio, seconds, max(0.0, min(1.0, seconds / step)) if step else 0.0, parts
        )


def _without(ordered: Sequence[float], team: Sequence[float], index: int) -> float:
    """The `index`-th of the ordered values, those of the team left out."""
    taken = 0
    for number, value in enumerate(team):
        # Of equal values it does not matter which one is left out.
        place = bisect_left(ordered, value) + (number - bisect_left(team, value))
        if place <= index + taken:
            taken += 1
    return ordered[index + taken]
