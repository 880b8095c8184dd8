"""A checkpoint on the disk: found, read and verified, or refused with the file and the reason."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megastable.base.errors import CheckpointError
from megastable.checkpoint.files import write_file
from megastable.checkpoint.new_run import refuse_existing
from megastable.checkpoint.store import (
    LATEST,
    MANIFEST,
    SAVING,
    STATE,
    Contents,
    LayoutState,
    RunState,
    newest_first,
    read_contents,
    read_state,
    set_aside,
    set_aside_newer,
    verify_checkpoint,
)
from tests.checkpoint.standins import names


def run_state(**changes: Any) -> RunState:
    layout = LayoutState(tensor=1, pipeline=1, data=2, zero=1, precision="bf16")
    return RunState(order_fingerprint="abc", layout=layout, **changes)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two files of weights and a state, with their manifest."""
    folder = tmp_path / "step-10"
    folder.mkdir()
    contents: dict[str, Any] = {"rank-00000.json": b'{"a": 1}', "rank-00001.json": b'{"a": 2}'}
    contents[STATE] = run_state(step=10).model_dump_json().encode()
    files = {name: write_file(folder / name, content) for name, content in contents.items()}
    (folder / MANIFEST).write_bytes(Contents(step=10, files=files).to_sealed_bytes())
    return folder


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b'{"step": 1}', b"\xff\xfe", b"[" * 100_000, b"NaN", b'{"format": true}', b'{"step": 1e999}',
        b"9" * 9999, b'{"step": -1}', b'{"colour": "red"}',
    ],
)  # fmt: skip
def test_a_damaged_manifest_or_state_is_named(content: bytes, checkpoint: Path) -> None:
    for name, read in ((MANIFEST, read_contents), (STATE, read_state)):
        (checkpoint / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{name}: damaged"):
            read(checkpoint)


def test_a_changed_manifest_is_damaged_even_where_it_can_be_read(checkpoint: Path) -> None:
    text = (checkpoint / MANIFEST).read_text()
    (checkpoint / MANIFEST).write_text(text.replace('"step": 10', '"step": 11'))
    with pytest.raises(CheckpointError, match="its checksum does not match"):
        verify_checkpoint(checkpoint)


@pytest.mark.parametrize("of", [1, 3])
def test_another_format_names_the_version_that_wrote_it(checkpoint: Path, of: int) -> None:
    (checkpoint / MANIFEST).write_text(
        f'{{"format": {of}, "versions": {{"megastable": "9.1"}}, "news": true}}'
    )
    with pytest.raises(CheckpointError, match=rf"format {of}, of version 9\.1 .*use that version"):
        verify_checkpoint(checkpoint)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_state_after_a_broken_loss_is_read_again(bad: float, checkpoint: Path) -> None:
    """A discarded step leaves its nan among the recent losses: resuming must not fail over it."""
    state = run_state(recent_losses=[1.0, bad, 2.0], first_loss=bad, stability={"window": [bad, 0.1]})
    (checkpoint / STATE).write_text(state.model_dump_json(indent=1))
    again = read_state(checkpoint)
    assert again.recent_losses == pytest.approx([1.0, bad, 2.0], nan_ok=True)
    assert again.first_loss == pytest.approx(bad, nan_ok=True)
    assert again.stability["window"] == pytest.approx([bad, 0.1], nan_ok=True)


def test_the_newest_first_and_nothing_else(tmp_path: Path) -> None:
    for name in ("step-9", "step-100", "step-20", ".saving-step-200", "step-x", "step-", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-300").write_text("a file")
    (tmp_path / "latest").write_text("step-100")
    assert [path.name for path in newest_first(tmp_path)] == ["step-100", "step-20", "step-9"]
    assert newest_first(tmp_path / "none") == []


def fill(folder: Path, *steps: int) -> Path:
    """Checkpoints of `steps`, the last of which is the latest."""
    for step in steps:
        (folder / f"step-{step}").mkdir()
        (folder / f"step-{step}/weights.pt").write_text(str(step))
    (folder / LATEST).write_text(f"step-{steps[-1]}")
    return folder


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


def test_where_something_new_may_be(tmp_path: Path) -> None:
    step = tmp_path / "run/checkpoints/step-5"
    step.mkdir(parents=True)
    for path in (tmp_path / "run/recipe.yaml", step / "manifest.json", step / "state.json"):
        path.touch()
    copied = tmp_path / "copied"
    step.rename(copied)
    (tmp_path / "dangling").symlink_to("nowhere")
    for good in ("new", "run/exported", "checkpoints/new", "a/b/c"):
        refuse_existing(tmp_path / good)
    for bad, why in (
        ("run", "exists already"),
        ("dangling", "exists already"),
        ("run/checkpoints/new", "would lie in .*run/checkpoints"),
        ("run/checkpoints/step-9/a/b", "would lie in .*run/checkpoints"),
        ("copied/new", "would lie in .*copied"),
        ("x" * 300, "cannot be made: File name too long"),
    ):
        with pytest.raises(CheckpointError, match=why):
            refuse_existing(tmp_path / bad)
