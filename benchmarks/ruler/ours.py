"""megastable_guard as a contestant."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.ruler.contestants import APPLY, REFUSE, Action, Watcher
from benchmarks.ruler.run import Run
from benchmarks.ruler.task import BATCH, POSITIONS, STEPS, measure_losses
from megastable_guard import Guard, SkippableSampler

LATER = 40 * BATCH  # rows, after which deferred ones are read: well before the end


class Ours(Watcher):
    """The guard and its sampler with their defaults: steps since the onset are read later."""

    name, title = "ours", "megastable_guard"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.sampler = SkippableSampler(POSITIONS, BATCH, shuffle=False, updates=STEPS, after=LATER)
        self.guard = Guard(run.model, run.optimizer)
        self.ids = deque[int](maxlen=BATCH)  # of the present step
        self.rows = self.read_rows()

    def read_rows(self) -> Iterator[int]:
        """Of the sampler, from where it stands."""
        for row in self.sampler:
            self.ids.append(row)
            yield row

    def judge_step(self, run: Run, loss: float, norm: float) -> Action:
        verdict = self.guard.check(loss=loss, grad_norm=norm)
        if verdict.rewind:
            return Action("rewind", verdict.step)
        return APPLY if verdict.apply else REFUSE

    def rewind(self, trained: int) -> int:
        """Go back in place; the step."""
        step = self.guard.rewind()
        self.seek(step, trained)
        return step

    def seek(self, step: int, trained: int) -> None:
        """Go on behind `step`, by what the guard has found."""
        self.sampler.seek(step, trained=trained, skip=self.guard.skipped, defer=self.guard.deferred)
        self.rows = self.read_rows()


class OursTried(Ours):
    """The same with the loop's ids and its replay: bad rows are named, and tried before they are skipped."""

    name, title = "ours-tried", "megastable_guard, naming and trying rows"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.run, self.measured = run, 0.0  # steps of time
        self.guard.use_replay(self.replay, at_once=BATCH, ahead=self.sampler.look_ahead)

    def replay(self, ids: Sequence[int]) -> Tensor:
        """The loss of every row [n], nats per token, by the data as it is. A forward pass is a third of a step."""
        self.measured += (1.0 if torch.is_grad_enabled() else 1 / 3) * len(ids) / BATCH
        inputs, labels = (
            torch.from_numpy(array[ids]) for array in (self.run.data.inputs, self.run.data.labels)
        )
        return measure_losses(self.run.model, inputs, labels)

    def judge_step(self, run: Run, loss: float, norm: float) -> Action:
        verdict = self.guard.check(loss=loss, grad_norm=norm, sample_ids=list(self.ids))
        if verdict.rewind:
            return Action("rewind", verdict.step)
        if not verdict.apply and self.guard.deferred:
            self.seek(verdict.step, trained=verdict.step)
        if run.alone:
            run.facts["measured"] = self.measured
        return APPLY if verdict.apply else REFUSE


OURS: dict[str, type[Watcher]] = {kind.name: kind for kind in (Ours, OursTried)}
