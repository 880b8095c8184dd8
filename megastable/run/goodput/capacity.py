"""Keeps which share of the ranks that a run was to have its attempts lack. Pure."""

from __future__ import annotations

import re

from megastable.run.events.supervisor_events import HostsAwaited, Launched, SupervisorEvent

FEWER = re.compile(r"going on with \d+ of (\d+) hosts")  # as the supervisor says it when it has waited


class Capacity:
    """Fed the supervisor's events. Who started a supervisor with fewer hosts wants no more: what is wanted is what its
    events say, else the most that an attempt had since it was started. Without a supervisor, nothing is missing: nobody
    but a person changes the number of ranks."""

    def __init__(self) -> None:
        self._wanted = self._hosts = 0
        self._full = 0  # ranks of an attempt on all hosts
        self._launched = False

    def started(self, event: SupervisorEvent) -> None:
        if event.what == "started":
            self._wanted = self._full = 0

    def awaited(self, event: HostsAwaited) -> None:
        if told := FEWER.search(event.reason or ""):
            self._wanted = int(told[1][:9])

    def launched(self, event: Launched) -> None:
        self._hosts, self._launched = len(event.hosts), True
        self._wanted = event.wanted or max(self._wanted, self._hosts)

    def missing(self, world: int) -> float:
        """The share of the wanted ranks that an attempt of `world` ranks lacks."""
        if not self._launched:
            return 0.0
        if self._hosts >= self._wanted > 0:
            self._full = world
        elif not self._hosts:  # of an older version
            self._full = max(self._full, world)
        # Hosts may have different numbers of ranks.
        have, wanted = (world, self._full) if self._full and world else (self._hosts, self._wanted)
        return max(0.0, 1 - have / wanted) if wanted else 0.0
