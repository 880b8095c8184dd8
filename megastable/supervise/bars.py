"""For how long a host that failed is left out, or is the last choice. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megastable.supervise.exit_cause import End
from megastable_guard.actions import Action, Cause, Remedy

LOST = ("host gone", "rank lost")  # kinds of failures of a host, not of a process on it


MOST = 5  # doublings of the cool-off


@dataclass(frozen=True)
class HostBar:
    """until: time.time(). wholly: not to be used at all; else where nobody else is there. strikes: failures so far.
    burn_in: seconds of the one that is still to be passed, 0 = none."""

    until: float
    wholly: bool
    strikes: int
    burn_in: float = 0.0


def next_bar(
    before: HostBar | None, wholly: bool, cool_off: float, now: float, least: int = 1, burn_in: float = 0.0
) -> HostBar:
    """The bar of a host that has failed; before: its last one. Every strike doubles it; they are forgotten when the
    host has done without another one for as long as that bar was. least: strikes that it counts as. One that has
    to pass a burn-in has to whatever happens to it meanwhile."""
    strikes = (
        1 if before is None or now - before.until > _length(before.strikes, cool_off) else before.strikes + 1
    )
    strikes = max(strikes, least)
    burn_in = max(burn_in, 0.0 if before is None else before.burn_in)
    return HostBar(now + _length(strikes, cool_off), wholly or burn_in > 0, strikes, burn_in)


def _length(strikes: int, cool_off: float) -> float:
    return cool_off * 2.0 ** min(strikes - 1, MOST)


def bars_after(
    end: End, remedy: Remedy, before: Mapping[str, HostBar], cool_off: float, now: float
) -> dict[str, HostBar]:
    """What follows for the hosts that a failure is blamed on. before: all bars so far; now: time.time().

    A process that was killed says little about its host; the same host again and again does (restart_policy.py).
    """
    wholly = remedy.action is Action.STOP and remedy.cause is Cause.HARDWARE
    hosts = end.gone or ((end.host,) if end.host is not None else ())
    if not (wholly or end.hung or end.what in LOST):
        return {}
    return {host: next_bar(before.get(host), wholly, cool_off, now) for host in hosts}


def in_force(bars: Mapping[str, HostBar], now: float) -> dict[str, bool]:
    """Hosts that are the last choice (False), or not to be used at all (True)."""
    return {host: bar.wholly for host, bar in bars.items() if now < bar.until or bar.burn_in}
