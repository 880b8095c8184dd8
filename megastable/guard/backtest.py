"""Backtest the guard on a recorded run: the same detector and policy over its numbers, without training.

A recording does not react: a rewind does not take place. So the rest of an excursion that was acted on is marked and
not acted on again, and the effect of the action is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from megastable.config.stability import StabilityConfig
from megastable.guard.actions import Action
from megastable.guard.guard import Guard
from megastable.guard.signals import Signals, Verdict
from megastable.guard.spacing import thin


class Recorded(NamedTuple):
    """A step of a recording; grad_norm, lr and data (a name for its training data) are None if not recorded."""

    step: int
    loss: float
    grad_norm: float | None = None
    lr: float | None = None
    data: str | None = None


@dataclass(frozen=True)
class BacktestDecision:
    """What would have been done at a step, and why. reset: the detector's baseline would have been reset."""

    step: int
    verdict: Verdict
    action: Action
    reason: str
    reset: bool = False


def simulate(
    rows: Iterable[Recorded], config: StabilityConfig, fp8: bool = False
) -> Iterator[BacktestDecision]:
    """The guard's answer to every step, in order. fp8: whether the run computed in FP8; without measurements FP8 cannot
    be identified as the cause, and is left only where the rate would be cut."""
    guard = Guard(config, simulated=True, fp8=fp8)
    snapshots: list[int] = []
    data: str | None = None
    c = config.snapshots
    for row in rows:
        if not snapshots:
            snapshots = [row.step - 1]  # a run takes its first snapshot when it starts
        mixed = data is not None and row.data is not None and row.data != data
        data = row.data or data
        signals = Signals(row.step, row.loss, row.grad_norm, row.lr, mixed)
        decision = guard.judge(signals, snapshots[0] if c.interval else None)
        found = decision.finding
        if c.interval and found.verdict is Verdict.HEALTHY and row.step >= snapshots[-1] + c.interval:
            snapshots = thin([*snapshots, row.step], c.keep, c.interval)
        yield BacktestDecision(row.step, found.verdict, decision.action, decision.reason, found.reset)


class Episode(NamedTuple):
    """Consecutive steps with the same verdict and action; a reset of the baseline is an episode of its own."""

    first: BacktestDecision
    last: int
    steps: int


def episodes(judged: Iterable[BacktestDecision]) -> list[Episode]:
    """The rows of a table: everything but healthy steps, repetitions merged."""
    found = []
    for kind, group in groupby(judged, key=lambda step: (step.verdict, step.action, step.reset)):
        if kind[:2] != (Verdict.HEALTHY, Action.APPLY):
            steps = list(group)
            found.append(Episode(steps[0], steps[-1].step, len(steps)))
    return found
