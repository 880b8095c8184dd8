"""What a run does after an incident is over, and how high its loss is of late."""

from __future__ import annotations

import math
from collections import deque

from megastable.base.collectives import first
from megastable.guard.incident import Breakdown
from megastable.guard.robust import median
from megastable.recovery.incident_log import IncidentLog
from megastable.recovery.run_parts import StepResult
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import IncidentEvent, IncidentLater
from megastable.run.log import RunLog

LATELY = 20  # applied steps whose median tells the level
LATER = (100, 500)  # steps after an incident was over at which its effect is told


class Level:
    """Of the last applied steps."""

    def __init__(self) -> None:
        self._lately = deque[tuple[int, float, float]](maxlen=LATELY)  # step, loss, gradient norm

    def stepped(self, done: StepResult) -> None:
        step, measured = done.state.step, done.measured
        while self._lately and self._lately[-1][0] >= step:  # undone
            self._lately.pop()
        if done.applied and math.isfinite(measured.loss) and math.isfinite(measured.grad_norm):
            self._lately.append((step, measured.loss, measured.grad_norm))

    def since(self, step: int = 0) -> tuple[float, float] | None:
        """Medians of loss and gradient norm, from a step on; None if there were none, as right after a start."""
        told = [numbers for at, *numbers in self._lately if at >= step]
        if not told:
            return None
        losses, norms = zip(*told, strict=True)
        return median(losses), median(norms)


class IncidentEffects:
    """Journals the loss some steps after each incident was over, and at the end of the run."""

    def __init__(self, run: RunDirectory, incidents: IncidentLog, level: Level, log: RunLog) -> None:
        """Collective."""
        self.incidents, self.level, self.log = incidents, level, log
        closed, self._told = first(lambda: _recall(run))
        self.incidents.closed |= closed

    def stepped(self, step: int) -> None:
        """A step is done."""
        for number, closed in self.incidents.closed.items():
            if (after := step - closed) in LATER:
                self._tell(number, step, after)

    def finish(self, step: int) -> None:
        """The run ends after `step`."""
        for number, closed in self.incidents.closed.items():
            if step > closed:
                self._tell(number, step, step - closed, at_end=True)

    def _tell(self, number: int, step: int, after: int, **more: bool) -> None:
        level = self.level.since()
        if level is None or (number, after) in self._told:
            return
        self._told.add((number, after))
        self.log.emit(IncidentLater(number=number, step=step, after=after, loss=level[0], **more))


def _recall(run: RunDirectory) -> tuple[dict[int, int], set[tuple[int, int]]]:
    """By number, the steps at which incidents were over; and what was told of them."""
    closed, told = dict[int, int](), set[tuple[int, int]]()
    for event in run.events(IncidentEvent, IncidentLater):
        if (number := event.number) is None:
            continue
        if isinstance(event, IncidentLater):
            told.add((number, event.after or 0))
        elif event.what == "closed" and event.step is not None:
            of_numbers = event.summary.get("verdict") not in [*Breakdown]
            if event.summary.get("outcome") == "healed" and of_numbers:
                closed[number] = event.step
    return closed, told
