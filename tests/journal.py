"""Journals in tests: events that are not complete, and a log that keeps what it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.reading import event_of
from megastable.run.log import RunLog


def note(run: RunDirectory, name: str, **fields: Any) -> None:
    """An event, complete or not, into the journal of a run."""
    RunLog(run).emit_event(event_of({"event": name, **fields}))


def events(run: Path, *names: str) -> list[Event]:
    """Those of a run's journal that have one of these names, all if none is given."""
    return [event for event in RunDirectory(run).iterate_events() if not names or event.event in names]


class KeptLog(RunLog):
    """Writes nowhere."""

    def __init__(self) -> None:
        self.events, self.said = list[Event](), list[str]()
        self.active, self.console = True, self.said.append

    def write_event(self, event: Event) -> None:
        self.events.append(event)
