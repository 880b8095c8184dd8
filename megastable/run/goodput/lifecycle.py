"""Walks a run's journal and accounts for its time: launches, training, ends, waiting. Pure.

What is over is never judged again: a step done again counts as `redone` the second time, not the first. So totals only
grow, and a process that ends without being continued has redone nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megastable.base import errors
from megastable.run.events.event import Event, Other, read_real, read_tree, read_whole
from megastable.run.events.people_events import Note
from megastable.run.events.reading import PassedOver
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
from megastable.run.goodput.process_time import NO_STEPS, ProcessTime, StepTimes, explains_gap
from megastable.run.goodput.time_account import Reason, TimeAccount, TimeKind, TimeLine

FEWER = re.compile(r"going on with \d+ of (\d+) hosts")  # as the supervisor says it when it has waited


class Capacity:
    """Fed the supervisor's events. Who started a supervisor with fewer hosts wants no more: what is wanted is what its
    events say, else the most that an attempt had since it was started. Without a supervisor, nothing is missing: nobody
    but a person changes the number of ranks."""

    def __init__(self) -> None:
        self._wanted = self._hosts = 0
        self._full = 0  # ranks of an attempt on all hosts
        self._launched = False

    def hear_event(self, event: Event) -> None:
        match event:
            case SupervisorEvent(what="started"):
                self._wanted = self._full = 0
            case HostsAwaited():
                if fewer_match := FEWER.search(event.reason or ""):
                    self._wanted = int(fewer_match[1][:9])
            case Launched():
                self._hosts, self._launched = len(event.hosts), True
                self._wanted = event.wanted or max(self._wanted, self._hosts)

    def measure_missing(self, world: int) -> float:
        """The share of the wanted ranks that an attempt of `world` ranks lacks."""
        if not self._launched:
            return 0.0
        if self._hosts >= self._wanted > 0:
            self._full = world
        # Hosts may have different numbers of ranks.
        ranks_there, wanted = (world, self._full) if self._full and world else (self._hosts, self._wanted)
        return max(0.0, 1 - ranks_there / wanted) if wanted else 0.0


# Seconds. Nearer clocks are left as they are: a message that was late makes a clock look late by as much.
NEAR = 0.2
FAR = 1e9  # no clock is so wrong: damage
SUPERVISOR_EVENTS = (SupervisorEvent, Launched, Hang, Ended, Restart, HostsAwaited)


class Clocks:
    """How far the clock of rank 0's host is ahead of the supervisor's, by attempt: hosts may be a minute apart. Without
    a supervisor it is unknown: taken as 0.

    Rank 0 writes the events of the training and the step records by the clock of its host, the supervisor writes by its
    own, and measures the difference before every attempt (cluster/store.py).
    """

    def __init__(self) -> None:
        self._ahead: dict[int, float] = {}

    def hear_launch(self, attempt: int, event: Launched) -> bool:
        """Whether what ranks of this attempt wrote is to be corrected in another way than before."""
        ahead_before, seconds_ahead = self._ahead.pop(attempt, None), event.ahead
        if seconds_ahead is not None and NEAR <= abs(seconds_ahead) < FAR:
            self._ahead[attempt] = seconds_ahead
        return self._ahead.get(attempt) != ahead_before

    def correct_event(self, event: Event, attempt: int | None) -> Event:
        """An event that was heard during `attempt`, by the supervisor's clock."""
        seconds_ahead, event_time = self._ahead.get(attempt or 0), event.time
        if seconds_ahead is None or event_time is None or not of_rank(event):
            return event
        return event.from_fields({**event.fields, "time": event_time - seconds_ahead})

    def correct_progress(self, told: Mapping[str, Any]) -> float | None:
        """The time of progress.json, which rank 0 writes, too."""
        moment = read_real(told.get("time"))
        return None if moment is None else moment - self._ahead.get(read_whole(told.get("attempt")) or 0, 0.0)

    def correct_steps(self, steps: StepTimes) -> StepTimes:
        """All steps by the supervisor's clock, in their order by it."""
        if not self._ahead:
            return steps
        corrected_steps = steps._replace(time=steps.time.copy())
        for attempt, seconds_ahead in self._ahead.items():
            corrected_steps.time[steps.attempt == attempt] -= seconds_ahead
        return corrected_steps.select_rows(np.argsort(corrected_steps.time, kind="stable"))


def of_rank(event: Event) -> bool:
    """Whether rank 0 wrote it. The supervisor tells of incidents without the state of the policy."""
    if isinstance(event, IncidentEvent):
        return "policy" in event or (event.what == "closed" and "step" in event)
    return not isinstance(event, SUPERVISOR_EVENTS)


