"""Journals events and prints them, in one call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from megastable.base import durable
from megastable.base.errors import DataError, SpaceError
from megastable.run.directory import RunDirectory, as_json
from megastable.run.events.event import Event

log = logging.getLogger(__name__)


def print_nothing(text: str) -> None:
    """A console that prints nothing."""


class RunLog:
    """The log of one process. console: takes lines; active: whether this rank writes and prints for all.

    A full disk does not end a run: events wait in memory until the next write.
    """

    def __init__(
        self, run: RunDirectory, console: Callable[[str], None] = print_nothing, active: bool = True
    ) -> None:
        self.run, self.console, self.active = run, console, active

    def emit_event(self, event: Event, *, say: bool | str = False) -> None:
        """Journal an event: on return it is durable, or logged as pending if the disk refuses. say: also print its
        line, or this text."""
        try:
            self._put(event, say)
        except DataError as error:
            log.warning("%s; waiting in memory: %s", error, self.run.waiting[-1])
            self._tell(event, say)

    def commit_event(self, event: Event, *, say: bool | str = False) -> None:
        """As `emit_event`, for events that a restart depends on. Raises SpaceError if the event is not on the disk."""
        try:
            self._put(event, say)
        except DataError as error:
            raise SpaceError(
                f"{error}. A restart would not know of this: {event.event}: make room, then start again from the "
                "newest checkpoint"
            ) from None

    def say_line(self, text: str) -> None:
        """Print a line without journaling it."""
        if self.active:
            self.console(text)

    @property
    def waiting(self) -> bool:
        """Whether events are pending because the disk refused them."""
        return bool(self.run.waiting)

    def flush_events(self) -> None:
        """Write pending events. Raises DataError if the disk still refuses."""
        while self.run.waiting:
            durable.append_line(self.run.journal, self.run.waiting[0])
            self.run.waiting.pop(0)

    def write_event(self, event: Event) -> None:
        """Journal an event, which waits if the disk refuses it. Raises DataError then, which says why."""
        self.run.waiting.append(as_json({"time": round(time.time(), 3), **event.fields}))
        self.flush_events()

    def _put(self, event: Event, say: bool | str) -> None:
        if self.active:
            self.write_event(event)
            self._tell(event, say)

    def _tell(self, event: Event, say: bool | str) -> None:
        if say:
            self.console(say if isinstance(say, str) else event.format_line())
