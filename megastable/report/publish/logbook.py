"""Tells a run day by day: what happened, what was done about it, what it cost. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.base.text import duration, plural
from megastable.report.postmortem import sentences
from megastable.report.postmortem.facts import Evidence
from megastable.run.events.event import Event, whole
from megastable.run.events.stability_events import AlertEvent
from megastable.run.events.supervisor_events import Ended, HostsAwaited, Launched, Restart
from megastable.run.events.training_events import (
    CheckpointSaved,
    Finished,
    Resumed,
    Stopped,
    Training,
    Unstable,
)
from megastable.run.run_history import Measurement

Columns = Mapping[str, npt.NDArray[Any]]
# Events that are told by their own sentence, under a heading.
HEADINGS = {
    "Recipe changed": "config_changed", "Data": "blend_changed mix_changed order_changed",
    "Batch size": "batch_changed", "Sequence length": "length_changed", "Data ahead": "looked_ahead look_ahead_spent",
    "Data skipped by a person": "skips_added", "Data given back": "skips_given_back", "Note": "note",
    "Changed by a person": "change_made change_refused", "After a change": "change_measured", "Alert": "alert",
    "Precision": "fell_back returned", "Kernels": "kernels_left kernels_tried_again",
    "Learning rate": "rate_cut rate_lifted", "Slow signal": "trend",
    "Hardware": "replicas_differ wrong_copy state_changed messages_differ gradients_doubted replay_differs host_faulty",
    "Hosts": "host_slow host_left_out host_proven hosts_awaited",
    "Checkpoint": "checkpoint_failed checkpoint_rejected checkpoint_suspect rolled_back", "Records": "records_lost",
    "Start": "imported reshaped", "Warning": "warning", "Handover": "handover", "Gave up": "unstable",
}  # fmt: skip
HEADING_OF = {name: heading for heading, names in HEADINGS.items() for name in names.split()}
ALIKE = 3  # entries of one heading in a row; of more the first and the last are told
NEAR = 120.0  # seconds around the end of a process in which its incident is opened


@dataclass(frozen=True)
class LogbookEntry:
    """time: Unix seconds. what: happened; done: about it; cost: of it, in words. page: of the incident, relative to the
    record; mood: good, warn, bad or plain."""

    time: float
    step: int | None
    heading: str
    what: str
    done: str = ""
    cost: str = ""
    page: str = ""
    mood: str = "plain"

    @property
    def moment(self) -> str:
        return datetime.fromtimestamp(self.time, UTC).strftime("%H:%M")


@dataclass
class LogbookDay:
    """date: UTC. progress: of its steps, a sentence."""

    date: str
    progress: str = ""
    entries: list[LogbookEntry] = field(default_factory=list)


def logbook(
    events: Sequence[Event], incidents: Sequence[Evidence], steps: Columns,
    evaluations: Sequence[Measurement],
) -> list[LogbookDay]:  # fmt: skip
    """events: the journal, in order. steps: columns step, time, loss and applied of those that were not undone, in
    order; evaluations: likewise."""
    opened = {e.incident.number: e for e in incidents}
    failures = [_opened_at(e) for e in incidents if e.incident.breakdown]
    entries = [*_of_events(events, failures), *(_of_incident(e) for e in opened.values())]
    days: dict[str, LogbookDay] = {}
    for date, told in groupby(
        sorted(entries, key=lambda entry: entry.time), key=lambda entry: _date(entry.time)
    ):
        days[date] = LogbookDay(date, entries=_folded(list(told)))
    for date, progress in _progress(events, steps, evaluations).items():
        days.setdefault(date, LogbookDay(date)).progress = progress
    return [days[date] for date in sorted(days)]


def _of_events(events: Sequence[Event], failures: Sequence[float]) -> Iterable[LogbookEntry]:
    launched: Launched | None = None
    resumed: Resumed | None = None
    begun = False
    for number, event in enumerate(events):
        time, step = event.time or 0.0, whole(event.get("step"))
        match event:
            case Launched():
                launched = event
            case Resumed():
                resumed = event
            case Training():
                yield LogbookEntry(
                    time, step, "Training goes on" if begun or step else "Training begins",
                    _start(event, launched, resumed),
                )  # fmt: skip
                launched, resumed, begun = None, None, True
            case Ended():
                # The supervisor makes an incident of most failures, which says more.
                if event.get("what") and not any(abs(at - time) < NEAR for at in failures):
                    yield LogbookEntry(
                        time,
                        step,
                        "Processes ended",
                        _sentence(event.sentence()),
                        _again(events[number:]),
                        mood="warn",
                    )
            case Stopped():
                yield LogbookEntry(time, step, "Stopped", "Stopped as asked, with a checkpoint.")
            case Finished():
                yield LogbookEntry(time, event.steps, "Finished", _sentence(event.sentence()), mood="good")
            case _ if (heading := HEADING_OF.get(event.event)) and (told := event.sentence()):
                if not (isinstance(event, HostsAwaited) and not event.hosts):
                    mood = (
                        "bad"
                        if isinstance(event, Unstable)
                        or (isinstance(event, AlertEvent) and event.what == "begun")
                        else "plain"
                    )
                    yield LogbookEntry(time, step, heading, _sentence(told), mood=mood)


def _start(event: Training, launched: Launched | None, resumed: Resumed | None) -> str:
    hosts = [str(host) for host in launched.hosts] if launched is not None else []
    named = (
        f" on {', '.join(hosts[:8])}" + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
        if hosts
        else ""
    )
    told = f"{plural(event.world or 0, 'rank')}{named}, from position {event.cursor or 0:,} of the data"
    if launched is not None and launched.attempt is not None and launched.attempt > 1:
        told = f"attempt {launched.attempt}: {told}"
    if resumed is not None:
        told += f"; {resumed.sentence()}"
    return _sentence(told)


def _again(events: Sequence[Event]) -> str:
    """What the supervisor did after the end of an attempt."""
    for event in events[1:]:
        if isinstance(event, Launched):
            break
        if isinstance(event, Restart):
            return _sentence(event.sentence())
    return ""


def _of_incident(e: Evidence) -> LogbookEntry:
    i, sequel = e.incident, sentences.sequel(e)
    # The sequel tells of the last action.
    told = [
        sentences.acted(action)
        for action in (i.actions[:-1] if sequel != sentences.outcome(e) else i.actions)
    ]
    return LogbookEntry(
        _opened_at(e), i.onset or i.step, f"Incident {i.number}", sentences.seen(i),
        " ".join(dict.fromkeys([*told, sequel, sentences.describe_worth(e)])).strip(),
        cost_in_words(e), f"incidents/{i.number:04d}/report.html",
        {"healed": "good", "stopped": "bad"}.get(i.outcome, "warn"),
    )  # fmt: skip


def cost_in_words(e: Evidence) -> str:
    """Of an incident: steps, time, GPU-hours, money."""
    c = e.cost
    told = [plural(c.steps, "step")] if c.steps else []
    told += [plural(c.batches_refused, "refused update")] if c.batches_refused else []
    told += [duration(c.seconds)] if c.seconds else []
    told += [f"{c.gpu_hours:.2g} GPU-hours"] if c.gpu_hours else []
    told += [f"{c.money:,.2f} {e.run.currency}"] if c.money else []
    return ", ".join(told)


def _opened_at(e: Evidence) -> float:
    own = [entry.time for entry in e.timeline if entry.own]
    return min(own, default=e.timeline[0].time if e.timeline else 0.0)


def _folded(entries: list[LogbookEntry]) -> list[LogbookEntry]:
    """Many entries of one heading in a row as two, which say how many there are."""
    found = list[LogbookEntry]()
    for heading, some in groupby(entries, key=lambda entry: entry.heading):
        alike = list(some)
        if len(alike) > ALIKE and not heading.startswith("Incident"):
            more = f"{len(alike) - 2:,} more in between: data/journal.jsonl."
            alike = [alike[0], LogbookEntry(alike[1].time, None, heading, more), alike[-1]]
        found += alike
    return found


def _progress(events: Sequence[Event], steps: Columns, evaluations: Sequence[Measurement]) -> dict[str, str]:
    """By day: steps, loss, validation, checkpoints."""
    told, saved = dict[str, str](), defaultdict[str, int](int)
    losses = {_date(one.time): one.loss for one in evaluations}  # the last one of a day
    for event in events:
        if isinstance(event, CheckpointSaved):
            saved[_date(event.time or 0.0)] += 1
    days = (steps["time"] // 86400).astype(np.int64)
    for day in np.unique(days).tolist():
        rows, date = np.flatnonzero(days == day), _date(day * 86400.0)
        first, last = int(steps["step"][rows[0]]), int(steps["step"][rows[-1]])
        parts = [f"steps {first:,} to {last:,}"]
        good = steps["loss"][rows][steps["applied"][rows].astype(bool)]
        good = good[np.isfinite(good)]
        if len(good):
            part = max(1, min(20, len(good) // 10))
            parts.append(f"loss {np.median(good[:part]):.3f} to {np.median(good[-part:]):.3f}")
        told[date] = "; ".join(parts)
    for date in {*saved, *losses}:
        more = [f"validation {losses[date]:.3f}"] if date in losses else []
        more += [f"{plural(saved[date], 'checkpoint')} saved"] if saved[date] else []
        told[date] = "; ".join([*([told[date]] if date in told else []), *more])
    return {date: _sentence(text) for date, text in told.items()}


def _date(time: float) -> str:
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d")
    except (ValueError, OverflowError, OSError):
        return "1970-01-01"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "." if text else ""
