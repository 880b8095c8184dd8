"""Faults of a cluster: what happens to a host, its processes, its link or the shared disk, how it ends, and the right
answer. Written down before the runs that are reported.

They come from outside: production code knows none of them. One at a time: a process that writes to a stalled disk
cannot be killed by anything.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil

from drills.hosts import Host, Hosts, SharedDisk
from drills.namespaces import Started
from megastable.base.errors import ConfigError

AGENT = re.compile(r"megastable(\.\w+)*\.agent")  # the module that runs on every host of a run
PERIOD, SHARE = 0.02, 0.2  # seconds between two stops of slowed ranks; the part of them that they run
LONGEST = 240.0  # ... for which they are slow
SLOWED = "slowed ranks"
SLOW = 2_000_000  # bits a second of a slow link: a hundredth of what a small run wants


@dataclass
class Cluster:
    """What faults happen to. head: the supervisor's host. supervise: starts the supervisor there, as the service
    manager of a host would; supervisor: the one that runs."""

    hosts: Hosts
    head: str
    supervise: Callable[[], Started]
    supervisor: Started | None = field(default=None)

    def start_supervisor(self) -> None:
        self.supervisor = self.supervise()


Strike = Callable[[Cluster, Host], bool]


class Place(StrEnum):
    """Where a fault may happen."""

    ANY = "any host"
    HEAD = "the supervisor's host"
    OTHER = "any host but the supervisor's"


@dataclass(frozen=True)
class Kind:
    """A kind of fault. strike: does it to a host; whether there was anything to do it to. mend: ends it.

    seconds: between the two, at least and at most; None: `mend` may follow at once. back: whether all hosts are there
    again after `mend`; the run must then end with the bytes of an undisturbed one, else with HOST_GONE. blames: whether
    the host is to be blamed, rather than none. harmless: whether the run may go on as if nothing had happened, without
    a verdict. words: one of them must be in a verdict, in whatever case; no words: any verdict will do. early: in a
    step of the first quarter. impossible: why it cannot be done on these hosts, if so.
    """

    name: str
    title: str
    strike: Strike
    mend: Callable[[Cluster, Host], object] = lambda cluster, host: None
    place: Place = Place.ANY
    seconds: tuple[float, float] | None = None
    back: bool = True
    blames: bool = True
    harmless: bool = False
    words: tuple[str, ...] = ()
    early: bool = False
    impossible: Callable[[Hosts], str | None] = lambda hosts: None

    def possible_hosts(self, hosts: Sequence[str], head: str) -> list[str]:
        """The hosts that it may happen to."""
        return [
            host for host in hosts if self.place is Place.ANY or (host == head) == (self.place is Place.HEAD)
        ]

    def host_to_blame(self, host: str) -> str | None:
        """The host that a verdict must name, if one."""
        return host if self.blames else None

    def accepts_verdict(self, verdict: str, blamed: str | None, host: str) -> bool:
        """Whether a verdict is right. verdict: a sentence, empty if there was none; blamed: the host it names."""
        if not verdict:
            return self.harmless and blamed is None
        is_known = not self.words or any(known_word.lower() in verdict.lower() for known_word in self.words)
        return is_known and blamed == self.host_to_blame(host)


# Processes


def _signal_rank(number: signal.Signals) -> Strike:
    """To the first rank of a host."""

    def strike(cluster: Cluster, host: Host) -> bool:
        return _send(list(host.ranks().values())[:1], number)

    return strike


def _kill_agent(cluster: Cluster, host: Host) -> bool:
    return _send(
        [process for process in host.processes() if AGENT.fullmatch(_module(process))], signal.SIGKILL
    )


def _kill_supervisor(cluster: Cluster, host: Host) -> bool:
    was_struck = cluster.supervisor is not None and cluster.supervisor.send(signal.SIGKILL)
    if was_struck and cluster.supervisor is not None:
        cluster.supervisor.wait()
    return was_struck


def _slow_ranks(cluster: Cluster, host: Host) -> bool:
    """Let all ranks of a host run for a fifth of the time only, until they are gone or `LONGEST` has passed."""
    host_ranks = list(host.ranks().values())
    if not host_ranks:
        return False

    def pace() -> None:
        end_time = time.monotonic() + LONGEST
        while time.monotonic() < end_time and _send(host_ranks, signal.SIGSTOP):
            time.sleep(PERIOD * (1 - SHARE))
            _send(host_ranks, signal.SIGCONT)
            time.sleep(PERIOD * SHARE)

    threading.Thread(target=pace, name=SLOWED, daemon=True).start()
    return True


def _until_replaced(cluster: Cluster, host: Host) -> None:
    """Wait until no rank is slowed any more: a spare has taken the host's place, where that pays, or the run is
    over."""
    for thread in threading.enumerate():
        if thread.name == SLOWED:
            thread.join()


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> bool:
    was_sent = False
    for one_process in processes:
        with suppress(psutil.NoSuchProcess):
            one_process.send_signal(number)
            was_sent = True
    return was_sent


def _module(process: psutil.Process) -> str:
    """The module that a Python process runs, empty if none: not of an ssh or a shell that starts it elsewhere."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    if not words or not Path(words[0]).name.startswith("python") or "-m" not in words[:-1]:
        return ""
    return words[words.index("-m") + 1]


