"""Checkpoints that do not count any more: renamed, said, and never come back by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastable.base.errors import CheckpointError
from megastable.checkpoint.store import LATEST, SAVING, newest_first, set_aside, set_aside_newer


def fill(folder: Path, *steps: int) -> Path:
    """Checkpoints of `steps`, the last of which is the latest."""
    for step in steps:
        (folder / f"step-{step}").mkdir()
        (folder / f"step-{step}/weights.pt").write_text(str(step))
    (folder / LATEST).write_text(f"step-{steps[-1]}")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_those_of_later_steps_go_and_stay_to_be_looked_at(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20, 30, 40)
    assert set_aside_newer(tmp_path, 20) == ["step-40", "step-30"]
    assert names(tmp_path) == [LATEST, "step-10", "step-20", "suspect-step-30", "suspect-step-40"]
    assert (tmp_path / LATEST).read_text() == "step-20"
    # Again and again: suspects do not pile up, not even those of later steps.
    fill(tmp_path, 30)
    assert set_aside_newer(tmp_path, 29) == ["step-30"]
    assert names(tmp_path) == [LATEST, "step-10", "step-20", "suspect-step-30"]
    fill(tmp_path, 30)
    (tmp_path / "step-30/weights.pt").write_text("again")
    assert set_aside_newer(tmp_path, 29) == ["step-30"]
    assert (tmp_path / "suspect-step-30/weights.pt").read_text() == "again"


def test_where_none_is_later_nothing_happens(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20)
    (tmp_path / "suspect-step-15").mkdir()
    before = names(tmp_path)
    assert set_aside_newer(tmp_path, 20) == []
    assert names(tmp_path) == before and (tmp_path / LATEST).read_text() == "step-20"


def test_where_none_is_left_there_is_no_latest(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20)
    assert set_aside_newer(tmp_path, 5) == ["step-20", "step-10"]
    assert newest_first(tmp_path) == [] and not (tmp_path / LATEST).exists()


def test_one_that_cannot_be_renamed_is_an_error_and_the_others_go_all_the_same(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20, 30, 40)
    (tmp_path / "suspect-step-30").write_text("a file in its place")
    with pytest.raises(CheckpointError, match=r"step-30.*by hand, then start again"):
        set_aside_newer(tmp_path, 15)
    assert [path.name for path in newest_first(tmp_path)] == ["step-30", "step-10"]
    assert (tmp_path / LATEST).read_text() == "step-30"


def test_one_that_was_being_replaced_does_not_come_back(tmp_path: Path) -> None:
    """A crash between the two renames of a save leaves it whole, under a hidden name."""
    fill(tmp_path, 10, 20)
    (tmp_path / "step-20").rename(tmp_path / f"{SAVING}replaced-step-20")
    assert set_aside_newer(tmp_path, 10) == ["step-20"]
    assert names(tmp_path) == [LATEST, "step-10", "suspect-step-20"]


def test_a_damaged_one_is_put_aside_as_well_as_can_be(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20)
    set_aside(tmp_path / "step-20")
    assert names(tmp_path) == [LATEST, "rejected-step-20", "step-10"]
    assert (tmp_path / LATEST).read_text() == "step-10"
    set_aside(tmp_path / "step-30")  # there is none: nothing to be lost
    assert (tmp_path / LATEST).read_text() == "step-10"
