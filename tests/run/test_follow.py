"""Following a journal while it grows, is torn, mended, shortened and replaced."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base import jsonl
from megastable.run.events.follow import ANCHOR, Follower
from tests.tiers import examples

ENTRIES = st.lists(
    st.builds(
        lambda rest, kind: {**rest, "event": kind},
        st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=6) | st.none(), max_size=3),
        st.text(max_size=4),
    ),
    max_size=8,
)
NO_EVENTS = [b'{"a": 1}', b'{"time": 1, "event": null}', b'{"event": ["a"]}', b'{"event": {"a": 1}}']
RUBBISH = st.sampled_from([b"", b"{", b"\0\0\0", b"\xff}", b"[1, 2]", b'{"a": }', b"12", *NO_EVENTS])


def event(n: int, **more: Any) -> dict[str, Any]:
    return {"event": "x", "n": n, **more}


def lines(entries: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(e).encode() + b"\n" for e in entries)


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


@settings(deadline=None, max_examples=examples(80))
@given(ENTRIES, st.lists(RUBBISH, max_size=8), st.data())
def test_any_pieces_give_the_same_events_each_once(
    entries: list[dict[str, Any]], rubbish: list[bytes], data: st.DataObject
) -> None:
    mixed = [lines([e]) for e in entries]
    for piece in rubbish:
        mixed.insert(data.draw(st.integers(0, len(mixed))), piece + b"\n")
    content = b"".join(mixed)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=12)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        follower, found, done = Follower(path), list[dict[str, Any]](), 0
        assert follower.new() == []
        for begin, end in zip([0, *cuts], [*cuts, len(content)]):
            append(path, content[begin:end])
            found += follower.new()
            done = content[:end].count(b"\n")
            whole = [json.loads(m) for m in mixed[:done] if m.startswith(b"{") and m[:-1] not in rubbish]
            # The line in the middle of which the file ends may have come already, without its newline.
            assert len(found) - len(whole) in (0, 1) and found[: len(whole)] == whole
        assert found == entries
        assert follower.damaged == sum(piece != b"" for piece in rubbish)
        assert follower.new() == [] and follower.starts == 1


@settings(deadline=None, max_examples=examples(60))
@given(ENTRIES, ENTRIES, st.data())
def test_a_torn_line_that_is_set_aside_costs_nothing(
    before: list[dict[str, Any]], after: list[dict[str, Any]], data: st.DataObject
) -> None:
    """A process dies in the middle of a line; the next one mends the file before it appends."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        torn = json.dumps({"event": "torn", "n": 1})
        append(path, lines(before) + torn[: data.draw(st.integers(0, len(torn) - 1))].encode())
        follower = Follower(path)
        found = follower.new()
        for entry in after:
            jsonl.append(path, json.dumps(entry))
            found += follower.new()
        assert found == before + after
        assert follower.starts == 1


@pytest.mark.parametrize("longer", [False, True])
def test_another_file_is_read_from_its_beginning(longer: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append(path, lines([event(n) for n in range(5)]))
    follower = Follower(path)
    assert len(follower.new()) == 5
    other = [event(m, other=True) for m in range(9 if longer else 2)]
    (tmp_path / "b").write_bytes(lines(other))
    (tmp_path / "b").replace(path)
    assert follower.new() == other
    assert follower.starts == 2
    append(path, lines([event(-1)]))
    assert follower.new() == [event(-1)]


def test_a_shortened_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append(path, lines([event(1), event(2)]))
    follower = Follower(path)
    follower.new()
    path.write_bytes(lines([event(1)]))
    assert follower.new() == [event(1)] and follower.starts == 2
    append(path, lines([event(3)]))
    assert follower.new() == [event(3)] and follower.starts == 2


def test_what_comes_again_is_known_by_the_starts_also_when_seen_in_the_middle(tmp_path: Path) -> None:
    """An editor empties the file, then writes it: whoever looked in between must not take it for news."""
    path = tmp_path / "a.jsonl"
    append(path, lines([event(1), event(2), event(3)]))
    follower = Follower(path)
    follower.new()
    path.write_bytes(b"")
    assert follower.new() == [] and follower.starts == 1
    append(path, lines([event(1), event(3)]))
    assert follower.new() == [event(1), event(3)] and follower.starts == 2
    append(path, lines([event(4)]))
    assert follower.new() == [event(4)] and follower.starts == 2


def test_the_same_content_under_a_new_inode_is_not_told_twice(tmp_path: Path) -> None:
    """As after a copy back from a backup, or an editor that saved what it had loaded."""
    path = tmp_path / "a.jsonl"
    content = lines([event(n, text=chr(120) * 100) for n in range(2 * ANCHOR // 100)])
    append(path, content)
    follower = Follower(path)
    follower.new()
    (tmp_path / "b").write_bytes(content + lines([event(-1)]))
    (tmp_path / "b").replace(path)
    assert follower.new() == [event(-1)] and follower.starts == 1


def test_a_file_that_comes_late_or_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    follower = Follower(path)
    assert follower.new() == [] and follower.problem == ""
    append(path, lines([event(1)]))
    assert follower.new() == [event(1)]
    path.unlink()
    assert follower.new() == []
    append(path, lines([event(1), event(2)]))
    assert follower.new() == [event(2)]


def test_a_folder_in_its_place_is_said(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert follower.new() == []
    assert "cannot be read" in follower.problem


def test_brackets_without_end_are_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append(path, b'{"a": ' + b"[" * 200_000 + b"}\n" + lines([event(1)]))
    follower = Follower(path)
    assert follower.new() == [event(1)] and follower.damaged == 1


def test_reading_stopped_in_the_middle_goes_on_there(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append(path, lines([event(n) for n in range(4)]))
    follower = Follower(path)
    assert next(follower.stream()) == event(0)
    assert follower.new() == [event(1), event(2), event(3)]


class Growing(io.BytesIO):
    """A file whose writer goes on just after its end was seen."""

    def __init__(self, content: bytes, *more: bytes) -> None:
        super().__init__(content)
        self.more = list(more)

    def readline(self, size: int | None = -1, /) -> bytes:
        line, place = super().readline(size), self.tell()
        self.grow()
        self.seek(place)
        return line

    def grow(self) -> None:
        self.seek(0, io.SEEK_END)
        self.write(self.more.pop(0) if self.more else b"")


def test_a_line_that_is_finished_while_it_is_read_comes_once(tmp_path: Path) -> None:
    """Its end must not be taken for a line."""
    content = lines([event(n) for n in range(4)])
    for cut in range(1, len(content)):
        for again in range(cut, len(content)):
            file = Growing(content[:cut], content[cut:again], content[again:])
            follower, found = Follower(tmp_path / "a.jsonl"), list[dict[str, Any]]()
            for _ in range(4):
                assert follower._known(file)
                found += follower._rest(file)
                file.grow()
            assert found == [event(n) for n in range(4)] and follower.damaged == 0, (cut, again)
