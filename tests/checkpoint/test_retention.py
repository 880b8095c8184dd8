"""Which checkpoints are deleted: by rules that hold for any of them, and on a disk that does not always do as asked."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base import durable
from megastable.base.errors import CheckpointError
from megastable.checkpoint import markers, retention, store
from megastable.checkpoint.health import CalmSteps
from megastable.checkpoint.retention import KeptCheckpoint, apply, doomed, standing
from megastable.checkpoint.store import DELETING
from tests.checkpoint.standins import checkpoint, names, run_with

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
    gone = doomed(checkpoints, keep, keep_every)
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
    assert doomed(checkpoints, keep, keep_every) == sorted(steps(checkpoints) - stay)
    assert stay or not checkpoints


def test_a_table() -> None:
    proven = [
        KeptCheckpoint(100, True),
        KeptCheckpoint(200, True),
        KeptCheckpoint(300, True),
        KeptCheckpoint(400),
    ]
    assert doomed(proven, 2) == [100, 200]
    assert doomed(proven, 1) == [100, 200]
    assert doomed(proven, 9) == []
    # Trouble since 300: what was good before outlives any number of later ones.
    assert doomed([KeptCheckpoint(200, True), *map(KeptCheckpoint, range(300, 1000, 100))], 2) == [
        400,
        500,
        600,
        700,
    ]
    # None proven: the oldest is the likeliest to be from before it.
    assert doomed([*map(KeptCheckpoint, range(100, 700, 100))], 2) == [200, 300, 400]
    # Not exactly on multiples of 1,000; 1,990 and 2,010 are both of 1,990's past, only one is the first after 2,000.
    off = [KeptCheckpoint(step, True) for step in (40, 990, 1010, 1500, 1990, 2010, 2500, 5500, 5600)]
    assert doomed(off, 1, 1000) == [40, 990, 1500, 1990, 2500]
    assert doomed([], 3, 10) == []


@given(st.integers(1, 20), keeps, st.integers(0, 60))
def test_however_often_is_saved_some_come_to_prove_themselves(interval: int, keep: int, after: int) -> None:
    trend, folder = CalmSteps(after), dict[int, KeptCheckpoint]()
    for step in range(1, 300):
        proven = trend.step(step, calm=True)
        if step % interval == 0:
            proven += trend.saved(step)
            folder[step] = KeptCheckpoint(step)
        folder |= {one: KeptCheckpoint(one, healthy=True) for one in proven if one in folder}
        folder = {c.step: c for c in left(list(folder.values()), keep, 0)}
        assert len(folder) <= keep + 2
        newest = max((c.step for c in folder.values() if c.healthy), default=0)
        assert step - newest <= 2 * (after + interval)


def test_to_keep_none_is_refused() -> None:
    with pytest.raises(ValueError, match="keep=0"):
        doomed([KeptCheckpoint(1)], 0)
    with pytest.raises(ValueError, match="keep_every=-1"):
        doomed([KeptCheckpoint(1)], 1, -1)


# On the disk


def test_old_ones_go_and_the_names_are_told(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10, 20, 30, 40, 50)
    markers.mark_healthy(folder / "step-20", 25, 5)
    assert apply(folder, 1) == ["step-10", "step-40"]
    assert names(folder) == ["latest", "step-20", "step-30", "step-50"]
    assert apply(folder, 1) == []
    store.verify(folder / "step-20")


def test_the_markers_and_the_files_are_what_is_decided_by(tmp_path: Path) -> None:
    folder = run_with(tmp_path, *range(10, 100, 10))
    markers.pin(folder / "step-20", "mine")
    (folder / "step-30" / markers.PINNED).write_text("damaged")
    markers.mark_healthy(folder / "step-40", 45, 5)
    shutil.copy(folder / "step-40" / markers.HEALTH, folder / "step-60" / markers.HEALTH)
    assert standing(folder)[1:6] == [
        KeptCheckpoint(20, pinned=True), KeptCheckpoint(30, pinned=True), KeptCheckpoint(40, healthy=True),
        KeptCheckpoint(50), KeptCheckpoint(60),
    ]  # fmt: skip
    assert apply(folder, 2) == ["step-10", "step-60", "step-70"]


def test_what_was_put_aside_is_no_business_of_it(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", 10, 20, 30)
    other = ["suspect-step-5", "rejected-step-40", ".saving-step-50", "step-x", "step-007", "steps", "step-²"]
    for name in other:
        (folder / name).mkdir()
    elsewhere = checkpoint(tmp_path / "elsewhere", 8)
    (folder / "step-8").symlink_to(elsewhere)
    assert apply(folder, 1) == ["step-20"]  # 10 is the oldest, none is proven
    assert names(folder) == sorted(["latest", "step-8", "step-10", "step-30", *other])
    store.verify(elsewhere)


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
    assert apply(folder, 1) == ["step-20"]
    store.verify(folder / "step-30")
    store.verify(folder / "step-10")


def test_a_damaged_healthy_one_does_not_count_either(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10, 20, 30, 40, 50, 60)
    for name in ("step-20", "step-30"):
        markers.mark_healthy(folder / name, 45, 5)
    (folder / "step-30" / store.STATE).unlink()
    assert apply(folder, 1) == ["step-10", "step-50"]
    assert names(folder) == ["latest", "step-20", "step-30", "step-40", "step-60"]


def test_what_latest_names_stays(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10, 20, 30, 40)
    (folder / store.LATEST).write_text("step-20")
    assert apply(folder, 1) == ["step-30"]


def test_what_a_crash_left_goes_next_time_and_a_pinned_one_comes_back(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10, 20, 30)
    (folder / "step-10").rename(folder / f"{DELETING}step-10")
    (folder / f"{DELETING}step-10" / store.STATE).unlink()
    markers.pin(folder / "step-20", "between the rename and the look")
    (folder / "step-20").rename(folder / f"{DELETING}step-20")
    assert apply(folder, 5) == []
    assert names(folder) == ["latest", "step-20", "step-30"]
    store.verify(folder / "step-20")


def test_a_disk_that_refuses_is_logged_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run_with(tmp_path, 10, 20, 30, 40)
    (folder / f"{DELETING}step-20").write_text("a file in its place")
    with caplog.at_level(logging.WARNING):
        assert apply(folder, 1) == ["step-30"]
    assert "step-20: not deleted" in caplog.text
    store.verify(folder / "step-20")
    (folder / f"{DELETING}step-20").unlink()
    assert apply(folder, 1) == ["step-20"]


def test_who_pins_while_it_is_deleted_keeps_it(tmp_path: Path) -> None:
    folder = run_with(tmp_path, 10, 20)
    markers.pin(folder / "step-10", "after the decision, before the rename")
    assert not retention._hide(folder, "step-10")
    store.verify(folder / "step-10")


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
        assert apply(folder, 1) == ["step-20"]
    assert "Input/output error" in caplog.text
    assert names(folder) == [f"{DELETING}step-20", "latest", "step-10", "step-30"]
    store.read_state(folder / f"{DELETING}step-20")
    assert apply(folder, 1) == [] and names(folder) == ["latest", "step-10", "step-30"]


def test_a_folder_that_is_none_is_no_reason_to_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert apply(tmp_path / "none", 1) == [] and standing(tmp_path / "none") == []
    (tmp_path / "file").write_text("")
    assert apply(tmp_path / "file", 1) == [] and "no old checkpoint is deleted" in caplog.text
    with pytest.raises(CheckpointError, match="cannot be read"):
        standing(tmp_path / "file")
