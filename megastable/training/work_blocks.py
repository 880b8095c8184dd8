"""Sums up how long this rank's own work took, for its heartbeats: means of ten steps at a time, of the same ten on
every rank. Not medians: a pause in every fifth step slows the run, too."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from megastable.base.activity import StepTimes
from megastable.run.rank_ipc import WorkBlock

STEPS = 10  # of a block
ENOUGH = 8  # steps for a mean: a process may start within a block, or go back


class WorkBlocks:
    """Fed every step in order."""

    def __init__(self) -> None:
        self._steps: list[StepTimes] = []

    def add(self, steps: Iterable[StepTimes]) -> list[WorkBlock]:
        """The blocks that these steps complete."""
        found = []
        for one in steps:
            last = self._steps[-1][0] if self._steps else one[0]
            if one[0] // STEPS != last // STEPS or (self._steps and one[0] <= last):
                found += self._sum_up()
            self._steps.append(one)
            if one[0] % STEPS == STEPS - 1:
                found += self._sum_up()
        return found

    def _sum_up(self) -> list[WorkBlock]:
        steps, self._steps = self._steps, []
        if len(steps) < ENOUGH:
            return []
        return [WorkBlock(
            block=steps[0][0] // STEPS, step=_mean([s for _, s, _ in steps]),
            own=_mean([sum(parts) for _, _, parts in steps]),
            parts=[_mean(part) for part in zip(*(parts for _, _, parts in steps), strict=True)],
        )]  # fmt: skip


def _mean(seconds: Sequence[float]) -> float:
    return round(statistics.fmean(seconds), 6)
