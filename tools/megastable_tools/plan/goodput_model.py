"""Predicts the goodput of a cluster whose GPUs fail: closed formulas for failures that come by chance. Pure.

A run makes progress in segments: `interval` seconds of training, then `blocked` seconds in which a copy of the state is
made, which is safe `commit` seconds later. A failure undoes what is not safe, is noticed after `detection`, and the run
starts again, which may fail as well. Failures are independent and as likely at any moment (a Poisson process), as
Young (1974) and Daly (2006, doi:10.1016/j.future.2004.11.016) assume. A run that shrinks is on so many hosts for so
much of the time, and each number has a goodput of its own: hosts are away for much longer than a segment takes. Hosts
that idle fail like others. `goodput_trial` throws dice on the same rules. docs/goodput.md names the source of every
number.
"""

from __future__ import annotations

import math
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

    def used(self, missing: int) -> float:
        """The share of all hosts that can train while so many are missing."""
        here = (self.hosts - missing) / self.hosts
        return 2.0 ** math.floor(math.log2(here)) if self.halves and here > 0 else here

    def with_spares(self, minutes: float = 2.0) -> FaultyCluster:
        return replace(self, away=60 * minutes)

    def shrinking(self, after: float = 120.0, halves: bool = False) -> FaultyCluster:
        """A host is awaited for `after` seconds (`supervise.shrink_after`), then the others go on."""
        return replace(self, away=min(after, self.repair), shrinks=True, halves=halves)

    def with_peers(self) -> FaultyCluster:
        """Copies in the memory of another host, as often as pays."""
        return replace(self, snapshot=math.sqrt(2 * self.copied / self.rate))

    def tuned(self, least: float = 600.0) -> FaultyCluster:
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


def expected(c: FaultyCluster) -> ExpectedGoodput:
    """The goodput of a long run. See the module."""
    if not (c.shrinks and c.rate):
        return _level(c, 1.0, 1.0)
    chances, shares, capacity = _missing(c), np.zeros(len(fields(ExpectedGoodput))), 0.0
    running = 0.0  # the share of the time in which it runs while one host fewer is missing
    for missing, chance in chances.items():
        used = c.used(missing)
        if not used:
            continue
        # How often a second a host of the run was lost, so that now so many are missing, and the run grew to so many.
        losses = running * c.rate * c.lost * c.used(missing - 1) if missing else 0.0
        grows = c.used(missing + 1) < used
        growths = chances.get(missing + 1, 0.0) * (missing + 1) / c.repair if grows else 0.0
        start = math.expm1(c.rate * used * c.start) / (c.rate * used)
        # To grow is a planned restart, from a checkpoint that is waited for.
        starting = losses * start + growths * (start + max(c.blocked, c.commit))
        down = ExpectedGoodput(detection=losses * c.detection, waiting=losses * c.away, start_up=starting)
        begins = np.array(astuple(down))
        if begins.sum() > chance:
            begins *= chance / begins.sum()
        running = chance - float(begins.sum())
        goes_on = running * np.array(astuple(_level(c, used, 1 - c.lost)))
        shares, capacity = shares + used * (begins + goes_on), capacity + chance * used
    return replace(ExpectedGoodput(*shares.tolist()), smaller=1 - capacity)


def _level(c: FaultyCluster, used: float, stays: float) -> ExpectedGoodput:
    """Of a run that is on this share of the hosts, as shares of its own time. stays: the share of failures after which
    it goes on like that; after another one, what follows is no time of this level."""
    rate = c.rate * used
    tau, blocked, late = c.interval / used, c.blocked, c.commit
    disk = 0.0  # of a second of training, for checkpoints beside the copies in memory
    if c.snapshot is not None:
        tau, blocked, late = c.snapshot / used, c.copied, c.copied
        disk = c.blocked * used / c.interval
    segment = tau * (1 + disk) + blocked
    # What was begun before the newest safe copy is undone too; where that is lost, all since the one on disk.
    further = late + (c.pair * (c.interval / used / 2 + c.commit) if c.snapshot is not None else 0.0)
    waits = 0.0 if c.shrinks else c.lost * c.away
    again = math.expm1(rate * segment)  # starts of a segment in vain
    restarts = stays * again
    count = restarts * math.exp(rate * c.start)  # failures, those of starts too
    starting = restarts * math.expm1(rate * c.start) / rate if rate else 0.0
    worked = again / rate + (again - restarts + count) * further if rate else segment
    wall = worked + starting + count * (c.detection + waits)
    training = tau
    copies = blocked + tau * disk
    # Incidents of training come by steps, not by GPU.
    redo = (c.ring if c.rewinds else c.interval) / used / 2
    each = redo + c.spike_cost + (0.0 if c.rewinds else c.start)
    spiky = c.spikes / DAY * training * used * each
    whole = wall + spiky
    return ExpectedGoodput(
        training=training / whole, redone=(worked - training - copies) / whole, copying=copies / whole,
        detection=count * c.detection / whole, waiting=count * waits / whole, start_up=starting / whole,
        spikes=spiky / whole,
    )  # fmt: skip


def _missing(c: FaultyCluster) -> dict[int, float]:
    """How many hosts are under repair, and in which share of the time. Each of them fails on its own, so the number is
    binomially distributed. Unlikely ones are left out."""
    load = c.rate * c.lost / c.hosts * c.repair
    share, n = load / (1 + load), c.hosts
    reach = 10 * math.sqrt(n * share * (1 - share)) + 10
    found = {}
    for missing in range(max(0, math.floor(n * share - reach)), min(n, math.ceil(n * share + reach)) + 1):
        ways = math.lgamma(n + 1) - math.lgamma(missing + 1) - math.lgamma(n - missing + 1)
        odds = missing * math.log(share) if missing and share else 0.0 if not missing else -math.inf
        found[missing] = math.exp(ways + odds + (n - missing) * math.log1p(-share))
    return found


def spares(c: FaultyCluster, shortage: float = 0.01) -> int:
    """Hosts in reserve with which a failure finds none left in at most that share of cases: those under repair are
    Poisson distributed."""
    mean = c.rate * c.lost * c.repair
    count, chance = 0, math.exp(-mean)
    within = chance
    while 1 - within > shortage:
        count += 1
        chance *= mean / count
        within += chance
    return count + 1
