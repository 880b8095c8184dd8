"""A checkpoint on the disk: found, read and verified, or refused with the file and the reason."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megastable.base.errors import CheckpointError
from megastable.checkpoint.files import write_file
from megastable.checkpoint.store import (
    MANIFEST,
    STATE,
    Contents,
    LayoutState,
    RunState,
    newest_first,
    problems,
    read_contents,
    read_state,
    verify,
)


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
    (folder / MANIFEST).write_bytes(Contents(step=10, files=files).sealed())
    return folder


@pytest.mark.parametrize("name", ["rank-00000.json", "rank-00001.json", STATE])
@pytest.mark.parametrize("damage", ["missing", "cut off", "longer", "one bit", "empty"])
def test_any_damage_to_any_file_is_named(damage: str, name: str, checkpoint: Path) -> None:
    path = checkpoint / name
    content = bytearray(path.read_bytes())
    match damage:
        case "missing":
            path.unlink()
        case "cut off":
            path.write_bytes(content[:-1])
        case "longer":
            path.write_bytes(content + b"\0")
        case "one bit":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        case "empty":
            path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"step-10/{name}: "):
        verify(checkpoint)


def test_the_ranks_share_the_files_out(checkpoint: Path) -> None:
    """Of three ranks each reads one file: exactly one finds the damage."""
    (checkpoint / "rank-00001.json").write_bytes(b"")
    found = []
    for rank in range(3):
        try:
            verify(checkpoint, rank, 3)
        except CheckpointError as error:
            found.append(str(error))
    assert len(found) == 1 and "rank-00001.json" in found[0]


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
        verify(checkpoint)


@pytest.mark.parametrize("of", [1, 3])
def test_another_format_names_the_version_that_wrote_it(checkpoint: Path, of: int) -> None:
    (checkpoint / MANIFEST).write_text(
        f'{{"format": {of}, "versions": {{"megastable": "9.1"}}, "news": true}}'
    )
    with pytest.raises(CheckpointError, match=rf"format {of}, of version 9\.1 .*use that version"):
        verify(checkpoint)


def test_files_that_were_swapped_are_said_to_be(checkpoint: Path) -> None:
    one, other = checkpoint / "rank-00000.json", checkpoint / "rank-00001.json"
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)
    found = problems(checkpoint)
    assert len(found) == 2 and "its checksum is that of rank-00001.json in the manifest: swapped" in found[0]


def test_a_file_of_a_larger_checkpoint_is_not_taken_along(checkpoint: Path) -> None:
    (checkpoint / "rank-00002.json").write_text("{}")
    assert problems(checkpoint) == [
        f"{checkpoint / 'rank-00002.json'}: not in the manifest: of another checkpoint"
    ]
    (checkpoint / "rank-00002.json").rename(checkpoint / "health.json")  # markers may come later
    assert problems(checkpoint) == []


def test_a_checkpoint_under_another_ones_name(checkpoint: Path) -> None:
    moved = checkpoint.rename(checkpoint.with_name("step-20"))
    with pytest.raises(CheckpointError, match="is of step 10: another checkpoint's"):
        verify(moved)
    verify(moved.rename(checkpoint.with_name("suspect-step-10")))
    verify(checkpoint.with_name("suspect-step-10").rename(checkpoint.with_name("the-best")))


def test_a_missing_manifest_means_that_the_save_did_not_finish(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="did not finish"):
        verify(checkpoint)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_state_after_a_broken_loss_is_read_again(bad: float, checkpoint: Path) -> None:
    """A discarded step leaves its nan among the recent losses: resuming must not fail over it."""
    state = run_state(recent_losses=[1.0, bad, 2.0], first_loss=bad, stability={"window": [bad, 0.1]})
    (checkpoint / STATE).write_text(state.model_dump_json(indent=1))
    again = read_state(checkpoint)
    assert again.recent_losses == pytest.approx([1.0, bad, 2.0], nan_ok=True)
    assert again.first_loss == pytest.approx(bad, nan_ok=True)
    assert again.stability["window"] == pytest.approx([bad, 0.1], nan_ok=True)


def test_floats_of_the_state_are_exact(checkpoint: Path) -> None:
    losses = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308]
    (checkpoint / STATE).write_text(run_state(recent_losses=losses, seconds=1e-17).model_dump_json())
    again = read_state(checkpoint)
    assert again.recent_losses == losses and again.seconds == 1e-17


def test_the_newest_first_and_nothing_else(tmp_path: Path) -> None:
    for name in ("step-9", "step-100", "step-20", ".saving-step-200", "step-x", "step-", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-300").write_text("a file")
    (tmp_path / "latest").write_text("step-100")
    assert [path.name for path in newest_first(tmp_path)] == ["step-100", "step-20", "step-9"]
    assert newest_first(tmp_path / "none") == []
