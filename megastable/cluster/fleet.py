"""What an attempt runs on: this host alone, or several hosts with an agent on each (hosts.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from megastable.cluster.preflight import HostFinding
from megastable.run.machine_state import HostReading


@dataclass(frozen=True)
class Fate:
    """How a process ended: by exit code or signal; neither if unknown. host: where it ran."""

    code: int | None = None
    signal: int | None = None
    host: str = ""


class KernelView(NamedTuple):
    """What the kernel says of a process; host: None = this one."""

    host: str | None
    text: str


@dataclass(frozen=True)
class BurnInAnswer:
    """found: what was wrong, "" if nothing was. unmade: why there was no burn-in, "" if there was one."""

    found: str = ""
    unmade: str = ""


class Attempt(Protocol):
    """One start of the launcher on all hosts.

    names: the hosts it runs on. code: the launcher's exit code, once known. fates: how ranks ended, by rank, in the
    order seen. gone: hosts that were lost, and how: the end of a sentence. asked: whether a signal to a launcher of
    ours has asked for a stop.
    """

    number: int
    asked: bool
    fates: dict[int, Fate]
    gone: dict[str, str]

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def code(self) -> int | None: ...

    def poll_processes(self) -> bool:
        """Whether anything of it runs. Poll often."""

    def find_failed_log(self) -> tuple[str, Path]:
        """The host whose launcher failed first, and its log; else the host of rank 0."""

    def kill_all(self) -> None:
        """Kill everything at once: ranks stuck in a collective do not react to softer signals."""

    def read_kernel_views(self) -> dict[int, KernelView]:
        """The kernel's view of the ranks that can be seen, by rank."""


class Fleet(ABC):
    """The hosts of a run. Without more said, this host alone, which nobody else needs to know.

    names: of all of them, spares last. burns_in: whether hosts that do not train can be burned in.
    """

    names: list[str]
    burns_in = False

    @abstractmethod
    def find_running_attempt(self, names: Sequence[str]) -> Attempt | None:
        """An attempt that runs already, started by an earlier supervisor on these hosts; none: on all."""

    @abstractmethod
    def find_ended_attempt(self, number: int, names: Sequence[str]) -> Attempt:
        """What can still be seen of an attempt that an earlier supervisor started on these hosts, and that has
        ended."""

    @abstractmethod
    def start_attempt(self, number: int, names: Sequence[str]) -> Attempt:
        """On these hosts, all of which can begin; that of rank 0 first. Raises OSError if a file for it cannot be
        written."""

    @abstractmethod
    def latest_readings(self) -> Mapping[str, HostReading]:
        """The newest state of each host that tells it."""

    def count_ranks(self, names: Sequence[str]) -> int:
        """How many ranks these hosts have; 0 if the launcher decides."""
        return 0

    def list_missing_hosts(self, attempt: int) -> Mapping[str, str]:
        """Hosts that cannot begin again now, and why; `attempt`: the newest, of which nothing may be left. Poll often:
        it also works on what is missing."""
        return {}

    def check_hosts(self, names: Sequence[str], hurry: Callable[[], bool]) -> Sequence[HostFinding]:
        """What speaks against these hosts, before an attempt; takes seconds. hurry: whether to give it up."""
        return ()

    def poll_burn_in(self, name: str, seconds: float) -> BurnInAnswer | None:
        """What a burn-in of a host that does not train found; None while it goes on. Starts it. Poll often."""
        return BurnInAnswer(unmade="this host trains")

    def find_host_asked_to_stop(self) -> str | None:
        """The host whose agent was asked to stop, if one was; a spare may leave."""
        return None

    def name_of_host(self, hostname: str) -> str:
        """The name of a host here, from the one that it has itself."""
        return hostname

    def clock_offset(self, hostname: str) -> float:
        """How far its clock is ahead of ours, in seconds."""
        return 0.0

    def close(self, code: int) -> None:  # noqa: B027 (nobody is to be told)
        """The run is over."""
