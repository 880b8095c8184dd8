"""Which checkpoints are deleted: by rules that hold for any of them, and on a disk that does not always do as asked."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base import durable
from megastable.base.errors import CheckpointError
from megastable.checkpoint import markers, store
from megastable.checkpoint.files import write_file
from megastable.checkpoint.held_points import PartFolder, PointKey
from megastable.checkpoint.markers import StepsOnTrend
from megastable.checkpoint.parts import upload_files
from megastable.checkpoint.saving import (
    KeptCheckpoint,
    Saver,
    choose_deleted,
    delete_old_checkpoints,
    list_kept,
)
from megastable.checkpoint.store import DELETING
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import CheckpointRecovered, Resumed
from tests.checkpoint.standins import names, run_with
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.training.test_failures import batch, keep_files_small, train
from tests.training.test_resume import identical

folders = st.lists(
    st.builds(
        KeptCheckpoint, st.integers(0, 60), st.booleans(), st.sampled_from([False, False, False, True])
    ),
    unique_by=lambda c: c.step,
    max_size=15,
)
keeps = st.integers(1, 5)
every = st.sampled_from([0, 1, 5, 7, 10, 25, 100])


def left(checkpoints: list[KeptCheckpoint], keep: int, keep_every: int) -> list[KeptCheckpoint]:
    gone = choose_deleted(checkpoints, keep, keep_every)
    return [c for c in checkpoints if c.step not in gone]


def steps(checkpoints: list[KeptCheckpoint]) -> set[int]:
    return {c.step for c in checkpoints}


# The decision


@given(folders, keeps, every)
def test_what_must_stay_stays_and_nothing_else(
    checkpoints: list[KeptCheckpoint], keep: int, keep_every: int
) -> None:
    ordered = sorted(checkpoints, key=lambda c: c.step)
    stay = steps(ordered[-keep:]) | {c.step for c in ordered if c.pinned}
    proven = [c.step for c in ordered if c.healthy]
    if proven:
        stay.add(proven[-1])
    stay |= set([c.step for c in ordered if not proven or c.step > proven[-1]][:1])
    for multiple in range(keep_every, 200, keep_every or 1) if keep_every else ():
        later = [c.step for c in ordered if c.step >= multiple]
        if later and later[0] < multiple + keep_every:
            stay.add(later[0])
    assert steps(left(checkpoints, keep, keep_every)) == stay
    assert choose_deleted(checkpoints, keep, keep_every) == sorted(steps(checkpoints) - stay)
    assert stay or not checkpoints


@given(st.integers(1, 20), keeps, st.integers(0, 60))
def test_however_often_is_saved_some_come_to_prove_themselves(interval: int, keep: int, after: int) -> None:
    trend, folder = StepsOnTrend(after), dict[int, KeptCheckpoint]()
    for step in range(1, 300):
        proven = trend.add_step(step, on_trend=True)
        if step % interval == 0:
            proven += trend.add_checkpoint(step)
            folder[step] = KeptCheckpoint(step)
        folder |= {one: KeptCheckpoint(one, healthy=True) for one in proven if one in folder}
        folder = {c.step: c for c in left(list(folder.values()), keep, 0)}
        assert len(folder) <= keep + 2
        newest = max((c.step for c in folder.values() if c.healthy), default=0)
        assert step - newest <= 2 * (after + interval)


# On the disk


@pytest.mark.parametrize("damage", ["cut off", "no manifest", "no file", "renamed", "nested"])
def test_a_damaged_one_pushes_no_good_one_out(damage: str, tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10, 20, 30, 40)
    bad = folder / "step-40"
    match damage:
        case "cut off":
            (bad / "rank-00000.safetensors").write_bytes(b"")
        case "no manifest":
            (bad / store.MANIFEST).unlink()
        case "no file":
            (bad / store.STATE).unlink()
        case "renamed":
            bad.rename(folder / "step-50")
        case "nested":
            (bad / store.MANIFEST).write_text("[" * 100_000)
    assert delete_old_checkpoints(folder, 1) == ["step-20"]
    store.verify_checkpoint(folder / "step-30")
    store.verify_checkpoint(folder / "step-10")


def test_what_a_crash_left_goes_next_time_and_a_pinned_one_comes_back(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10, 20, 30)
    (folder / "step-10").rename(folder / f"{DELETING}step-10")
    (folder / f"{DELETING}step-10" / store.STATE).unlink()
    markers.pin_checkpoint(folder / "step-20", "between the rename and the look")
    (folder / "step-20").rename(folder / f"{DELETING}step-20")
    assert delete_old_checkpoints(folder, 5) == []
    assert names(folder) == ["latest", "step-20", "step-30"]
    store.verify_checkpoint(folder / "step-20")


@pytest.mark.parametrize(("module", "call"), [(shutil, "rmtree"), (durable, "sync_directory")])
def test_what_cannot_be_deleted_now_is_hidden_and_goes_later(
    module: ModuleType,
    call: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is deleted before its new name is on the disk: a power cut must not bring half of it back."""
    folder = run_with(tmp_path, 10, 20, 30)

    def refuse(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(module, call, refuse)
        assert delete_old_checkpoints(folder, 1) == ["step-20"]
    assert "Input/output error" in caplog.text
    assert names(folder) == [f"{DELETING}step-20", "latest", "step-10", "step-30"]
    store.read_state(folder / f"{DELETING}step-20")
    assert delete_old_checkpoints(folder, 1) == [] and names(folder) == ["latest", "step-10", "step-30"]


def test_a_folder_that_is_none_is_no_reason_to_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert delete_old_checkpoints(tmp_path / "none", 1) == [] and list_kept(tmp_path / "none") == []
    (tmp_path / "file").write_text("")
    assert (
        delete_old_checkpoints(tmp_path / "file", 1) == [] and "no old checkpoint is deleted" in caplog.text
    )
    with pytest.raises(CheckpointError, match="cannot be read"):
        list_kept(tmp_path / "file")


def kill_in_the_upload() -> None:
    """SIGKILL this process when its part is sealed on the local disk and not brought over."""
    from megastable.checkpoint import saving

    def upload(*_: object) -> None:
        # Both parts must be there: a checkpoint of which a rank's part is missing is none.
        os.kill(os.getpid(), signal.SIGKILL)

    saving.upload_files = upload  # type: ignore[assignment]


@pytest.mark.slow
def test_a_run_killed_in_an_upload_goes_on_from_the_local_disk(corpus: Path, tmp_path: Path) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert run_ranks(1, train, tiny(corpus, straight, train=batch())) == [(0, "")]
    config = tiny(corpus, run, train=batch(), checkpoint={"interval": 15, "staging": tmp_path / "disk"})
    with pytest.raises(AssertionError):
        run_ranks(1, train, config, kill_in_the_upload)
    assert not store.newest_first(run / "checkpoints")
    (staged,) = PartFolder(tmp_path / "disk", run).list_parts()
    assert staged.key.step == 15
    assert run_ranks(1, train, config) == [(0, "")]
    events = list(RunDirectory(run).iterate_events(CheckpointRecovered, Resumed))
    assert [(e["event"], e["step"]) for e in events] == [("checkpoint_recovered", 15), ("resumed", 15)]
    assert identical(straight / "checkpoints/step-20", run / "checkpoints/step-20") == 3
    store.verify_checkpoint(run / "checkpoints/step-15")
    assert not list((tmp_path / "disk").rglob("*.safetensors"))


def test_every_rank_writes_there_first_and_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    config = tiny(corpus, run, train=batch(), checkpoint={"interval": 10, "staging": disk})
    assert run_ranks(2, train, config) == [(0, ""), (0, "")]
    for name in ("step-10", "step-20"):
        store.verify_checkpoint(run / "checkpoints" / name)
    assert not [path for path in disk.rglob("*") if path.is_file()]


def test_what_changed_on_the_local_disk_is_not_brought_over(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    record = write_file(here / "a", b"x" * 100)
    upload_files(here, {"a": record}, there)
    assert (there / "a").read_bytes() == b"x" * 100
    (here / "a").write_bytes(b"x" * 99 + b"y")
    with pytest.raises(OSError, match="has changed since it was written"):
        upload_files(here, {"a": record}, there)


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
    events = list(RunDirectory(run).iterate_events(CheckpointRecovered))
    assert [bool(e["problem"]) for e in events] == [True, False]


def test_a_rank_leaves_the_folder_that_another_one_is_about_to_write_to(tmp_path: Path) -> None:
    """Of the same checkpoint, and still empty."""
    staging, key = PartFolder(tmp_path / "staging", tmp_path), PointKey(step=5, epoch=0, lineage="a" * 16)
    staging.root.mkdir(parents=True)
    opened = os.open(staging.begin_point(key), os.O_RDONLY)
    try:
        Saver._stage(cast(Saver, SimpleNamespace(_rank=1)), staging, key)
        assert os.fstat(opened).st_nlink  # 0 once it has been removed
    finally:
        os.close(opened)
