"""What an attempt runs on: this host alone, or several hosts with an agent on each (hosts.py)."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megastable.cluster.launcher import command
from megastable.cluster.local_attempt import Fate, LocalAttempt
from megastable.cluster.preflight import HostFinding
from megastable.run.directory import RunDirectory
from megastable.run.rank_ipc import log_of


class Attempt(Protocol):
    """One start of the launcher on all hosts.

    code: the launcher's exit code, once known. fates: how ranks ended, by rank, in the order seen. gone: hosts that
    nothing is heard of any more, and why that is believed.
    """

    number: int
    fates: dict[int, Fate]
    gone: dict[str, str]

    @property
    def code(self) -> int | None: ...

    def look(self) -> bool:
        """Whether anything of it runs. Poll often."""

    def witness(self) -> tuple[str, Path]:
        """The host whose launcher failed first, and its log; else the host of rank 0."""

    def end(self) -> None:
        """Kill everything at once: ranks stuck in a collective do not react to softer signals."""

    def states(self) -> dict[int, str]:
        """The kernel's view of the ranks that can be seen, by rank."""


class Fleet(Protocol):
    """The hosts of a run. names: of all of them, the one with rank 0 first."""

    @property
    def names(self) -> Sequence[str]: ...

    def found(self) -> Attempt | None:
        """An attempt that runs already, started by an earlier supervisor."""

    def missing(self, attempt: int) -> Mapping[str, str]:
        """Hosts that cannot begin anew now, and why; `attempt`: the newest, of which nothing may be left. Poll often:
        it also works on what is missing."""

    def preflight(self) -> Sequence[HostFinding]:
        """What speaks against the hosts, before an attempt; takes seconds."""

    def start(self, number: int) -> Attempt: ...

    def stop_asked(self) -> str | None:
        """The host whose agent was asked to stop, if one was."""

    def called(self, hostname: str) -> str:
        """The name of a host here, from the one that it has itself."""

    def close(self, code: int) -> None:
        """The run is over."""


class Here:
    """This host alone, without an agent. words: module, recipe, overrides and arguments for the launcher."""

    def __init__(
        self, run: RunDirectory, module: str, recipe: str, overrides: Sequence[str], given: Sequence[str]
    ) -> None:
        self.run, self.words = run, (module, recipe, overrides, given)
        self.names = [socket.gethostname()]

    def found(self) -> Attempt | None:
        return LocalAttempt.found(self.run)

    def missing(self, attempt: int) -> Mapping[str, str]:
        return {}

    def preflight(self) -> Sequence[HostFinding]:
        return ()

    def start(self, number: int) -> Attempt:
        log: Path = log_of(self.run, number)
        return LocalAttempt.start(self.run, number, command(self.run, number, *self.words), log)

    def stop_asked(self) -> str | None:
        return None

    def called(self, hostname: str) -> str:
        return hostname

    def close(self, code: int) -> None:
        pass
