"""Sends parts of snapshots between the memories of hosts, over TCP.

Both sides prove first that they know the token of these processes (run/wire.py), which torch.distributed has told
them. Requests are lines of JSON; files follow as they are and are hashed on arrival. Nothing is pickled or executed.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import xxhash
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from megastable.base import free_memory
from megastable.checkpoint.files import FileRecord
from megastable.checkpoint.held_points import HeldPart, PointKey, every_name
from megastable.checkpoint.memory_folder import MemoryFolder
from megastable.run import wire

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

    def wait(self, count: int, sleep: Callable[[float], object] = time.sleep) -> None:
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
        wire.prepare(s)
        s.settimeout(SECONDS)
        self.socket, self.file = s, s.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(wire.encoded(message))

    def line(self, longest: int = LINE) -> dict[str, Any]:
        """Raises WireError, OSError; ConnectionResetError at the end."""
        text = self.file.readline(longest)
        if not text:
            raise ConnectionResetError("the connection was closed")
        if not text.endswith(b"\n"):
            raise wire.WireError(f"a line of more than {longest} bytes, or torn")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise wire.WireError("not a line of JSON") from None
        if not isinstance(found, dict):
            raise wire.WireError("not a JSON object")
        return found

    def give(self, path: Path, size: int, pace: Pace, go_on: Callable[[], None] = lambda: None) -> None:
        """Send a file's bytes from the memory that it lies in, without a copy in this process."""
        with path.open("rb") as file:
            at = 0
            while at < size:
                go_on()
                count = min(CHUNK, size - at)
                pace.wait(count)
                sent = self.socket.sendfile(file, at, count)
                if sent != count:
                    raise OSError(f"{path} is shorter than it was")
                at += sent

    def take(self, path: Path, record: FileRecord) -> None:
        """Receive a file, which is in place once its hash is right. Raises OSError."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            with temporary.open("wb", buffering=0) as file:
                digest = _received(self.file, file, record.size)
            if digest != record.xxh3:
                raise wire.WireError(f"{path.name}: its hash is not the one announced")
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def close(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.file.close()
        self.socket.close()


def _received(source: BinaryIO, target: BinaryIO, size: int) -> str:
    digest, buffer, left = xxhash.xxh3_128(), memoryview(bytearray(CHUNK)), size
    while left:
        count = source.readinto(buffer[: min(left, CHUNK)])  # type: ignore[attr-defined]
        if not count:
            raise ConnectionResetError("the connection was closed in mid-file")
        digest.update(buffer[:count])
        rest = buffer[:count]
        while rest:
            rest = rest[target.write(rest) :]
        left -= count
    return digest.hexdigest()


class MemoryServer:
    """Keeps copies for other ranks in `folder`, and gives them back. Its threads end with the process.

    address: to listen on. refuse: why a point is not to be kept, "" if it is; kept: whether another point of a rank is
    still wanted when a new one comes. received: bytes of copies so far.
    """

    def __init__(
        self,
        folder: MemoryFolder,
        address: str,
        token: str,
        refuse: Callable[[PointKey], str] = lambda _: "",
        kept: Callable[[PointKey], bool] = lambda _: False,
    ) -> None:
        self.folder, self._token, self.refuse, self.kept = folder, token, refuse, kept
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listening = socket.create_server((address, 0), family=family)
        self.address, self.port = address, int(self._listening.getsockname()[1])
        self.received = 0
        self.lock = threading.Lock()  # while a part is sealed, or points are invalidated
        self._open = set[_MemoryPeer]()
        threading.Thread(target=self._accept, name="memory-server", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in list(self._open):
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                s, _ = self._listening.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(s,), name="memory-peer", daemon=True).start()

    def _serve(self, s: socket.socket) -> None:
        connection = _MemoryPeer(s)
        self._open.add(connection)
        try:
            own = wire.nonce()
            connection.send({"nonce": own})
            hello = connection.line(wire.GREETING)
            theirs = str(hello.get("nonce"))
            if not hmac.compare_digest(
                str(hello.get("proof")), wire.proof(self._token, "client", theirs, own)
            ):
                return
            connection.send({"proof": wire.proof(self._token, "server", own, theirs)})
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
                connection.socket.settimeout(None)
                return
            else:
                raise wire.WireError(f"no such request: {request.do!r}")
        except OSError as error:
            connection.send({"error": str(error)})
            raise
        connection.send({"ok": True})
        connection.socket.settimeout(None)

    def _put(self, connection: _MemoryPeer, request: _Request) -> None:
        key, record = request.key, request.record
        if key is None or record is None or record.size < 0 or request.name not in every_name(request.rank):
            raise wire.WireError(f"not a file of rank {request.rank}: {request.name!r}")
        if why := self.refuse(key):
            raise wire.WireError(why)
        self.folder.drop_part(request.rank, lambda other: other == key or self.kept(other))
        if free_memory.free() < record.size + SPARE:
            raise OSError(f"{self.folder.root}: no memory left for a copy of {record.size} bytes")
        folder = self.folder.begin(key)
        connection.send({"go": True})
        connection.take(folder / request.name, record)
        self.received += record.size

    def _seal(self, request: _Request) -> None:
        part = request.part
        if part is None:
            raise wire.WireError("no part to seal")
        with self.lock:
            if why := self.refuse(part.key):
                self.folder.drop_part(part.rank, lambda other: other != part.key)
                raise wire.WireError(why)
            for name, record in part.files.items():
                if (self.folder.point(part.key) / name).stat().st_size != record.size:
                    raise wire.WireError(f"{name} is not as it was put")
            self.folder.seal(part)

    def _get(self, connection: _MemoryPeer, request: _Request) -> None:
        key = request.key
        if key is None or request.name not in every_name(request.rank):
            raise wire.WireError(f"not a file of rank {request.rank}: {request.name!r}")
        path = self.folder.point(key) / request.name
        size = path.stat().st_size
        connection.send({"size": size})
        connection.give(path, size, Pace(None))


class MemoryClient:
    """A connection to a server. Raises OSError, as all methods do; then it is of no more use."""

    def __init__(self, host: str, port: int, token: str) -> None:
        s = socket.create_connection((host, port), timeout=SECONDS)
        try:
            self._connection = _MemoryPeer(s)
            own, theirs = wire.nonce(), str(self._connection.line(wire.GREETING).get("nonce"))
            self._connection.send({"nonce": own, "proof": wire.proof(token, "client", own, theirs)})
            answer = self._connection.line(wire.GREETING)
            wanted = wire.proof(token, "server", theirs, own)
            if not hmac.compare_digest(str(answer.get("proof")), wanted):
                raise wire.WireError("the peer does not know the token of these processes")
        except BaseException:
            s.close()
            raise

    def put(self, folder: Path, part: HeldPart, pace: Pace, go_on: Callable[[], None]) -> int:
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

    def get(self, key: PointKey, rank: int, name: str, record: FileRecord, into: Path) -> None:
        """Fetch a file into the folder `into`, if its hash is right."""
        self._connection.send({"do": "get", "key": key.model_dump(), "rank": rank, "name": name})
        answer = self._connection.line()
        if answer.get("size") != record.size:
            raise wire.WireError(f"{name}: {answer.get('error') or 'of another size there'}")
        self._connection.take(into / name, record)

    def _agreed(self, what: str = "ok") -> None:
        answer = self._connection.line()
        if not answer.get(what):
            raise wire.WireError(str(answer.get("error", "refused")))

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
