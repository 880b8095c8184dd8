"""Predicts the goodput of a cluster whose GPUs fail: closed formulas for failures that come by chance. Pure.

A run makes progress in segments: `interval` seconds of training, then `blocked` seconds in which a copy of the state is
made, which is safe `commit` seconds later. A failure undoes what is not safe, is noticed after `detection`, and the run
starts again, which may fail as well. Failures are independent and as likely at any moment (a Poisson process), as
Young (1974) and Daly (2006, doi:10.1016/j.future.2004.11.016) assume. A run that shrinks is on so many hosts for so
much of the time, and each number has a goodput of its own: hosts are away for much longer than a segment takes. Hosts
that idle fail like others. `play_trial` throws dice on the same rules. docs/goodput.md names the source of every
number.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import astuple, dataclass, fields, replace

import numpy as np

DAY = 86400.0
# Llama 3, arXiv:2407.21783, section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs.
LLAMA = 419 / (54 * 16384)


@dataclass(frozen=True)
class FaultyCluster:
    """What a run meets. Times in seconds.

    failures: per GPU and day; lost: the share of them after which the host is gone for `repair`; away: how long the run
    then waits for a host (`repair` without a spare, minutes with one, or before it goes on without). start: from the
    launch to the first step. interval, blocked, commit: of checkpoints on disk. snapshot, copied: interval and cost of
    copies in the memory of another host, None without; pair: the share of failures that take both. spikes: incidents of
    training a day; spike_cost: seconds that each costs beside what is redone; rewinds: whether they are undone in
    memory, from copies every `ring` seconds. shrinks: it goes on without the lost host, and takes it in again later;
    halves: the batch can be shared out among all hosts, half of them, a quarter, but no other number.

    `interval`, `snapshot`, `ring` and `spikes` are those of all hosts: they count steps, which take longer on fewer.
    """

    gpus: int
    start: float
    failures: float = LLAMA
    lost: float = 0.5
    host: int = 8
    repair: float = 4 * 3600.0
    away: float = 4 * 3600.0
    detection: float = 20.0
    interval: float = 1800.0
    blocked: float = 2.0
    commit: float = 60.0
    snapshot: float | None = None
    copied: float = 0.5
    pair: float = 0.01
    spikes: float = 0.3
    spike_cost: float = 1800.0
    rewinds: bool = False
    ring: float = 120.0
    shrinks: bool = False
    halves: bool = False

    @property
    def rate(self) -> float:
        """Failures a second, of all hosts."""
        return self.gpus * self.failures / DAY

    @property
    def hosts(self) -> int:
        return max(1, round(self.gpus / self.host))

    def usable_share(self, missing: int) -> float:
        """The share of all hosts that can train while so many are missing."""
        here = (self.hosts - missing) / self.hosts
        return 2.0 ** math.floor(math.log2(here)) if self.halves and here > 0 else here

    def with_spares(self) -> FaultyCluster:
        """A host is there after two minutes."""
        return replace(self, away=120.0)

    def with_shrinking(self, after: float = 120.0, halves: bool = False) -> FaultyCluster:
        """A host is awaited for `after` seconds (`supervise.shrink_after`), then the others go on."""
        return replace(self, away=min(after, self.repair), shrinks=True, halves=halves)

    def with_peers(self) -> FaultyCluster:
        """Copies in the memory of another host, as often as pays."""
        return replace(self, snapshot=math.sqrt(2 * self.copied / self.rate))

    def with_tuned_interval(self, least: float = 600.0) -> FaultyCluster:
        """Checkpoints as often as pays (Young's formula), but not more often than every `least` seconds: the file
        system has other users."""
        return replace(self, interval=max(least, math.sqrt(2 * self.blocked / self.rate)))

    def with_rewinds(self) -> FaultyCluster:
        return replace(self, rewinds=True, spike_cost=5.0)


@dataclass(frozen=True)
class ExpectedGoodput:
    """Shares of what all hosts could do in the wall time; they add up to 1. smaller: of hosts under repair, and of
    those that idle because of them."""

    training: float = 0.0
    redone: float = 0.0
    copying: float = 0.0
    detection: float = 0.0
    waiting: float = 0.0
    start_up: float = 0.0
    spikes: float = 0.0
    smaller: float = 0.0


def expect_goodput(c: FaultyCluster) -> ExpectedGoodput:
    """The goodput of a long run. See the module."""
    if not (c.shrinks and c.rate):
        return _level(c, 1.0, 1.0)
    missing_chances, all_shares, used_capacity = _missing(c), np.zeros(len(fields(ExpectedGoodput))), 0.0
    running_share = 0.0  # the share of the time in which it runs while one host fewer is missing
    for missing, chance in missing_chances.items():
        used = c.usable_share(missing)
        if not used:
            continue
        # How often a second a host of the run was lost, so that now so many are missing, and the run grew to so many.
        losses = running_share * c.rate * c.lost * c.usable_share(missing - 1) if missing else 0.0
        can_grow = c.usable_share(missing + 1) < used
        growth_rate = missing_chances.get(missing + 1, 0.0) * (missing + 1) / c.repair if can_grow else 0.0
        start_seconds = math.expm1(c.rate * used * c.start) / (c.rate * used)
        # To grow is a planned restart, from a checkpoint that is waited for.
        starting = losses * start_seconds + growth_rate * (start_seconds + max(c.blocked, c.commit))
        down = ExpectedGoodput(detection=losses * c.detection, waiting=losses * c.away, start_up=starting)
        begins = np.array(astuple(down))
        if begins.sum() > chance:
            begins *= chance / begins.sum()
        running_share = chance - float(begins.sum())
        goes_on = running_share * np.array(astuple(_level(c, used, 1 - c.lost)))
        all_shares, used_capacity = all_shares + used * (begins + goes_on), used_capacity + chance * used
    return replace(ExpectedGoodput(*all_shares.tolist()), smaller=1 - used_capacity)


def _level(c: FaultyCluster, used: float, stays: float) -> ExpectedGoodput:
    """Of a run that is on this share of the hosts, as shares of its own time. stays: the share of failures after which
    it goes on like that; after another one, what follows is no time of this level."""
    rate = c.rate * used
    training_interval, blocked_seconds, late = c.interval / used, c.blocked, c.commit
    disk = 0.0  # of a second of training, for checkpoints beside the copies in memory
    if c.snapshot is not None:
        training_interval, blocked_seconds, late = c.snapshot / used, c.copied, c.copied
        disk = c.blocked * used / c.interval
    segment_seconds = training_interval * (1 + disk) + blocked_seconds
    # What was begun before the newest safe copy is undone too; where that is lost, all since the one on disk.
    unsafe_seconds = late + (c.pair * (c.interval / used / 2 + c.commit) if c.snapshot is not None else 0.0)
    waits = 0.0 if c.shrinks else c.lost * c.away
    again = math.expm1(rate * segment_seconds)  # starts of a segment in vain
    restart_count = stays * again
    count = restart_count * math.exp(rate * c.start)  # failures, those of starts too
    starting = restart_count * math.expm1(rate * c.start) / rate if rate else 0.0
    worked = again / rate + (again - restart_count + count) * unsafe_seconds if rate else segment_seconds
    wall_seconds = worked + starting + count * (c.detection + waits)
    training = training_interval
    copies = blocked_seconds + training_interval * disk
    # Incidents of training come by steps, not by GPU.
    redone_seconds = (c.ring if c.rewinds else c.interval) / used / 2
    spike_seconds = redone_seconds + c.spike_cost + (0.0 if c.rewinds else c.start)
    spike_time = c.spikes / DAY * training * used * spike_seconds
    whole = wall_seconds + spike_time
    return ExpectedGoodput(
        training=training / whole, redone=(worked - training - copies) / whole, copying=copies / whole,
        detection=count * c.detection / whole, waiting=count * waits / whole, start_up=starting / whole,
        spikes=spike_time / whole,
    )  # fmt: skip


def _missing(c: FaultyCluster) -> dict[int, float]:
    """How many hosts are under repair, and in which share of the time. Each of them fails on its own, so the number is
    binomially distributed. Unlikely ones are left out."""
    repair_load = c.rate * c.lost / c.hosts * c.repair
    share, n = repair_load / (1 + repair_load), c.hosts
    reach = 10 * math.sqrt(n * share * (1 - share)) + 10
    chance_by_missing = {}
    for missing in range(max(0, math.floor(n * share - reach)), min(n, math.ceil(n * share + reach)) + 1):
        log_ways = math.lgamma(n + 1) - math.lgamma(missing + 1) - math.lgamma(n - missing + 1)
        log_odds = missing * math.log(share) if missing and share else 0.0 if not missing else -math.inf
        chance_by_missing[missing] = math.exp(log_ways + log_odds + (n - missing) * math.log1p(-share))
    return chance_by_missing


def count_spares(c: FaultyCluster) -> int:
    """Hosts in reserve with which a failure finds none left in at most 1 % of cases: those under repair are Poisson
    distributed."""
    mean_missing = c.rate * c.lost * c.repair
    spare_count, count_chance = 0, math.exp(-mean_missing)
    chance_within = count_chance
    while 1 - chance_within > 0.01:
        spare_count += 1
        count_chance *= mean_missing / spare_count
        chance_within += count_chance
    return spare_count + 1


# The life of a run on such a cluster, event by event: the slow reference of the formulas


def play_trial(c: FaultyCluster, training: float, seed: int) -> float:
    """The goodput of one run of so many seconds of training, by all hosts."""
    run_life = _Life(c, seed)
    while run_life.done < training:
        run_life.go_on(training)
    return training / run_life.wall


class _Life:
    """wall: seconds passed; done: seconds of training by all hosts that count now; used: the share of hosts that
    train; back: when those under repair return."""

    def __init__(self, c: FaultyCluster, seed: int) -> None:
        self.c, self.dice = c, random.Random(seed)
        self.wall = self.done = 0.0
        self.used, self.back = 1.0, list[float]()
        self.fails = self._next(c.rate)
        self.spike = self._next(c.spikes / DAY)  # in seconds of training, as are the next two
        self.since = 0.0  # the last copy
        self.last = 0.0  # where the newest checkpoint on disk is
        # Copies that are being made or are safe: (training it holds, wall time at which it is safe).
        self.disk, self.memory = [(0.0, 0.0)], [(0.0, 0.0)]
        self.peers = c.snapshot is not None
        self.every = c.interval if c.snapshot is None else c.snapshot
        self.cost, self.late = (c.copied, c.copied) if self.peers else (c.blocked, c.commit)

    def _next(self, rate: float) -> float:
        return self.dice.expovariate(rate) if rate else math.inf

    def go_on(self, training: float) -> None:
        """Train until something happens."""
        next_stop = min(self.every - self.since, self.spike, training - self.done)
        next_event = max(self.wall, min([self.fails, *self.back[:1]]))
        if self.wall + next_stop / self.used > next_event:  # in a step
            self._train((next_event - self.wall) * self.used)
            self.wall = next_event
            if self.back and self.back[0] <= next_event:
                self._grow()
            else:
                self._strike()
            return
        self._train(next_stop)
        self.wall += next_stop / self.used
        if self.spike <= 0:
            self._undo()
        elif self.since >= self.every:
            self._copy()

    def _train(self, seconds: float) -> None:
        self.done, self.since, self.spike = self.done + seconds, self.since + seconds, self.spike - seconds

    def _undo(self) -> None:
        """A spike: what it undoes is done again at once. Failures pause meanwhile."""
        c = self.c
        undone_seconds = (c.ring if c.rewinds else c.interval) / 2
        pause_seconds = undone_seconds / self.used + c.spike_cost + (0.0 if c.rewinds else c.start)
        self.wall, self.fails = self.wall + pause_seconds, self.fails + pause_seconds
        self.spike = self._next(c.spikes / DAY)

    def _copy(self) -> None:
        ready = self.wall + self.cost + (self.c.blocked * self.every / self.c.interval if self.peers else 0.0)
        while self.fails < ready:
            self.wall = self.fails
            if self._strike():
                return
        self.wall, self.since = ready, 0.0
        kept_copies = self.memory if self.peers else self.disk
        kept_copies.append((self.done, self.wall + self.late))
        if self.peers and self.done - self.last >= self.c.interval:
            self.disk.append((self.done, self.wall + self.c.commit))
            self.last = self.done
        del self.memory[:-4], self.disk[:-4]

    def _strike(self) -> bool:
        """A failure while it trains; whether it goes back."""
        now = self.wall
        if not self._hit():
            return False
        loses_both = self.peers and self.dice.random() < self.c.pair
        possible_copies = self.memory if self.peers and not loses_both else self.disk
        self.done = next((held for held, safe_time in reversed(possible_copies) if safe_time <= now), 0.0)
        self._start()
        return True

    def _hit(self) -> bool:
        """A failure; whether it ends the processes: then it is noticed, and a host awaited."""
        faulty_cluster = self.c
        host_lost, ends_run = self.dice.random() < faulty_cluster.lost, True
        if faulty_cluster.shrinks:
            # Any host may be hit: first those that train, then those that idle, then those under repair.
            hit_host = self.dice.random() * faulty_cluster.hosts
            ends_run = hit_host < self.used * faulty_cluster.hosts
            if host_lost and hit_host < faulty_cluster.hosts - len(self.back):
                heapq.heappush(self.back, self.wall + faulty_cluster.repair)
        if ends_run:
            self.wall += faulty_cluster.detection + (faulty_cluster.away if host_lost else 0.0)
        self.fails = self.wall + self._next(faulty_cluster.rate)
        return ends_run

    def _grow(self) -> None:
        """A host is back: a planned restart, if more hosts can train."""
        used_before = self.used
        self._arrive()
        if self.used > used_before:
            pause = max(self.c.blocked, self.c.commit)
            self.wall, self.fails, self.last = self.wall + pause, self.fails + pause, self.done
            self.disk.append((self.done, self.wall))
            self._start()
        else:
            self.used = used_before

    def _arrive(self) -> None:
        """Who is there now."""
        if not self.c.shrinks:
            return
        while True:
            while self.back and self.back[0] <= self.wall:
                heapq.heappop(self.back)
            self.used = self.c.usable_share(len(self.back))
            if self.used:
                return
            self.wall = self.back[0]

    def _start(self) -> None:
        """Processes, again and again until that succeeds."""
        self._arrive()
        ready_time = self.wall + self.c.start
        while self.fails < ready_time:
            self.wall = max(self.wall, self.fails)
            if self._hit():
                self._arrive()
                ready_time = self.wall + self.c.start
        self.wall, self.since = max(self.wall, ready_time), 0.0
        self.last = min(self.last, self.done)
        self.memory = [(self.done, 0.0)]
        self.disk = [disk_copy for disk_copy in self.disk if disk_copy[0] <= self.done]
