"""megastable_guard as a contestant."""

from __future__ import annotations

from typing import Any

from benchmarks.ruler.contestants import APPLY, REFUSE, Action, Watcher
from benchmarks.ruler.run import Run
from benchmarks.ruler.task import BATCH, POSITIONS, STEPS
from megastable_guard import Guard, SkippableSampler


class Ours(Watcher):
    """megastable_guard's Guard and SkippableSampler with their defaults."""

    name, title = "ours", "megastable_guard"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.sampler = SkippableSampler(POSITIONS, BATCH, shuffle=False, updates=STEPS)
        self.guard = Guard(run.model, run.optimizer, **self.options(run))
        self.rows = iter(self.sampler)

    def options(self, run: Run) -> dict[str, Any]:
        return {}

    def judge_step(self, run: Run, loss: float, norm: float) -> Action:
        verdict = self.guard.check(loss=loss, grad_norm=norm)
        if verdict.rewind:
            return Action("rewind", verdict.step)
        return APPLY if verdict.apply else REFUSE

    def rewind(self, trained: int) -> int:
        """Go back in place; the step."""
        step = self.guard.rewind()
        self.sampler.seek(step, trained=trained, defer=self.guard.deferred)
        self.rows = iter(self.sampler)
        return step


OURS: dict[str, type[Watcher]] = {Ours.name: Ours}
