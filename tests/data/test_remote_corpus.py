"""Corpora in an object store: what is read is what the manifest describes, whatever is fetched or killed when."""

from __future__ import annotations

import fcntl
import multiprocessing as mp
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base import object_store
from megastable.base.errors import ConfigError, DataError
from megastable.base.object_store import ObjectStore, StoreError
from megastable.config.tree import CorpusConfig, DataConfig
from megastable.data import remote_corpus
from megastable.data.corpora import find_warnings, open_corpora
from megastable.data.loader import Loader, RankPart
from megastable.data.manifest import Manifest, Stream
from megastable.data.remote_corpus import open_remote
from megastable.data.remote_shards import FETCHING, LOCKS, Remote, RemoteShards
from megastable.data.shard_format import hash_file
from megastable.data.shards import Shard
from megastable.data.skips import Skips
from tests.data.conftest import MakeCorpus
from tests.patience import until

SIZES = [900, 700, 800, 600, 500, 650]


@pytest.fixture
def original(make_corpus: MakeCorpus, tmp_path: Path) -> Path:
    """A corpus with a tokenizer's file, as it lies in the store."""
    folder = tmp_path / "store"
    manifest = make_corpus(folder, SIZES)
    (folder / "tokenizer.model").write_bytes(b"a tokenizer")
    xxh3 = hash_file(folder / "tokenizer.model")
    tokenizer = manifest.tokenizer.model_copy(update={"xxh3": xxh3})
    manifest.model_copy(update={"tokenizer": tokenizer}).save_manifest(folder)
    return folder


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for end in ("bin", "idx") for path in folder.glob(f"*.{end}"))


def count_downloads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    downloads, real = Counter[str](), ObjectStore.download_file

    def download(self: ObjectStore, key: str, path: Path) -> None:
        downloads[key] += 1
        real(self, key, path)

    monkeypatch.setattr(ObjectStore, "download_file", download)
    return downloads


