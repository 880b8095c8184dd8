"""Files and directories appear whole or not at all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megastable.base.errors import DataError
from megastable.data.local_copy import staged_directory, write_file


def content(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()
    }


def test_a_directory_appears_at_the_end_and_replaces_the_old_one(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "output"
    for text in ("old", "new"):
        before = content(output)
        with staged_directory(output) as staging:
            (staging / text).write_text(text)
            assert content(output) == before
    assert content(tmp_path) == {"deep/output/new": "new"}
    assert os.listdir(output.parent) == ["output"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_the_old_one_is_all_there_is(tmp_path: Path, error: type[BaseException]) -> None:
    with staged_directory(tmp_path / "output") as staging:
        (staging / "file").write_text("old")

    def fail() -> None:
        with staged_directory(tmp_path / "output") as staging:
            (staging / "file").write_text("new")
            raise error

    with pytest.raises(error):
        fail()
    assert content(tmp_path) == {"output/file": "old"}
    assert os.listdir(tmp_path) == ["output"]


def test_only_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = socket.gethostname()
    kept = [
        f"output.tmp-{host}-1",
        f"output.tmp-otherhost-{dead.pid}",
        "output.tmp-mine",
        "other.tmp-x-2",
        "output.old",
    ]
    for name in (*kept, f"output.tmp-{host}-{dead.pid}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with staged_directory(tmp_path / "output"):
        pass
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "output"])


def test_a_place_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be made"), staged_directory(tmp_path / "file" / "output"):
        pass
    with pytest.raises(DataError, match="could not be written"):
        write_file(tmp_path / "file" / "output", b"")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    for text in (b"old", b"new"):
        write_file(tmp_path / "a" / "file", text)
    assert content(tmp_path) == {"a/file": "new"}
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="could not be written"):
        write_file(tmp_path / "b", b"a directory is in the way")
    assert content(tmp_path) == {"a/file": "new"}
