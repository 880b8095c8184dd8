"""Lists the journal's events around an incident, one per line, in words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from megastable.base.text import plural
from megastable.report.postmortem.sample_texts import Facts
from megastable.run.events.event import Event
from megastable.run.events.stability_events import IncidentEvent

MOST = 80  # lines


class TimelineEntry(Facts):
    """An event. time: Unix seconds; step: None if it has none; own: of the incident itself."""

    time: float
    step: int | None
    text: str
    own: bool

    @property
    def moment(self) -> str:
        return datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%d %H:%M:%S")


def timeline(events: Sequence[Event], number: int) -> list[TimelineEntry]:
    """Events of incident `number` and around it."""
    entries = [_entry(event, number) for event in events]
    if len(entries) <= MOST:
        return entries
    half = MOST // 2
    more = plural(len(entries) - 2 * half, "more event")
    between = TimelineEntry(time=entries[half].time, step=None, text=more, own=False)
    return [*entries[:half], between, *entries[-half:]]


def _entry(event: Event, number: int) -> TimelineEntry:
    step = event.get("step")
    return TimelineEntry(
        time=event["time"], step=step if type(step) is int else None,
        text=event.sentence() or event.event.replace("_", " "),
        own=isinstance(event, IncidentEvent) and event.get("number") == number,
    )  # fmt: skip
