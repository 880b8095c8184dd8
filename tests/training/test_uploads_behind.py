"""Training from a store, with its checkpoints uploaded: the steps and the bytes are those of a run without."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megastable.base.errors import ConfigError
from megastable.base.object_store import ObjectStore, StoreError
from megastable.config.tree import RunConfig
from megastable.run import records
from megastable.run.directory import RunDirectory
from megastable.run.run_image import OBJECTS, PLAN, find_image
from tests.conftest import tiny
from tests.distributed import run_ranks, train
from tests.training.test_resume import identical

COLUMNS = ("step", "first_position", "next_position", "loss", "grad_norm", "lr")


def config_of(corpus: Path, run: Path, steps: int, **checkpoint: Any) -> RunConfig:
    return tiny(
        corpus, run, checkpoint={"interval": 2, "keep": 2, "healthy_after": 1, **checkpoint},
        train={"steps": steps, "global_batch": 8, "micro_batch": 4, "eval_samples": 0, "eval_interval": 0},
    )  # fmt: skip


def test_a_wiped_run_goes_on_as_one_that_was_not(corpus: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    plain, wiped = tmp_path / "plain", tmp_path / "wiped"
    run_ranks(1, train, config_of(corpus, plain, 6))
    run_ranks(1, train, config_of(corpus, wiped, 4, upload=url))
    uploaded = find_image(ObjectStore(url))
    assert uploaded is not None and list(uploaded[1].checkpoints) == ["step-4", "step-2"]
    assert "checkpoints/step-2/health.json" in uploaded[1].files and "summary.json" in uploaded[1].files
    shutil.rmtree(wiped)
    with pytest.raises(AssertionError, match=r"give its checkpoint\.upload again"):
        run_ranks(1, forget_url, config_of(corpus, wiped, 6, upload=url))
    run_ranks(1, train, config_of(corpus, wiped, 6, upload=url))
    identical(plain / "checkpoints/step-6", wiped / "checkpoints/step-6")
    tables = [records.read_newest_records(run / "steps") for run in (plain, wiped)]
    assert all(tables[0].column(name).equals(tables[1].column(name)) for name in COLUMNS)
    events = [json.loads(line) for line in (wiped / "journal.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "resumed"] == [4]
    newest = find_image(ObjectStore(url))
    assert newest is not None and list(newest[1].checkpoints) == ["step-6", "step-4"]


def forget_url(config: RunConfig) -> None:
    """A start that is killed before the checkpoints are fetched, and one without the URL."""
    from megastable.run.run_image import restore_records

    assert config.run.dir is not None and config.checkpoint.upload is not None
    restore_records(config.run.dir, config.checkpoint.upload, print)
    assert (RunDirectory(config.run.dir).checkpoints / PLAN).exists()
    train(config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"upload": None})}))


def train_in_outages(config: RunConfig, phases: Path) -> int:
    """Train while the store fails for a while, twice for reads and all the time for writes."""
    real, begun, over = ObjectStore.download_file, time.monotonic(), threading.Event()

    def download(self: ObjectStore, key: str, path: Path) -> None:
        if key.startswith("part-") and time.monotonic() - begun < 12.0:
            raise StoreError("connection refused")
        real(self, key, path)

    def refuse(self: ObjectStore, key: str, content: bytes) -> None:
        if key.startswith(OBJECTS):
            raise StoreError("503")

    def watch() -> None:
        seen = set[str]()
        while not over.wait(0.1):
            path = RunDirectory(config.run.dir).progress if config.run.dir else Path()
            if path.exists():
                seen.add(json.loads(path.read_text())["phase"])
                phases.write_text(json.dumps(sorted(seen)))

    ObjectStore.download_file, ObjectStore.write_object = download, refuse  # type: ignore[method-assign]
    import megastable.training.checkpoints as of_training

    of_training.LAST_SECONDS = 1.0  # type: ignore[misc]
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return train(config)
    finally:
        over.set()
        watcher.join()


def train_without_store(config: RunConfig) -> int:
    def refuse(self: ObjectStore, key: str, content: bytes) -> None:
        if key.startswith(OBJECTS):
            raise StoreError("503")

    ObjectStore.write_object = refuse  # type: ignore[method-assign]
    return train(config)


@pytest.mark.slow
def test_the_end_waits_for_its_upload_no_longer_than_the_other_ranks_do(corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus, tmp_path / "run", 2, upload=f"file://{tmp_path}/store")
    config = config.model_copy(update={"run": config.run.model_copy(update={"timeout": 20})})
    assert run_ranks(2, train_without_store, config) == [0, 0]


@pytest.mark.slow
def test_outages_pause_a_step_for_data_and_nothing_for_uploads(corpus: Path, tmp_path: Path) -> None:
    plain, run, cache = tmp_path / "plain", tmp_path / "run", tmp_path / "cache"
    given = tmp_path / "given"
    shutil.copytree(corpus, given)
    manifest = json.loads((given / "manifest.json").read_text())
    (given / "tokenizer.model").write_bytes(b"t")
    from megastable.data.shard_format import hash_file

    manifest["tokenizer"]["xxh3"] = hash_file(given / "tokenizer.model")
    (given / "manifest.json").write_text(json.dumps(manifest))
    run_ranks(1, train, config_of(given, plain, 6))
    config = config_of(cache, run, 6, upload=f"file://{tmp_path}/store")
    remote = config.data.corpora[0].model_copy(update={"url": f"file://{given}"})
    config = config.model_copy(update={"data": config.data.model_copy(update={"corpora": [remote]})})
    run_ranks(1, train_in_outages, config, tmp_path / "phases.json")
    identical(plain / "checkpoints/step-6", run / "checkpoints/step-6")
    assert "object store" in json.loads((tmp_path / "phases.json").read_text())
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert sum("503" in e.get("text", "") for e in events if e["event"] == "warning") == 1
    assert find_image(ObjectStore(f"file://{tmp_path}/store")) is None


def test_what_needs_a_run_directory_is_refused_without_one() -> None:
    from megastable.config.recipe import load_recipe

    with pytest.raises(ConfigError, match=r"set run\.dir"):
        load_recipe("launch/recipes/quickstart.yaml", ["checkpoint.upload=s3://bucket/run"])
