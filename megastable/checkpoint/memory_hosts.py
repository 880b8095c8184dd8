"""The memories of all hosts of a run, as a rank sees them: its own folder, and a server on every rank. Collective."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self

import psutil
import torch.distributed as dist
import xxhash
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from megastable.base import free_memory
from megastable.base.collectives import gather_objects, run_on_first
from megastable.base.free_memory import GIB, SHARE
from megastable.checkpoint.files import FileRecord, hash_file
from megastable.checkpoint.held_points import (
    Complete,
    HeldPart,
    MemoryFolder,
    PointKey,
    every_name,
    memory_of,
)
from megastable.config.stability import MemoryCopyConfig
from megastable.run import wire

# Sends parts of snapshots between the memories of hosts, over TCP.
#
# Both sides prove first that they know the token of these processes (run/wire.py), which torch.distributed has told
# them. Requests are lines of JSON; files follow as they are and are hashed on arrival. Nothing is pickled or
# executed.


CHUNK = 1 << 20  # bytes sent and received at a time
LINE = 1 << 20  # longest line
SECONDS = 20.0  # without a byte, after which a peer counts as gone
SPARE = 1 << 28  # bytes of memory that a copy leaves free


class _Request(BaseModel):
    """do: "put" or "get" a file of a rank's part, or "seal" a part whose files were put."""

    model_config = ConfigDict(extra="forbid")

    do: str
    key: PointKey | None = None
    rank: NonNegativeInt = 0
    name: str = ""
    record: FileRecord | None = None
    part: HeldPart | None = None


class Pace:
    """Keeps to so many bytes a second, on average; None: no limit."""

    def __init__(self, rate: float | None) -> None:
        self._rate, self._due = rate, 0.0

    def wait_before(self, count: int, sleep: Callable[[float], object] = time.sleep) -> None:
        """Before `count` bytes are sent."""
        if self._rate is None:
            return
        now = time.monotonic()
        self._due = max(self._due, now - 0.1)  # what was not used is not made up for
        if self._due > now:
            sleep(self._due - now)
        self._due += count / self._rate


