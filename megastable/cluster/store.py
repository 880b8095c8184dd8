"""The supervisor's store: listens for the heartbeats of all ranks and for the agents of all hosts, in a thread.

It holds the last word of each. One connection per rank: the kernel closes it when a process dies, at once, while a host
that is gone is only silent. So the order in which connections end says who died first.
"""

from __future__ import annotations

import asyncio
import hmac
import resource
import secrets
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megastable.base.errors import ConfigError
from megastable.run.directory import RunDirectory
from megastable.run.wire import (
    GREETING,
    LONGEST,
    Address,
    Lines,
    Message,
    WireError,
    encode_message,
    make_nonce,
    make_proof,
    prepare_socket,
)

GREETED = 10.0  # seconds for a peer to prove that it knows the token
MOST_WORK = 1 << 16  # reports of ranks that nobody has read
CLOCKS = 60  # reports of an agent, one a second at least, by which its clock is judged: it may be set right meanwhile
WAITING = 4096  # connections that the kernel may hold for us: all ranks come at once


@dataclass
class Heard:
    """The last word of a rank of `attempt`. at: time.monotonic() of it; closed: ... of the end of its connection; cut:
    whether that end was a timeout or a reset, as of a host that is gone, and not the end of a process; beat: the fields
    of `Beat` (rank_ipc.py)."""

    rank: int
    attempt: int
    host: str
    pid: int
    at: float
    beat: Message = field(default_factory=dict)
    closed: float | None = None
    cut: bool = False


@dataclass
class AgentLink:
    """An agent's connection. name: of its host in the host file; local: its address on the connection; at: of its last
    word; clocks: seconds by which its clock was ahead of ours, in every report; machine: its newest `HostReading`, as a
    dict; inbox: what else it said, oldest first."""

    name: str
    hello: Message
    local: str
    at: float
    clocks: deque[float]
    connection: Any
    inbox: deque[Message] = field(default_factory=deque)
    machine: Message = field(default_factory=dict)
    state: Message = field(default_factory=dict)
    closed: float | None = None

    @property
    def clock(self) -> float:
        """How far its clock is ahead of ours, in seconds. Every delay makes it look late: the largest of the newest
        differences is nearest to the truth."""
        return max(list(self.clocks))