# Hosts, links and the shared disk


def _on_host(act: Callable[[Host], object]) -> Strike:
    """What can always be done to a host."""

    def strike(cluster: Cluster, host: Host) -> bool:
        act(host)
        return True

    return strike


def _on_disk(act: Callable[[SharedDisk], object]) -> Strike:
    """What can always be done to the shared disk."""
    return lambda cluster, host: act(cluster.hosts.shared) is None


def _power_on_head(cluster: Cluster, host: Host) -> None:
    host.power_on()
    cluster.start_supervisor()


GONE = ("gone", "silent", "unreachable", "not reached", "no word", "lost")
STILL = ("no progress", "hang", "hung", "stall", "stopped", "not respond", "not answer")
KINDS = (
    Kind("killed-rank", "SIGKILL to a rank", _signal_rank(signal.SIGKILL), words=("SIGKILL", "killed")),
    Kind("stopped-rank", "SIGSTOP to a rank, for good", _signal_rank(signal.SIGSTOP), words=STILL),
    Kind("slow-host", "all ranks of a host are stopped for four fifths of the time", _slow_ranks, _until_replaced,
         words=("is slow",), early=True),
    Kind("killed-agent", "SIGKILL to the agent of a host", _kill_agent, place=Place.OTHER, harmless=True,
         words=("agent", *GONE)),
    Kind("killed-supervisor", "SIGKILL to the supervisor, which is started again", _kill_supervisor,
         lambda cluster, host: cluster.start_supervisor(), Place.HEAD, blames=False, harmless=True),
    Kind("killed-sshd", "sshd of a host and its sessions are killed, sshd comes back",
         lambda cluster, host: host.kill_sshd(), _on_host(Host.start_sshd), Place.OTHER, (5, 20), harmless=True,
         words=("ssh", "agent", *GONE)),
    Kind("killed-host", "a host loses its power, and gets it back", _on_host(Host.power_off),
         _on_host(Host.power_on), Place.OTHER, (5, 20), words=GONE),
    Kind("killed-head", "the supervisor's host loses its power, and gets it back", _on_host(Host.power_off),
         _power_on_head, Place.HEAD, (5, 20), words=GONE),
    Kind("cut-link", "a host's link is cut for good", _on_host(Host.cut_link), place=Place.OTHER, back=False,
    words=GONE),
    # A short one is for TCP to get over.
    Kind("flapping-link", "a host's link is cut for a while", _on_host(Host.cut_link), _on_host(Host.join_link),
    Place.OTHER,
         (2, 60), harmless=True, words=(*GONE, *STILL)),
    Kind("slow-link", "a host's link is slow for a while", _on_host(lambda host: host.slow_link(SLOW)),
         _on_host(Host.restore_link), Place.OTHER, (10, 30), harmless=True, words=("slow", *STILL),
         impossible=lambda hosts: next(iter(hosts)).cannot_slow()),
    Kind("full-disk", "the shared disk is full for a while", _on_disk(SharedDisk.fill_disk),
    _on_disk(SharedDisk.empty_disk),
         seconds=(5, 20), blames=False, harmless=True, words=("space", "full", "disk", "77")),
    Kind("stalled-disk", "the shared disk stalls for a while", _on_disk(SharedDisk.freeze_disk),
    _on_disk(SharedDisk.thaw_disk),
         seconds=(5, 60), blames=False, harmless=True, words=("shared", "disk", "directory", "file system", *STILL),
         impossible=lambda hosts: hosts.shared.cannot_freeze),
)  # fmt: skip
NAMES = tuple(kind.name for kind in KINDS)


def choose_kinds(names: Sequence[str]) -> list[Kind]:
    """Kinds by name, in the order of `KINDS`; without names: all. Raises ConfigError."""
    if unknown_names := [name for name in names if name not in NAMES]:
        raise ConfigError(f"{unknown_names[0]}: there is no such fault: {', '.join(NAMES)}")
    return [kind for kind in KINDS if not names or kind.name in names]
