"""Skips against a naive set of positions, and the ledger against crashes and careless hands."""

from __future__ import annotations

import json
import logging
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megastable.data.skips import Range, SkipEntry, Skips, append, read_ledger
from megastable.errors import DataError

RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda r: (r[0], r[0] + r[1])), max_size=10
)


def positions(ranges: list[Range]) -> set[int]:
    return {position for first, end in ranges for position in range(first, end)}


@settings(deadline=None)
@given(RANGES)
def test_ranges_are_merged(ranges: list[Range]) -> None:
    skips = Skips.of(ranges)
    assert positions(skips.ranges) == positions(ranges)
    assert all(a[1] < b[0] for a, b in zip(skips.ranges, skips.ranges[1:], strict=False))
    for position in range(-1, 80):
        assert skips.contains(position) == (position in positions(ranges))


@settings(deadline=None)
@given(RANGES, st.integers(0, 80), st.integers(0, 40))
def test_next_kept_is_the_naive_walk(ranges: list[Range], cursor: int, count: int) -> None:
    skipped, walked, at = positions(ranges), [], cursor
    while len(walked) < count:
        if at not in skipped:
            walked.append(at)
        at += 1
    kept, following = Skips.of(ranges).next_kept(cursor, count)
    assert kept.dtype == np.int64
    assert kept.tolist() == walked
    assert following == at


@settings(deadline=None)
@given(RANGES, st.integers(0, 80), st.lists(st.integers(0, 9), max_size=8))
def test_steps_of_any_size_walk_the_same_way(ranges: list[Range], cursor: int, counts: list[int]) -> None:
    skips = Skips.of(ranges)
    whole, _ = skips.next_kept(cursor, sum(counts))
    parts: list[int] = []
    for count in counts:
        kept, cursor = skips.next_kept(cursor, count)
        parts += kept.tolist()
    assert parts == whole.tolist()


@settings(deadline=None)
@given(RANGES, st.integers(0, 80), st.integers(0, 80))
def test_between(ranges: list[Range], first: int, end: int) -> None:
    found = Skips.of(ranges).between(first, end)
    assert positions(found) == positions(ranges) & set(range(first, end))
    assert all(a < b for a, b in found)


@settings(deadline=None)
@given(RANGES, RANGES)
def test_union(one: list[Range], other: list[Range]) -> None:
    assert Skips.of(one).union(Skips.of(other)).ranges == Skips.of(one + other).ranges


def test_huge_ranges_are_not_walked_through() -> None:
    """A walk of 10^18 positions would not end before the test's timeout."""
    skips = Skips.of([(5, 10**18), *((10**18 + 2 * n, 10**18 + 2 * n + 1) for n in range(100_000))])
    kept, following = skips.next_kept(3, 6)
    assert kept.tolist() == [3, 4, *(10**18 + n for n in (1, 3, 5, 7))]
    assert following == 10**18 + 8
    assert skips.between(10**17, 10**18 + 3) == [(10**17, 10**18 + 1), (10**18 + 2, 10**18 + 3)]


def test_everything_skipped() -> None:
    with pytest.raises(DataError, match="all others are skipped"):
        Skips.of([(10, 2**62)]).next_kept(5, 6)


@pytest.mark.parametrize(
    "wrong",
    [(5, 5), (6, 5), (-1, 5), (0, 2**62 + 1), (0.0, 5), (0, "5"), (True, 5), (1, 2, 3), 7, None, (1, None)],
)
def test_ranges_refused(wrong: object) -> None:
    with pytest.raises(DataError, match="skip range"):
        Skips.of([(1, 2), wrong])  # type: ignore[list-item]


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "skips.jsonl"


def test_append_and_read(ledger: Path) -> None:
    assert read_ledger(ledger) == []
    before = datetime.now(UTC)
    entries = [
        SkipEntry(first=5, end=9, reason="spike"),
        SkipEntry(first=7, end=12, reason="overlaps", incident=3, step=44),
        SkipEntry(first=0, end=1, reason="set", time=datetime(2020, 1, 1, tzinfo=UTC)),
    ]
    for entry in entries:
        append(ledger, entry)
    found = read_ledger(ledger)
    assert [entry.model_copy(update={"time": None}) for entry in found] == [
        entry.model_copy(update={"time": None}) for entry in entries
    ]
    assert all(before <= entry.time <= datetime.now(UTC) for entry in found[:2] if entry.time)
    assert found[2].time == entries[2].time
    assert Skips.of((entry.first, entry.end) for entry in found).ranges == [(0, 1), (5, 12)]
    assert ledger.read_text().count("\n") == 3


