"""The memories of all hosts of a run, as a rank sees them: its own folder, and a server on every rank. Collective."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import psutil
import torch.distributed as dist

from megastable.base import free_memory
from megastable.base.collectives import first, gathered
from megastable.base.free_memory import GIB, SHARE
from megastable.checkpoint.files import FileRecord, hash_file
from megastable.checkpoint.held_points import Complete, HeldPart
from megastable.checkpoint.memory_folder import MemoryFolder, memory_of
from megastable.checkpoint.memory_wire import MemoryClient, MemoryServer
from megastable.config.stability import MemoryCopyConfig

LOOPBACK = "127.0.0.1"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class MemoryView:
    """What a rank sees of its host's memory. problem: why it is of no use; exists: whether it holds a folder of the
    run; listens: the address that others can reach."""

    memory: str
    problem: str
    exists: bool
    listens: str


class MemoryHosts:
    """folder: of this host, open. hosts: of every rank, the number of its memory. partner: the rank that keeps a copy
    of this one's points, None if there is no other host. copying: whether copies are wanted."""

    def __init__(
        self, config: MemoryCopyConfig, folder: MemoryFolder, seen: list[MemoryView], copying: bool
    ) -> None:
        self.config, self.folder, self.copying = config, folder, copying
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        names = list(dict.fromkeys(s.memory for s in seen))
        self.hosts = [names.index(s.memory) for s in seen]
        self.host = self.hosts[self.rank]
        self.partner = partners(self.hosts)[self.rank]
        self.clients = [rank for rank, at in enumerate(partners(self.hosts)) if at == self.rank]
        self.token = first(lambda: secrets.token_hex(16))
        self.server = MemoryServer(folder, seen[self.rank].listens, self.token)
        self._addresses: list[tuple[str, int]] = gathered((self.server.address, self.server.port))

    @property
    def local(self) -> list[int]:
        """The ranks of this host."""
        return self.ranks_of(self.host)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.local[0] == self.rank

    def ranks_of(self, host: int) -> list[int]:
        return [rank for rank, at in enumerate(self.hosts) if at == host]

    def connect(self, rank: int) -> MemoryClient:
        """To the server of another rank. Raises OSError."""
        address, port = self._addresses[rank]
        return MemoryClient(address, port, self.token)

    def held(self) -> list[list[HeldPart]]:
        """By host, the parts in its memory. Collective."""
        everyone = gathered(self.folder.held() if self.leads else [])
        found: list[list[HeldPart]] = [[] for _ in set(self.hosts)]
        for host, parts in zip(self.hosts, everyone, strict=True):
            found[host] += parts
        return found

    def bring(self, point: Complete, names: Iterable[str]) -> str:
        """Have files of a point in this host's memory, with the right hash, fetched from others if need be. The problem
        if one cannot be had."""
        clients: dict[int, MemoryClient] = {}
        try:
            into = self.folder.begin(point.key)
            for name in names:
                self._bring(point, name, point.files[name], into, clients)
        except OSError as error:
            return str(error)
        finally:
            for client in clients.values():
                client.close()
        return ""

    def _bring(
        self, point: Complete, name: str, record: FileRecord, into: Path, clients: dict[int, MemoryClient]
    ) -> None:
        problem = "no host has it"
        with suppress(FileNotFoundError):
            if hash_file(into / name) == record:
                return
            problem = "the hash of the copy here is wrong"
            (into / name).unlink()
        part = next(rank for rank, of in point.parts.items() if name in of.files)
        for host in point.holders(name):
            ranks = self.ranks_of(host)
            if host == self.host:
                continue
            giver = ranks[self.rank % len(ranks)]  # all of its ranks share the work
            try:
                client = clients.get(giver) or clients.setdefault(giver, self.connect(giver))
                client.get(point.key, part, name, record, into)
            except OSError as error:
                if (broken := clients.pop(giver, None)) is not None:
                    broken.close()
                problem = str(error)
            else:
                return
        raise OSError(f"{name}: {problem}")

    def room(self, size: int) -> str:
        """Why there is no room for copies of parts of `size` bytes here, if so. Collective: the same on every rank."""
        free = free_memory.free() + self.folder.size()
        with suppress(OSError):
            space = os.statvfs(self.folder.root)
            free = min(free, space.f_bavail * space.f_frsize + self.folder.size())
        everyone = gathered((size, free))
        for host in sorted(set(self.hosts)):
            ranks = self.ranks_of(host)
            wanted = sum(everyone[rank][0] for rank in [*ranks, *self._kept_by(ranks)]) * 2
            least = min(everyone[rank][1] for rank in ranks)
            given = self.config.memory_gib
            budget = given * GIB * len(ranks) if given is not None else SHARE * least
            if wanted > min(budget, least):
                return (
                    f"copies of snapshots take {wanted / GIB:.2f} GiB on the host of rank {ranks[0]}, and there is "
                    f"room for {min(budget, least) / GIB:.2f} (stability.snapshots.copies.memory_gib)"
                )
        return ""

    def _kept_by(self, ranks: Collection[int]) -> list[int]:
        """The ranks of other hosts whose points these keep."""
        return [rank for rank, at in enumerate(partners(self.hosts)) if at in ranks]

    def close(self, remove: bool) -> None:
        """remove: also what it holds."""
        self.server.close()
        if remove:
            self.folder.remove()
        else:
            self.folder.close()


