"""A real run from a real S3 server: shards from there, checkpoints to there, killed in the middle of an upload, its
local disk wiped, started again; the same bytes as a run without any of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import psutil
import pytest
import yaml

from megastable.base.object_store import DeniedError, ObjectStore, StoreError
from megastable.base.upload_process import UploadProcess
from megastable.checkpoint import store
from megastable.data.manifest import Manifest, TokenizerInfo, adopt_shards
from megastable.data.shard_format import ShardWriter, hash_file
from megastable.data.skip_ledger import SkipEntry, append_entry
from megastable.run import records
from megastable.run.directory import RunDirectory, read_object
from megastable.run.run_image import OBJECTS, find_image
from tests.conftest import VOCABULARY, tiny
from tests.distributed import run_ranks, train
from tests.patience import PATIENCE, until
from tests.training.test_resume import identical

ROOT = Path(__file__).resolve().parents[2]
STEPS, INTERVAL, SHARDS = 18, 3, 24
HERE = 30_000  # bytes of shards that may be here: of about 24 x 3.6 KB, of which two ranks have 16 open


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """moto's S3 server in a process of its own, with a bucket."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
        )
    for name, text in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, text)

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    until(answers)
    import fsspec

    # One of an earlier server's address would be found again: the address is in the environment, not in its arguments.
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    fsspec.filesystem("s3").mkdir("bucket")
    yield process
    process.kill()  # also if it is stopped
    process.wait()


def write_shards(folder: Path) -> Manifest:
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(SHARDS):
        with ShardWriter(folder / f"part-{number}", VOCABULARY) as writer:
            while writer.tokens < 1_600:
                steps = random.integers(-3, 4, random.integers(5, 200))
                writer.add_document(np.append((random.integers(1, 99) + steps.cumsum()) % 98 + 1, 0))
    (folder / "tokenizer.model").write_bytes(b"a tokenizer")
    xxh3 = hash_file(folder / "tokenizer.model")
    tokenizer = TokenizerInfo(
        file="tokenizer.model", kind="sentencepiece", xxh3=xxh3, vocab_size=VOCABULARY, eod=0
    )
    manifest = adopt_shards(folder, tokenizer, 0.05)
    manifest.save_manifest(folder)
    return manifest


def put_folder(folder: Path, url: str) -> None:
    object_store = ObjectStore(url)
    for path in folder.iterdir():
        object_store.upload_file(path, path.name)


def parts_of(**more: Any) -> dict[str, Any]:
    return {
        "train": {
            "steps": STEPS,
            "global_batch": 64,
            "micro_batch": 2,
            "eval_samples": 8,
            "eval_interval": 0,
        },
        "checkpoint": {"interval": INTERVAL, "keep": 2, "healthy_after": 4, **more},
        "logging": {
            "trackers": [],
            "interval": 1000,
            "norms_interval": 5,
            "peak_tflops": 1.0,
            "flush_steps": 3,
        },
    }


