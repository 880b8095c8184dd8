"""Skips against a naive set of positions, and the ledger against crashes and careless hands."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megastable.base.errors import DataError
from megastable.data.order import LAST_POSITION, Order, OrderedCorpus
from megastable.data.skip_ledger import AnyEntry, Ledger, SkipEntry, append, read_ledger
from megastable.data.skips import Range, Selection, Skips, ranges_of

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


@settings(deadline=None)
@given(RANGES)
def test_gaps(ranges: list[Range]) -> None:
    skips = Skips.of(ranges)
    gaps = skips.gaps()
    assert positions(gaps.between(0, 99)) == set(range(99)) - positions(ranges)
    assert gaps.gaps().ranges == skips.ranges
    assert gaps.ranges[-1][1] == LAST_POSITION
    assert Skips.of([(0, LAST_POSITION)]).gaps().ranges == []


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


def test_entries_refused() -> None:
    for first, end in [(5, 5), (-1, 3), (0, 2**62 + 1)]:
        with pytest.raises(ValidationError):
            SkipEntry(first=first, end=end, reason="x")


def test_a_ledger_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not be written"):
        append(tmp_path / "no" / "skips.jsonl", SkipEntry(first=1, end=2, reason="x"))
    with pytest.raises(DataError, match="cannot be read"):
        read_ledger(tmp_path)


# Selections: positions, and corpora that were swapped out

CORPORA = ("books", "code", "web")
ORDER = Order(
    [OrderedCorpus(name, 500, weight) for name, weight in zip(CORPORA, (0.5, 0.2, 0.3), strict=True)],
    16, seed=3, block=16,
)  # fmt: skip
OF = ORDER.locate(np.arange(400)).corpus.tolist()  # the corpus at every position that is looked at here


def out(name: str | None, first: int, end: int = LAST_POSITION) -> SkipEntry:
    return SkipEntry(first=first, end=end, reason="x", corpus=name)


def selection_of(entries: Sequence[AnyEntry], more: Sequence[Range] = (), order: Order = ORDER) -> Selection:
    return Selection(order, Ledger(entries).exclusions, more)


def test_corpora_that_are_left() -> None:
    entries = [out("web", 5, 90), out("web", 70), out("code", 3, 10**15), out(None, 0, 7)]
    selection = selection_of(entries)
    assert selection.corpora_left == 2  # code comes back
    assert selection_of([]).corpora_left == 3
    assert selection_of([*entries, out("code", 10**15)]).corpora_left == 1
    kept, _ = selection.next_kept(0, 20)
    assert kept.tolist() == [p for p in range(7, 400) if OF[p] == 0][:20]


def test_a_corpus_that_is_swapped_out_again_is_out_once() -> None:
    """Twice by two incidents, at one position more or less."""
    twice = selection_of([out("web", 50), out("web", 49)])
    once = selection_of([out("web", 49)])
    assert twice.corpora_left == once.corpora_left == 2
    assert twice.next_kept(0, 90)[0].tolist() == once.next_kept(0, 90)[0].tolist()


@pytest.mark.parametrize("name", ["news", "", "Web"])
def test_a_corpus_that_is_none_of_the_run(name: str) -> None:
    with pytest.raises(
        DataError, match=f"swaps out corpus '{name}', which is not one of .*'books'.* correct its name"
    ):
        selection_of([out("web", 5), out(name, 5, 9)])


def test_all_corpora_out() -> None:
    entries = [out(name, first) for name, first in zip(CORPORA, (5, 10, 10**15), strict=True)]
    assert selection_of(entries[:2]).corpora_left == 1
    with pytest.raises(DataError, match=r"swaps out every corpus, or .*: delete one of those lines"):
        selection_of(entries)
    with pytest.raises(DataError, match="swaps out every corpus"):
        Selection(Order([OrderedCorpus("only", 500, 1.0)], 16, seed=3), Ledger([out("only", 7)]).exclusions)


def test_all_corpora_out_for_long_are_not_walked_through() -> None:
    """To the last position but one, by a careless hand: a walk there would not end before the test's timeout."""
    back = 10**15
    for_long = selection_of([out("books", 40, back), out("code", 9), out("web", 30, back + 7)])
    kept, _ = for_long.next_kept(0, 60)
    assert max(p for p in kept.tolist() if p < back) < 40 and kept[-1] >= back
    nearly = selection_of([out(name, 5, LAST_POSITION - 1) for name in CORPORA])
    assert nearly.next_kept(0, 5)[0].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="all others are skipped"):
        nearly.next_kept(0, 7)


def test_what_is_left_of_a_selection_may_be_skipped_as_well() -> None:
    selection = selection_of([out("web", 0), out(None, 50)])
    left = [p for p in range(50) if OF[p] != 2]
    assert selection.next_kept(0, len(left))[0].tolist() == left
    with pytest.raises(DataError, match="all others are skipped"):
        selection.next_kept(0, len(left) + 1)


def test_a_selection_refuses_wrong_ranges_of_the_recipe() -> None:
    for wrong in [(9, 5), (-1, 5), (0, 2**62 + 1), (1.5, 3)]:
        with pytest.raises(DataError, match="skip range"):
            selection_of([], [wrong])  # type: ignore[list-item]


def test_a_swapped_corpus_through_the_ledger(ledger: Path) -> None:
    entries = [out(None, 3, 9), out("web", 20), out("web", 5, 30), out(None, 6, 12)]
    for entry in entries:
        append(ledger, entry)
    found = read_ledger(ledger)
    assert [(e.first, e.end, e.corpus) for e in found] == [(e.first, e.end, e.corpus) for e in entries]
    selection = selection_of(found)
    left = [p for p in range(400) if not 3 <= p < 12 and not (p >= 5 and OF[p] == 2)]
    assert selection.next_kept(0, 60)[0].tolist() == left[:60]


@given(st.sets(st.integers(0, 40)))
def test_ranges_are_the_inverse_of_their_expansion(positions: set[int]) -> None:
    found = ranges_of(sorted(positions))
    assert [p for first, end in found for p in range(first, end)] == sorted(positions)
    assert all(first < end for first, end in found)
    assert all(end < first for (_, end), (first, _) in pairwise(found))
