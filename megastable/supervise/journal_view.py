"""Summarizes a run's journal, event by event, in small memory however long the journal is."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megastable.base.errors import HANDOVER, NO_SPACE, STOPPED, UNSTABLE
from megastable.base.text import visible
from megastable.run.events.event import Event, Other, read_later, real, whole
from megastable.run.events.follow import PassedOver
from megastable.run.events.stability_events import AlertEvent, Discarded, Probed, TrendEvent
from megastable.run.events.supervisor_events import (
    Ended,
    HostLeftOut,
    HostProven,
    HostsAwaited,
    HostSlow,
    Launched,
    Restart,
    SupervisorEvent,
)
from megastable.run.events.training_events import (
    CheckpointSaved,
    Evaluated,
    Finished,
    TasksEvaluated,
    TasksFailed,
    TasksSkipped,
    Training,
)
from megastable.supervise.task_history import TaskHistory

TAIL = 30  # events kept as text
KEPT = 20  # of evaluations, attempts and restarts
WORKS = ("training", "resumed", "launched")  # a process was at work at these
OTHERS = (
    "supervisor",
    "hook_failed",
    "hang",
    "ended",
    "restart",
    "hosts_awaited",
    "host_slow",
    "tasks_evaluated",
    "tasks_failed",
    "tasks_skipped",
)  # no sign of a training process
ENDED_AS = ("hang", "killed", "crash", "handover", "unstable", "no_space", "stopped", "done", "unknown")
ENDS = ("stopped", "finished", "unstable", "handover")  # last events of a training process


@dataclass(frozen=True)
class Said:
    """An event as text, safe to show. time: unix seconds."""

    time: float
    event: str
    text: str


@dataclass(frozen=True)
class IncidentSummary:
    """One incident, now; see guard/incident.py. onset: the step that names it. kind: its class. put_off: deferred
    samples, in words. loss_*: nats per token."""

    number: int
    onset: int
    step: int
    verdict: str
    kind: str
    cause: str
    action: str
    outcome: str
    steps_lost: int
    batches_discarded: int
    put_off: str
    loss_before: float | None
    loss_peak: float | None
    failure: str


@dataclass(frozen=True)
class AttemptSummary:
    """One start of the training processes by a supervisor. how: see kind_of_end; "" while it runs."""

    number: int
    began: float | None
    how: str = ""
    code: int | None = None
    signal: int | None = None
    step: int | None = None
    failure: str = ""


@dataclass(frozen=True)
class SlowSummary:
    """ratio: of a host's own work's time to the others'; cost: the share of a step that this is; text: a sentence."""

    ratio: float | None
    cost: float | None
    text: str


