"""What is written into a checkpoint later: read back, and not believed when it is damaged or about another one."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from megastable.base.errors import CheckpointError
from megastable.checkpoint import markers, store
from megastable.checkpoint.markers import HEALTH, PINNED
from tests.checkpoint.standins import checkpoint
from tests.full_disk import files_no_larger_than

DAMAGED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"format": 1}',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"format": 1, "time": NaN}',
]


def test_a_marked_one_is_healthy_and_still_whole(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100)
    assert markers.healthy(path) is None and markers.problems(path) == []
    before = time.time()
    markers.mark_healthy(path, step=150, steps=50)
    found = markers.healthy(path)
    assert found is not None and (found.step, found.steps) == (150, 50)
    assert before - 0.01 <= found.time <= time.time() + 0.01
    store.verify(path)  # a marker is no file of the manifest
    assert sorted(f.name for f in path.iterdir() if f.name.startswith(".")) == []


def test_a_marker_says_nothing_of_another_checkpoint(tmp_path: Path) -> None:
    one, other = checkpoint(tmp_path, 100), checkpoint(tmp_path, 200)
    markers.mark_healthy(one, 150, 50)
    shutil.copy(one / HEALTH, other / HEALTH)
    assert markers.healthy(one) and markers.healthy(other) is None
    [problem] = markers.problems(other)
    assert str(other / HEALTH) in problem and "another checkpoint" in problem


def test_one_byte_of_the_manifest_makes_it_another_checkpoint(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100)
    markers.mark_healthy(path, 150, 50)
    manifest = path / store.MANIFEST
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    assert markers.healthy(path) is None
    manifest.unlink()
    assert markers.healthy(path) is None


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_health_marker_counts_as_none_a_damaged_pin_as_a_pin(
    content: bytes, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path, 100)
    (path / HEALTH).write_bytes(content)
    (path / PINNED).write_bytes(content)
    assert markers.healthy(path) is None
    found = markers.pinned(path)
    assert found is not None and found.reason == markers.UNREADABLE
    assert len(markers.problems(path)) == 2
    assert all("damaged (" in problem and "\n" not in problem for problem in markers.problems(path))


def test_what_lies_in_the_place_of_a_pin_is_one(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100)
    (path / PINNED).symlink_to("nowhere")
    assert markers.pinned(path) is not None
    (path / PINNED).unlink()
    (path / PINNED).mkdir()
    assert markers.pinned(path) is not None
    with pytest.raises(CheckpointError, match=r"pinned\.json could not be removed"):
        markers.unpin(path)


@pytest.mark.parametrize("reason", ["", "the best so far", "\x1b[31m\n{}", "bytes \udcff of a command line"])
def test_pinned_until_unpinned(reason: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100)
    assert markers.pinned(path) is None
    markers.pin(path, "an older reason")
    markers.pin(path, reason)
    found = markers.pinned(path)
    assert found is not None and found.reason == reason.replace("\udcff", "\\udcff")
    assert markers.unpin(path) and markers.pinned(path) is None
    assert not markers.unpin(path)


def test_what_is_no_checkpoint_is_not_marked(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("folder", "file", "none", "n" * 300):
        with pytest.raises(CheckpointError):
            markers.pin(tmp_path / name)
        assert markers.pinned(tmp_path / "file") is None and markers.healthy(tmp_path / "file") is None
    for name in ("folder", "file", "none"):
        with pytest.raises(CheckpointError):
            markers.mark_healthy(tmp_path / name, 1, 1)
    for name in ("file", "none"):
        with pytest.raises(CheckpointError, match="no such checkpoint"):
            markers.unpin(tmp_path / name)
    assert list((tmp_path / "folder").iterdir()) == []


def test_what_is_not_finite_is_not_healthy(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100, finite=False)
    with pytest.raises(CheckpointError, match="not finite"):
        markers.mark_healthy(path, 150, 50)
    assert markers.healthy(path) is None


def test_a_disk_that_refuses_leaves_the_older_marker(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100)
    markers.pin(path, "old")
    with files_no_larger_than(10):
        with pytest.raises(CheckpointError, match=r"pinned\.json could not be written"):
            markers.pin(path, "new")
        with pytest.raises(CheckpointError, match=r"health\.json could not be written"):
            markers.mark_healthy(path, 150, 50)
    found = markers.pinned(path)
    assert found is not None and found.reason == "old" and markers.healthy(path) is None
    assert not [f.name for f in path.iterdir() if f.name.startswith(".")]


def test_a_convicted_one_is_no_longer_healthy_until_a_person_accepts_it(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100)
    markers.mark_healthy(path, 150, 50)
    markers.convict(path, "its weights are others")
    ruling = markers.convicted(path)
    assert ruling is not None and ruling.reason == "its weights are others"
    assert markers.healthy(path) is None and markers.accepted(path) is None
    markers.accept(path, "on purpose")
    assert markers.convicted(path) is None and markers.accepted(path) is not None
    markers.convict(path, "again")  # by a run that did not ask
    assert markers.convicted(path) is not None and markers.accepted(path) is None
    store.verify(path)
    with pytest.raises(CheckpointError):
        markers.convict(tmp_path / "step-7", "there is none")


@pytest.mark.parametrize("text", DAMAGED)
@pytest.mark.parametrize("name", [store.CONVICTED, store.ACCEPTED])
def test_a_damaged_ruling_counts_as_none(name: str, text: bytes, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 100)
    (path / name).write_bytes(text)
    assert markers.convicted(path) is None and markers.accepted(path) is None
    assert any("damaged" in problem for problem in markers.problems(path))
