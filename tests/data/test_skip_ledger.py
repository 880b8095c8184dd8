"""The skip ledger against careless hands; and read again without what is known."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base import durable
from megastable.base.errors import DataError
from megastable.data.order import LAST_POSITION, Order, OrderedCorpus
from megastable.data.samples import Document
from megastable.data.skip_ledger import (
    RANGES,
    AnyEntry,
    Ledger,
    SampleEntry,
    ShardDocuments,
    SkipEntry,
    append_entries,
    append_entry,
    read_ledger,
    sample_entries,
)
from megastable.data.skips import Identity, Range, Selection, Skips

IDENTITY: dict[str, Any] = {"corpus": "web", "fingerprint": "f00", "tokens": [[0, 32]], "reason": "x"}


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "skips.jsonl"


def line(**fields: Any) -> str:
    return json.dumps(IDENTITY | fields)


def test_read_ledger_gives_both_kinds_of_lines_back(ledger: Path) -> None:
    documents = [ShardDocuments(shard="part-0", documents=[3, 17])]
    entries: list[AnyEntry] = [
        SkipEntry(first=5, end=9, reason="window", incident=1, step=4),
        SampleEntry(**IDENTITY, incident=2, step=9, documents=documents),
        SkipEntry(first=9, end=LAST_POSITION, reason="out", corpus="code"),
        SampleEntry(**IDENTITY | {"tokens": [[64, 96], [0, 10]], "reason": "ü"}),
    ]
    before, set_time = datetime.now(UTC), datetime(2020, 1, 1, tzinfo=UTC)
    append_entries(ledger, [*entries[:3], entries[3].model_copy(update={"time": set_time})])
    found = read_ledger(ledger)
    assert [e.model_copy(update={"time": None}) for e in found] == entries
    assert all(e.time is not None and before <= e.time <= datetime.now(UTC) for e in found[:3])
    assert found[3].time == set_time and ledger.read_text().count("\n") == 4
    excluded = Ledger.read_ledger(ledger).exclusions
    assert excluded.positions.ranges == [(5, 9)] and excluded.lines == 4
    assert {name: skips.ranges for name, skips in excluded.swapped.items()} == {"code": [(9, LAST_POSITION)]}
    assert {key: skips.ranges for key, skips in excluded.tokens.items()} == {
        Identity("web", "f00"): [(0, 32), (64, 96)]
    }
    assert Ledger.read_ledger(ledger).of_incident(2).entries == [found[1]]
    assert Ledger.read_ledger(ledger).by_position.entries == [found[0], found[2]]
    assert Ledger.read_ledger(ledger).without_reason(2, "x").entries == [found[0], *found[2:]]
    assert Ledger.read_ledger(ledger).without_reason(1, "x").entries == found


ODD = [
    ("{}", "first Field required"),
    ('{"first": 1, "end": 2, "reason": "x", "documents": []}', "documents Extra"),
    (line(tokens=[]), "tokens .*at least 1"),
    (line(tokens=[[9, 5], [1, 2]]), "first 9 is not below end 5"),
    (line(tokens=[[1, 2**62 + 1]]), "less than or equal"),
    (line(tokens=[[1, 2, 3]]), "at most 2"),
    (line(tokens=[[1.5, 2]]), "integer"),
    (line(fingerprint=""), "fingerprint .*at least 1"),
    (line(documents=[{"shard": "s"}]), "documents.0.documents Field required"),
    (line(time="0001-01-01T00:00:00"), "year 0|out of range"),
    (line(incident=10**30), "incident .*less than"),
    (line(reason="\ud800"), "hex escape"),
    (line(reason="x").replace('"x"', "[" * 200_000 + "]" * 200_000), "not JSON"),
    ("{broken", "not JSON"),
    ("[1, 2]", "line 2"),
    ('{"first": 9, "end": 5, "reason": "x"}', "first 9 is not below end 5"),
    ('{"first": -1, "end": 5, "reason": "x"}', "first .*greater than or equal to 0"),
    ('{"first": true, "end": 5, "reason": "x"}', "first .*integer"),
    ('{"first": 1, "reason": "x"}', "end Field required"),
    ('{"first": 1, "end": 2, "reason": "x", "why": 1}', "why Extra"),
    ("\udcff", "not JSON"),
]


@pytest.mark.parametrize(("wrong", "message"), ODD)
def test_read_ledger_names_a_wrong_line(ledger: Path, wrong: str, message: str) -> None:
    content = f"{line()}\n{wrong}\n{line()}\n".encode(errors="surrogateescape")
    ledger.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_ledger(ledger)
    assert f"correct or delete line 2 of {ledger}" in str(caught.value)
    odd: list[str] = []
    assert len(read_ledger(ledger, odd)) == 2 and odd == [str(caught.value)]


def test_sample_entries_of_many_samples_stay_short(ledger: Path) -> None:
    """A line that a crash tears is found in the last megabyte of the file."""
    order = Order(
        [OrderedCorpus("web", 10**9, 1.0, "f" * 64), OrderedCorpus("code", 10**6, 1.0, "e" * 64)], 64, seed=0
    )
    positions = np.arange(3 * RANGES)
    documents = [Document(corpus="web", shard="a", document=n, first_token=0, tokens=1) for n in (3, 9)]
    entries = sample_entries(order, positions, "bad", documents, incident=4, step=7)
    assert {e.corpus for e in entries} == {"web", "code"} and len(entries) <= 5
    assert sum(len(e.tokens) for e in entries) >= 2 * RANGES
    assert next(e.documents for e in entries if e.corpus == "web") == [
        ShardDocuments(shard="a", documents=[3, 9])
    ]
    append_entries(ledger, entries)
    lines, _ = durable.read_lines(ledger)
    assert max(map(len, lines)) < 1 << 18
    assert Ledger.read_ledger(ledger).exclusions.tokens.keys() == {
        Identity("web", "f" * 64),
        Identity("code", "e" * 64),
    }


RANGE_LISTS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda r: (r[0], r[0] + r[1])), max_size=10
)


def positions(ranges: list[Range]) -> set[int]:
    return {position for first, end in ranges for position in range(first, end)}


@settings(deadline=None)
@given(RANGE_LISTS)
def test_skips_merge_ranges(ranges: list[Range]) -> None:
    skips = Skips.from_ranges(ranges)
    assert positions(skips.ranges) == positions(ranges)
    assert all(a[1] < b[0] for a, b in zip(skips.ranges, skips.ranges[1:], strict=False))
    for position in range(-1, 80):
        assert skips.contains(position) == (position in positions(ranges))


@settings(deadline=None)
@given(RANGE_LISTS, st.integers(0, 80), st.integers(0, 40))
def test_next_kept_is_the_naive_walk(ranges: list[Range], cursor: int, count: int) -> None:
    skipped, walked, at = positions(ranges), [], cursor
    while len(walked) < count:
        if at not in skipped:
            walked.append(at)
        at += 1
    kept, following = Skips.from_ranges(ranges).next_kept(cursor, count)
    assert kept.dtype == np.int64
    assert kept.tolist() == walked
    assert following == at


def test_next_kept_does_not_walk_through_huge_ranges() -> None:
    """A walk of 10^18 positions would not end before the test's timeout."""
    skips = Skips.from_ranges([(5, 10**18), *((10**18 + 2 * n, 10**18 + 2 * n + 1) for n in range(100_000))])
    kept, following = skips.next_kept(3, 6)
    assert kept.tolist() == [3, 4, *(10**18 + n for n in (1, 3, 5, 7))]
    assert following == 10**18 + 8
    assert skips.ranges_between(10**17, 10**18 + 3) == [(10**17, 10**18 + 1), (10**18 + 2, 10**18 + 3)]


