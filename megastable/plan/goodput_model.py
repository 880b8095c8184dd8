"""Predicts the goodput of a cluster whose GPUs fail: closed formulas for failures that come by chance. Pure.

A run makes progress in segments: `interval` seconds of training, then `blocked` seconds in which a copy of the state is
made, which is safe `commit` seconds later. A failure undoes what is not safe, is noticed after `detection`, and the run
starts again, which may fail as well. Failures are independent and as likely at any moment (a Poisson process), as
Young (1974) and Daly (2006, doi:10.1016/j.future.2004.11.016) assume. `goodput_trial` throws dice on the same rules.
docs/goodput.md names the source of every number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

DAY = 86400.0
# Llama 3, arXiv:2407.21783, section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs.
LLAMA = 419 / (54 * 16384)


@dataclass(frozen=True)
class FaultyCluster:
    """What a run meets. Times in seconds.

    failures: per GPU and day; lost: the share of them after which the host is gone for `repair`; away: how long the run
    then waits for another host (`repair` without a spare, minutes with one, 0 if it goes on without). start: from the
    launch to the first step. interval, blocked, commit: of checkpoints on disk. snapshot, copied: interval and cost of
    copies in the memory of another host, None without; pair: the share of failures that take both. spikes: incidents of
    training a day; spike_cost: seconds that each costs beside what is redone; rewinds: whether they are undone in
    memory, from copies every `ring` seconds. shrinks: it goes on without the lost host, and takes it in again later.
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

    @property
    def rate(self) -> float:
        """Failures a second."""
        return self.gpus * self.failures / DAY

    def with_spares(self, minutes: float = 2.0) -> FaultyCluster:
        return replace(self, away=60 * minutes)

    def shrinking(self) -> FaultyCluster:
        return replace(self, away=0.0, shrinks=True)

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
    """Shares of the wall time; they add up to 1. `smaller`: the capacity that hosts under repair lack."""

    training: float
    redone: float
    copying: float
    detection: float
    waiting: float
    start_up: float
    spikes: float
    smaller: float


def expected(c: FaultyCluster) -> ExpectedGoodput:
    """The goodput of a long run. See the module."""
    rate = c.rate
    tau, blocked, late = c.interval, c.blocked, c.commit
    disk = 0.0  # of a second of training, for checkpoints beside the copies in memory
    if c.snapshot is not None:
        tau, blocked, late = c.snapshot, c.copied, c.copied
        disk = c.blocked / c.interval
    segment = tau * (1 + disk) + blocked
    # What was begun before the newest safe copy is undone too; where that is lost, all since the one on disk.
    further = late + (c.pair * (c.interval / 2 + c.commit) if c.snapshot is not None else 0.0)
    waits = c.lost * c.away
    again = math.expm1(rate * segment)  # starts of a segment in vain
    starts = math.exp(rate * c.start)  # starts of the processes until one succeeds
    fixed = c.detection + waits + further
    wall = again * (1 / rate + fixed) * starts if rate else segment
    count = again * starts  # failures in that time
    starting = again * math.expm1(rate * c.start) / rate if rate else 0.0
    if c.shrinks:  # the host comes back: a planned restart, from a checkpoint of that moment
        back = count * c.lost * (c.start + c.blocked)
        starting, wall = starting + back, wall + back
    training = tau
    copies = blocked + tau * disk
    lost = wall - training - copies - starting - count * (c.detection + waits)
    # Incidents of training come by time, not by GPU.
    redo = (c.ring if c.rewinds else c.interval) / 2
    each = redo + c.spike_cost + (0.0 if c.rewinds else c.start)
    spiky = c.spikes / DAY * training * each
    # By Little's law so many hosts are under repair at any moment.
    gone = rate * c.lost * c.repair * c.host / c.gpus if c.shrinks else 0.0
    whole = (wall + spiky) / (1 - gone)
    return ExpectedGoodput(
        training=training / whole, redone=lost / whole, copying=copies / whole,
        detection=count * c.detection / whole, waiting=count * waits / whole, start_up=starting / whole,
        spikes=spiky / whole, smaller=gone,
    )  # fmt: skip


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