def test_a_remote_corpus_gives_the_tokens_of_the_local_one(original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    open_remote(folder, f"file://{original}", None)
    assert not list(folder.glob("*.bin")) and (folder / "tokenizer.model").read_bytes() == b"a tokenizer"
    local, remote = (Stream(f, Manifest.load_manifest(f), "train") for f in (original, folder))
    assert local.manifest.fingerprint() == remote.manifest.fingerprint()
    first = remote.read_tokens(0, 50)
    assert len(list(folder.glob("*.bin"))) == 1  # what was needed, no more
    assert np.array_equal(first, local.read_tokens(0, 50))
    assert np.array_equal(remote.read_tokens(0, remote.tokens), local.read_tokens(0, local.tokens))
    assert sorted(p.name for p in folder.glob("*.bin")) == sorted(p.name for p in original.glob("*.bin"))
    (folder / "part-2.bin").unlink()
    with pytest.raises(DataError, match=r"part-2\.bin is not fetched"):
        Shard(folder / "part-2")  # as tools do that know folders only
    with pytest.raises(DataError, match="leave it out"):
        RemoteShards(folder, Remote(url="s3://a/b", limit=1)).check_unlimited("all are needed")
    remote.remote.check_unlimited("all are needed")  # type: ignore[union-attr]
    assert not list((folder / FETCHING).iterdir())


def test_memory_stores_work_by_the_same_code(original: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for path in original.iterdir():
        memory.pipe_file(f"/bucket/c/{path.name}", path.read_bytes())
    folder = tmp_path / "here"
    open_remote(folder, "memory://bucket/c", None)
    stream = Stream(folder, Manifest.load_manifest(folder), "train")
    assert np.array_equal(
        stream.read_tokens(0, 99), Stream(original, stream.manifest, "train").read_tokens(0, 99)
    )
    store = ObjectStore("memory://bucket/c")
    assert set(store.list_objects("part-0")) <= {"part-0.bin", "part-0.idx"}
    assert store.list_objects("")["tokenizer.model"] == 11
    store.write_object("x/y", b"12")
    assert store.list_objects("x/") == {"x/y": 2} and store.read_object("x/y") == b"12"
    store.delete_objects(["x/y", "x/z"])
    assert store.list_objects("x/") == {}


def test_wrong_objects_are_refused_by_name(original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    open_remote(folder, f"file://{original}", None)
    stream = Stream(folder, Manifest.load_manifest(folder), "train")
    content = bytearray((original / "part-1.bin").read_bytes())
    content[7] ^= 1
    (original / "part-1.bin").write_bytes(content)
    (original / "part-2.bin").write_bytes((original / "part-2.bin").read_bytes()[:-2])
    (original / "part-3.idx").unlink()
    for name, words in (
        ("part-1", "part-1.bin is not"),
        ("part-2", "part-2.bin is not"),
        ("part-3", "part-3.idx"),
    ):
        with pytest.raises(DataError, match=words):
            stream.open_shard(name)
    assert not list(folder.glob("*.bin")) and not list((folder / FETCHING).iterdir())
    assert stream.open_shard("part-0").tokens == SIZES[0]


def test_what_is_no_folder_for_it_is_refused(original: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is in it"):
        open_remote(original, "file:///nowhere", None)  # a person's only copy would be removed for room
    folder = tmp_path / "here"
    open_remote(folder, f"file://{original}", 10**6)
    with pytest.raises(ConfigError, match="not of"):
        open_remote(folder, "file:///nowhere", None)
    with pytest.raises(DataError, match="not a prepared corpus"):
        open_remote(tmp_path / "other", f"file://{tmp_path}/nothing", None)
    (original / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(DataError, match="not the tokenizer"):
        open_remote(tmp_path / "third", f"file://{original}", None)
    with pytest.raises(ConfigError, match="foo"):
        ObjectStore("foo://bucket")
    with pytest.raises(ValueError, match="give it as url"):
        CorpusConfig(path="s3://bucket/mine")
    with pytest.raises(ValueError, match="such as s3"):
        CorpusConfig(path="mine", url="bucket/mine")
    with pytest.raises(ValueError, match="cache_gib"):
        CorpusConfig(path="mine", cache_gib=1)


def test_a_start_that_was_killed_at_once_is_begun_again(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(path: Path, content: bytes) -> None:
        path.with_name(f".{path.name}.half").write_bytes(content[:3])
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(remote_corpus.durable, "write_file", die)
        with pytest.raises(KeyboardInterrupt):
            open_remote(tmp_path / "here", f"file://{original}", None)
    open_remote(tmp_path / "here", f"file://{original}", None)
    assert Manifest.load_manifest(tmp_path / "here") == Manifest.load_manifest(original)


def test_a_killed_fetch_leaves_nothing_that_counts(original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    open_remote(folder, f"file://{original}", 4000)
    half = folder / FETCHING / "part-0"
    half.mkdir(parents=True)
    (half / "part-0.bin").write_bytes(b"half")
    (half / ".bytes").write_text("10000000")  # of a process that is gone: it reserves nothing
    (folder / LOCKS / "part-0").touch()
    (folder / "part-1.idx").write_bytes((original / "part-1.idx").read_bytes())  # killed between two renames
    stream = Stream(folder, Manifest.load_manifest(folder), "train")
    assert stream.open_shard("part-1").verify_shard() == stream.describe_shard("part-1")
    assert not half.exists()


def fetch_in_process(folder: Path, name: str, barrier: object, log: Path) -> None:
    real = ObjectStore.download_file

    def download(self: ObjectStore, key: str, path: Path) -> None:
        with log.open("a") as file:
            file.write(f"{key}\n")
        time.sleep(0.1)
        real(self, key, path)

    ObjectStore.download_file = download  # type: ignore[method-assign]
    barrier.wait()  # type: ignore[attr-defined]
    stream = Stream(folder, Manifest.load_manifest(folder), "train")
    shard = stream.open_shard(name)
    barrier.wait()  # type: ignore[attr-defined]  # all have it open at once
    assert shard.verify_shard() == stream.describe_shard(name)


def test_processes_of_a_host_fetch_a_shard_once(original: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "here", tmp_path / "log"
    open_remote(folder, f"file://{original}", None)
    context = mp.get_context("fork")
    barrier = context.Barrier(3)
    processes = [
        context.Process(target=fetch_in_process, args=(folder, "part-4", barrier, log)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
        assert process.exitcode == 0
    assert log.read_text().split() == ["part-4.bin", "part-4.idx"]


def test_what_is_open_stays_and_what_was_opened_longest_ago_goes(original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    manifest = Manifest.load_manifest(original)
    sizes = {info.name: info.bin_bytes + info.idx_bytes for info in manifest.shards}
    limit = sizes["part-0"] + sizes["part-1"] + sizes["part-2"]
    open_remote(folder, f"file://{original}", limit)
    stream = Stream(folder, manifest, "train")
    held = stream.open_shard("part-0")
    stream.open_shard("part-1")
    stream.open_shard("part-2")
    stream.open_shard("part-1")
    stream.open_shard("part-3")  # part-0 is open, part-1 was opened after part-2
    assert sorted(p.stem for p in folder.glob("*.bin")) == ["part-0", "part-1", "part-3"]
    assert held.verify_shard() == stream.describe_shard("part-0")
    del held
    stream.open_shard("part-4")
    assert "part-0" not in {p.stem for p in folder.glob("*.bin")} and bytes_in(folder) <= limit


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_order_of_reads_gives_the_same_tokens_within_the_limit(data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make = make_corpus_of(root / "store")
        sizes = {info.name: info.bin_bytes + info.idx_bytes for info in make.shards}
        limit = data.draw(st.integers(max(sizes.values()), sum(sizes.values())))
        open_remote(root / "here", f"file://{root / 'store'}", limit)
        local, remote = Stream(root / "store", make, "train"), RemoteShards.find_remote(root / "here")
        assert remote is not None
        stream, held = Stream(root / "here", make, "train"), dict[str, object]()
        names = st.sampled_from(sorted(sizes))
        for _ in range(data.draw(st.integers(1, 12))):
            action = data.draw(st.sampled_from(["open", "hold", "drop", "kill", "damage", "read"]))
            shard = data.draw(names)
            if action == "read":
                first = data.draw(st.integers(0, local.tokens - 1))
                count = data.draw(st.integers(1, min(300, local.tokens - first)))
                fresh = Stream(root / "here", make, "train")
                assert np.array_equal(fresh.read_tokens(first, count), local.read_tokens(first, count))
                del fresh
            elif action == "open":
                was_here = remote.is_here(stream.describe_shard(shard))
                assert stream.open_shard(shard).verify_shard() == stream.describe_shard(shard)
            elif action == "hold":
                held[shard] = stream.open_shard(shard)
            elif action == "drop":
                held.pop(shard, None)
            elif action == "kill":  # a fetch that was killed, at any place
                half = root / "here" / FETCHING / shard
                half.mkdir(parents=True, exist_ok=True)
                (half / ".bytes").write_text(str(sizes[shard]))
                (half / f"{shard}.bin").write_bytes(b"?" * data.draw(st.integers(0, 99)))
            elif shard not in held:  # a disk that lost the end of a file: sizes tell
                for path in (root / "here").glob(f"{shard}.bin"):
                    path.write_bytes(path.read_bytes()[:-2])
            if action == "open" and not was_here:  # room was made for it
                assert bytes_in(root / "here") <= max(limit, sum(sizes[s] for s in {*held, shard}))
        for shard in held:
            assert held[shard].verify_shard() == stream.describe_shard(shard)  # type: ignore[attr-defined]


_MADE: dict[str, bytes] = {}


def make_corpus_of(folder: Path) -> Manifest:
    """The same small corpus each time, made once."""
    from megastable.data.manifest import TokenizerInfo, adopt_shards
    from megastable.data.shards import ShardWriter

    folder.mkdir()
    if not _MADE:
        random = np.random.default_rng(1)
        for number, size in enumerate((300, 200, 260, 180)):
            with ShardWriter(folder / f"part-{number}", 1000) as writer:
                while writer.tokens < size:
                    document = random.integers(1, 1000, min(17, size - writer.tokens))
                    document[-1] = 0
                    writer.add_document(document)
        (folder / "t.model").write_bytes(b"t")
        tokenizer = TokenizerInfo(
            file="t.model", kind="sentencepiece", xxh3=hash_file(folder / "t.model"), vocab_size=1000, eod=0
        )
        adopt_shards(folder, tokenizer, 0.0).save_manifest(folder)
        _MADE.update({path.name: path.read_bytes() for path in folder.iterdir()})
    for name, content in _MADE.items():
        (folder / name).write_bytes(content)
    return Manifest.load_manifest(folder)


def read_steps(folder: Path, url: str | None, steps: int, cache_gib: float | None = None) -> list[np.ndarray]:
    given = CorpusConfig(path=folder, url=url, cache_gib=cache_gib)
    corpora = open_corpora([given], 32, 5)
    with Loader(corpora.train, Skips.from_ranges([]), 0, 8, RankPart(2), DataConfig()) as loader:
        return [np.concatenate([m.tokens.numpy() for m in next(loader).micro_batches]) for _ in range(steps)]


@pytest.mark.parametrize("limit", [None, 6000])
def test_a_loader_reads_the_same_and_fetches_ahead(
    original: Path, tmp_path: Path, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = count_downloads(monkeypatch)
    plain = read_steps(original, None, 30)
    gib = None if limit is None else limit / 2**30
    fetched = read_steps(tmp_path / "here", f"file://{original}", 30, gib)
    assert all(np.array_equal(one, other) for one, other in zip(plain, fetched, strict=True))
    if limit is None:
        assert {key: n for key, n in downloads.items() if n > 1} == {}


@pytest.mark.parametrize(("ahead", "taken"), [(256, 0), (1, 0), (1, 3)])
def test_shards_are_fetched_before_their_step(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, taken: int
) -> None:
    """Those of the steps in view first, then all others."""
    monkeypatch.setattr(remote_corpus, "AHEAD", ahead)
    corpora = open_corpora([CorpusConfig(path=tmp_path / "here", url=f"file://{original}")], 32, 5)
    with Loader(corpora.train, Skips.from_ranges([]), 0, 2, RankPart(2), DataConfig(prefetch=1)) as loader:
        for _ in range(taken):
            next(loader)
        until(lambda: len(list((tmp_path / "here").glob("*.bin"))) == len(SIZES))


def test_a_limit_below_the_corpus_is_warned_of(original: Path, tmp_path: Path) -> None:
    gib = 6000 / 2**30
    given = CorpusConfig(path=tmp_path / "here", url=f"file://{original}", cache_gib=gib)
    warnings = find_warnings(open_corpora([given], 32, 5), 10, False)
    assert any("fetched again" in text for text in warnings)
    assert not find_warnings(open_corpora([given.model_copy(update={"cache_gib": 1.0})], 32, 5), 10, False)


def test_an_outage_is_waited_for_and_said(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_remote(tmp_path / "here", f"file://{original}", None)
    stream = Stream(tmp_path / "here", Manifest.load_manifest(original), "train")
    real, down = ObjectStore.download_file, threading.Event()

    def download(self: ObjectStore, key: str, path: Path) -> None:
        if down.is_set():
            raise StoreError("connection refused")
        real(self, key, path)

    monkeypatch.setattr(ObjectStore, "download_file", download)
    down.set()
    found = list[np.ndarray]()
    reader = threading.Thread(target=lambda: found.append(stream.read_tokens(0, 40)))
    reader.start()
    until(lambda: "refused" in object_store.describe_wait())
    assert (
        "part-0.bin" in object_store.describe_wait() and "connection refused" in object_store.describe_wait()
    )
    assert not found
    down.clear()
    reader.join(60)
    assert np.array_equal(found[0], Stream(original, stream.manifest, "train").read_tokens(0, 40))
    assert not object_store.describe_wait()
    assert "waiting for" in caplog.text and "no longer waiting" in caplog.text


def test_a_shard_that_another_process_fetches_is_waited_for_and_said(original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    open_remote(folder, f"file://{original}", None)
    stream = Stream(folder, Manifest.load_manifest(folder), "train")
    lock = (folder / LOCKS / "part-0").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    reader = threading.Thread(target=stream.read_tokens, args=(0, 9))
    reader.start()
    until(lambda: "part-0" in object_store.describe_wait())
    lock.close()
    reader.join(60)
    assert not reader.is_alive() and not object_store.describe_wait()


def test_what_is_fetched_ahead_holds_nobody_up(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that hangs while shards are fetched ahead would seem to wait for the store, which is no hang."""
    begun, go_on, real = threading.Event(), threading.Event(), ObjectStore.download_file

    def download(self: ObjectStore, key: str, path: Path) -> None:
        begun.set()
        go_on.wait()
        real(self, key, path)

    corpora = open_corpora([CorpusConfig(path=tmp_path / "here", url=f"file://{original}")], 32, 5)
    monkeypatch.setattr(ObjectStore, "download_file", download)
    ahead = remote_corpus.ReadAhead(corpora.train.order, corpora.train.streams)
    ahead.follow_steps(iter([np.arange(4)]))
    assert begun.wait(60) and not object_store.describe_wait()
    stream = corpora.train.streams[0]
    reader = threading.Thread(target=lambda: stream.read_tokens(0, stream.tokens))
    reader.start()
    until(lambda: bool(object_store.describe_wait()))  # until somebody needs one
    go_on.set()
    reader.join(60)
    ahead.close()
    assert not reader.is_alive() and not object_store.describe_wait()


def test_clients_draw_from_random_numbers_of_their_own() -> None:
    connector = pytest.importorskip("aiohttp.connector")
    ObjectStore("memory://bucket")
    before = random.getstate()
    connector.random.shuffle(list(range(9)))
    assert random.getstate() == before


def test_a_wait_ends_when_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise StoreError("down")

    with pytest.raises(StoreError):
        object_store.retry(fail, "it", seconds=0.2)
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(StoreError):
        object_store.retry(fail, "it", stopped=stopped)
    tries = list[int]()

    def missing() -> None:
        tries.append(1)
        raise FileNotFoundError("no")

    with pytest.raises(FileNotFoundError):
        object_store.retry(missing, "it")
    assert len(tries) == 1 and os.getpid()
