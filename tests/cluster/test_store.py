"""The store: who is let in, what it hears, what it notices at once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megastable.cluster.store import CLOCKS, Store
from megastable.run.directory import RunDirectory
from megastable.run.wire import LONGEST, Address, Message, StoreClient, WireError, encode_message
from tests.patience import PATIENCE, until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(RunDirectory(tmp_path)) as store:
        yield store


def rank(store: Store, number: int = 0, attempt: int = 1) -> StoreClient:
    hello = {"role": "rank", "attempt": attempt, "rank": number, "host": "first", "pid": 7}
    return StoreClient(store.address, hello)


def agent(store: Store, name: str = "first", ahead: float = 0.0) -> StoreClient:
    hello = {"role": "agent", "name": name, "hostname": name, "time": time.time() + ahead}
    return StoreClient(store.address, hello)


def test_store_address_is_for_the_user_alone(store: Store) -> None:
    assert Address.read_file(store.run.store) == store.address
    assert store.run.store.stat().st_mode & 0o777 == 0o600
    assert store.address.host == "127.0.0.1"


def test_store_hears_heartbeats_and_sees_a_death_at_once(store: Store) -> None:
    store.begin_attempt(1)
    links = [rank(store, number) for number in range(3)]
    assert links[0].welcome["attempt"] == 1
    for number, link in enumerate(links):
        link.send_message({"activity": "forward", "step": number})
    until(lambda: {r: h.beat.get("step") for r, h in store.ranks.items()} == {0: 0, 1: 1, 2: 2})
    links[1].close()
    until(lambda: store.ranks[1].closed is not None)
    assert store.ranks[0].closed is None is store.ranks[2].closed


def test_store_tells_ranks_of_another_attempt_and_does_not_hear_them(store: Store) -> None:
    early = rank(store, 0, attempt=2)  # before the supervisor takes it over
    store.begin_attempt(2)
    until(lambda: 0 in store.ranks)
    assert early.receive_messages(PATIENCE) == [{"attempt": 2}]
    store.begin_attempt(3)
    assert early.receive_messages(PATIENCE) == [{"attempt": 3}]
    early.send_message({"activity": "forward"})
    late = rank(store, 5, attempt=2)
    assert late.welcome["attempt"] == 3
    new = rank(store, 1, attempt=3)
    until(lambda: 1 in store.ranks)
    assert list(store.ranks) == [1]
    new.close()


def test_store_tells_an_agent_and_knows_its_clock(store: Store) -> None:
    assert not store.send_to_agent("second", {"end": 1})
    link = agent(store, "second", ahead=40.0)
    until(lambda: "second" in store.agents)
    assert store.send_to_agent("second", {"end": 1})
    assert link.receive_messages(PATIENCE) == [{"end": 1}]
    link.send_message({"state": {"running": False}, "time": time.time() + 40})
    link.send_message({"states": {"0": "asleep"}})
    until(lambda: list(store.agents["second"].inbox) == [{"states": {"0": "asleep"}}])
    assert store.agents["second"].state == {"running": False}
    assert 39 < store.agents["second"].clock <= 40
    again = agent(store, "second")  # the old connection is a dead one
    with pytest.raises(OSError, match=r"closed|reset"):
        link.receive_messages(PATIENCE)
    assert store.agents["second"].closed is None
    again.close()


def test_agent_link_clock_is_that_of_the_newest_reports(store: Store) -> None:
    """Of the newest reports the one that was least delayed counts, not one of before."""
    link = agent(store, "second", ahead=40.0)
    for number, late in enumerate([0.0, *[0.5] * (CLOCKS - 1), 0.1, 0.5]):
        link.send_message({"state": {"number": number}, "time": time.time() - late})
    until(lambda: "second" in store.agents and store.agents["second"].state == {"number": CLOCKS + 1})
    assert len(store.agents["second"].clocks) == CLOCKS
    assert -0.5 < store.agents["second"].clock <= -0.1
    link.close()


def test_store_lets_no_strangers_in(store: Store) -> None:
    """Without the token, with a forged one, with anything but our language, or with nothing."""
    wrong = store.address.model_copy(update={"token": "guess"})
    good = {"role": "rank", "attempt": 0, "rank": 0, "host": "first", "pid": 7, "name": "first"}
    bad: list[Message] = [{"rank": "one"}, {"rank": 1e400}, {"pid": None}, {"role": "agent", "time": []}]
    for address, hello in ((wrong, good), *((store.address, good | more) for more in bad)):
        with pytest.raises(OSError):
            StoreClient(address, hello)
    for words in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b"{}\n",
        b"x" * 10_000,
        b"[" * 4_000 + b"\n",
        b"\xff\xfe{}\n",
        encode_message({"nonce": 1, "role": "agent"}),
    ):
        with socket.create_connection((store.address.host, store.address.port)) as s:
            s.settimeout(PATIENCE)
            s.sendall(words)
            seen = b""
            while data := _received(s):
                seen += data
            assert seen.count(b"\n") == 1 and store.token.encode() not in seen
    assert not store.ranks and not store.agents


@pytest.mark.parametrize(
    "words",
    [
        b"gar\x00bage\n",
        b"[1]\n",
        b"[" * 100_000 + b"\n",
        b"x" * (LONGEST + 1),
        encode_message({"state": {}}),
        encode_message({"state": 7, "time": 1.0}),
        encode_message({"state": {}, "time": "noon"}),
    ],
)
def test_store_cuts_off_a_peer_that_talks_nonsense_and_no_other(
    store: Store, caplog: pytest.LogCaptureFixture, words: bytes
) -> None:
    store.begin_attempt(1)
    good, bad = agent(store, "first"), agent(store, "second")
    good.send_message({"state": {"running": True}, "time": time.time()})
    with suppress(OSError):  # it may be cut off before it has said all of it
        bad._socket.sendall(words)
    until(lambda: store.agents["second"].closed is not None)
    assert isinstance(store.agents["second"].state, dict)
    assert store.send_to_agent("first", {"end": 1})
    assert good.receive_messages(PATIENCE) == [{"end": 1}] and store.agents["first"].state == {
        "running": True
    }
    assert not caplog.records, caplog.text  # asyncio tells of exceptions that nobody has caught


def _received(s: socket.socket) -> bytes:
    try:
        return s.recv(4096)
    except ConnectionResetError:
        return b""


def test_store_client_does_not_obey_without_the_token(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(host="127.0.0.1", port=server.getsockname()[1], token="secret")

        def impostor() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(encode_message({"nonce": "1"}))
                peer.recv(4096)
                peer.sendall(encode_message({"proof": "guess", "attempt": 9}))
                peer.recv(4096)

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(WireError, match="does not know"):
            StoreClient(address, {"role": "agent"})
        thread.join()


def test_store_listens_on_ipv6(tmp_path: Path) -> None:
    if not any("::1" in str(one) for one in psutil.net_if_addrs()["lo"]):
        pytest.skip("this machine has no ::1")
    with Store(RunDirectory(tmp_path), "::1") as store:
        store.begin_attempt(1)
        link = rank(store)
        link.send_message({"step": 4})
        until(lambda: store.ranks and store.ranks[0].beat == {"step": 4})
        assert link.local == "::1"