def test_written_by_hand(ledger: Path) -> None:
    ledger.write_text('{"first": 1200, "end": 1300, "reason": "mine"}\n\n{"first":0,"end":4,"reason":""}')
    assert [(entry.first, entry.end) for entry in read_ledger(ledger)] == [(1200, 1300), (0, 4)]
    append(ledger, SkipEntry(first=8, end=9, reason="next"))
    assert [entry.first for entry in read_ledger(ledger)] == [1200, 0, 8]


@settings(deadline=None)
@given(cut=st.integers(1, 60), tail=st.sampled_from([b"", b"\x00\x00", b"\xff"]))
def test_a_torn_last_line(cut: int, tail: bytes) -> None:
    """A crash at any byte of a write: nothing acknowledged is lost, and the ledger goes on."""
    with tempfile.TemporaryDirectory() as directory:
        ledger = Path(directory) / "skips.jsonl"
        append(ledger, SkipEntry(first=1, end=2, reason="first"))
        whole = ledger.read_bytes()
        second = SkipEntry(first=3, end=4, reason="second, torn", time=datetime.now(UTC))
        torn = second.model_dump_json().encode()[:cut] + tail
        ledger.write_bytes(whole + torn)
        assert [entry.first for entry in read_ledger(ledger)] == [1]
        append(ledger, SkipEntry(first=5, end=6, reason="third"))
        assert [entry.first for entry in read_ledger(ledger)] == [1, 5]
        assert ledger.read_bytes().startswith(whole)
        assert (Path(directory) / "skips.jsonl.torn").read_bytes() == torn + b"\n"


def test_a_torn_line_is_reported(ledger: Path, caplog: pytest.LogCaptureFixture) -> None:
    append(ledger, SkipEntry(first=1, end=2, reason="first"))
    with ledger.open("a") as file:
        file.write('{"first": 3, "e')
    with caplog.at_level(logging.WARNING):
        read_ledger(ledger)
    assert "line 2 was torn" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not JSON"),
        ("[1, 2]", "line 2"),
        ('{"first": 9, "end": 5, "reason": "x"}', "first 9 is not below end 5"),
        ('{"first": 5, "end": 5, "reason": "x"}', "not below"),
        ('{"first": -1, "end": 5, "reason": "x"}', "first .*greater than or equal to 0"),
        ('{"first": 1.0, "end": 5, "reason": "x"}', "first .*integer"),
        ('{"first": true, "end": 5, "reason": "x"}', "first .*integer"),
        ('{"first": "1", "end": 5, "reason": "x"}', "first .*integer"),
        (json.dumps({"first": 1, "end": 2**62 + 1, "reason": "x"}), "end .*less than or equal"),
        ('{"first": 1, "reason": "x"}', "end Field required"),
        ('{"first": 1, "end": 2}', "reason Field required"),
        ('{"first": 1, "end": 2, "reason": "x", "why": 1}', "why Extra"),
        ("\udcff", "not JSON"),
    ],
)
def test_bad_lines(ledger: Path, line: str, message: str) -> None:
    good = '{"first": 1, "end": 2, "reason": "x"}\n'
    ledger.write_bytes(f"{good}{line}\n{good}".encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message) as caught:
        read_ledger(ledger)
    assert f"{ledger} line 2" in str(caught.value)
    assert "correct or delete line 2" in str(caught.value)


def test_entries_refused() -> None:
    for first, end in [(5, 5), (-1, 3), (0, 2**62 + 1)]:
        with pytest.raises(ValidationError):
            SkipEntry(first=first, end=end, reason="x")


def test_a_ledger_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not be written"):
        append(tmp_path / "no" / "skips.jsonl", SkipEntry(first=1, end=2, reason="x"))
    with pytest.raises(DataError, match="cannot be read"):
        read_ledger(tmp_path)
