"""Walks a run's journal and accounts for its time: launches, training, ends, waiting. Pure.

What is over is never judged anew: a step done again counts as `redone` the second time, not the first. So totals only
grow, and a process that ends without being continued has redone nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megastable.base import errors
from megastable.run.events.event import Event, Other, real, tree, whole
from megastable.run.events.follow import PassedOver
from megastable.run.events.people_events import Note
from megastable.run.events.stability_events import Handover, IncidentEvent
from megastable.run.events.supervisor_events import (
    Ended,
    Hang,
    HostsAwaited,
    Launched,
    Restart,
    SupervisorEvent,
)
from megastable.run.events.training_events import Finished, Stopped, Training, Unstable
from megastable.run.goodput.capacity import Capacity
from megastable.run.goodput.clocks import Clocks
from megastable.run.goodput.process_time import ProcessTime, explains
from megastable.run.goodput.step_times import NO_STEPS, StepTimes
from megastable.run.goodput.time_account import Reason, TimeAccount, TimeKind, TimeLine

OF_SUPERVISOR = (
    "crash",
    "hang",
    "damaged_checkpoint",
)  # verdicts of incidents that are no work of the training
SLACK = 2.0  # seconds by which clocks of hosts may differ: steps recorded so long after an end belong to it
SET_BACK = 60.0  # seconds by which a journal goes back in time only where a clock was set, or hosts differ
NOTHING = Reason()
GROWS = re.compile("hosts can take part")  # a reason to stop and begin again
PHASES = {
    "evaluate": TimeKind.EVALUATION, "checkpoint": TimeKind.CHECKPOINTING, "rewind": TimeKind.RECOVERY,
    "examine samples": TimeKind.RECOVERY, "try suspects": TimeKind.RECOVERY,
    "try suspects, next step": TimeKind.RECOVERY, "starting": TimeKind.START_UP,
}  # fmt: skip
CODES = {
    errors.OK: "complete", errors.STOPPED: "stopped", errors.UNSTABLE: "unstable", errors.NO_SPACE: "no space",
    errors.HOST_GONE: "host gone", errors.BAD_INPUT: "bad input",
}  # fmt: skip


class Lifecycle:
    """Fed every event in order. steps: those recorded; all of a process must be there when its end is heard.

    line: the account so far, None before the first event. supervised: whether a supervisor is at work. newest: the time
    of the newest event. set_back: the most seconds by which a clock was set back.
    """

    def __init__(self) -> None:
        self.clocks = Clocks()
        self._recorded = self._steps = NO_STEPS  # by the clocks of ranks, and by the supervisor's
        self.line: TimeLine | None = None
        self.newest = self.set_back = 0.0
        self.supervised = False
        self.attempt = 0
        self.done = 0  # the farthest step
        self.process: ProcessTime | None = None  # the one that trains
        self._kind = TimeKind.NOT_RUNNING  # of the time since `line.end`, if none trains
        self._why = Reason("first start")  # what that is charged to, and what is done again
        self._failed: Reason | None = None  # the last failure, until its incident is named
        self._awaited = ""  # hosts
        self._launched = False  # whether processes are starting
        self._known = False  # whether it was heard in which attempt the process was launched that trains
        self._pause = 0.0  # until when a restart is put off
        self._took_over: float | None = None  # when a supervisor found the process that trains
        self._capacity = Capacity()
        self._lineup = 0  # hosts of the newest attempt
        self._shrunk = NOTHING  # why the newest attempt on fewer hosts has fewer
        self._reasons: dict[int, Reason] = {}  # of incidents of the training
        self._alert: dict[int, tuple[str, str]] = {}  # verdict and cause of incidents

    @property
    def steps(self) -> StepTimes:
        """By the supervisor's clock, as is all that is told."""
        return self._steps

    @steps.setter
    def steps(self, recorded: StepTimes) -> None:
        if recorded is not self._recorded:
            self._recorded, self._steps = recorded, self.clocks.steps(recorded)

    def hear(self, event: Event) -> None:
        """Take in one event. Those without a time, and unknown ones, are passed over."""
        event = self.clocks.event(event, self.attempt if self.supervised else None)
        moment = event.time
        if moment is None or not abs(moment) < 1e12 or isinstance(event, PassedOver | Note):
            return  # people write notes also of runs that are over
        if self.newest - moment > SET_BACK:
            self.set_back = max(self.set_back, self.newest - moment)
        self.newest = max(self.newest, moment)
        if self.line is None:
            self.line = TimeLine(moment - _before(event))
        if isinstance(event, Other):
            return
        match event:
            case SupervisorEvent():
                self._supervisor(event, moment)
            case Launched():
                self._leave(moment)
                self._wait(moment)
                self.attempt = event.attempt or self.attempt + 1
                if self.clocks.launched(self.attempt, event):
                    self._steps = self.clocks.steps(self._recorded)
                self._kind, self._launched = TimeKind.START_UP, True
                self._shrunk = self._why if len(event.hosts) < self._lineup else self._shrunk
                self._lineup = len(event.hosts)
                self._capacity.launched(event)
            case Training():
                self._training(event, moment)
            case Finished() | Stopped() | Unstable() | Handover():
                self._goodbye(event, moment)
            case Hang():
                self._hang(event, moment)
            case Ended():
                self._ended(event, moment)
            case Restart():
                self._leave(moment)
                self._planned(event)
                self._wait(moment)
                self._pause = moment + max(0.0, event.delay or 0.0)
                self._kind = TimeKind.START_UP
            case HostsAwaited():
                self._hosts(event, moment)
        self._incident(event)
        if self.process is not None and explains(event):
            self.process.events.append(event)

    # Events

    def _planned(self, event: Restart) -> None:
        """What stopped in good order begins again: the reason of that is the cause of its stop."""
        if self._why.cause != "stopped" or not event.reason:
            return
        self._why.cause = event.reason
        if GROWS.search(event.reason):
            self._why.cause = "growing"
            self._why.incident, self._why.host = self._shrunk.incident, self._shrunk.host

    def _supervisor(self, event: SupervisorEvent, moment: float) -> None:
        self._capacity.started(event)
        if event.what == "ended":
            self._leave(moment)
            self._wait(moment)
            self.supervised, self._kind, self._pause = False, TimeKind.NOT_RUNNING, 0.0
            code = event.code
            # After a failure, the failure remains the cause.
            if code in (errors.OK, errors.STOPPED) or not self._why.cause:
                self._why = Reason(CODES.get(code if code is not None else -1, f"code {code}"))
            return
        if self.process is not None:
            self._took_over = moment  # what the process did meanwhile is known later
        else:
            if (
                not self._launched
            ):  # the supervisor of before died, if there was one; processes go on starting
                self._kind = TimeKind.NOT_RUNNING
                self._wait(moment - _before(event))
                self._kind = TimeKind.START_UP
            self.supervised = True
            self._wait(moment)
            self._kind = TimeKind.START_UP
        self.supervised = True

    def _training(self, event: Training, moment: float) -> None:
        assert self.line is not None
        if self.process is not None:  # it ended without a word, and without a supervisor
            self._leave(moment - _before(event))
        if self._kind is TimeKind.NOT_RUNNING:  # without a supervisor
            self._wait(moment - _before(event))
            self._kind = TimeKind.START_UP
        self._wait(moment)
        step, self._known, self._launched = event.step or 0, self._launched, False
        missing = self._capacity.missing(event.world or 0)
        self.process = ProcessTime(self.attempt, NOTHING, self._why, self.done, step, self._reasons, missing)
        self._took_over = None

    def _goodbye(self, event: Event, moment: float) -> None:
        if self.process is None:
            return
        cause = {"stopped": "stopped", "finished": "complete", "handover": "hand-over"}.get(
            event.event, "unstable"
        )
        number = whole(event.get("number"))
        self._why = Reason(cause, number if not isinstance(event, Finished | Stopped) else None)
        kind = TimeKind.CHECKPOINTING if isinstance(event, Stopped) else None
        reached = whole(event.get("steps" if isinstance(event, Finished) else "step")) or 0
        self._close(moment, kind, 0, reached, self._why)
        self._kind = TimeKind.ENDING if self.supervised else TimeKind.NOT_RUNNING

    def _hang(self, event: Hang, moment: float) -> None:
        since = moment - max(0.0, event.waited or 0.0)
        self._why = self._failed = Reason("hang")
        if self.process is not None:
            self._close(since, None, event.step or 0)
        else:
            self._wait(since)
        self._kind = TimeKind.HANG
        self._wait(moment)
        self._kind = TimeKind.ENDING

    def _ended(self, event: Ended, moment: float) -> None:
        hung, what = bool(event.hung), event.get("what")
        if isinstance(what, str) and what and not (hung and self._failed is not None):
            told = self._why.incident if self._kind is TimeKind.ENDING else None  # it said so itself
            self._why = self._failed = Reason(what, told)
        if self._failed is not None:
            self._failed.host = self._failed.host or event.host or ""
        if self.process is not None:
            silent = event.silent
            last = moment if silent is None else moment - max(0.0, silent)
            steps = self._of_process(moment)
            if len(steps.time):
                last = min(moment, max(last, float(steps.time[-1])))
            elif silent is None:
                last = self.line.end if self.line is not None else moment
            self._close(last, None, event.clock or 0)
            if self._took_over is not None and self._took_over > last:
                self._kind = TimeKind.NOT_RUNNING  # nobody was there to notice
                self._wait(self._took_over)
            self._kind = TimeKind.HANG if hung else TimeKind.ENDING
        self._wait(moment)
        self._launched = False
        self.done = max(self.done, event.clock or 0)
        self._kind = TimeKind.ENDING

    def _hosts(self, event: HostsAwaited, moment: float) -> None:
        self._leave(moment)
        self._capacity.awaited(event)
        if event.hosts:
            self._kind = TimeKind.HOSTS
            self._awaited = ", ".join(map(str, event.hosts))
            self._wait(moment)
        else:  # all are there
            self._wait(moment)
            self._kind = TimeKind.START_UP

    def _incident(self, event: Event) -> None:
        summary = tree(event.get("summary"))
        number = whole(summary.get("number", event.get("number")))
        if number is None or not isinstance(event, IncidentEvent):
            return
        self._alert[number] = (str(summary.get("verdict") or ""), str(summary.get("cause") or ""))
        # One of the supervisor is opened, or acted on again, right after the end of the attempt.
        follows = self._failed is not None and event.what in ("opened", "attributed")
        if follows and self._alert[number][0] in OF_SUPERVISOR:
            self._why.incident = number
        if event.what in ("restarted", "closed"):
            self._failed = None

    # Time

    def _of_process(self, until: float) -> StepTimes:
        """The recorded steps of the process that trains. How wrong the clocks of later attempts were is not known yet:
        their records may look as old."""
        assert self.line is not None
        found = self.steps.between(self.line.end - 0.01, until + SLACK)
        if not self._known:
            return found
        own = (found.attempt == self.attempt) | (found.attempt == 0)
        return found if own.all() else found.rows(np.flatnonzero(own))

    def _close(
        self, until: float, tail: TimeKind | None, clock: int, reached: int = 0, why: Reason | None = None
    ) -> None:
        """The process that trains ended. clock: the farthest step that it had done when it was lost; reached: when it
        ended in good order, so with all of its records written: what is missing of them is unknown time. why: what
        the tail is charged to."""
        assert self.process is not None and self.line is not None
        process, self.process = self.process, None
        self._name()
        process.events = [e for e in process.events if self._own(e)]
        steps = self._of_process(until)
        if not len(steps.step):
            began = max(clock, reached, process.told()) > process.step
            tail, why = None if began else TimeKind.START_UP, None
        self.done = max(
            self.done,
            reached,
            process.put(self.line, steps, max(until, self.line.end), tail, clock, why),
        )

    def _leave(self, moment: float) -> None:
        """The process that trained, if any, has gone without a word by `moment`."""
        if self.process is None:
            return
        steps, events = self._of_process(moment), [e.time or 0.0 for e in self.process.events]
        assert self.line is not None
        last = max([self.line.end, *events, *steps.time[-1:].tolist()])
        self._why = Reason("ended without a word")
        self._close(min(last, moment), None, 0)
        self._kind = TimeKind.NOT_RUNNING

    def _wait(self, moment: float) -> None:
        """Account for the time since the last event, if no process trains."""
        line = self.line
        assert line is not None
        if self.process is not None or moment <= line.end:
            return
        coming = self.attempt + self.supervised
        if self._pause > line.end:
            line.until(min(self._pause, moment), TimeKind.PAUSE, line.charge(self._why, coming))
        waits = self._kind is TimeKind.HOSTS
        prepares = waits or (self._kind is TimeKind.START_UP and not self._launched)
        why = replace(self._why, host=self._awaited) if waits else self._why
        line.until(moment, self._kind, line.charge(why, coming if prepares else self.attempt))

    def _own(self, event: Event) -> bool:
        """Whether an event of the training says what it did, and not the supervisor."""
        number = whole(event.get("number"))
        return (
            not isinstance(event, IncidentEvent)
            or self._alert.get(number or 0, ("",))[0] not in OF_SUPERVISOR
        )

    def _name(self) -> None:
        """Name the causes of the training's incidents, as far as they are known."""
        for number, reason in self._reasons.items():
            verdict, cause = self._alert.get(number, ("", ""))
            reason.cause = ", ".join(part for part in (verdict, cause) if part)

    def snapshot(self, now: float, progress: Mapping[str, Any] | None = None) -> TimeAccount | None:
        """The account up to `now`, without changing this one; None before the first event. progress: progress.json, for
        the steps that are not recorded yet."""
        if self.line is None:
            return None
        other = Lifecycle()
        other.__dict__ |= self.__dict__
        other.line, settled = self.line.copy(), self.line.end
        if self.process is not None:
            told = progress or {}
            settled = max([settled, *self._of_process(now).time[-1:].tolist()])
            other.process = replace(self.process, events=list(self.process.events))
            step, last = whole(told.get("step")), self.clocks.progress(told)
            tail = PHASES.get(str(told.get("phase")))
            clock = step or 0
            if last is not None and self.line.end < last < now and tail is None:
                other._close(last, None, clock)
                other._kind = TimeKind.UNKNOWN
                other._why = Reason("no progress yet")
            else:
                other._close(now, tail, clock)
        other._wait(now)
        other._name()
        assert other.line is not None
        return other.line.account(min(settled, other.line.end))


def _before(event: Event) -> float:
    """Seconds between the start of the process and its first event."""
    told = real(event.get("seconds")) if isinstance(event, SupervisorEvent | Training) else None
    return told if told is not None and 0 <= told < 1e9 else 0.0
