"""Burns in single hosts that stand by, in the background of a run."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from pydantic import ValidationError

from megastable.base.text import visible
from megastable.cluster.child_process import ChildProcess
from megastable.cluster.host_check import BURN_IN
from megastable.cluster.host_report import HostBurnIn
from megastable.cluster.reach import CONNECT, KEPT, Reach, python, reason_of

AGAIN = 60.0  # seconds before one that could not be made is tried again


@dataclass(frozen=True)
class BurnInAnswer:
    """found: what was wrong, "" if nothing was. unmade: why there was no burn-in, "" if there was one."""

    found: str = ""
    unmade: str = ""


class HostBurnIns:
    """reach: how hosts are reached. Without an agent: a burn-in ends by itself if nobody waits for it any more."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._running: dict[str, ChildProcess] = {}
        self._next: dict[str, float] = {}  # when one that could not be made is tried again

    def poll(self, host: str, seconds: float) -> BurnInAnswer | None:
        """What a burn-in of `seconds` found; None while it goes on. Starts it. Poll often."""
        running, now = self._running.get(host), time.monotonic()
        if running is None:
            if now < self._next.get(host, now):
                return None
            command = python(
                "megastable.cluster.burn_in", "--seconds", str(seconds), "--seed", str(secrets.randbits(32))
            )
            limit = seconds + BURN_IN + CONNECT
            try:
                self._running[host] = ChildProcess(self._reach.words(host, command), limit, kept=KEPT)
            except (OSError, ValueError) as error:
                return self._unmade(host, f"could not be started: {error}")
            return None
        result = running.poll()
        if result is None:
            return None
        del self._running[host]
        if reason := reason_of(result, seconds + BURN_IN + CONNECT):
            return self._unmade(host, reason)
        try:
            report = HostBurnIn.model_validate_json(result.tail.strip().splitlines()[-1])
        except (IndexError, ValidationError):
            return self._unmade(host, "its report cannot be read")
        if report.in_use:
            return self._unmade(host, report.in_use)
        return BurnInAnswer(found="; ".join(visible(text, 1000) for text in report.found))

    def _unmade(self, host: str, reason: str) -> BurnInAnswer:
        self._next[host] = time.monotonic() + AGAIN
        return BurnInAnswer(unmade=visible(reason, 400))

    def close(self) -> None:
        for running in self._running.values():
            running.kill()
        self._running.clear()
