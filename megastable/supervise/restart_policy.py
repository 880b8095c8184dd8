"""Diagnoses process failures, and chooses the supervisor's action: restart, skip the step's samples, or stop; and how
long a host that failed is left out, or is the last choice. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from megastable.base.errors import NO_SPACE
from megastable.supervise.exit_cause import End
from megastable_guard.actions import Action, Cause, Remedy
from megastable_guard.guard_config import PolicyConfig

FULL = "the disk is full"


@dataclass(frozen=True)
class Failure:
    """A failed attempt of the run.

    what: its kind, equal for equal failures ("SIGKILL", "hang", "RuntimeError: ..."). step: the step in progress, None
    before the first. host: None if unknown. clock: the farthest step done by then. skipped: the samples of that step
    were skipped because of it. code: the exit code, if known.
    """

    what: str
    step: int | None
    host: str | None
    clock: int
    skipped: bool = False
    code: int | None = None


def choose_remedy(failures: Sequence[Failure], hosts: int, config: PolicyConfig) -> Remedy:
    """The action after the last of `failures`, those of one run in order; hosts: how many it runs on."""
    c, last = config, failures[-1]
    recent_failures = [f for f in failures if last.clock - f.clock < c.budget_window]
    disk_is_full = last.code == NO_SPACE
    # A full disk is not the reporting host's fault: all of them write to it.
    there = sum(f.host == last.host and f.host is not None and f.code != NO_SPACE for f in recent_failures)
    failures_here = _trailing(
        recent_failures, lambda f: (f.what, f.step) == (last.what, last.step) and f.step is not None
    )
    same_host = hosts > 1 and there >= c.same_host and not disk_is_full
    # A full disk recurs at every checkpoint: no sample is bad. Of several hosts, a bad sample raises an error on the
    # one that reads it; one that is killed or hangs there three times is rather at fault itself.
    if len(failures_here) >= c.same_place and not disk_is_full and (last.code is not None or not same_host):
        often_text = f"{last.what} at step {last.step}, {len(failures_here)} times in a row"
        if not any(one_failure.skipped for one_failure in failures_here):
            return Remedy(Action.RESTART, Cause.DATA, f"{often_text}: its samples are skipped", skip=True)
        if not same_host:
            return Remedy(Action.STOP, Cause.CODE, f"{often_text}, with other data, too: code or settings")
    if same_host:
        stop_reason = f"{there} failures of {last.host} within {c.budget_window} steps: that host is faulty"
        return Remedy(Action.STOP, Cause.HARDWARE, stop_reason)
    cause = Cause.STORAGE if disk_is_full else Cause.PROCESS
    barren_failures = _trailing(recent_failures, lambda f: f.clock == last.clock)
    if len(barren_failures) >= c.barren:
        row_text = f"{len(barren_failures)} failures in a row"
        stop_reason = f"{row_text} without a step of new ground (stability.policy.barren)"
        stop_reason += f": {FULL}, and stays full" if disk_is_full else ""
        return Remedy(Action.STOP, cause, stop_reason)
    if len(recent_failures) > c.restarts:
        stop_reason = f"the {c.restarts} restarts per {c.budget_window} steps (stability.policy) are spent"
        return Remedy(Action.STOP, cause, stop_reason)
    if disk_is_full:
        return Remedy(Action.RESTART, cause, f"{FULL}: make room; retrying")
    return Remedy(Action.RESTART, cause, f"{last.what}: no pattern, treated as transient")


def _trailing(failures: Sequence[Failure], like: Callable[[Failure], bool]) -> list[Failure]:
    """The trailing failures that match, without a gap."""
    return list(takewhile(like, reversed(failures)))


def pause_seconds(failures: Sequence[Failure], most: float) -> float:
    """Seconds to wait before a restart: none after new ground, then doubling from 1 up to `most`."""
    barren_count = len(_trailing(failures, lambda f: f.clock == failures[-1].clock))
    return 0.0 if barren_count <= 1 else min(most, 2.0 ** (barren_count - 2))


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


def next_exclusion(
    before: HostBar | None, wholly: bool, cool_off: float, now: float, least: int = 1, burn_in: float = 0.0
) -> HostBar:
    """The bar of a host that has failed; before: its last one. Every strike doubles it; they are forgotten when the
    host has done without another one for as long as that bar was. least: strikes that it counts as. One that has
    to pass a burn-in has to whatever happens to it meanwhile."""
    strikes = max(1, least)
    if before is not None:
        burn_in = max(burn_in, before.burn_in)
        if now - before.until <= _length(before.strikes, cool_off):
            strikes = max(before.strikes + 1, least)
    return HostBar(now + _length(strikes, cool_off), wholly or burn_in > 0, strikes, burn_in)


def _length(strikes: int, cool_off: float) -> float:
    return cool_off * 2.0 ** min(strikes - 1, MOST)


def exclusions_after(
    end: End, remedy: Remedy, before: Mapping[str, HostBar], cool_off: float, now: float
) -> dict[str, HostBar]:
    """What follows for the hosts that a failure is blamed on. before: all bars so far; now: time.time().

    A process that was killed says little about its host; the same host again and again does (restart_policy.py).
    """
    wholly = remedy.action is Action.STOP and remedy.cause is Cause.HARDWARE
    hosts = end.gone or ((end.host,) if end.host is not None else ())
    if not (wholly or end.hung or end.what in LOST):
        return {}
    return {host: next_exclusion(before.get(host), wholly, cool_off, now) for host in hosts}


def in_force(bars: Mapping[str, HostBar], now: float) -> dict[str, bool]:
    """Hosts that are the last choice (False), or not to be used at all (True)."""
    return {host: bar.wholly for host, bar in bars.items() if now < bar.until or bar.burn_in}
