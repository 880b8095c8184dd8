"""Reads and writes the journal for the supervisor: passes on every event, and retries writes on a full disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from megastable.base.errors import DataError, SpaceError
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.follow import Follower
from megastable.run.log import RunLog
from megastable.run.rank_ipc import log_of
from megastable.supervise.log_tail import LogTail
from megastable.supervise.supervisor_state import SupervisorState

T = TypeVar("T")
AGAIN = 0.2  # seconds between two tries to write


class Listener(Protocol):
    """Receives events: terminal, notifications, metrics, reports."""

    def event(self, event: Event) -> None: ...

    def output(self, text: str) -> None: ...

    def say(self, text: str) -> None: ...

    def tick(self) -> None: ...


class SupervisorJournal:
    """state: what the journal says. hurry: whether the supervisor was told to stop."""

    def __init__(self, run: RunDirectory, listener: Listener, hurry: Callable[[], bool]) -> None:
        self.run, self.listener, self.hurry = run, listener, hurry
        self.state = SupervisorState()
        self._log = RunLog(run, listener.say)
        self._follower = Follower(run.journal, brief=True)
        self._output = LogTail(log_of(run, 0))

    def catch_up(self) -> None:
        """Read what was written before this process began, without passing it on again."""
        for event in self._follower.new():
            self.state.add(event)
        self._output = LogTail.at_end(log_of(self.run, self.state.attempt))

    def listen(self) -> None:
        """Read new events, and show the output of the ranks."""
        starts, events = self._follower.starts, self._follower.new()
        if self._follower.starts != starts:
            self.state = (
                SupervisorState()
            )  # a person repaired the journal: it is read again, but its events are not passed on again
        for event in events:
            self.state.add(event)
            if self._follower.starts == starts:
                self.listener.event(event)
        if self.state.attempt:
            log = log_of(self.run, self.state.attempt)
            if log != self._output.path:
                self._output = LogTail(log)
            if text := self._output.new():
                self.listener.output(text)
        self.listener.tick()

    def emit(self, event: Event, say: bool | str = False) -> None:
        """Journal an event, waiting for a full disk. Raises SpaceError if told to stop meanwhile."""
        self._log.emit(event)
        if self._log.waiting:
            self.insist(self._log.flush)
        if say:
            self.listener.say(say if isinstance(say, str) else event.line())

    def insist(self, action: Callable[[], T]) -> T:
        """Retry what writes until the disk allows it. Raises SpaceError if told to stop."""
        told = False
        while True:
            try:
                return action()
            except (OSError, DataError) as error:
                if not told:
                    self.listener.say(f"WARNING: {error}: make room; waiting for it")
                told = True
                if self.hurry():
                    raise SpaceError(f"{error}: make room, and start again") from None
            time.sleep(AGAIN)