def skip_samples(run: Path) -> None:
    """What a person has put on the ledger: it lives in the run directory alone."""
    run.mkdir(parents=True)
    append_entry(RunDirectory(run).skips, SkipEntry(first=60, end=175, reason="bad"))
    append_entry(RunDirectory(run).skips, SkipEntry(first=630, end=650, reason="bad"))


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for a process and all that it has started, at once; nothing if it has ended."""
    for action in ("suspend", "suspend", "kill"):  # twice: it may have started one more meanwhile
        with suppress(psutil.NoSuchProcess):
            for member in [
                psutil.Process(process.pid),
                *psutil.Process(process.pid).children(recursive=True),
            ]:
                with suppress(psutil.NoSuchProcess):
                    getattr(member, action)()
    process.wait()


@pytest.mark.slow
def test_refused_credentials_are_told_from_an_outage_and_renewed(
    server: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_from_now_on(count: bytes) -> None:
        """moto asks for credentials of a user that there is, after so many requests."""
        url = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset-auth"
        urlopen(Request(url, data=count, headers={"Content-Type": "text/plain"}, method="POST"))

    object_store, process = ObjectStore("s3://bucket/runs"), UploadProcess("s3://bucket/runs")
    (tmp_path / "file").write_bytes(b"content")
    file = tmp_path / "file", "two", hash_file(tmp_path / "file")
    object_store.write_object("one", b"")
    process.upload_file(*file)
    check_from_now_on(b"0")
    with pytest.raises(DeniedError, match="one"):
        object_store.write_object("one", b"")
    with pytest.raises(DeniedError, match="two"):
        process.upload_file(*file)
    process.close()
    check_from_now_on(b"1000000")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    credentials = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    with pytest.raises(DeniedError, match="Credential"):
        object_store.write_object("one", b"")
    credentials.write_text("[default]\naws_access_key_id = me\naws_secret_access_key = secret\n")
    object_store.write_object("one", b"renewed")
    assert object_store.read_object("one") == b"renewed"
    server.kill()
    with pytest.raises(StoreError) as caught:
        object_store.write_object("one", b"")
    assert not isinstance(caught.value, DeniedError)


@pytest.mark.slow
def test_a_run_whose_disk_is_wiped_goes_on_from_the_store_with_the_same_bytes(
    server: subprocess.Popen[bytes], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    local = tmp_path / "corpus"
    write_shards(local)
    put_folder(local, "s3://bucket/corpus")
    plain, wiped, cache = tmp_path / "plain", tmp_path / "wiped", tmp_path / "cache"
    url = "s3://bucket/runs/one"
    skip_samples(plain)
    run_ranks(2, train, tiny(local, plain, **parts_of()))

    config = tiny(cache, wiped, **parts_of(upload=url)).model_dump(mode="json")
    remote = {"path": str(cache), "url": "s3://bucket/corpus", "cache_gib": HERE / 2**30}
    config["data"]["corpora"] = [remote]
    config["supervise"] |= {"hang_floor": 4.0, "hang_factor": 3.0, "backoff_seconds": 1.0}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config))
    words = [sys.executable, "-m", "megastable", "supervise", str(recipe), "--", "--num_gpus", "2"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    skip_samples(wiped)
    object_store = ObjectStore(url)

    def start(log: str) -> subprocess.Popen[bytes]:
        with (tmp_path / log).open("wb") as output:
            process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=output, stderr=output)
        request.addfinalizer(lambda: end_tree(process))
        return process

    def image_steps() -> list[str]:
        found = find_image(object_store)
        return list(found[1].checkpoints) if found else []

    def in_the_middle() -> bool:
        assert process.poll() is None, (tmp_path / "first.log").read_text()
        image, newest = find_image(object_store), store.newest_first(wiped / "checkpoints")
        if image is None or not image[1].checkpoints or not newest or newest[0].name in image[1].checkpoints:
            return False
        named = {f.key for f in image[1].files.values()}
        records_of_newest = store.read_contents(newest[0]).files.values()
        there = object_store.list_objects(OBJECTS)
        keys = {f"{OBJECTS}{r.xxh3}-{r.size}" for r in records_of_newest}
        return 0 < len(keys & there.keys() - named) < len(keys)

    process = start("first.log")
    until(in_the_middle)
    end_tree(process)
    uploaded = store.step_of(Path(image_steps()[0]))
    assert uploaded < store.step_of(store.newest_first(wiped / "checkpoints")[0])
    shutil.rmtree(wiped)
    shutil.rmtree(cache)

    process = start("second.log")
    # The store hangs: the step waits for its data, and nobody takes that for a hang.
    progress = RunDirectory(wiped).progress
    until(lambda: (read_object(progress).get("step") or 0) > uploaded or process.poll() is not None)
    server.send_signal(signal.SIGSTOP)
    time.sleep(20)
    assert process.poll() is None
    told = (tmp_path / "second.log").read_text()  # rank 0 waits itself, or for the other rank
    assert read_object(progress)["phase"] == "object store" or "waits for data from an object store" in told
    server.send_signal(signal.SIGCONT)
    assert process.wait(PATIENCE) == 0, (tmp_path / "second.log").read_text()
    assert "is brought back from" in (tmp_path / "second.log").read_text()
    identical(plain / f"checkpoints/step-{STEPS}", wiped / f"checkpoints/step-{STEPS}")
    table, again = (records.read_newest_records(run / "steps") for run in (plain, wiped))
    assert table.num_rows == STEPS
    for column in ("step", "first_position", "next_position", "loss", "grad_norm", "lr", "worst_position"):
        assert table.column(column).equals(again.column(column)), column
    lines = [(run / "skips.jsonl").read_text() for run in (plain, wiped)]
    assert [json.loads(line)["first"] for line in lines[0].splitlines()] == [60, 630]
    assert [json.loads(line)["first"] for line in lines[1].splitlines()] == [60, 630]
    events = [json.loads(line) for line in (wiped / "journal.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "resumed"] == [uploaded]
    assert not [e for e in events if e["event"] == "hang"]
    # The end is in the store, too.
    here = [path.name for path in store.newest_first(wiped / "checkpoints")]
    assert image_steps() == here and here[:2] == [f"step-{STEPS}", f"step-{STEPS - INTERVAL}"]
    image = find_image(object_store)
    assert image is not None and "summary.json" in image[1].files
    assert set(object_store.list_objects(OBJECTS)) == {f.key for f in image[1].files.values()}
