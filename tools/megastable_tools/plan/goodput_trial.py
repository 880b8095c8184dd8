"""Plays the life of a run on a cluster whose GPUs fail, event by event: the slow reference of goodput_model.py."""

from __future__ import annotations

import heapq
import math
import random

from megastable_tools.plan.goodput_model import DAY, FaultyCluster


def trial(c: FaultyCluster, training: float, seed: int) -> float:
    """The goodput of one run of so many seconds of training, by all hosts."""
    life = _Life(c, seed)
    while life.done < training:
        life.go_on(training)
    return training / life.wall


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
        until = min(self.every - self.since, self.spike, training - self.done)
        soon = max(self.wall, min([self.fails, *self.back[:1]]))
        if self.wall + until / self.used > soon:  # in a step
            self._train((soon - self.wall) * self.used)
            self.wall = soon
            if self.back and self.back[0] <= soon:
                self._grow()
            else:
                self._strike()
            return
        self._train(until)
        self.wall += until / self.used
        if self.spike <= 0:
            self._undo()
        elif self.since >= self.every:
            self._copy()

    def _train(self, seconds: float) -> None:
        self.done, self.since, self.spike = self.done + seconds, self.since + seconds, self.spike - seconds

    def _undo(self) -> None:
        """A spike: what it undoes is done again at once. Failures pause meanwhile."""
        c = self.c
        undone = (c.ring if c.rewinds else c.interval) / 2
        pause = undone / self.used + c.spike_cost + (0.0 if c.rewinds else c.start)
        self.wall, self.fails = self.wall + pause, self.fails + pause
        self.spike = self._next(c.spikes / DAY)

    def _copy(self) -> None:
        ready = self.wall + self.cost + (self.c.blocked * self.every / self.c.interval if self.peers else 0.0)
        while self.fails < ready:
            self.wall = self.fails
            if self._strike():
                return
        self.wall, self.since = ready, 0.0
        copies = self.memory if self.peers else self.disk
        copies.append((self.done, self.wall + self.late))
        if self.peers and self.done - self.last >= self.c.interval:
            self.disk.append((self.done, self.wall + self.c.commit))
            self.last = self.done
        del self.memory[:-4], self.disk[:-4]

    def _strike(self) -> bool:
        """A failure while it trains; whether it goes back."""
        now = self.wall
        if not self._hit():
            return False
        both = self.peers and self.dice.random() < self.c.pair
        copies = self.memory if self.peers and not both else self.disk
        self.done = next((held for held, safe in reversed(copies) if safe <= now), 0.0)
        self._start()
        return True

    def _hit(self) -> bool:
        """A failure; whether it ends the processes: then it is noticed, and a host awaited."""
        c = self.c
        lost, ends = self.dice.random() < c.lost, True
        if c.shrinks:
            # Any host may be hit: first those that train, then those that idle, then those under repair.
            host = self.dice.random() * c.hosts
            ends = host < self.used * c.hosts
            if lost and host < c.hosts - len(self.back):
                heapq.heappush(self.back, self.wall + c.repair)
        if ends:
            self.wall += c.detection + (c.away if lost else 0.0)
        self.fails = self.wall + self._next(c.rate)
        return ends

    def _grow(self) -> None:
        """A host is back: a planned restart, if more hosts can train."""
        before = self.used
        self._arrive()
        if self.used > before:
            pause = max(self.c.blocked, self.c.commit)
            self.wall, self.fails, self.last = self.wall + pause, self.fails + pause, self.done
            self.disk.append((self.done, self.wall))
            self._start()
        else:
            self.used = before

    def _arrive(self) -> None:
        """Who is there now."""
        if not self.c.shrinks:
            return
        while True:
            while self.back and self.back[0] <= self.wall:
                heapq.heappop(self.back)
            self.used = self.c.used(len(self.back))
            if self.used:
                return
            self.wall = self.back[0]

    def _start(self) -> None:
        """Processes, again and again until that succeeds."""
        self._arrive()
        ready = self.wall + self.c.start
        while self.fails < ready:
            self.wall = max(self.wall, self.fails)
            if self._hit():
                self._arrive()
                ready = self.wall + self.c.start
        self.wall, self.since = max(self.wall, ready), 0.0
        self.last = min(self.last, self.done)
        self.memory[:], self.disk[:] = (
            [(self.done, 0.0)],
            [copy for copy in self.disk if copy[0] <= self.done],
        )
