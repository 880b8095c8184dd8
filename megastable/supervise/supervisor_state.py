"""Rebuilds what a supervisor knows of a run from its journal, so that it may die at any moment. Pure."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace

from pydantic import ValidationError

from megastable.guard.incident import Breakdown, Incident
from megastable.run.events.event import Event
from megastable.run.events.stability_events import Handover, HostFaulty, IncidentEvent
from megastable.run.events.supervisor_events import (
    Ended,
    HostLeftOut,
    HostProven,
    HostSlow,
    Launched,
    Restart,
    SupervisorEvent,
)
from megastable.run.events.training_events import (
    CheckpointRejected,
    CheckpointSaved,
    Finished,
    RolledBack,
    Stopped,
    TasksEvaluated,
    TasksFailed,
    TasksSkipped,
    Training,
    Unstable,
)  # fmt: skip
from megastable.supervise.bars import HostBar
from megastable.supervise.exit_cause import End
from megastable.supervise.restart_policy import Failure


class SupervisorState:
    """Fed every event in order.

    attempt: the newest, 0 = none; under_way: it was launched, and no end is journaled. clock: the farthest step done.
    lineup: the hosts of the newest attempt; slow: those that are slow. bars: of hosts that failed since a person
    started the run; left_out: those that were left out since the last failure. launched: whether an attempt began since
    then; widest: on how many hosts at most; unfit: by number of hosts, failures of attempts on fewer that did not train
    a step.
    began: the step that the current processes resumed from; rejected: of the newest checkpoint that they passed over.
    failures: since a person started the run; failed: time of the last one, until training goes on; unmended: an end not
    acted on yet; skipped: the positions skipped because of it. predecessor: (process, host) of a supervisor that ended
    without a word. evaluated: the newest step whose checkpoint eval.command is done with, unless a person rolled it
    back. number: of the newest incident. open: our incidents that are not resolved. since: the training's events about
    its end, in this attempt.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.under_way = False
        self.lineup: tuple[str, ...] = ()
        self.bars: dict[str, HostBar] = {}
        self.slow: set[str] = set()
        self.left_out: set[str] = set()
        self.launched, self.widest = False, 0
        self.unfit: Counter[int] = Counter()
        self.clock = 0
        self.began = 0
        self.rejected = 0
        self.failures: list[Failure] = []
        self.failed: float | None = None
        self.unmended: End | None = None
        self.skipped: list[tuple[int, int]] = []
        self.predecessor: tuple[int, str] | None = None
        self.evaluated = 0
        self.number = 0
        self.open: dict[int, Incident] = {}
        self.since: list[Event] = []

    def hear(self, event: Event) -> None:
        """Take in one event. Malformed ones are ignored: repairing the journal is not this process's job."""
        with suppress(KeyError, TypeError, ValueError):
            self._hear(event)

    def _hear(self, event: Event) -> None:
        match event:
            case SupervisorEvent():
                self._supervisor(event)
            case Launched():
                self.attempt, self.under_way = int(event["attempt"]), True
                self.lineup = tuple(map(str, event.hosts))
                self.launched = True
                self.widest = max(self.widest, len(self.lineup), event.wanted or 0)
                self.rejected = 0
                self.slow.clear()
                self.since.clear()
                self.unmended = None
            case HostLeftOut():
                self.bars[str(event["host"])] = HostBar(
                    float(event["until"]),
                    bool(event["wholly"]),
                    int(event["strikes"]),
                    float(event.burn_in or 0.0),
                )
                self.left_out.add(str(event["host"]))
            case HostProven():
                if (bar := self.bars.get(host := str(event["host"]))) is not None:
                    self.bars[host] = replace(bar, burn_in=0.0)
            case HostSlow():
                (self.slow.discard if event["what"] == "over" else self.slow.add)(str(event["host"]))
            case Restart():
                self.unmended = None
            case Training():
                self.began = int(event["step"])
                self.clock = max(self.clock, self.began)
            case CheckpointSaved():
                self.clock = max(self.clock, int(event["step"]))
            case CheckpointRejected():
                self.rejected = max(self.rejected, int(str(event["name"]).removeprefix("step-")))
            case TasksEvaluated() | TasksFailed() | TasksSkipped():
                self.evaluated = max(self.evaluated, int(event["of_step"]))
            case RolledBack():
                self.evaluated = min(self.evaluated, int(event["step"]))
            case Finished() | Stopped() | Handover() | HostFaulty() | Unstable():
                self.since.append(event)
            case Ended():
                self._ended(event)
            case IncidentEvent():
                self._incident(event)

    def _supervisor(self, event: SupervisorEvent) -> None:
        if event["what"] == "started":
            self.failures.clear()
            self.bars.clear()
            self.unfit.clear()
            self.launched, self.widest = False, 0
        if event["what"] == "ended":
            self.unmended = None
        self.predecessor = None if event["what"] == "ended" else (int(event["pid"]), str(event["host"]))

    def _ended(self, event: Ended) -> None:
        self.under_way = False
        self.clock = max(self.clock, int(event["clock"]))
        if event.get("what"):
            self.failed = float(event["time"])
            self.skipped = list(event.skipped)
            self.left_out.clear()
            self.unmended = None
            end = End.model_validate({k: event[k] for k in End.model_fields if k in event})
            if self.does_not_fit(end):
                self.unfit[len(self.lineup)] += 1
            host = None if self.does_not_fit(end) else end.host
            self.failures.append(
                Failure(
                    what=end.what,
                    step=end.step,
                    host=host,
                    clock=self.clock,
                    skipped=bool(self.skipped),
                    code=end.code,
                )
            )
            self.unmended = end

    def does_not_fit(self, end: End) -> bool:
        """Whether an attempt on fewer hosts than before ended by an error before its first step, as where a larger
        share of the optimizer's state does not fit into memory: that is no host's fault."""
        died = bool(end.code or end.signal) and not end.gone
        return died and not end.trained and len(self.lineup) < self.widest

    def _incident(self, event: IncidentEvent) -> None:
        self.number = max(self.number, int(event["number"]))
        if event["what"] == "restarted":
            self.failed = None
        try:
            incident = Incident.model_validate(event["summary"])
        except ValidationError:
            return
        if isinstance(incident.verdict, Breakdown):
            self.open.pop(incident.number, None)
            if incident.outcome == "open":
                self.open[incident.number] = incident
