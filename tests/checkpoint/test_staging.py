"""A local disk between the ranks and the shared directory: what was sealed there is not lost with the processes."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from megastable.base import errors
from megastable.checkpoint import store
from megastable.checkpoint.files import write_file
from megastable.checkpoint.held_points import PointKey
from megastable.checkpoint.memory_folder import PartFolder
from megastable.checkpoint.saving import Saver
from megastable.checkpoint.staging import upload
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import CheckpointFailed, CheckpointRecovered, Resumed
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.training.test_failures import batch, keep_files_small, train
from tests.training.test_resume import identical


def kill_in_the_upload() -> None:
    """SIGKILL this process when its part is sealed on the local disk and not brought over."""
    from megastable.checkpoint import saving

    def upload(*_: object) -> None:
        # Both parts must be there: a checkpoint of which a rank's part is missing is none.
        os.kill(os.getpid(), signal.SIGKILL)

    saving.upload = upload  # type: ignore[assignment]


@pytest.mark.slow
def test_a_run_killed_in_an_upload_goes_on_from_the_local_disk(corpus: Path, tmp_path: Path) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert run_ranks(1, train, tiny(corpus, straight, train=batch())) == [(0, "")]
    config = tiny(corpus, run, train=batch(), checkpoint={"interval": 15, "staging": tmp_path / "disk"})
    with pytest.raises(AssertionError):
        run_ranks(1, train, config, kill_in_the_upload)
    assert not store.newest_first(run / "checkpoints")
    (staged,) = PartFolder(tmp_path / "disk", run).held()
    assert staged.key.step == 15
    assert run_ranks(1, train, config) == [(0, "")]
    events = list(RunDirectory(run).events(CheckpointRecovered, Resumed))
    assert [(e["event"], e["step"]) for e in events] == [("checkpoint_recovered", 15), ("resumed", 15)]
    assert identical(straight / "checkpoints/step-20", run / "checkpoints/step-20") == 3
    store.verify(run / "checkpoints/step-15")
    assert not list((tmp_path / "disk").rglob("*.safetensors"))


def test_every_rank_writes_there_first_and_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    config = tiny(corpus, run, train=batch(), checkpoint={"interval": 10, "staging": disk})
    assert run_ranks(2, train, config) == [(0, ""), (0, "")]
    for name in ("step-10", "step-20"):
        store.verify(run / "checkpoints" / name)
    assert not [path for path in disk.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_local_disk_that_is_full(corpus: Path, tmp_path: Path) -> None:
    """The save fails like one to a full shared directory; nothing of it remains."""
    disk = tmp_path / "disk"
    disk.write_text("no folder")
    config = tiny(corpus, tmp_path / "run", train=batch(), checkpoint={"staging": disk})
    ((code, message),) = run_ranks(1, train, config)
    assert code == errors.NO_SPACE and "could not be written" in message
    (failed, *_) = RunDirectory(tmp_path / "run").events(CheckpointFailed)
    assert "disk" in failed["problem"]
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_what_changed_on_the_local_disk_is_not_brought_over(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    record = write_file(here / "a", b"x" * 100)
    upload(here, {"a": record}, there)
    assert (there / "a").read_bytes() == b"x" * 100
    (here / "a").write_bytes(b"x" * 99 + b"y")
    with pytest.raises(OSError, match="has changed since it was written"):
        upload(here, {"a": record}, there)


@pytest.mark.slow
def test_a_new_run_in_the_directory_of_an_old_one_takes_nothing_of_it(corpus: Path, tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    config = tiny(corpus, run, train=batch(), checkpoint={"interval": 15, "staging": disk})
    with pytest.raises(AssertionError):
        run_ranks(1, train, config, kill_in_the_upload)
    assert PartFolder(disk, run).held()
    shutil.rmtree(run)
    assert run_ranks(1, train, config) == [(0, "")]
    assert not list(RunDirectory(run).events(CheckpointRecovered, Resumed))
    assert not list(disk.rglob("*.safetensors"))


def train_with_small_files(config: RunConfig) -> tuple[int, str]:
    keep_files_small(20_000)
    return train(config)


@pytest.mark.slow
def test_what_cannot_be_brought_over_now_is_kept_for_the_next_start(corpus: Path, tmp_path: Path) -> None:
    """The shared directory may be full: the only copy of the newest checkpoint is not the thing to delete."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    config = tiny(corpus, run, train=batch(), checkpoint={"interval": 15, "staging": disk})
    with pytest.raises(AssertionError):
        run_ranks(1, train, config, kill_in_the_upload)
    full = tiny(
        corpus, run, train=batch(steps=1), checkpoint={"interval": 0, "at_end": False, "staging": disk}
    )
    run_ranks(1, train_with_small_files, full)
    assert run_ranks(1, train, config) == [(0, "")]
    events = list(RunDirectory(run).events(CheckpointRecovered))
    assert [bool(e["problem"]) for e in events] == [True, False]


def test_a_rank_leaves_the_folder_that_another_one_is_about_to_write_to(tmp_path: Path) -> None:
    """Of the same checkpoint, and still empty."""
    staging, key = PartFolder(tmp_path / "staging", tmp_path), PointKey(step=5, epoch=0, lineage="a" * 16)
    staging.root.mkdir(parents=True)
    opened = os.open(staging.begin(key), os.O_RDONLY)
    try:
        Saver._stage(cast(Saver, SimpleNamespace(_rank=1)), staging, key)
        assert os.fstat(opened).st_nlink  # 0 once it has been removed
    finally:
        os.close(opened)
