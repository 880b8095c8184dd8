"""For how long a host that failed is left out, or is the last choice. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megastable.stability.actions import Action, Cause, Remedy
from megastable.supervise.exit_cause import End

LOST = ("host gone", "rank lost")  # kinds of failures of a host, not of a process on it


@dataclass(frozen=True)
class HostBar:
    """until: time.time(). wholly: not to be used at all; else where nobody else is there. strikes: failures so far."""

    until: float
    wholly: bool
    strikes: int


def bar_after(
    end: End, remedy: Remedy, before: HostBar | None, cool_off: float, now: float
) -> HostBar | None:
    """What follows for the host that a failure is blamed on; None: nothing. before: its last bar; now: time.time().

    A process that was killed says little about its host; the same host again and again does (restart_policy.py).
    """
    wholly = remedy.action is Action.STOP and remedy.cause is Cause.HARDWARE
    if end.host is None or not (wholly or end.hung or end.what in LOST):
        return None
    strikes = 1 if before is None else before.strikes + 1
    return HostBar(now + cool_off * 2.0 ** (strikes - 1), wholly, strikes)


def in_force(bars: Mapping[str, HostBar], now: float) -> dict[str, bool]:
    """Hosts that are the last choice (False), or not to be used at all (True)."""
    return {host: bar.wholly for host, bar in bars.items() if now < bar.until}
