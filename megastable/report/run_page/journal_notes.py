"""Follows a run's journal for its page: the list of events, and what is marked in the plots."""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megastable.run.events.event import Event, real, whole
from megastable.run.events.follow import Follower, PassedOver
from megastable.run.events.people_events import ChangeMade
from megastable.run.events.stability_events import (
    AlertEvent,
    IncidentEvent,
    Probed,
    RateCut,
    RateLifted,
    RateWarmup,
    TrendEvent,
)
from megastable.run.events.supervisor_events import Ended, HostSlow, Launched
from megastable.run.events.training_events import (
    NEXT_UPDATE,
    CheckpointHealthy,
    CheckpointRejected,
    CheckpointSaved,
    CheckpointSuspect,
    Evaluated,
    TasksEvaluated,
    Training,
    Warned,
)

KEPT = 20_000  # events in the list
NO_END = "its end is not recorded: the supervisor was killed, too"
FAR = 1e11  # unix seconds, which no clock tells
REFUSED = re.compile(rb'"event": "(?:discarded|discard_examined)"')
# Events by what a reader looks for.
GROUPS = {
    "incident": "incident discarded unstable handover alert trend located would baseline_reset rate_cut rate_warmup "
    "rate_lifted fell_back returned replicas_differ state_changed gradients_doubted replay_differs snapshot_rejected "
    "warning branches_tried discard_examined samples_examined samples_dropped",
    "checkpoint": "checkpoint rolled_back resumed reshaped memory_resume memory_refused memory_dropped memory_off "
    "imported",
    "data": "order_changed exchanges_undone blend_changed mix_changed batch_changed length_changed looked_ahead "
    "look_ahead_spent look_ahead_failed skips",
    "people": "note change_ config_changed",
    "process": "supervisor launched training ended hang restart hosts_awaited host_ stopped finished hook_failed",
}
PREFIXES = {prefix: group for group, prefixes in GROUPS.items() for prefix in prefixes.split()}


class JournalLine(NamedTuple):
    """time: unix seconds; group: a key of `GROUPS`, or "other"."""

    time: float
    step: int | None
    name: str
    group: str
    text: str
    incident: int | None


@dataclass
class CheckpointNote:
    """What the journal says of a checkpoint. state: saved, healthy, suspect or rejected; why: of the last two."""

    name: str
    step: int
    time: float
    bytes: int | None
    seconds: float | None
    blocked: float | None
    state: str = "saved"
    why: str = ""
    proved: int | None = None


@dataclass
class IncidentNote:
    """An incident: its latest summary, and what was said of it when. opened, closed: unix seconds; back_to: the step
    that the run went back to."""

    number: int
    opened: float
    closed: float | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    back_to: int | None = None
    lines: list[JournalLine] = field(default_factory=list)


class SomeValues(NamedTuple):
    """Values by name, measured of the state after a step. time: unix seconds; None: as of the step."""

    step: int
    time: float | None
    values: dict[str, float]


@dataclass
class _Noted:
    lines: deque[JournalLine] = field(default_factory=lambda: deque(maxlen=KEPT))
    passed: int = 0  # refused updates that are not in the list
    incidents: dict[int, IncidentNote] = field(default_factory=dict)
    evaluations: list[tuple[int, float, float]] = field(default_factory=list)  # step, loss, time
    probes: list[tuple[int, float, float]] = field(default_factory=list)  # likewise, of the probe
    probes_undone: list[tuple[int, float, float]] = field(default_factory=list)  # of weights that were undone
    by_corpus: list[SomeValues] = field(default_factory=list)  # validation losses
    tasks: list[SomeValues] = field(default_factory=list)  # scores
    checkpoints: dict[str, CheckpointNote] = field(default_factory=dict)
    rates: list[tuple[int, float, str]] = field(
        default_factory=list
    )  # cuts, warm-ups, lifts, live changes, other updates after a resume: step, time, sentence
    trends: dict[str, str] = field(default_factory=dict)  # warnings that are not over, by signal
    alert: str = ""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    starts: list[tuple[float, int | None]] = field(default_factory=list)  # of training: time, ranks
    peaks: list[tuple[int, float, str]] = field(default_factory=list)  # step, TFLOP/s of a device, source
    software: dict[str, Any] = field(default_factory=dict)  # of the newest start
    hosts: list[str] = field(default_factory=list)
    slow: dict[str, str] = field(default_factory=dict)
    began: float | None = None

    def undo(self, step: int) -> None:
        """The run goes on from `step`: what was measured of later weights is of none that there are."""
        self.evaluations = [one for one in self.evaluations if one[0] <= step]
        self.probes_undone += [one for one in self.probes if one[0] > step]
        self.probes = [one for one in self.probes if one[0] <= step]
        self.by_corpus = [one for one in self.by_corpus if one.step <= step]
        self.tasks = [one for one in self.tasks if one.step <= step]