def open_memory(config: MemoryCopyConfig, run: Path, supervised: bool) -> tuple[MemoryHosts | None, str]:
    """The hosts' memories if copies are wanted or there are some of the run; and why not, if they cannot be had.
    supervised: whether there is somebody who starts the run again. Collective."""
    if config.mode == "never":
        return None, ""
    folder = MemoryFolder(base := Path(os.path.expandvars(config.folder)), run)
    try:
        mine = MemoryView(memory_of(base), "", folder.root.is_dir(), _own_address())
    except OSError as error:
        mine = MemoryView("", str(error), False, LOOPBACK)
    seen: list[MemoryView] = gathered(mine)
    several = len({s.memory for s in seen}) > 1
    copying = config.mode == "always" or (supervised and several)
    if not copying and not any(s.exists for s in seen):
        return None, ""
    problem = mine.problem
    if several and ip_address(mine.listens).is_loopback:  # rank 0's host may know itself by that
        other = next((s.listens for s in seen if not ip_address(s.listens).is_loopback), LOOPBACK)
        mine = MemoryView(mine.memory, mine.problem, mine.exists, _towards(other) or LOOPBACK)
    try:
        if not problem:
            folder.open()
    except OSError as error:
        problem = str(error)
    everyone: list[tuple[MemoryView, str]] = gathered((mine, problem))
    if problem := next((p for _, p in everyone if p), ""):
        folder.close()
        return None, problem
    found = MemoryHosts(config, folder, [s for s, _ in everyone], copying)
    if found.leads:
        folder.sweep(config.days)
    return found, ""


def _own_address(environment: Mapping[str, str] = os.environ) -> str:
    """Where the other ranks can reach this one: on the interface that gloo or NCCL is told to use, else on the one that
    leads to rank 0."""
    for name in INTERFACES:
        wanted = environment.get(name, "").removeprefix("=").split(",")[0]
        for one in psutil.net_if_addrs().get(wanted, []):
            if one.family == socket.AF_INET:
                return str(one.address)
    return _towards(environment.get("MASTER_ADDR", LOOPBACK)) or LOOPBACK


def _towards(host: str) -> str | None:
    """Our own address on the way to a host."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect((host, 9))  # sends nothing
            return str(s.getsockname()[0])
    return None


def partners(hosts: Sequence[Hashable]) -> list[int | None]:
    """By rank: the rank that keeps a copy of its point; None if all ranks are on one host.

    hosts: of every rank, by rank. The hosts form a ring in the order of their first ranks, and the i-th rank of a host
    sends to the i-th of the next one, around again if that has fewer. So the ranks of a host receive equally many
    copies, give or take one, and a host that is lost takes with it the copies of one other host only.
    """
    ranks: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    ring, found = list(ranks.values()), list[int | None]([None] * len(hosts))
    for here, there in zip(ring, [*ring[1:], ring[0]], strict=True) if len(ring) > 1 else ():
        for i, rank in enumerate(here):
            found[rank] = there[i % len(there)]
    return found
