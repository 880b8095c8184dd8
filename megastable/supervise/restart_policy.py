"""Diagnose process failures, and choose the supervisor's action: restart, skip the step's samples, or stop. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from megastable.base.errors import NO_SPACE
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


def after_failure(failures: Sequence[Failure], hosts: int, config: PolicyConfig) -> Remedy:
    """The action after the last of `failures`, those of one run in order; hosts: how many it runs on."""
    c, last = config, failures[-1]
    recent = [f for f in failures if last.clock - f.clock < c.budget_window]
    full = last.code == NO_SPACE
    # A full disk is not the reporting host's fault: all of them write to it.
    there = sum(f.host == last.host and f.host is not None and f.code != NO_SPACE for f in recent)
    here = _trailing(recent, lambda f: (f.what, f.step) == (last.what, last.step) and f.step is not None)
    same_host = hosts > 1 and there >= c.same_host and not full
    # A full disk recurs at every checkpoint: no sample is guilty. Of several hosts, a bad sample raises an error on the
    # one that reads it; one that is killed or hangs there three times is rather at fault itself.
    if len(here) >= c.same_place and not full and (last.code is not None or not same_host):
        often = f"{last.what} at step {last.step}, {len(here)} times in a row"
        if not any(f.skipped for f in here):
            return Remedy(Action.RESTART, Cause.DATA, f"{often}: its samples are skipped", skip=True)
        if not same_host:
            return Remedy(Action.STOP, Cause.CODE, f"{often}, with other data, too: code or settings")
    if same_host:
        reason = f"{there} failures of {last.host} within {c.budget_window} steps: that host is faulty"
        return Remedy(Action.STOP, Cause.HARDWARE, reason)
    cause = Cause.STORAGE if full else Cause.PROCESS
    barren = _trailing(recent, lambda f: f.clock == last.clock)
    if len(barren) >= c.barren:
        reason = f"{len(barren)} failures in a row without a step of new ground (stability.policy.barren)"
        return Remedy(Action.STOP, cause, f"{reason}: {FULL}, and stays full" if full else reason)
    if len(recent) > c.restarts:
        reason = f"the {c.restarts} restarts per {c.budget_window} steps (stability.policy) are spent"
        return Remedy(Action.STOP, cause, reason)
    if full:
        return Remedy(Action.RESTART, cause, f"{FULL}: make room; retrying")
    return Remedy(Action.RESTART, cause, f"{last.what}: no pattern, treated as transient")


def _trailing(failures: Sequence[Failure], like: Callable[[Failure], bool]) -> list[Failure]:
    """The trailing failures that match, without a gap."""
    return list(takewhile(like, reversed(failures)))


def pause(failures: Sequence[Failure], most: float) -> float:
    """Seconds to wait before a restart: none after new ground, then doubling from 1 up to `most`."""
    count = len(_trailing(failures, lambda f: f.clock == failures[-1].clock))
    return 0.0 if count <= 1 else min(most, 2.0 ** (count - 2))
