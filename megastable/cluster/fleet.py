"""What an attempt runs on: this host alone, or several hosts with an agent on each (hosts.py)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megastable.cluster.host_burn_in import BurnInAnswer
from megastable.cluster.host_watch import HostWatch
from megastable.cluster.launcher import TrainingCommand, command
from megastable.cluster.local_attempt import Fate, KernelView, LocalAttempt
from megastable.cluster.preflight import HostFinding
from megastable.run.directory import RunDirectory
from megastable.run.machine_state import HostReading
from megastable.run.rank_ipc import log_of


class Attempt(Protocol):
    """One start of the launcher on all hosts.

    names: the hosts it runs on. code: the launcher's exit code, once known. fates: how ranks ended, by rank, in the
    order seen. gone: hosts that were lost, and how: the end of a sentence.
    """

    number: int
    fates: dict[int, Fate]
    gone: dict[str, str]

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def code(self) -> int | None: ...

    def look(self) -> bool:
        """Whether anything of it runs. Poll often."""

    def witness(self) -> tuple[str, Path]:
        """The host whose launcher failed first, and its log; else the host of rank 0."""

    def end(self) -> None:
        """Kill everything at once: ranks stuck in a collective do not react to softer signals."""

    def states(self) -> dict[int, KernelView]:
        """The kernel's view of the ranks that can be seen, by rank."""


class Fleet(Protocol):
    """The hosts of a run. names: of all of them, spares last."""

    @property
    def names(self) -> Sequence[str]: ...

    def found(self, names: Sequence[str]) -> Attempt | None:
        """An attempt that runs already, started by an earlier supervisor on these hosts; none: on all."""

    def left(self, number: int, names: Sequence[str]) -> Attempt:
        """What can still be seen of an attempt that an earlier supervisor started on these hosts, and that has
        ended."""

    def ranks(self, names: Sequence[str]) -> int:
        """How many ranks these hosts have."""

    def missing(self, attempt: int) -> Mapping[str, str]:
        """Hosts that cannot begin anew now, and why; `attempt`: the newest, of which nothing may be left. Poll often:
        it also works on what is missing."""

    def preflight(self, names: Sequence[str], hurry: Callable[[], bool]) -> Sequence[HostFinding]:
        """What speaks against these hosts, before an attempt; takes seconds. hurry: whether to give it up."""

    @property
    def burns_in(self) -> bool:
        """Whether hosts that do not train can be burned in."""

    def burn_in(self, name: str, seconds: float) -> BurnInAnswer | None:
        """What a burn-in of a host that does not train found; None while it goes on. Starts it. Poll often."""

    def start(self, number: int, names: Sequence[str]) -> Attempt:
        """On these hosts, all of which can begin; that of rank 0 first. Raises OSError if a file for it cannot be
        written."""

    def stop_asked(self) -> str | None:
        """The host whose agent was asked to stop, if one was; a spare may leave."""

    def called(self, hostname: str) -> str:
        """The name of a host here, from the one that it has itself."""

    def clock(self, hostname: str) -> float:
        """How far its clock is ahead of ours, in seconds."""

    def readings(self) -> Mapping[str, HostReading]:
        """The newest state of each host that tells it."""

    def close(self, code: int) -> None:
        """The run is over."""


class Here:
    """This host alone, without an agent."""

    burns_in = False

    def __init__(self, run: RunDirectory, training: TrainingCommand) -> None:
        self.run, self.training = run, training
        self.names = [socket.gethostname()]
        self.watch = HostWatch()

    def found(self, names: Sequence[str]) -> Attempt | None:
        return LocalAttempt.found(self.run)

    def ranks(self, names: Sequence[str]) -> int:
        return 0

    def left(self, number: int, names: Sequence[str]) -> Attempt:
        return LocalAttempt(self.run, number)

    def missing(self, attempt: int) -> Mapping[str, str]:
        return {}

    def preflight(self, names: Sequence[str], hurry: Callable[[], bool]) -> Sequence[HostFinding]:
        return ()

    def burn_in(self, name: str, seconds: float) -> BurnInAnswer | None:
        return BurnInAnswer(unmade="this host trains")

    def start(self, number: int, names: Sequence[str]) -> Attempt:
        log: Path = log_of(self.run, number)
        return LocalAttempt.start(self.run, number, command(self.run, number, self.training), log)

    def stop_asked(self) -> str | None:
        return None

    def called(self, hostname: str) -> str:
        return hostname

    def clock(self, hostname: str) -> float:
        return 0.0

    def readings(self) -> Mapping[str, HostReading]:
        reading = self.watch.latest()
        return {} if reading is None else {self.names[0]: reading}

    def close(self, code: int) -> None:
        pass
