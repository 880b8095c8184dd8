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

from megastable.base import durable
from megastable.run.events.reading import Follower
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
def test_follower_gives_the_same_events_each_once_whatever_the_pieces(
    entries: list[dict[str, Any]], rubbish: list[bytes], data: st.DataObject
) -> None:
    mixed = [lines([e]) for e in entries]
    for piece in rubbish:
        mixed.insert(data.draw(st.integers(0, len(mixed))), piece + b"\n")
    content = b"".join(mixed)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=12)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        follower, found = Follower(path), list[dict[str, Any]]()
        assert follower.read_new() == []
        for begin, end in zip([0, *cuts], [*cuts, len(content)]):
            append(path, content[begin:end])
            found += follower.read_new()
            done = content[:end].count(b"\n")
            whole = [json.loads(m) for m in mixed[:done] if m.startswith(b"{") and m[:-1] not in rubbish]
            # The line in the middle of which the file ends may have come already, without its newline.
            assert len(found) - len(whole) in (0, 1) and found[: len(whole)] == whole
        assert found == entries and follower.read_new() == [] and follower.starts == 1
        assert follower.damaged == sum(piece != b"" for piece in rubbish)


@settings(deadline=None, max_examples=examples(60))
@given(ENTRIES, ENTRIES, st.data())
def test_follower_loses_nothing_where_a_torn_line_is_mended(
    before: list[dict[str, Any]], after: list[dict[str, Any]], data: st.DataObject
) -> None:
    """A process dies in the middle of a line; the next one mends the file before it appends."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        torn = json.dumps({"event": "torn", "n": 1})
        append(path, lines(before) + torn[: data.draw(st.integers(0, len(torn) - 1))].encode())
        follower = Follower(path)
        found = follower.read_new()
        for entry in after:
            durable.append_line(path, json.dumps(entry))
            found += follower.read_new()
        assert found == before + after and follower.starts == 1


KNOWN = [event(n) for n in range(5)]


@pytest.mark.parametrize(
    ("contents", "wanted", "starts"),
    [
        ([[event(9), event(8)]], [event(9), event(8)], 2),  # another file
        (
            [[event(n, other=True) for n in range(9)]],
            [event(n, other=True) for n in range(9)],
            2,
        ),  # and a longer one
        ([KNOWN[:2]], KNOWN[:2], 2),  # shortened
        ([[], KNOWN[:2]], KNOWN[:2], 2),  # an editor empties it before it writes
        ([[*KNOWN, event(7)]], [event(7)], 1),  # copied back from a backup
        ([None, [*KNOWN, event(7)]], [event(7)], 1),  # gone for a while
    ],
)
def test_follower_reads_another_file_from_its_beginning(
    contents: list[list[dict[str, Any]] | None], wanted: list[dict[str, Any]], starts: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    follower = Follower(path)
    assert follower.read_new() == [] and follower.problem == ""  # there is none yet
    append(path, lines(KNOWN))
    assert follower.read_new() == KNOWN
    found = list[Any]()
    for content in contents:
        path.unlink(missing_ok=True)
        if content is not None:
            append(path, lines(content))
        found += follower.read_new()
    assert found == wanted and follower.starts == starts
    append(path, lines([event(-1)]))
    assert follower.read_new() == [event(-1)] and follower.starts == starts


def test_follower_passes_damage_over_and_says_so(tmp_path: Path) -> None:
    assert Follower(tmp_path).read_new() == []
    folder = Follower(tmp_path)
    folder.read_new()
    assert "cannot be read" in folder.problem
    path = tmp_path / "a.jsonl"
    append(path, b'{"a": ' + b"[" * 200_000 + b"}\n" + lines(KNOWN))
    follower = Follower(path)
    assert next(follower.stream_events()) == event(0) and follower.damaged == 1
    assert follower.read_new() == KNOWN[1:]  # reading that was stopped in the middle goes on there


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


def test_follower_gives_a_line_once_that_is_finished_while_it_is_read(tmp_path: Path) -> None:
    """Its end must not be taken for a line."""
    content = lines(KNOWN[:4])
    for cut in range(1, len(content)):
        for again in range(cut, len(content)):
            file = Growing(content[:cut], content[cut:again], content[again:])
            follower, found = Follower(tmp_path / "a.jsonl"), list[dict[str, Any]]()
            for _ in range(4):
                assert follower._known(file)
                found += follower._rest(file)
                file.grow()
            assert found == KNOWN[:4] and follower.damaged == 0, (cut, again)