class JournalNotes:
    """Of one run. `noted` grows with every `look`; it begins anew when the file was repaired."""

    def __init__(self, journal: Path) -> None:
        self._follower = Follower(journal, passing)
        self._starts = self._follower.starts
        self.noted = _Noted()
        self.count = 0  # of events so far

    @property
    def problems(self) -> list[str]:
        found = [self._follower.problem] if self._follower.problem else []
        if self._follower.damaged:
            found.append(f"{self._follower.path}: damaged lines passed over: {self._follower.damaged}")
        return found

    def look(self) -> bool:
        """Whether there is anything new. Journals are small, but for lines on refused updates."""
        before = (self.count, self._follower.starts)
        for event in self._follower.stream():
            if self._follower.starts != self._starts:
                self._starts, self.noted = self._follower.starts, _Noted()
            self.count += 1
            self._note(event)
        return before != (self.count, self._follower.starts)

    def _note(self, event: Event) -> None:
        n = self.noted
        if isinstance(event, PassedOver):
            n.passed += event.refused or 0
            return
        time = event.time or 0.0
        time = time if abs(time) < FAR else 0.0
        if n.began is None and time:
            n.began = time
        step = whole(event.get("to_step", event.get("step")))
        summary = event.get("summary")
        number = whole(summary.get("number")) if isinstance(summary, dict) else None
        if isinstance(event, Probed):  # in a plot; in the list they would take the place of what happened
            if step is not None and event.loss is not None and math.isfinite(event.loss):
                n.probes.append((step, event.loss, time))
            return
        line = JournalLine(time, step, event.event, group_of(event.event), event.sentence(), number)
        n.lines.append(line)
        if number is not None and isinstance(summary, dict):
            case = n.incidents.setdefault(number, IncidentNote(number, time))
            case.summary = summary
            case.lines.append(line)
            if isinstance(event, IncidentEvent) and event.what == "closed":
                case.closed = time
            if (
                isinstance(event, IncidentEvent)
                and event.what in ("rewound", "restarted")
                and step is not None
            ):
                case.back_to = step
                n.undo(step)
        match event:
            case Evaluated():
                if step is not None and event.loss is not None and math.isfinite(event.loss):
                    n.evaluations.append((step, event.loss, time))
                    if event.by_corpus:
                        n.by_corpus.append(SomeValues(step, time, event.by_corpus))
            case TasksEvaluated():
                if event.of_step is not None and event.numbers:
                    n.tasks.append(SomeValues(event.of_step, None, event.numbers))
            case CheckpointSaved():
                name = str(event.get("name"))
                n.checkpoints.pop(name, None)
                n.checkpoints[name] = CheckpointNote(
                    name, step or 0, time, event.bytes, real(event.seconds), real(event.blocked)
                )
            case CheckpointHealthy():
                if known := n.checkpoints.get(str(event.get("name"))):
                    known.state, known.proved = "healthy", step
            case CheckpointSuspect() | CheckpointRejected():
                if known := n.checkpoints.get(str(event.get("name"))):
                    known.state = "suspect" if isinstance(event, CheckpointSuspect) else "rejected"
                    known.why = line.text
            case RateCut() | RateWarmup() | RateLifted() | ChangeMade():
                n.rates.append((step or 0, time, line.text))
            case Warned() if event.sign == NEXT_UPDATE:
                n.rates.append((step or 0, time, line.text))
            case TrendEvent():
                n.trends.pop(str(event.signal), None)
                if event.what != "over":
                    n.trends[str(event.signal)] = line.text
            case AlertEvent():
                n.alert = line.text if event.what == "begun" else ""
            case Training():
                n.starts.append((time, event.world))
                if step is not None:
                    n.undo(step)
                n.software = dict(event.software) or n.software
                if event.peak_tflops is not None and math.isfinite(event.peak_tflops):
                    n.peaks.append((step or 0, event.peak_tflops, event.peak_source or ""))
            case Launched():
                if n.attempts and "ended" not in n.attempts[-1]:
                    n.attempts[-1]["how"] = NO_END
                n.slow.clear()
                n.hosts = [str(host) for host in event.hosts]
                n.attempts.append(
                    {"number": event.attempt, "began": time, "hosts": len(n.hosts), "how": "runs"}
                )
            case Ended():
                if n.attempts and n.attempts[-1]["number"] == event.attempt:
                    n.attempts[-1] |= {"ended": time, "how": line.text}
            case HostSlow():
                host = str(event.host)
                n.slow.pop(host, None)
                if event.what != "over":
                    n.slow[host] = line.text


def group_of(name: str) -> str:
    """The group of an event, by its name."""
    return next((group for prefix, group in PREFIXES.items() if name.startswith(prefix)), "other")


def passing(block: bytes) -> tuple[list[bytes], int]:
    """The lines of a long block but for those on refused updates, and how many of these there are: the step records
    have them, too."""
    lines, refused = list[bytes](), 0
    for line in block.removesuffix(b"\n").split(b"\n"):
        if REFUSED.search(line, 0, 120):
            refused += b'"event": "discarded"' in line
        else:
            lines.append(line)
    return lines, refused


def selected(lines: Any, query: str = "", group: str = "", most: int = 200) -> tuple[list[JournalLine], int]:
    """The newest `most` lines of a group ("" = all) that have all words of `query`, newest first, and the number of all
    of them."""
    words, found, count = query.lower().split(), list[JournalLine](), 0
    for line in reversed(lines):
        if group and line.group != group:
            continue
        if words:
            text = f"{line.text} {line.name} step {line.step}".lower()
            if not all(word in text for word in words):
                continue
        count += 1
        if len(found) < most:
            found.append(line)
    return found, count
