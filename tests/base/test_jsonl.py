"""Append-only JSON lines: what a crash can take, and what it cannot."""

from __future__ import annotations

import fcntl
import json
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base import jsonl
from megastable.base.errors import DataError
from tests.full_disk import files_no_larger_than
from tests.patience import PATIENCE
from tests.tiers import examples

ENTRIES = st.lists(
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=3), max_size=5
)


def values(path: Path) -> list[object]:
    return [json.loads(line) for line in jsonl.read(path)[0]]


def test_what_is_appended_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for number in range(5):
        jsonl.append(path, json.dumps({"n": number, "text": "zwei\nZeilen – ü"}))
    assert [v["n"] for v in values(path)] == [0, 1, 2, 3, 4]  # type: ignore[index]
    assert path.read_bytes().count(b"\n") == 5
    assert [p.name for p in tmp_path.iterdir()] == ["journal.jsonl"]


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert jsonl.read(tmp_path / "none.jsonl") == ([], b"")


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(ENTRIES, st.data())
def test_a_cut_anywhere_loses_the_line_it_is_in_and_no_other(
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
        lines, torn = jsonl.read(path)
        assert [json.loads(line) for line in lines] == entries[:whole]
        assert torn == content[ends[whole] :].removeprefix(b"\n")
        jsonl.append(path, '{"after": 1}')
        assert values(path) == [*entries[:whole], {"after": 1}]
        kept = Path(folder, "a.jsonl.torn")
        assert (kept.read_bytes() if kept.exists() else b"") == (torn + b"\n" if torn else b"")


@pytest.mark.parametrize("rubbish", [b"\0\0\0\0", b"\xff\xfe{", b'{"a": 1', b"[1, "])
def test_rubbish_at_the_end_is_set_aside(rubbish: bytes, tmp_path: Path) -> None:
    """Zeros are what some file systems leave of a line that was not yet written back."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' + rubbish)
    assert jsonl.read(path) == ([b'{"n": 1}'], rubbish)
    jsonl.append(path, '{"n": 2}')
    assert values(path) == [{"n": 1}, {"n": 2}]
    assert (tmp_path / "a.jsonl.torn").read_bytes() == rubbish + b"\n"


def test_a_long_file_is_mended_by_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line = b'{"n": 1}\n'
    path.write_bytes(line * 300_000 + b'{"n": ')
    jsonl.append(path, '{"n": 2}')
    lines, torn = jsonl.read(path)
    assert len(lines) == 300_001 and lines[-1] == b'{"n": 2}' and torn == b""


def test_a_full_disk_is_an_error_and_costs_no_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    jsonl.append(path, '{"n": 1}')
    with files_no_larger_than(20), pytest.raises(DataError, match=r"a\.jsonl could not be written"):
        jsonl.append(path, json.dumps({"n": 2, "text": "x" * 50}))
    assert values(path) == [{"n": 1}]
    jsonl.append(path, '{"n": 3}')
    assert values(path) == [{"n": 1}, {"n": 3}]


def test_a_folder_in_its_place_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not be written"):
        jsonl.append(tmp_path, "{}")
    with pytest.raises(DataError, match="cannot be read"):
        jsonl.read(tmp_path)


def test_whoever_appends_waits_for_the_other(tmp_path: Path) -> None:
    """Otherwise a line half-written by another process would be taken for torn and cut off."""
    path = tmp_path / "a.jsonl"
    thread = threading.Thread(target=jsonl.append, args=(path, '{"n": 2}'))
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