class Store:
    """Of one supervisor. Use as a context manager. interface: the one address to listen on.

    attempt: the only one whose ranks are heard; others are told to end. ranks: by rank. agents: by name. Both are
    written by the store's thread, and may be read at any time. work: how long their work took ranks, for one reader to
    take from; the newest.
    """

    def __init__(self, run: RunDirectory, interface: str = "127.0.0.1") -> None:
        self.run, self.interface = run, interface
        self.attempt = 0
        self.ranks: dict[int, Heard] = {}
        self.agents: dict[str, AgentLink] = {}
        self.work: deque[tuple[Heard, Any]] = deque(maxlen=MOST_WORK)
        self.token = secrets.token_hex(32)
        self._loop = asyncio.new_event_loop()
        self._connections: set[_Connection] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store", daemon=True)

    def __enter__(self) -> Store:
        """Raises ConfigError if it cannot listen."""
        allow_many_files()
        self._thread.start()
        starting = self._loop.create_server(lambda: _Connection(self), self.interface, 0, backlog=WAITING)
        try:
            self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
            port = int(self._server.sockets[0].getsockname()[1])
            self.address = Address(host=self.interface, port=port, token=self.token)
            self.address.write_file(self.run.store)
        except OSError as error:
            self.__exit__()
            raise ConfigError(
                f"the supervisor cannot listen on {self.interface} (supervise.interface), or write {self.run.store}: "
                f"{error}"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        if hasattr(self, "_server"):
            self._server.close()
        for connection in list(self._connections):
            connection.transport.close()
        await asyncio.sleep(0)  # the transports close in the next turn of the loop

    def begin_attempt(self, attempt: int) -> None:
        """A new attempt begins: forget the ranks of older ones, and tell those that still speak to end."""
        asyncio.run_coroutine_threadsafe(self._begin(attempt), self._loop).result()

    async def _begin(self, attempt: int) -> None:
        self.attempt, self.ranks = attempt, {}
        for connection in self._connections:
            if connection.rank is not None:
                connection.write_message({"attempt": attempt})
                self.add_rank(connection.rank)

    def add_rank(self, rank: Heard) -> None:
        """In the store's thread: a rank has connected, or its attempt has begun for us."""
        if rank.attempt == self.attempt:
            self.ranks[rank.rank] = rank

    def send_to_agent(self, name: str, message: Message) -> bool:
        """Send to the agent of a host; False if it is not connected. That it was sent does not mean that it arrived."""
        agent_link = self.agents.get(name)
        if agent_link is None or agent_link.closed is not None:
            return False
        self._loop.call_soon_threadsafe(agent_link.connection.write_message, message)
        return True


class _Connection(asyncio.Protocol):
    """One peer, in the store's thread."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.lines = Lines(GREETING)
        self.nonce = make_nonce()
        self.greeted = False
        self.rank: Heard | None = None
        self.agent: AgentLink | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        prepare_socket(transport.get_extra_info("socket"))
        self.store._connections.add(self)
        self.write_message({"nonce": self.nonce})
        self.limit = asyncio.get_running_loop().call_later(GREETED, self._expire)

    def _expire(self) -> None:
        if not self.greeted:
            self.transport.abort()

    def write_message(self, message: Message) -> None:
        if not self.transport.is_closing():
            self.transport.write(encode_message(message))

    def data_received(self, data: bytes) -> None:
        try:
            for message in self.lines.feed_bytes(data):
                if self.greeted:
                    self._hear(message)
                else:
                    self._greet(message)
        except (WireError, KeyError, TypeError, ValueError, OverflowError):
            self.transport.abort()  # not one of ours

    def _greet(self, hello: Message) -> None:
        peer_nonce = str(hello["nonce"])
        proof = make_proof(self.store.token, "client", peer_nonce, self.nonce)
        if not hmac.compare_digest(str(hello.get("proof")), proof):
            raise WireError("a peer that does not know the token")
        self.greeted, self.lines.longest = True, LONGEST
        now = time.monotonic()
        if hello["role"] == "rank":
            rank, attempt, pid = int(hello["rank"]), int(hello["attempt"]), int(hello["pid"])
            self.rank = Heard(rank, attempt, str(hello["host"]), pid, now)
            self.store.add_rank(self.rank)
        else:
            self.agent = AgentLink(
                str(hello["name"]), hello, str(self.transport.get_extra_info("peername")[0]), now,
                deque([float(hello["time"]) - time.time()], CLOCKS), self,
            )  # fmt: skip
            link_before = self.store.agents.get(self.agent.name)
            if link_before is not None and link_before.closed is None:
                link_before.connection.transport.abort()  # the same host again: the old connection is a dead one
            self.store.agents[self.agent.name] = self.agent
        server_proof = make_proof(self.store.token, "server", self.nonce, peer_nonce)
        self.write_message({"proof": server_proof, "attempt": self.store.attempt})

    def _hear(self, message: Message) -> None:
        now = time.monotonic()
        if self.rank is not None:
            if work_blocks := message.pop("work", None):
                self.store.work.append((self.rank, work_blocks))
            self.rank.at, self.rank.beat = now, message
        elif self.agent is not None:
            self.agent.at = now
            if "state" in message:
                if not isinstance(message["state"], dict):
                    raise WireError("the state of an agent is not a JSON object")
                self.agent.state = message["state"]
                self.agent.clocks.append(float(message["time"]) - time.time())
            elif "machine" in message:
                self.agent.machine = dict(message["machine"])
            else:
                self.agent.inbox.append(message)

    def connection_lost(self, error: Exception | None) -> None:
        self.limit.cancel()
        self.store._connections.discard(self)
        for peer in (self.rank, self.agent):
            if peer is not None:
                peer.closed = time.monotonic()
        if self.rank is not None:
            self.rank.cut = error is not None


def allow_many_files() -> None:
    """A connection is a file, and the usual limit is 1,024 of them."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
