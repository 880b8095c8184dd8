"""Events of what people do to a run: notes, and settings that they change while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megastable.base.text import number
from megastable.run.events.event import Event, Real, Text, Tree, Whole


class Note(Event):
    """step: that the run had done, or that the note is about. who: a login name."""

    NAME = "note"
    step: Whole
    who: Text
    text: Text

    def words(self) -> str:
        return f"note{_by(self)}: {self.get('text')}"


def _by(event: Event) -> str:
    return f" by {event['who']}" if event.get("who") else ""