# Verdicts of incidents that are no work of the training.
OF_SUPERVISOR = ("crash", "hang", "damaged_checkpoint")
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
            self._recorded, self._steps = recorded, self.clocks.correct_steps(recorded)

    def hear_event(self, event: Event) -> None:
        """Take in one event. Those without a time, and unknown ones, are passed over."""
        event = self.clocks.correct_event(event, self.attempt if self.supervised else None)
        event_time = event.time
        if event_time is None or not abs(event_time) < 1e12 or isinstance(event, PassedOver | Note):
            return  # people write notes also of runs that are over
        if self.newest - event_time > SET_BACK:
            self.set_back = max(self.set_back, self.newest - event_time)
        self.newest = max(self.newest, event_time)
        if self.line is None:
            self.line = TimeLine(event_time - _before(event))
        if isinstance(event, Other):
            return
        self._capacity.hear_event(event)
        match event:
            case SupervisorEvent():
                self._supervisor(event, event_time)
            case Launched():
                self._leave(event_time)
                self._wait(event_time)
                self.attempt = event.attempt or self.attempt + 1
                if self.clocks.hear_launch(self.attempt, event):
                    self._steps = self.clocks.correct_steps(self._recorded)
                self._kind, self._launched = TimeKind.START_UP, True
                self._shrunk = self._why if len(event.hosts) < self._lineup else self._shrunk
                self._lineup = len(event.hosts)
            case Training():
                self._training(event, event_time)
            case Finished() | Stopped() | Unstable() | Handover():
                self._goodbye(event, event_time)
            case Hang():
                self._hang(event, event_time)
            case Ended():
                self._ended(event, event_time)
            case Restart():
                self._leave(event_time)
                # What stopped in good order begins again: the reason of that is the cause of its stop.
                if self._why.cause == "stopped" and event.reason:
                    self._why.cause = event.reason
                    if GROWS.search(event.reason):
                        self._why.cause = "growing"
                        self._why.incident, self._why.host = self._shrunk.incident, self._shrunk.host
                self._wait(event_time)
                self._pause = event_time + max(0.0, event.delay or 0.0)
                self._kind = TimeKind.START_UP
            case HostsAwaited():
                self._hosts(event, event_time)
        self._incident(event)
        if self.process is not None and explains_gap(event):
            self.process.events.append(event)

    # Events

    def _supervisor(self, event: SupervisorEvent, moment: float) -> None:
        if event.what == "ended":
            self._leave(moment)
            self._wait(moment)
            self.supervised, self._kind, self._pause = False, TimeKind.NOT_RUNNING, 0.0
            exit_code = event.code
            # After a failure, the failure remains the cause.
            if exit_code in (errors.OK, errors.STOPPED) or not self._why.cause:
                self._why = Reason(CODES.get(exit_code if exit_code is not None else -1, f"code {exit_code}"))
            return
        if self.process is not None:
            self._took_over = moment  # what the process did meanwhile is known later
        else:
            # The supervisor of before died, if there was one; processes go on starting.
            if not self._launched:
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
        missing = self._capacity.measure_missing(event.world or 0)
        self.process = ProcessTime(self.attempt, NOTHING, self._why, self.done, step, self._reasons, missing)
        self._took_over = None

    def _goodbye(self, event: Event, moment: float) -> None:
        if self.process is None:
            return
        stop_causes = {"stopped": "stopped", "finished": "complete", "handover": "hand-over"}
        has_incident = not isinstance(event, Finished | Stopped)
        incident_number = read_whole(event.get("number")) if has_incident else None
        self._why = Reason(stop_causes.get(event.event, "unstable"), incident_number)
        tail_kind = TimeKind.CHECKPOINTING if isinstance(event, Stopped) else None
        reached_step = read_whole(event.get("steps" if isinstance(event, Finished) else "step")) or 0
        self._close(moment, tail_kind, 0, reached_step, self._why)
        self._kind = TimeKind.ENDING if self.supervised else TimeKind.NOT_RUNNING

    def _hang(self, event: Hang, moment: float) -> None:
        last_progress = moment - max(0.0, event.waited or 0.0)
        self._why = self._failed = Reason("hang")
        if self.process is not None:
            self._close(last_progress, None, event.step or 0)
        else:
            self._wait(last_progress)
        self._kind = TimeKind.HANG
        self._wait(moment)
        self._kind = TimeKind.ENDING

    def _ended(self, event: Ended, moment: float) -> None:
        was_hung, what = bool(event.hung), event.get("what")
        if isinstance(what, str) and what and not (was_hung and self._failed is not None):
            # It said so itself.
            known_incident = self._why.incident if self._kind is TimeKind.ENDING else None
            self._why = self._failed = Reason(what, known_incident)
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
            self._kind = TimeKind.HANG if was_hung else TimeKind.ENDING
        self._wait(moment)
        self._launched = False
        self.done = max(self.done, event.clock or 0)
        self._kind = TimeKind.ENDING

    def _hosts(self, event: HostsAwaited, moment: float) -> None:
        self._leave(moment)
        if event.hosts:
            self._kind = TimeKind.HOSTS
            self._awaited = ", ".join(map(str, event.hosts))
            self._wait(moment)
        else:  # all are there
            self._wait(moment)
            self._kind = TimeKind.START_UP

    def _incident(self, event: Event) -> None:
        summary = read_tree(event.get("summary"))
        incident_number = read_whole(summary.get("number", event.get("number")))
        if incident_number is None or not isinstance(event, IncidentEvent):
            return
        self._alert[incident_number] = (str(summary.get("verdict") or ""), str(summary.get("cause") or ""))
        # One of the supervisor is opened, or acted on again, right after the end of the attempt.
        follows_failure = self._failed is not None and event.what in ("opened", "attributed")
        if follows_failure and self._alert[incident_number][0] in OF_SUPERVISOR:
            self._why.incident = incident_number
        if event.what in ("restarted", "closed"):
            self._failed = None

    # Time

    def _of_process(self, until: float) -> StepTimes:
        """The recorded steps of the process that trains. How wrong the clocks of later attempts were is not known yet:
        their records may look as old."""
        assert self.line is not None
        steps_between = self.steps.select_between(self.line.end - 0.01, until + SLACK)
        if not self._known:
            return steps_between
        own_steps = (steps_between.attempt == self.attempt) | (steps_between.attempt == 0)
        return steps_between if own_steps.all() else steps_between.select_rows(np.flatnonzero(own_steps))

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
        process_steps = self._of_process(until)
        if not len(process_steps.step):
            has_begun = max(clock, reached, process.find_told()) > process.step
            tail, why = None if has_begun else TimeKind.START_UP, None
        farthest = process.put_time(self.line, process_steps, max(until, self.line.end), tail, clock, why)
        self.done = max(self.done, reached, farthest)

    def _leave(self, moment: float) -> None:
        """The process that trained, if any, has gone without a word by `moment`."""
        if self.process is None:
            return
        process_steps, event_times = self._of_process(moment), [e.time or 0.0 for e in self.process.events]
        assert self.line is not None
        last_sign = max([self.line.end, *event_times, *process_steps.time[-1:].tolist()])
        self._why = Reason("ended without a word")
        self._close(min(last_sign, moment), None, 0)
        self._kind = TimeKind.NOT_RUNNING

    def _wait(self, moment: float) -> None:
        """Account for the time since the last event, if no process trains."""
        line = self.line
        assert line is not None
        if self.process is not None or moment <= line.end:
            return
        coming = self.attempt + self.supervised
        if self._pause > line.end:
            line.fill_until(min(self._pause, moment), TimeKind.PAUSE, line.add_charge(self._why, coming))
        is_waiting = self._kind is TimeKind.HOSTS
        is_preparing = is_waiting or (self._kind is TimeKind.START_UP and not self._launched)
        wait_reason = replace(self._why, host=self._awaited) if is_waiting else self._why
        line.fill_until(
            moment, self._kind, line.add_charge(wait_reason, coming if is_preparing else self.attempt)
        )

    def _own(self, event: Event) -> bool:
        """Whether an event of the training says what it did, and not the supervisor."""
        incident_number = read_whole(event.get("number")) or 0
        by_supervisor = self._alert.get(incident_number, ("",))[0] in OF_SUPERVISOR
        return not isinstance(event, IncidentEvent) or not by_supervisor

    def _name(self) -> None:
        """Name the causes of the training's incidents, as far as they are known."""
        for incident_number, reason in self._reasons.items():
            verdict, cause = self._alert.get(incident_number, ("", ""))
            reason.cause = ", ".join(cause_part for cause_part in (verdict, cause) if cause_part)

    def account_until(self, now: float, progress: Mapping[str, Any] | None = None) -> TimeAccount | None:
        """The account up to `now`, without changing this one; None before the first event. progress: progress.json, for
        the steps that are not recorded yet."""
        if self.line is None:
            return None
        other = Lifecycle()
        other.__dict__ |= self.__dict__
        other.line, settled_until = self.line.copy_line(), self.line.end
        if self.process is not None:
            told = progress or {}
            settled_until = max([settled_until, *self._of_process(now).time[-1:].tolist()])
            other.process = replace(self.process, events=list(self.process.events))
            progress_step, progress_time = (
                read_whole(told.get("step")) or 0,
                self.clocks.correct_progress(told),
            )
            tail_kind = PHASES.get(str(told.get("phase")))
            if progress_time is not None and self.line.end < progress_time < now and tail_kind is None:
                other._close(progress_time, None, progress_step)
                other._kind = TimeKind.UNKNOWN
                other._why = Reason("no progress yet")
            else:
                other._close(now, tail_kind, progress_step)
        other._wait(now)
        other._name()
        assert other.line is not None
        return other.line.build_account(min(settled_until, other.line.end))


def _before(event: Event) -> float:
    """Seconds between the start of the process and its first event."""
    if not isinstance(event, SupervisorEvent | Training):
        return 0.0
    return event.seconds if event.seconds is not None and 0 <= event.seconds < 1e9 else 0.0
