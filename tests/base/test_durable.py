"""Append-only JSON lines: what a crash can take, and what it cannot."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base import durable
from megastable.base.durable import staged_directory
from megastable.base.errors import DataError
from tests.full_disk import files_no_larger_than
from tests.patience import PATIENCE
from tests.tiers import examples

ENTRIES = st.lists(
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=3), max_size=5
)


def values(path: Path) -> list[object]:
    return [json.loads(line) for line in durable.read_lines(path)[0]]


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(ENTRIES, st.data())
def test_append_line_after_a_cut_loses_one_line(
    entries: list[dict[str, object]], data: st.DataObject
) -> None:
    """A crash cuts the file off; whole lines stay, and appending goes on behind them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes(b"".join(json.dumps(e).encode() + b"\n" for e in entries))
        cut = data.draw(st.integers(0, path.stat().st_size))
        with path.open("r+b") as file:
            file.truncate(cut)
        ends = [0]
        for e in entries:
            ends.append(ends[-1] + len(json.dumps(e)) + 1)
        # A line is whole without its newline, too.
        whole = sum(cut >= end - 1 for end in ends[1:])
        content = path.read_bytes()
        lines, torn = durable.read_lines(path)
        assert [json.loads(line) for line in lines] == entries[:whole]
        assert torn == content[ends[whole] :].removeprefix(b"\n")
        durable.append_line(path, '{"after": 1}')
        assert values(path) == [*entries[:whole], {"after": 1}]
        kept = Path(folder, "a.jsonl.torn")
        assert (kept.read_bytes() if kept.exists() else b"") == (torn + b"\n" if torn else b"")


@pytest.mark.parametrize("rubbish", [b"\0\0\0\0", b"\xff\xfe{", b'{"a": 1', b"[1, "])
def test_append_line_sets_rubbish_aside(rubbish: bytes, tmp_path: Path) -> None:
    """Zeros are what some file systems leave of a line that was not yet written back."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' + rubbish)
    assert durable.read_lines(path) == ([b'{"n": 1}'], rubbish)
    durable.append_line(path, '{"n": 2}')
    assert values(path) == [{"n": 1}, {"n": 2}]
    assert (tmp_path / "a.jsonl.torn").read_bytes() == rubbish + b"\n"


def test_append_line_on_a_full_disk_costs_no_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    durable.append_line(path, '{"n": 1}')
    with files_no_larger_than(20), pytest.raises(DataError, match=r"a\.jsonl could not be written"):
        durable.append_line(path, json.dumps({"n": 2, "text": "x" * 50}))
    assert values(path) == [{"n": 1}]
    durable.append_line(path, '{"n": 3}')
    assert values(path) == [{"n": 1}, {"n": 3}]


def test_append_line_waits_for_another_process(tmp_path: Path) -> None:
    """Otherwise a line half-written by another process would be taken for torn and cut off."""
    path = tmp_path / "a.jsonl"
    thread = threading.Thread(target=durable.append_line, args=(path, '{"n": 2}'))
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b'{"n":')
        other.flush()
        thread.start()
        thread.join(timeout=0.3)
        assert thread.is_alive()
        other.write(b" 1}\n")
    thread.join(timeout=PATIENCE)
    assert values(path) == [{"n": 1}, {"n": 2}]
    assert not (tmp_path / "a.jsonl.torn").exists()


def content(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_staged_directory_keeps_the_old_one_after_an_error(
    tmp_path: Path, error: type[BaseException]
) -> None:
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


def test_staged_directory_removes_what_dead_processes_left(tmp_path: Path) -> None:
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