@dataclass
class JournalView:
    """step: the last that the journal names, or None. last: unix seconds of the last sign of a training process.
    starts: of training processes, supervised or not. refused: updates. word: the last event that shows which process is
    at work. goodbye: the last of ENDS, if nothing ran since. supervisor: its last event about itself, unless something
    ran after its end. started: recipe and arguments of the last start. hosts: of the newest attempt; left_out: until
    when (unix seconds), by host, others are preferred to those that failed. trends: slow signals that are warned of
    now, with what is said of each."""

    began: float | None = None
    last: float | None = None
    step: int | None = None
    world: int | None = None
    starts: int = 0
    refused: int = 0
    restarts: Counter[str] = field(default_factory=Counter)
    incidents: dict[int, IncidentSummary] = field(default_factory=dict)
    attempts: dict[int, AttemptSummary] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    left_out: dict[str, float] = field(default_factory=dict)
    slow: dict[str, SlowSummary] = field(default_factory=dict)
    trends: dict[str, str] = field(default_factory=dict)
    validation: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT))
    by_corpus: dict[str, float] = field(default_factory=dict)  # validation losses of the last evaluation
    probe: tuple[int, float] | None = None  # step and loss of the newest look at the probe
    tasks: TaskHistory = field(default_factory=TaskHistory)
    sizes: dict[str, int] = field(default_factory=dict)  # of checkpoints, bytes
    _tail: deque[Event] = field(default_factory=lambda: deque(maxlen=TAIL))
    goodbye: Event | None = None
    supervisor: SupervisorEvent | None = None
    started: Mapping[str, Any] = field(default_factory=dict)
    word: str = ""
    restart: Restart | HostsAwaited | None = None  # the pending one, or what it waits for
    alert: AlertEvent | None = None  # the current one

    def add(self, event: Event) -> None:
        """Take in one event; missing or malformed fields are ignored."""
        name, moment = event.event, event.time
        if moment is not None:
            self.began = self.began if self.began is not None else moment
            self.last = self.last if name in OTHERS else moment
        if not isinstance(event, Other | PassedOver | Probed):
            self._tail.append(event)
        if (step := whole(event.get("to_step" if "to_step" in event else "step"))) is not None:
            self.step = step
        if name in (*WORKS, *ENDS, "ended", "hang", "restart", "hosts_awaited", "rolled_back"):
            self.word = name
            self.goodbye = event if name in ENDS else None if name in WORKS else self.goodbye
            self.restart = event if isinstance(event, Restart | HostsAwaited) else None
            if name in WORKS and self.supervisor is not None and self.supervisor.what == "ended":
                self.supervisor = None
        match event:
            case Training():
                self.starts += 1
                self.world = event.world
            case Discarded():
                self.refused += 1
            case PassedOver():
                self.refused += event.refused or 0
            case AlertEvent():
                self.alert = event if event.what == "begun" else None
            case TrendEvent():
                if event.signal is not None:
                    self.trends.pop(signal := visible(event.signal, 40), None)
                    if event.what == "warned":
                        self.trends[signal] = visible(event.text or "", 300)
            case Evaluated():
                if event.loss is not None and step is not None:
                    self.validation.append((step, event.loss))
                    self.by_corpus = {visible(name, 80): loss for name, loss in event.by_corpus.items()}
            case Probed():
                if event.loss is not None and step is not None:
                    self.probe = (step, event.loss)
            case TasksEvaluated() | TasksFailed() | TasksSkipped():
                self.tasks.add(event)
            case CheckpointSaved():
                self._checkpoint(event)
            case Finished():
                self.step = event.steps or self.step
            case SupervisorEvent():
                self.supervisor = event
                if event.what != "ended":
                    self.word, self.started = name, event.fields
                if event.what == "started":
                    self.left_out.clear()  # a person has looked
            case HostLeftOut():
                if event.host is not None and event.until is not None:
                    self.left_out[visible(event.host, 80)] = event.until + (event.burn_in or 0.0)
            case HostProven():
                if event.host is not None:
                    self.left_out.pop(visible(event.host, 80), None)
            case HostSlow():
                if event.host is not None:
                    self.slow.pop(host := visible(event.host, 80), None)
                    if event.what != "over":
                        self.slow[host] = SlowSummary(event.ratio, event.cost, event.sentence())
            case Launched():
                self.slow.clear()
                self.hosts = tuple(visible(str(host), 80) for host in event.hosts)
                self._launched(event)
            case Ended():
                self._ended(event)
            case Restart():
                self.restarts[self._how(event.attempt)] += 1
        if isinstance(summary := event.get("summary"), dict):
            self._incident(summary)

    @property
    def over(self) -> bool:
        """Whether the training process or the supervisor ended properly, and nothing ran since."""
        return self.goodbye is not None or (self.supervisor is not None and self.supervisor.what == "ended")

    @property
    def tail(self) -> tuple[Said, ...]:
        """The last events as text, formatted only on demand: most of a long journal is never shown."""
        return tuple(Said(e.time or 0.0, e.event, e.line()) for e in self._tail)

    def _checkpoint(self, event: CheckpointSaved) -> None:
        if event.bytes is not None:
            name = str(event.get("name"))
            self.sizes.pop(name, None)
            self.sizes[name] = event.bytes
            for old in list(self.sizes)[:-KEPT]:
                del self.sizes[old]

    def _launched(self, event: Launched) -> None:
        if event.attempt is not None:
            self.attempts[event.attempt] = AttemptSummary(event.attempt, event.time)
            for old in list(self.attempts)[:-KEPT]:
                del self.attempts[old]

    def _ended(self, event: Ended) -> None:
        if event.attempt is not None:
            known = self.attempts.get(event.attempt)
            self.attempts[event.attempt] = AttemptSummary(
                event.attempt, known.began if known else None, kind_of_end(event), event.code, event.signal,
                step=event.step, failure=visible(event.get("failure") or "", 300),
            )  # fmt: skip

    def _how(self, number: int | None) -> str:
        """Why there is a restart: how the attempt ended, given its number or that of the next."""
        for known in (number, (number or 0) - 1):
            if known in self.attempts and self.attempts[known].how:
                return self.attempts[known].how
        return "unknown"

    def _incident(self, told: Mapping[str, Any]) -> None:
        number = whole(told.get("number"))
        if number is None:
            return
        actions = told.get("actions")
        self.incidents[number] = IncidentSummary(
            number=number,
            onset=whole(told.get("onset", told.get("step"))) or 0,
            step=whole(told.get("step")) or 0,
            verdict=visible(told.get("verdict", "?"), 40),
            kind=visible(told.get("kind", "?"), 40),
            cause=visible(told.get("cause", "?"), 40),
            action=visible(actions[-1], 40) if isinstance(actions, list) and actions else "",
            outcome=visible(told.get("outcome", "?"), 40),
            steps_lost=whole(told.get("steps_lost")) or 0,
            batches_discarded=whole(told.get("batches_discarded")) or 0,
            put_off=read_later(told),
            loss_before=real(told.get("loss_before")),
            loss_peak=real(told.get("loss_peak")),
            failure=visible(told.get("failure") or "", 300),
        )


def kind_of_end(event: Ended) -> str:
    """Why an attempt ended, from its `ended` event: one of ENDED_AS, for counting."""
    if event.get("hung"):
        return "hang"
    if event.get("signal"):
        return "killed"
    code = event.get("code")
    known = {0: "done", STOPPED: "stopped", UNSTABLE: "unstable", NO_SPACE: "no_space", HANDOVER: "handover"}
    return known.get(code, "crash") if isinstance(code, int) else "crash"
