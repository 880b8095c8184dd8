"""Parts between two memories over TCP: what is right arrives whole, and nothing else counts."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megastable.base import free_memory
from megastable.checkpoint.files import hash_file
from megastable.checkpoint.held_points import DAY, HeldPart, MemoryFolder, PointKey, names_of
from megastable.checkpoint.memory_hosts import MemoryClient, MemoryServer, Pace
from megastable.run import wire

TOKEN = "secret"
FREE = Pace(None)
KEY = b'{"step": 1, "epoch": 0, "lineage": "0123456789abcdef"}'


def key(step: int = 4, epoch: int = 0) -> PointKey:
    return PointKey(step=step, epoch=epoch, lineage="0123456789abcdef")


def nothing() -> None:
    pass


@pytest.fixture
def here(tmp_path: Path) -> MemoryFolder:
    return opened(tmp_path / "here")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MemoryServer]:
    server = MemoryServer(opened(tmp_path / "there"), "127.0.0.1", TOKEN)
    yield server
    server.close()


def opened(memory: Path, run: str = "run") -> MemoryFolder:
    memory.mkdir(exist_ok=True)
    folder = MemoryFolder(memory, memory.parent / run)
    folder.open_locked()
    return folder


def written(folder: MemoryFolder, of: PointKey, rank: int = 1, size: int = 3_000_000) -> HeldPart:
    into = folder.begin_point(of)
    for i, name in enumerate(names_of(rank)):
        (into / name).write_bytes(os.urandom(size if not i else 10))
    part = HeldPart(key=of, rank=rank, world=2, files={n: hash_file(into / n) for n in names_of(rank)})
    folder.seal_part(part)
    return part


def client(server: MemoryServer, token: str = TOKEN) -> MemoryClient:
    return MemoryClient(server.address, server.port, token)


def test_a_part_arrives_and_comes_back(here: MemoryFolder, server: MemoryServer, tmp_path: Path) -> None:
    parts = [written(here, key(), rank) for rank in (0, 1)]
    with client(server) as one:
        sent = [one.put_part(here.point_folder(key()), part, FREE, nothing) for part in parts]
    assert server.folder.list_parts() == parts == here.list_parts()
    assert sum(sent) == server.received == sum(r.size for part in parts for r in part.files.values())
    with client(server) as one:
        for name, record in parts[1].files.items():
            one.get_file(key(), 1, name, record, tmp_path)
            assert (tmp_path / name).read_bytes() == (here.point_folder(key()) / name).read_bytes()
        with pytest.raises(OSError, match="No such file"):
            one.get_file(key(5), 1, "rank-00001.json", parts[1].files["rank-00001.json"], tmp_path)


def test_a_new_point_replaces_those_that_are_not_kept(here: MemoryFolder, server: MemoryServer) -> None:
    server.kept = lambda of: of.step == 2
    with client(server) as one:
        for step in (1, 2, 3, 4):
            one.put_part(here.point_folder(key(step)), written(here, key(step)), FREE, nothing)
    assert [part.key.step for part in server.folder.list_parts()] == [2, 4]


@pytest.mark.parametrize("token", ["", "other"])
def test_strangers_are_refused(token: str, server: MemoryServer) -> None:
    with pytest.raises(OSError):
        client(server, token)


def test_a_server_that_does_not_know_the_token_gets_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def impostor() -> None:
            s, _ = listening.accept()
            s.sendall(wire.encode_message({"nonce": "x"}))
            s.recv(1000)
            s.sendall(wire.encode_message({"proof": "guessed"}))

        threading.Thread(target=impostor, daemon=True).start()
        with pytest.raises(OSError, match="does not know the token"):
            MemoryClient("127.0.0.1", listening.getsockname()[1], TOKEN)


def test_a_changed_byte_does_not_count(here: MemoryFolder, server: MemoryServer) -> None:
    part = written(here, key())
    path = here.point_folder(key()) / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[1_500_000] ^= 1
    path.write_bytes(content)
    with client(server) as one, pytest.raises(OSError, match="hash"):
        one.put_part(here.point_folder(key()), part, FREE, nothing)
    assert not server.folder.list_parts() and not list(server.folder.point_folder(key()).glob(".*"))


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_sender_that_breaks_off(after: int, here: MemoryFolder, server: MemoryServer) -> None:
    part, looks = written(here, key()), list[int]()

    def breaking() -> None:
        looks.append(1)
        if len(looks) > after:
            raise OSError("broken off")

    with client(server) as one, pytest.raises(OSError, match="broken off"):
        one.put_part(here.point_folder(key()), part, FREE, breaking)
    assert not server.folder.list_parts()
    with client(server) as one:  # the next one is as the first
        one.put_part(here.point_folder(key()), part, FREE, nothing)
    assert server.folder.list_parts() == [part]


def test_what_was_rewound_meanwhile_is_not_sealed(here: MemoryFolder, server: MemoryServer) -> None:
    part = written(here, key())

    def rewinding() -> None:
        if all(
            (server.folder.point_folder(key()) / name).exists() for name in part.files
        ):  # only the seal is missing
            server.refuse = lambda of: "the run was rewound" if of == key() else ""

    with client(server) as one, pytest.raises(OSError, match="rewound"):
        one.put_part(here.point_folder(key()), part, FREE, rewinding)
    assert not server.folder.list_parts()
    with client(server) as one, pytest.raises(OSError, match="rewound"):
        one.put_part(here.point_folder(key()), part, FREE, nothing)


def test_a_host_without_memory_refuses(
    here: MemoryFolder, server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = written(here, key())
    monkeypatch.setattr(free_memory, "free_bytes", lambda: 1000)
    with client(server) as one, pytest.raises(OSError, match="no memory left"):
        one.put_part(here.point_folder(key()), part, FREE, nothing)
    assert not server.folder.list_parts()


@pytest.mark.parametrize(
    "line",
    [
        b"{}\n", b"null\n", b"x" * 100 + b"\n", b'{"do": "run"}\n', b'{"do": "put", "name": "../../x", "rank": 0}\n',
        b'{"do": "get", "name": "/etc/passwd", "rank": 0}\n', b'{"do": "seal"}\n',
        b'{"do": "get", "rank": 1, "name": "rank-00001.json", "key": {"step": 1, "epoch": 0, "lineage": "../.."}}\n',
        b'{"do": "get", "rank": 1, "name": "/etc/passwd", "key": %s}\n' % KEY,
        b'{"do": "put", "rank": 1, "name": "../x", "record": {"size": 0, "xxh3": ""}, "key": %s}\n' % KEY,
    ],
)  # fmt: skip
def test_nonsense_ends_the_connection_and_nothing_else(line: bytes, server: MemoryServer) -> None:
    with client(server) as one:
        one._connection.socket.sendall(line)
        answer = one._connection.file.readline()
        assert not answer or "error" in json.loads(answer)
        assert one._connection.file.readline() == b""
    client(server).close()


def test_the_pace_is_kept() -> None:
    pace, slept = Pace(1e6), list[float]()
    for _ in range(10):
        pace.wait_before(100_000, slept.append)
    assert sum(slept) > 0.5 and max(slept) < 1.1  # what comes before is due
    Pace(None).wait_before(1 << 40)


# The folder


@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_that_is_not_of_this_user_alone_is_refused(linked: bool, tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path, tmp_path / "run")
    if linked:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.user.symlink_to(tmp_path / "elsewhere")
    else:
        folder.user.mkdir()
        folder.user.chmod(0o777)
    with pytest.raises(OSError, match="not a folder of this user alone"):
        folder.open_locked()


def test_torn_parts_are_not_held(here: MemoryFolder) -> None:
    part = written(here, key())
    (here.point_folder(key()) / "rank-00001.safetensors").write_bytes(b"short")
    written(here, key(8))
    (here.point_folder(key(8)) / "held-00001.json").write_text('{"format"')
    assert not here.list_parts()
    written(here, key(12), 0)
    assert [p.key.step for p in here.list_parts()] == [12] and part.rank == 1


def run_dir(path: Path, finished: bool = False) -> Path:
    path.mkdir()
    (path / "journal.jsonl").touch()
    if finished:
        (path / "summary.json").touch()
    return path


def test_what_is_abandoned_is_swept(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    for name, finished in (("going", False), ("finished", True), ("locked", True), ("old", False)):
        run_dir(tmp_path / name, finished)
    folders = {name: opened(memory, name) for name in ("going", "finished", "gone", "locked", "old")}
    for name, folder in folders.items():
        written(folder, key())
        if name != "locked":
            folder.close()  # its processes are dead
    past = time.time() - 4 * DAY
    os.utime(folders["old"].root, (past, past))
    mine = opened(memory, "mine")
    swept = {name.rpartition("-")[0] for name in mine.sweep_abandoned(3.0)}
    assert swept == {"finished", "gone", "old"}
    assert {name for name, folder in folders.items() if folder.list_parts()} == {"going", "locked"}
    assert mine.root.exists()