class _MemoryPeer:
    def __init__(self, s: socket.socket) -> None:
        wire.prepare_socket(s)
        s.settimeout(SECONDS)
        self.socket, self.file = s, s.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(wire.encode_message(message))

    def line(self, longest: int = LINE) -> dict[str, Any]:
        """Raises WireError, OSError; ConnectionResetError at the end."""
        line_bytes = self.file.readline(longest)
        if not line_bytes:
            raise ConnectionResetError("the connection was closed")
        if not line_bytes.endswith(b"\n"):
            raise wire.WireError(f"a line of more than {longest} bytes, or torn")
        try:
            message_fields = json.loads(line_bytes)
        except (ValueError, RecursionError):
            raise wire.WireError("not a line of JSON") from None
        if not isinstance(message_fields, dict):
            raise wire.WireError("not a JSON object")
        return message_fields

    def give(self, path: Path, size: int, pace: Pace, go_on: Callable[[], None] = lambda: None) -> None:
        """Send a file's bytes from the memory that it lies in, without a copy in this process."""
        with path.open("rb") as file:
            sent_bytes = 0
            while sent_bytes < size:
                go_on()
                block_size = min(CHUNK, size - sent_bytes)
                pace.wait_before(block_size)
                sent_now = self.socket.sendfile(file, sent_bytes, block_size)
                if sent_now != block_size:
                    raise OSError(f"{path} is shorter than it was")
                sent_bytes += sent_now

    def take(self, path: Path, record: FileRecord) -> None:
        """Receive a file, which is in place once its hash is right. Raises OSError."""
        temporary_path = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
        digest, receive_buffer, bytes_left = xxhash.xxh3_128(), memoryview(bytearray(CHUNK)), record.size
        try:
            with temporary_path.open("wb", buffering=0) as temporary_file:
                while bytes_left:
                    byte_count = self.file.readinto(receive_buffer[: min(bytes_left, CHUNK)])
                    if not byte_count:
                        raise ConnectionResetError("the connection was closed in mid-file")
                    digest.update(receive_buffer[:byte_count])
                    unwritten_bytes = receive_buffer[:byte_count]
                    while unwritten_bytes:
                        unwritten_bytes = unwritten_bytes[temporary_file.write(unwritten_bytes) :]
                    bytes_left -= byte_count
            if digest.hexdigest() != record.xxh3:
                raise wire.WireError(f"{path.name}: its hash is not the one announced")
            os.replace(temporary_path, path)
        finally:
            with suppress(OSError):
                temporary_path.unlink(missing_ok=True)

    def close(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.file.close()
        self.socket.close()


class MemoryServer:
    """Keeps copies for other ranks in `folder`, and gives them back. Its threads end with the process.

    address: to listen on. refuse: why a point is not to be kept, "" if it is; kept: whether another point of a rank is
    still wanted when a new one comes. received: bytes of copies so far.
    """

    def __init__(
        self, folder: MemoryFolder, address: str, token: str,
        refuse: Callable[[PointKey], str] = lambda _: "", kept: Callable[[PointKey], bool] = lambda _: False,
    ) -> None:  # fmt: skip
        self.folder, self._token, self.refuse, self.kept = folder, token, refuse, kept
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listening = socket.create_server((address, 0), family=address_family)
        self.address, self.port = address, int(self._listening.getsockname()[1])
        self.received = 0
        self.lock = threading.Lock()  # while a part is sealed, or points are invalidated
        self._open = set[_MemoryPeer]()
        threading.Thread(target=self._accept, name="memory-server", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for open_connection in list(self._open):
            with suppress(OSError):
                open_connection.socket.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                peer_socket, _ = self._listening.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(peer_socket,), name="memory-peer", daemon=True).start()

    def _serve(self, s: socket.socket) -> None:
        connection = _MemoryPeer(s)
        self._open.add(connection)
        try:
            own_nonce = wire.make_nonce()
            connection.send({"nonce": own_nonce})
            client_greeting = connection.line(wire.GREETING)
            client_nonce = str(client_greeting.get("nonce"))
            wanted_proof = wire.make_proof(self._token, "client", client_nonce, own_nonce)
            if not hmac.compare_digest(str(client_greeting.get("proof")), wanted_proof):
                return
            connection.send({"proof": wire.make_proof(self._token, "server", own_nonce, client_nonce)})
            connection.socket.settimeout(None)  # until the next point; the kernel notices a peer that is gone
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            while True:
                self._answer(connection)
        except (OSError, ValueError):  # gone, refused, or nonsense: the client knows
            return
        finally:
            self._open.discard(connection)
            with suppress(OSError):
                connection.close()

    def _answer(self, connection: _MemoryPeer) -> None:
        request = _Request.model_validate(connection.line())
        connection.socket.settimeout(SECONDS)
        try:
            if request.do == "put":
                self._put(connection, request)
            elif request.do == "seal":
                self._seal(request)
            elif request.do == "get":
                self._get(connection, request)
            else:
                raise wire.WireError(f"no such request: {request.do!r}")
        except OSError as error:
            connection.send({"error": str(error)})
            raise
        if request.do != "get":  # which is answered by the file
            connection.send({"ok": True})
        connection.socket.settimeout(None)

    def _put(self, connection: _MemoryPeer, request: _Request) -> None:
        key, record = request.key, request.record
        if key is None or record is None or record.size < 0 or request.name not in every_name(request.rank):
            raise wire.WireError(f"not a file of rank {request.rank}: {request.name!r}")
        if why := self.refuse(key):
            raise wire.WireError(why)
        self.folder.drop_part(request.rank, lambda other: other == key or self.kept(other))
        if free_memory.free_bytes() < record.size + SPARE:
            raise OSError(f"{self.folder.root}: no memory left for a copy of {record.size} bytes")
        folder = self.folder.begin_point(key)
        connection.send({"go": True})
        connection.take(folder / request.name, record)
        self.received += record.size

    def _seal(self, request: _Request) -> None:
        sealed_part = request.part
        if sealed_part is None:
            raise wire.WireError("no part to seal")
        with self.lock:
            if refusal_reason := self.refuse(sealed_part.key):
                self.folder.drop_part(sealed_part.rank, lambda other: other != sealed_part.key)
                raise wire.WireError(refusal_reason)
            for file_name, file_record in sealed_part.files.items():
                if (self.folder.point_folder(sealed_part.key) / file_name).stat().st_size != file_record.size:
                    raise wire.WireError(f"{file_name} is not as it was put")
            self.folder.seal_part(sealed_part)

    def _get(self, connection: _MemoryPeer, request: _Request) -> None:
        key = request.key
        if key is None or request.name not in every_name(request.rank):
            raise wire.WireError(f"not a file of rank {request.rank}: {request.name!r}")
        file_path = self.folder.point_folder(key) / request.name
        file_size = file_path.stat().st_size
        connection.send({"size": file_size})
        connection.give(file_path, file_size, Pace(None))


class MemoryClient:
    """A connection to a server. Raises OSError, as all methods do; then it is of no more use."""

    def __init__(self, host: str, port: int, token: str) -> None:
        server_socket = socket.create_connection((host, port), timeout=SECONDS)
        try:
            self._connection = _MemoryPeer(server_socket)
            server_nonce = str(self._connection.line(wire.GREETING).get("nonce"))
            own_nonce = wire.make_nonce()
            own_proof = wire.make_proof(token, "client", own_nonce, server_nonce)
            self._connection.send({"nonce": own_nonce, "proof": own_proof})
            server_answer = self._connection.line(wire.GREETING)
            wanted_proof = wire.make_proof(token, "server", server_nonce, own_nonce)
            if not hmac.compare_digest(str(server_answer.get("proof")), wanted_proof):
                raise wire.WireError("the peer does not know the token of these processes")
        except BaseException:
            server_socket.close()
            raise

    def put_part(self, folder: Path, part: HeldPart, pace: Pace, go_on: Callable[[], None]) -> int:
        """Send a part whose files lie in `folder`; bytes of them. go_on: raises to break off."""
        for name, record in part.files.items():
            key, given = part.key.model_dump(), record.model_dump()
            self._connection.send({"do": "put", "key": key, "rank": part.rank, "name": name, "record": given})
            self._agreed("go")
            self._connection.give(folder / name, record.size, pace, go_on)
            self._agreed()
        go_on()
        self._connection.send({"do": "seal", "part": part.model_dump()})
        self._agreed()
        return sum(record.size for record in part.files.values())

    def get_file(self, key: PointKey, rank: int, name: str, record: FileRecord, into: Path) -> None:
        """Fetch a file into the folder `into`, if its hash is right."""
        self._connection.send({"do": "get", "key": key.model_dump(), "rank": rank, "name": name})
        server_answer = self._connection.line()
        if server_answer.get("size") != record.size:
            raise wire.WireError(f"{name}: {server_answer.get('error') or 'of another size there'}")
        self._connection.take(into / name, record)

    def _agreed(self, what: str = "ok") -> None:
        server_answer = self._connection.line()
        if not server_answer.get(what):
            raise wire.WireError(str(server_answer.get("error", "refused")))

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        memory_names = list(dict.fromkeys(memory_view.memory for memory_view in seen))
        self.hosts = [memory_names.index(memory_view.memory) for memory_view in seen]
        self.host = self.hosts[self.rank]
        self.partner = assign_partners(self.hosts)[self.rank]
        self.clients = self._kept_by([self.rank])
        self.token = run_on_first(lambda: secrets.token_hex(16))
        self.server = MemoryServer(folder, seen[self.rank].listens, self.token)
        self._addresses: list[tuple[str, int]] = gather_objects((self.server.address, self.server.port))

    @property
    def local(self) -> list[int]:
        """The ranks of this host."""
        return self.ranks_of(self.host)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.local[0] == self.rank

    def ranks_of(self, host: int) -> list[int]:
        return [rank for rank, host_number in enumerate(self.hosts) if host_number == host]

    def connect_to(self, rank: int) -> MemoryClient:
        """To the server of another rank. Raises OSError."""
        address, port = self._addresses[rank]
        return MemoryClient(address, port, self.token)

    def gather_parts(self) -> list[list[HeldPart]]:
        """By host, the parts in its memory. Collective."""
        parts_by_rank = gather_objects(self.folder.list_parts() if self.leads else [])
        parts_by_host: list[list[HeldPart]] = [[] for _ in set(self.hosts)]
        for host, parts in zip(self.hosts, parts_by_rank, strict=True):
            parts_by_host[host] += parts
        return parts_by_host

    def bring_files(self, point: Complete, names: Iterable[str]) -> str:
        """Have files of a point in this host's memory, with the right hash, fetched from others if need be. The problem
        if one cannot be had."""
        open_clients: dict[int, MemoryClient] = {}
        try:
            point_folder = self.folder.begin_point(point.key)
            for file_name in names:
                self._bring(point, file_name, point.files[file_name], point_folder, open_clients)
        except OSError as error:
            return str(error)
        finally:
            for client in open_clients.values():
                client.close()
        return ""

    def _bring(
        self, point: Complete, name: str, record: FileRecord, into: Path, clients: dict[int, MemoryClient]
    ) -> None:
        last_problem = "no host has it"
        with suppress(FileNotFoundError):
            if hash_file(into / name) == record:
                return
            last_problem = "the hash of the copy here is wrong"
            (into / name).unlink()
        part_rank = next(rank for rank, held_part in point.parts.items() if name in held_part.files)
        for host in point.hosts_with(name):
            host_ranks = self.ranks_of(host)
            if host == self.host:
                continue
            giving_rank = host_ranks[self.rank % len(host_ranks)]  # all of its ranks share the work
            try:
                if giving_rank not in clients:
                    clients[giving_rank] = self.connect_to(giving_rank)
                clients[giving_rank].get_file(point.key, part_rank, name, record, into)
            except OSError as error:
                if (broken_client := clients.pop(giving_rank, None)) is not None:
                    broken_client.close()
                last_problem = str(error)
            else:
                return
        raise OSError(f"{name}: {last_problem}")

    def explain_no_room(self, size: int) -> str:
        """Why there is no room for copies of parts of `size` bytes here, if so. Collective: the same on every rank."""
        free_bytes = free_memory.free_bytes()
        with suppress(OSError):
            disk_space = os.statvfs(self.folder.root)
            free_bytes = min(free_bytes, disk_space.f_bavail * disk_space.f_frsize)
        needs_by_rank = gather_objects((size, free_bytes + self.folder.count_bytes()))
        for host in sorted(set(self.hosts)):
            ranks = self.ranks_of(host)
            wanted = sum(needs_by_rank[rank][0] for rank in [*ranks, *self._kept_by(ranks)]) * 2
            least_free = min(needs_by_rank[rank][1] for rank in ranks)
            given_gib = self.config.memory_gib
            host_budget = given_gib * GIB * len(ranks) if given_gib is not None else SHARE * least_free
            if wanted > min(host_budget, least_free):
                return (
                    f"copies of snapshots take {wanted / GIB:.2f} GiB on the host of rank {ranks[0]}, and there is "
                    f"room for {min(host_budget, least_free) / GIB:.2f} (stability.snapshots.copies.memory_gib)"
                )
        return ""

    def _kept_by(self, ranks: Collection[int]) -> list[int]:
        """The ranks of other hosts whose points these keep."""
        return [rank for rank, partner in enumerate(assign_partners(self.hosts)) if partner in ranks]

    def close(self, remove: bool) -> None:
        """remove: also what it holds."""
        self.server.close()
        if remove:
            self.folder.remove_all()
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
    seen: list[MemoryView] = gather_objects(mine)
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
            folder.open_locked()
    except OSError as error:
        problem = str(error)
    everyone: list[tuple[MemoryView, str]] = gather_objects((mine, problem))
    if problem := next((p for _, p in everyone if p), ""):
        folder.close()
        return None, problem
    found = MemoryHosts(config, folder, [s for s, _ in everyone], copying)
    if found.leads:
        folder.sweep_abandoned(config.days)
    return found, ""


def _own_address(environment: Mapping[str, str] = os.environ) -> str:
    """Where the other ranks can reach this one: on the interface that gloo or NCCL is told to use, else on the one that
    leads to rank 0."""
    for variable_name in INTERFACES:
        interface_name = environment.get(variable_name, "").removeprefix("=").split(",")[0]
        for interface_address in psutil.net_if_addrs().get(interface_name, []):
            if interface_address.family == socket.AF_INET:
                return str(interface_address.address)
    return _towards(environment.get("MASTER_ADDR", LOOPBACK)) or LOOPBACK


def _towards(host: str) -> str | None:
    """Our own address on the way to a host."""
    for address_family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError), socket.socket(address_family, socket.SOCK_DGRAM) as probe_socket:
            probe_socket.connect((host, 9))  # sends nothing
            return str(probe_socket.getsockname()[0])
    return None


def assign_partners(hosts: Sequence[Hashable]) -> list[int | None]:
    """By rank: the rank that keeps a copy of its point; None if all ranks are on one host.

    hosts: of every rank, by rank. The hosts form a ring in the order of their first ranks, and the i-th rank of a host
    sends to the i-th of the next one, around again if that has fewer. So the ranks of a host receive equally many
    copies, give or take one, and a host that is lost takes with it the copies of one other host only.
    """
    ranks_by_host: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_by_host.setdefault(host, []).append(rank)
    ring, partner_by_rank = list(ranks_by_host.values()), list[int | None]([None] * len(hosts))
    for host_ranks, next_ranks in zip(ring, [*ring[1:], ring[0]], strict=True) if len(ring) > 1 else ():
        for host_position, rank in enumerate(host_ranks):
            partner_by_rank[rank] = next_ranks[host_position % len(next_ranks)]
    return partner_by_rank
