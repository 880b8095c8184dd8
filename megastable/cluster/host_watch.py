"""Reads the state of this host and its GPUs again and again, in a thread of the supervisor or of the host's agent.

A driver that hangs holds up nobody: it is asked by a process of its own with a time limit (gpu_health.py), and after a
failure the thread waits twice as long as before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from megastable.base import free_memory
from megastable.cluster.gpu_health import NO_DRIVER, read_gpus
from megastable.run.machine_state import HostReading, host_reading

SECONDS = 15.0  # between two readings
LONGEST = 3600.0  # ... of GPUs, while they cannot be read


class HostWatch:
    """Of this host; begins with the first question."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._latest: HostReading | None = None
        self._thread: threading.Thread | None = None

    def latest(self) -> HostReading | None:
        """The newest reading; None until there is one. Returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="host watch", daemon=True)
            self._thread.start()
        return self._latest

    def _read(self, gpus: Sequence[Mapping[str, Any]], why: str) -> HostReading:
        return host_reading(free_memory.total(), free_memory.free(), os.getloadavg()[0], gpus, why)

    def _follow(self) -> None:
        pause = threading.Event()
        why, wait, left = "", self.seconds, 0.0
        while True:
            gpus = None
            if left <= 0:
                try:
                    gpus, problem = read_gpus()
                except (OSError, ValueError) as error:  # such as a /proc that is hidden from this user
                    problem = str(error)
                why = "" if problem is None or NO_DRIVER in problem else problem
                wait = self.seconds if problem is None else min(LONGEST, 2 * wait)
                left = wait
            with suppress(OSError, ValueError):
                self._latest = self._read(gpus or [], why)
            pause.wait(self.seconds)
            left -= self.seconds
