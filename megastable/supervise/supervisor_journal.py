"""The journal as the supervisor keeps it: every event is heard as it comes, and what it writes waits for the disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from megastable.base.errors import DataError, SpaceError
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.follow import Follower
from megastable.run.log import RunLog
from megastable.run.rank_ipc import log_of
from megastable.supervise.log_tail import LogTail
from megastable.supervise.supervisor_state import SupervisorState

AGAIN = 0.2  # seconds between two tries on a disk that refuses


class Listener(Protocol):
    """Who is told: a terminal, people, metrics, reports."""

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
        self._follower = Follower(run.journal)
        self._output = LogTail(log_of(run, 0))

    def catch_up(self) -> None:
        """Hear what was written before this process began; nobody is told of it again."""
        for event in self._follower.new():
            self.state.hear(event)
        self._output = LogTail.at_end(log_of(self.run, self.state.attempt))

    def listen(self) -> None:
        """Take in what the journal says, show what the ranks print."""
        starts, events = self._follower.starts, self._follower.new()
        if self._follower.starts != starts:
            self.state = (
                SupervisorState()
            )  # a person has mended it: it is heard again, but nobody is told again
        for event in events:
            self.state.hear(event)
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
        """What the supervisor does depends on it: a full disk is waited for. SpaceError when told to stop."""
        self._log.emit(event)
        if self._log.waiting:
            self.insist(self._log.flush)
        if say:
            self.listener.say(say if isinstance(say, str) else event.line())

    def insist(self, action: Callable[[], None]) -> None:
        """Do what the rest depends on, as soon as the disk allows. Raises SpaceError when told to stop."""
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
