"""Tells what a run does after a person has changed it, and after an incident is over."""

from __future__ import annotations

import math

from megastable.base.collectives import first
from megastable.recovery.incident_log import IncidentLog, drop_closed_after
from megastable.recovery.run_parts import StepResult
from megastable.run.directory import RunDirectory
from megastable.run.events.people_events import ChangeMeasured
from megastable.run.events.stability_events import Handover, IncidentEvent, IncidentLater
from megastable.run.events.training_events import Resumed, RolledBack, Training
from megastable.run.log import RunLog
from megastable.training.live_changes import LiveChanges
from megastable_guard.incident import Breakdown

CHANGED = 100  # steps after a change at which its effect is told
LATER = (100, 500)  # steps after an incident was over


class Effects:
    """Of one rank. Each effect is told once, by whichever process reaches the step; and at the end of the run."""

    def __init__(self, run: RunDirectory, changes: LiveChanges, incidents: IncidentLog, log: RunLog) -> None:
        """Collective."""
        self.changes, self.incidents, self.log = changes, incidents, log
        closed, self._told = first(lambda: _recall(run))
        self.incidents.closed |= closed

    def stepped(self, done: StepResult) -> None:
        """A step is done, and was not undone at once."""
        step = done.state.step
        self.changes.level.stepped(done)
        self._tell_changes(step, CHANGED)
        for number, closed in self.incidents.closed.items():
            if (after := step - closed) in LATER:
                self._tell_incident(number, step, after)

    def finish(self, step: int) -> None:
        """The run ends after `step`."""
        self._tell_changes(step, 1)
        for number, closed in self.incidents.closed.items():
            if step > closed:
                self._tell_incident(number, step, step - closed, at_end=True)

    def _tell_changes(self, step: int, after: int) -> None:
        """Of changes that have held for `after` steps, or until their end."""
        for change in self.changes.made:
            begin = change.step
            if begin is None or change.change in self._told:
                continue
            last = min(begin + after - 1, math.inf if change.until is None else change.until)
            if step < max(begin, last):
                continue
            self._told.add(change.change)
            loss, norm = self.changes.level.since(begin) or (None, None)
            event = ChangeMeasured(
                step=step, change=change.change, steps=step - begin + 1, new=dict(change.new),
                loss_before=change.loss, loss_after=loss, norm_before=change.grad_norm, norm_after=norm,
            )  # fmt: skip
            self.log.emit(event, say=True)

    def _tell_incident(self, number: int, step: int, after: int, **more: bool) -> None:
        level = self.changes.level.since()
        if level is None or (number, after) in self._told:
            return
        self._told.add((number, after))
        self.log.emit(IncidentLater(number=number, step=step, after=after, loss=level[0], **more))


def _recall(run: RunDirectory) -> tuple[dict[int, int], set[object]]:
    """By number, the steps at which incidents were over; and what was told: of which change, of which incident so many
    steps later."""
    closed, told = dict[int, int](), set[object]()
    undone = (
        False  # the next start goes back on purpose: not one after a crash, which trains the same steps again
    )
    for event in run.events(
        IncidentEvent, IncidentLater, ChangeMeasured, RolledBack, Handover, Resumed, Training
    ):
        if isinstance(event, ChangeMeasured):
            told.add(event.change)
        elif isinstance(event, RolledBack | Handover):
            undone = True
        elif isinstance(event, Resumed | Training):  # without a checkpoint there is the latter only
            if undone:
                closed = drop_closed_after(event.step or 0, closed)
            undone = False
        elif isinstance(event, IncidentLater):
            told.add((event.number, event.after))
        elif not isinstance(event, IncidentEvent):
            continue
        elif event.what == "rewound" and event.to_step is not None:
            closed = drop_closed_after(event.to_step, closed)
        elif event.what == "closed" and event.step is not None and event.number is not None:
            of_numbers = event.summary.get("verdict") not in [*Breakdown]
            if event.summary.get("outcome") == "healed" and of_numbers:
                closed[event.number] = event.step
    return closed, told
