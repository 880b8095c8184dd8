"""Puts what ranks wrote on the supervisor's clock: hosts may be a minute apart. Pure.

Rank 0 writes the events of the training and the step records by the clock of its host, the supervisor writes by its
own. How far the one is ahead of the other, the supervisor measures before every attempt (cluster/store.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megastable.run.events.event import Event, real, whole
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.events.supervisor_events import (
    Ended,
    Hang,
    HostsAwaited,
    Launched,
    Restart,
    SupervisorEvent,
)
from megastable.run.goodput.step_times import StepTimes

# Seconds. Nearer clocks are left as they are: a message that was late makes a clock look late by as much.
NEAR = 0.2
FAR = 1e9  # no clock is so wrong: damage
OF_SUPERVISOR = (SupervisorEvent, Launched, Hang, Ended, Restart, HostsAwaited)


class Clocks:
    """How far the clock of rank 0's host is ahead of the supervisor's, by attempt. Of older versions, and of a run
    without a supervisor, it is unknown: taken as 0."""

    def __init__(self) -> None:
        self._ahead: dict[int, float] = {}

    def launched(self, attempt: int, event: Launched) -> bool:
        """Whether what ranks of this attempt wrote is to be corrected in another way than before."""
        before, ahead = self._ahead.pop(attempt, None), event.ahead
        if ahead is not None and NEAR <= abs(ahead) < FAR:
            self._ahead[attempt] = ahead
        return self._ahead.get(attempt) != before

    def event(self, event: Event, attempt: int | None) -> Event:
        """An event that was heard during `attempt`, by the supervisor's clock."""
        ahead, moment = self._ahead.get(attempt or 0), event.time
        if ahead is None or moment is None or not of_rank(event):
            return event
        return event.of({**event.fields, "time": moment - ahead})

    def progress(self, told: Mapping[str, Any]) -> float | None:
        """The time of progress.json, which rank 0 writes, too."""
        moment = real(told.get("time"))
        return None if moment is None else moment - self._ahead.get(whole(told.get("attempt")) or 0, 0.0)

    def steps(self, steps: StepTimes) -> StepTimes:
        """All steps by the supervisor's clock, in their order by it."""
        if not self._ahead:
            return steps
        told = steps._replace(time=steps.time.copy())
        for attempt, ahead in self._ahead.items():
            told.time[steps.attempt == attempt] -= ahead
        return told.rows(np.argsort(told.time, kind="stable"))


def of_rank(event: Event) -> bool:
    """Whether rank 0 wrote it. The supervisor tells of incidents without the state of the policy."""
    if isinstance(event, IncidentEvent):
        return "policy" in event or (event.what == "closed" and "step" in event)
    return not isinstance(event, OF_SUPERVISOR)
