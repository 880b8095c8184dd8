"""Messages between supervisor, agents and ranks: lines of JSON over TCP, after both sides have proved that they know
the run's token. Nothing is pickled.

The supervisor's address and the token are in `store.json` of the run directory, which only the run's user can read.
The proof is a keyed hash of two nonces, one of each side, so the token itself is never sent. What follows is neither
encrypted nor signed: the network between the hosts must be trusted, as NCCL's and gloo's must be.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from megastable.base import durable

LONGEST = 1 << 22  # bytes of a line: a report with stacks of a host
GREETING = 1 << 12  # ... before a peer has proved anything
LOST_AFTER = 10.0  # seconds without acknowledgement after which the kernel gives a connection up
Message = dict[str, Any]


class WireError(OSError):
    """The peer does not speak our language, or does not know the token."""


class Address(BaseModel):
    """store.json: where the supervisor listens, and the token of its run."""

    model_config = ConfigDict(extra="ignore")

    host: str
    port: int
    token: str

    @classmethod
    def read_file(cls, path: Path) -> Self | None:
        """None if there is none, or it is half-written."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    def write_file(self, path: Path) -> None:
        """Raises OSError."""
        durable.write_file(path, self.model_dump_json().encode(), mode=0o600)


def make_proof(token: str, side: str, own: str, other: str) -> str:
    """What `side` ("server" or "client") sends to prove that it knows the token; own, other: nonces."""
    return hmac.new(token.encode(), f"{side} {own} {other}".encode(), "sha256").hexdigest()


def make_nonce() -> str:
    return secrets.token_hex(16)


def encode_message(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Lines:
    """Cuts a stream of bytes into messages. longest: bytes of a line."""

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        self._rest = b""

    def feed_bytes(self, data: bytes) -> list[Message]:
        """The messages that `data` completes. Raises WireError."""
        *message_lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, (*message_lines, self._rest))) > self.longest:
            raise WireError(f"a line of more than {self.longest} bytes")
        try:
            messages = [json.loads(message_line) for message_line in message_lines]
        except (ValueError, RecursionError):  # the latter: nested too deeply
            raise WireError("not a line of JSON") from None
        if not all(isinstance(message, dict) for message in messages):
            raise WireError("not a JSON object")
        return messages


def prepare_socket(s: socket.socket) -> None:
    """Let the kernel find out when the peer is gone, also if nobody says so."""
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LOST_AFTER * 1000))


class StoreClient:
    """A client's connection to the supervisor. hello: who we are. welcome: its answer. Raises OSError, as all methods
    do when the connection is lost. local: our own address on it."""

    def __init__(self, address: Address, hello: Mapping[str, Any], seconds: float = 5.0) -> None:
        self._socket = socket.create_connection((address.host, address.port), timeout=seconds)
        self._lines = Lines()
        self._waiting: list[Message] = []
        try:
            prepare_socket(self._socket)
            self.local = str(self._socket.getsockname()[0])
            own_nonce, their_nonce = make_nonce(), str(self._one(seconds).get("nonce"))
            own_proof = make_proof(address.token, "client", own_nonce, their_nonce)
            self.send_message({**hello, "nonce": own_nonce, "proof": own_proof})
            self.welcome = self._one(seconds)
            wanted_proof = make_proof(address.token, "server", their_nonce, own_nonce)
            if not hmac.compare_digest(str(self.welcome.get("proof")), wanted_proof):
                raise WireError("the supervisor does not know the run's token")
        except BaseException:
            self.close()
            raise

    def _one(self, seconds: float) -> Message:
        wait_until = time.monotonic() + seconds
        while not self._waiting:
            if time.monotonic() > wait_until:
                raise WireError("no answer")
            self._waiting += self._read(seconds)
        return self._waiting.pop(0)

    def send_message(self, message: Mapping[str, Any]) -> None:
        self._socket.settimeout(LOST_AFTER)
        self._socket.sendall(encode_message(message))

    def receive_messages(self, seconds: float) -> list[Message]:
        """What has come in, waiting up to `seconds` for the first; may be empty."""
        waiting_messages, self._waiting = self._waiting, []
        return waiting_messages or self._read(seconds)

    def _read(self, seconds: float) -> list[Message]:
        self._socket.settimeout(max(0.001, seconds))
        try:
            received_bytes = self._socket.recv(1 << 16)
        except TimeoutError:
            return []
        if not received_bytes:
            raise ConnectionResetError("the supervisor has closed the connection")
        return self._lines.feed_bytes(received_bytes)

    def close(self) -> None:
        self._socket.close()
