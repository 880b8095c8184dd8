"""Reads and writes the journal for the supervisor, which keeps no other state, so that it may die at any moment.

Retries writes on a full disk, and follows logs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import ValidationError

from megastable.base.errors import DataError, SpaceError
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.reading import Follower
from megastable.run.log import RunLog
from megastable.run.rank_ipc import log_of
from megastable.run.run_history import FailedAttempt, RunHistory
from megastable.supervise.exit_cause import End
from megastable.supervise.restart_policy import Failure, HostBar
from megastable_guard.incident import Breakdown, Incident

T = TypeVar("T")
AGAIN = 0.2  # seconds between two tries to write


class Listener(Protocol):
    """Receives events: terminal, notifications, metrics, reports."""

    def handle_event(self, event: Event) -> None: ...

    def show_output(self, text: str) -> None: ...

    def print_line(self, text: str) -> None: ...

    def poll_all(self) -> None: ...


class SupervisorJournal:
    """state: what the journal says. hurry: whether the supervisor was told to stop."""

    def __init__(self, run: RunDirectory, listener: Listener, hurry: Callable[[], bool]) -> None:
        self.run, self.listener, self.hurry = run, listener, hurry
        self.state = SupervisorState()
        self._log = RunLog(run, listener.print_line)
        self._follower = Follower(run.journal, brief=True)
        self._output = LogTail(log_of(run, 0))

    def catch_up(self) -> None:
        """Read what was written before this process began, without passing it on again."""
        for event in self._follower.read_new():
            self.state.add_event(event)
        self._output = LogTail.at_end(log_of(self.run, self.state.attempt))

    def read_new_events(self) -> None:
        """Read new events, and show the output of the ranks."""
        file_starts, new_events = self._follower.starts, self._follower.read_new()
        if self._follower.starts != file_starts:
            # A person repaired the journal: it is read again, but its events are not passed on again.
            self.state = SupervisorState()
        for new_event in new_events:
            self.state.add_event(new_event)
            if self._follower.starts == file_starts:
                self.listener.handle_event(new_event)
        if self.state.attempt:
            log_path = log_of(self.run, self.state.attempt)
            if log_path != self._output.path:
                self._output = LogTail(log_path)
            if new_output := self._output.read_new_lines():
                self.listener.show_output(new_output)
        self.listener.poll_all()

    def journal_event(self, event: Event, say: bool | str = False) -> None:
        """Journal an event, waiting for a full disk. Raises SpaceError if told to stop meanwhile."""
        self._log.emit_event(event)
        if self._log.waiting:
            self.retry_until_written(self._log.flush_events)
        if say:
            self.listener.print_line(say if isinstance(say, str) else event.format_line())

    def retry_until_written(self, action: Callable[[], T]) -> T:
        """Retry what writes until the disk allows it. Raises SpaceError if told to stop."""
        has_told = False
        while True:
            try:
                return action()
            except (OSError, DataError) as error:
                if not has_told:
                    self.listener.print_line(f"WARNING: {error}: make room; waiting for it")
                has_told = True
                if self.hurry():
                    raise SpaceError(f"{error}: make room, and start again") from None
            time.sleep(AGAIN)


PIECE = 1 << 20  # bytes that are read at once


class LogTail:
    """Follows the log at `path` from byte `seen` on. It need not exist yet."""

    def __init__(self, path: Path, seen: int = 0) -> None:
        self.path, self._seen = path, seen

    @classmethod
    def at_end(cls, path: Path) -> LogTail:
        return cls(path, _size(path))

    def read_new_lines(self) -> str:
        """The complete lines since the last call, without the last newline; "" = none."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._seen)
                log_piece = file.read(PIECE)
        except OSError:
            return ""
        whole_lines = log_piece[: log_piece.rfind(b"\n") + 1]
        self._seen += len(whole_lines)
        return whole_lines.decode(errors="replace").removesuffix("\n")


def end_of_log(path: Path, most: int) -> str:
    """At most the last `most` bytes of a log; "" if it does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, _size(path) - most))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class SupervisorState(RunHistory):
    """The run's history, and what a supervisor concludes from it. Malformed events are ignored: repairing the journal
    is not this process's job."""

    @property
    def began_step(self) -> int:
        """The step that the current processes resumed from."""
        return self.starts[-1].step if self.starts else 0

    @property
    def predecessor(self) -> tuple[int, str] | None:
        """(process, host) of a supervisor that ended without a word."""
        event = self.supervisor
        if event is None or event.what == "ended" or event.pid is None or event.host is None:
            return None
        return event.pid, event.host

    @property
    def number(self) -> int:
        """Of the newest incident; 0 if there is none."""
        return max(self.incidents, default=0)

    @property
    def open(self) -> dict[int, Incident]:
        """Our incidents that are not resolved."""
        open_incidents = dict[int, Incident]()
        for incident_number, known in sorted(self.incidents.items()):
            if known.summary.get("outcome") == "open" and known.summary.get("verdict") in list(Breakdown):
                with suppress(ValidationError):
                    open_incidents[incident_number] = Incident.model_validate(known.summary)
        return open_incidents

    @property
    def bars(self) -> dict[str, HostBar]:
        """Of hosts that failed since a person started the run."""
        return {
            host: HostBar(e.until, e.wholly, e.strikes, 0.0 if host in self.proven else e.burn_in or 0.0)
            for host, e in self.left_out.items()
            if e.until is not None and e.wholly is not None and e.strikes is not None
        }

    @property
    def failures(self) -> list[Failure]:
        """Since a person started the run."""
        found = list[Failure]()
        for failed_attempt in self.failed_attempts:
            if (end := _read_end(failed_attempt)) is not None:
                host = None if _lacks_hosts(end, failed_attempt.hosts, failed_attempt.widest) else end.host
                was_skipped = bool(failed_attempt.event.skipped)
                found.append(Failure(end.what, end.step, host, failed_attempt.clock, was_skipped, end.code))
        return found

    @property
    def unfit(self) -> Counter[int]:
        """By number of hosts, failures of attempts on fewer than before that did not train a step."""
        return Counter(
            failed.hosts for failed in self.failed_attempts
            if (end := _read_end(failed)) is not None and _lacks_hosts(end, failed.hosts, failed.widest)
        )  # fmt: skip

    @property
    def unmended(self) -> End | None:
        """An end that is not acted on yet."""
        return None if self.unanswered is None else _read_end(self.unanswered)

    def does_not_fit(self, end: End) -> bool:
        """Whether the newest attempt did not fit on its hosts."""
        return _lacks_hosts(end, len(self.hosts), self.widest)


def _read_end(failed: FailedAttempt) -> End | None:
    event_fields = failed.event.fields
    try:
        return End.model_validate(
            {
                field_key: event_fields[field_key]
                for field_key in End.model_fields
                if field_key in event_fields
            }
        )
    except ValidationError:
        return None


def _lacks_hosts(end: End, hosts: int, widest: int) -> bool:
    """Whether an attempt on fewer hosts than before ended by an error before its first step, as where a larger share
    of the optimizer's state does not fit into memory: that is no host's fault."""
    has_died = bool(end.code or end.signal) and not end.gone
    return has_died and not end.trained and hosts < widest