@pytest.mark.parametrize(
    "wrong",
    [(5, 5), (6, 5), (-1, 5), (0, 2**62 + 1), (0.0, 5), (0, "5"), (True, 5), (1, 2, 3), 7, None, (1, None)],
)
def test_skips_refuse_ranges(wrong: object) -> None:
    with pytest.raises(DataError, match="skip range"):
        Skips.from_ranges([(1, 2), wrong])  # type: ignore[list-item]


@settings(deadline=None)
@given(cut=st.integers(1, 60), tail=st.sampled_from([b"", b"\x00\x00", b"\xff"]))
def test_append_entry_sets_a_torn_line_aside(cut: int, tail: bytes) -> None:
    """A crash at any byte of a write: nothing acknowledged is lost, and the ledger goes on."""
    with tempfile.TemporaryDirectory() as directory:
        ledger = Path(directory) / "skips.jsonl"
        append_entry(ledger, SkipEntry(first=1, end=2, reason="first"))
        whole = ledger.read_bytes()
        second = SkipEntry(first=3, end=4, reason="second, torn", time=datetime.now(UTC))
        torn = second.model_dump_json().encode()[:cut] + tail
        ledger.write_bytes(whole + torn)
        assert [entry.first for entry in read_ledger(ledger)] == [1]
        append_entry(ledger, SkipEntry(first=5, end=6, reason="third"))
        assert [entry.first for entry in read_ledger(ledger)] == [1, 5]
        assert ledger.read_bytes().startswith(whole)
        assert (Path(directory) / "skips.jsonl.torn").read_bytes() == torn + b"\n"


# Selections: positions, and corpora that were swapped out

CORPORA = ("books", "code", "web")
ORDER = Order(
    [OrderedCorpus(name, 500, weight) for name, weight in zip(CORPORA, (0.5, 0.2, 0.3), strict=True)],
    16, seed=3, block=16,
)  # fmt: skip


def out(name: str | None, first: int, end: int = LAST_POSITION) -> SkipEntry:
    return SkipEntry(first=first, end=end, reason="x", corpus=name)


def selection_of(entries: Sequence[AnyEntry], more: Sequence[Range] = (), order: Order = ORDER) -> Selection:
    return Selection(order, Ledger(entries).exclusions, more)


def test_selection_refuses_all_corpora_out() -> None:
    entries = [out(name, first) for name, first in zip(CORPORA, (5, 10, 10**15), strict=True)]
    assert selection_of(entries[:2]).corpora_left == 1
    with pytest.raises(DataError, match=r"swaps out every corpus, or .*: delete one of those lines"):
        selection_of(entries)
    with pytest.raises(DataError, match="swaps out every corpus"):
        Selection(Order([OrderedCorpus("only", 500, 1.0)], 16, seed=3), Ledger([out("only", 7)]).exclusions)
