"""Reads journals as typed events; the only reader."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megastable.base import jsonl
from megastable.run.events import (
    data_events,
    people_events,
    stability_events,
    supervisor_events,
    training_events,
)
from megastable.run.events.event import Event, Other
from megastable.run.events.stability_events import IncidentEvent

KINDS: dict[str, type[Event]] = {
    kind.NAME: kind
    for module in (training_events, data_events, people_events, stability_events, supervisor_events)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind.NAME
}


def read_events(journal: Path, *marks: bytes) -> Iterator[Event]:
    """The events of a journal, in order, one for every line that is not blank. A malformed line is an `Other` without a
    name; a torn last line is left out. marks: if given, only lines with one of them are read.

    Raises DataError for a file that cannot be read; a missing one is empty.
    """
    lines = jsonl.read(journal)[0]
    wanted = (line for line in lines if any(mark in line for mark in marks)) if marks else lines
    return (event_of_line(line) for line in wanted if line.strip())


def event_of_line(line: bytes) -> Event:
    """Parse a line of a journal."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return NO_EVENT
    return event_of(entry) if isinstance(entry, dict) else NO_EVENT


def event_of(entry: Mapping[str, Any]) -> Event:
    """The event of a JSON object of a journal."""
    name = entry.get("event")
    kind = KINDS.get(name, Other) if isinstance(name, str) else Other
    return kind.of(entry)


def latest(events: Iterable[Event]) -> dict[int, dict[str, Any]]:
    """The latest summary of each incident, by number: every event of an incident carries all that was known by then."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        summary = event.get("summary") if isinstance(event, IncidentEvent) else None
        if isinstance(summary, dict) and isinstance(summary.get("number"), int):
            found[summary["number"]] = summary
    return found


NO_EVENT = Other.of({})
