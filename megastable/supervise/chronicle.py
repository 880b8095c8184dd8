"""What a journal tells of a run so far, folded event by event: small, however long the journal is."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from megastable.base.errors import HANDOVER, NO_SPACE, STOPPED, UNSTABLE
from megastable.base.text import TOLD, Event, read_later, say, visible
from megastable.supervise.follow import PASSED

TAIL = 30  # events that are kept in words
LARGEST = 2**53  # up to it a float is exact
KEPT = 20  # of evaluations, attempts and restarts
WORKS = ("training", "resumed", "launched")  # someone was at work then
OTHERS = ("supervisor", "hook_failed", "hang", "ended", "restart")  # no sign of a training process
ENDS = ("stopped", "finished", "unstable", "handover")  # how the training process says goodbye


@dataclass(frozen=True)
class Said:
    """An event in words, safe to show. time: unix seconds."""

    time: float
    event: str
    text: str


@dataclass(frozen=True)
class IncidentSummary:
    """One incident as it stands; see stability/incident.py. onset: the step that it is called by. kind: its class.
    put_off: samples that are read later, in words. loss_*: nats per token."""

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


@dataclass
class Chronicle:
    """step: the last that the journal names, None when it names none. last: unix seconds of the last sign of a training
    process. starts: of these, with or without a supervisor. refused: updates. word: the last event that says who is at
    work. goodbye: the last of ENDS, if nobody was at work since. supervisor: its last words about itself, unless
    somebody was at work after its end. started: how one was started last, with recipe and arguments."""

    began: float | None = None
    last: float | None = None
    step: int | None = None
    world: int | None = None
    starts: int = 0
    refused: int = 0
    restarts: Counter[str] = field(default_factory=Counter)
    incidents: dict[int, IncidentSummary] = field(default_factory=dict)
    attempts: dict[int, AttemptSummary] = field(default_factory=dict)
    validation: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT))
    sizes: dict[str, int] = field(default_factory=dict)  # of checkpoints, bytes
    _tail: deque[Event] = field(default_factory=lambda: deque(maxlen=TAIL))
    goodbye: Event | None = None
    supervisor: Event | None = None
    started: Event = field(default_factory=dict)
    word: str = ""
    restart: Event | None = None  # that is being waited for
    alert: Event | None = None  # the one that is not over

    def add(self, event: Event) -> None:
        """Take in one event; whatever it lacks, or has of a wrong kind, is passed over."""
        kind, moment = str(event.get("event")), real(event.get("time"))
        if moment is not None:
            self.began = self.began if self.began is not None else moment
            self.last = self.last if kind in OTHERS else moment
        if kind in TOLD:
            self._tail.append(event)
        if (step := whole(event.get("to_step" if "to_step" in event else "step"))) is not None:
            self.step = step
        if kind in (*WORKS, *ENDS, "ended", "hang", "restart"):
            self.word = kind
            self.goodbye = event if kind in ENDS else None if kind in WORKS else self.goodbye
            self.restart = event if kind == "restart" else None
            if kind in WORKS and (self.supervisor or {}).get("what") == "ended":
                self.supervisor = None
        if kind == "training":
            self.starts += 1
            self.world = whole(event.get("world"))
        elif kind == "discarded":
            self.refused += 1
        elif kind == PASSED:
            self.refused += whole(event.get("refused")) or 0
        elif kind == "alert":
            self.alert = event if event.get("what") == "begun" else None
        elif kind == "evaluated":
            loss = real(event.get("loss"))
            if loss is not None and step is not None:
                self.validation.append((step, loss))
        elif kind == "checkpoint":
            self._checkpoint(event)
        elif kind == "finished":
            self.step = whole(event.get("steps")) or self.step
        elif kind == "supervisor":
            self.supervisor = event
            if event.get("what") != "ended":
                self.word, self.started = "supervisor", event
        elif kind in ("launched", "ended"):
            self._attempt(kind, event, moment)
        elif kind == "restart":
            number = whole(event.get("attempt"))
            self.restarts[self._how(number)] += 1
        if isinstance(summary := event.get("summary"), dict):
            self._incident(summary)

    @property
    def over(self) -> bool:
        """Whether the training process or the supervisor said goodbye, and nobody was at work since."""
        return self.goodbye is not None or (self.supervisor or {}).get("what") == "ended"

    @property
    def tail(self) -> tuple[Said, ...]:
        """The last events in words. Put only when asked for: most of a long journal is never shown."""
        return tuple(Said(real(e.get("time")) or 0.0, str(e["event"]), say(e)) for e in self._tail)

    def _checkpoint(self, event: Event) -> None:
        if (size := whole(event.get("bytes"))) is not None:
            name = str(event.get("name"))
            self.sizes.pop(name, None)
            self.sizes[name] = size
            for old in list(self.sizes)[:-KEPT]:
                del self.sizes[old]

    def _attempt(self, kind: str, event: Event, moment: float | None) -> None:
        number = whole(event.get("attempt"))
        if number is None:
            return
        if kind == "launched":
            self.attempts[number] = AttemptSummary(number, moment)
            for old in list(self.attempts)[:-KEPT]:
                del self.attempts[old]
            return
        known = self.attempts.get(number)
        self.attempts[number] = AttemptSummary(
            number, known.began if known else None, kind_of_end(event), whole(event.get("code")),
            whole(event.get("signal")), step=whole(event.get("step")),
            failure=visible(event.get("failure") or "", 300),
        )  # fmt: skip

    def _how(self, number: int | None) -> str:
        """Why there is a restart: how the attempt ended, its own number or the one before the one to come."""
        for known in (number, (number or 0) - 1):
            if known in self.attempts and self.attempts[known].how:
                return self.attempts[known].how
        return "unknown"

    def _incident(self, told: Event) -> None:
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


def kind_of_end(event: Event) -> str:
    """Why an attempt ended, of an `ended` event: one of a handful of words, for counting."""
    if event.get("hung"):
        return "hang"
    if event.get("signal"):
        return "killed"
    code = event.get("code")
    known = {0: "done", STOPPED: "stopped", UNSTABLE: "unstable", NO_SPACE: "no_space", HANDOVER: "handover"}
    return known.get(code, "crash") if isinstance(code, int) else "crash"


def real(value: object) -> float | None:
    """A number of a JSON file: "nan" and "inf" are numbers there, true is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def whole(value: object) -> int | None:
    """A whole number of a JSON file, of a size that a program gave it."""
    number = real(value) if isinstance(value, int | float) else None
    if number is None or not abs(number) < LARGEST or number != int(number):
        return None
    return int(number)
