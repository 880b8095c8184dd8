"""The skip ledger against careless hands; and read again without what is known."""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base import jsonl
from megastable.base.errors import DataError
from megastable.data import skip_ledger
from megastable.data.documents import Document
from megastable.data.order import LAST_POSITION, Order, OrderedCorpus
from megastable.data.skip_ledger import (
    RANGES,
    AnyEntry,
    Ledger,
    SampleEntry,
    ShardDocuments,
    SkipEntry,
    SkipLedger,
    append,
    append_all,
    read_ledger,
    sample_entries,
)
from megastable.data.skips import Exclusions, Identity
from tests.tiers import examples

IDENTITY: dict[str, Any] = {"corpus": "web", "fingerprint": "f00", "tokens": [[0, 32]], "reason": "x"}


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "skips.jsonl"


def line(**fields: Any) -> str:
    return json.dumps(IDENTITY | fields)


def test_both_kinds_of_lines_come_back_as_they_were(ledger: Path) -> None:
    documents = [ShardDocuments(shard="part-0", documents=[3, 17])]
    entries: list[AnyEntry] = [
        SkipEntry(first=5, end=9, reason="window", incident=1, step=4),
        SampleEntry(**IDENTITY, incident=2, step=9, documents=documents),
        SkipEntry(first=9, end=LAST_POSITION, reason="out", corpus="code"),
        SampleEntry(**IDENTITY | {"tokens": [[64, 96], [0, 10]], "reason": "ü"}),
    ]
    before, set_time = datetime.now(UTC), datetime(2020, 1, 1, tzinfo=UTC)
    append_all(ledger, [*entries[:3], entries[3].model_copy(update={"time": set_time})])
    found = read_ledger(ledger)
    assert [e.model_copy(update={"time": None}) for e in found] == entries
    assert all(e.time is not None and before <= e.time <= datetime.now(UTC) for e in found[:3])
    assert found[3].time == set_time and ledger.read_text().count("\n") == 4
    excluded = Ledger.read(ledger).exclusions
    assert excluded.positions.ranges == [(5, 9)] and excluded.lines == 4
    assert {name: skips.ranges for name, skips in excluded.swapped.items()} == {"code": [(9, LAST_POSITION)]}
    assert {key: skips.ranges for key, skips in excluded.tokens.items()} == {
        Identity("web", "f00"): [(0, 32), (64, 96)]
    }
    assert Ledger.read(ledger).of_incident(2).entries == [found[1]]
    assert Ledger.read(ledger).by_position.entries == [found[0], found[2]]
    assert Ledger.read(ledger).without(2, "x").entries == [found[0], *found[2:]]
    assert Ledger.read(ledger).without(1, "x").entries == found


ODD = [
    ("{}", "first Field required"),
    ('{"first": 1, "end": 2, "reason": "x", "documents": []}', "documents Extra"),
    (line(first=1), "first Extra"),
    (line(tokens=[]), "tokens .*at least 1"),
    (line(tokens=None), "tokens .*array"),
    (line(tokens=[[5, 5]]), "first 5 is not below end 5"),
    (line(tokens=[[9, 5], [1, 2]]), "first 9 is not below end 5"),
    (line(tokens=[[-1, 5]]), "greater than or equal to 0"),
    (line(tokens=[[1, 2**62 + 1]]), "less than or equal"),
    (line(tokens=[[1]]), "at least 2"),
    (line(tokens=[[1, 2, 3]]), "at most 2"),
    (line(tokens=[[1.5, 2]]), "integer"),
    (line(tokens=[[True, 2]]), "integer"),
    (line(tokens=[1, 2]), "tokens.0 .*array"),
    (line(tokens=[None]), "tokens.0 .*array"),
    (line(fingerprint=""), "fingerprint .*at least 1"),
    (line(corpus=""), "corpus .*at least 1"),
    (line(corpus=None), "corpus .*string"),
    (line(fingerprint=7), "fingerprint .*string"),
    (line(reason=None), "reason .*string"),
    (line(documents=[{"shard": "s"}]), "documents.0.documents Field required"),
    (line(documents=[None]), "documents.0"),
    (line(time="yesterday"), "time .*datetime"),
    (line(time="0001-01-01T00:00:00"), "year 0|out of range"),
    (line(time="0001-01-01T00:00:00+02:00"), "out of range"),
    (line(time="9999-12-31T23:59:59-05:00"), "out of range"),
    (line(incident=10**30), "incident .*less than"),
    (line(step=-(10**30)), "step .*greater than"),
    (line(documents=[{"shard": "s", "documents": [10**30]}]), "documents.0.documents.0 .*less than"),
    (line(reason="\ud800"), "hex escape"),
    (line(reason="x").replace('"x"', "[" * 200_000 + "]" * 200_000), "not JSON"),
    (json.dumps({k: v for k, v in IDENTITY.items() if k != "tokens"}), "tokens Field required"),
    (json.dumps({k: v for k, v in IDENTITY.items() if k != "fingerprint"}), "fingerprint Field required"),
    ('{"first": 1, "end": 2, "reason": "x"}{"first": 3, "end": 4, "reason": "x"}', "not JSON"),
    ('{"first": 1, "end": 2, "reason": "\udcff"}', "not JSON"),
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
    ('{"first": 1, "end": 2, "reason": "x", "corpus": 3}', "corpus .*string"),
    ('{"first": 1, "end": 1e30, "reason": "x"}', "end .*integer"),
    ('{"first": 1, "end": 99999999999999999999999, "reason": "x"}', "end .*less than or equal"),
    ('{"first": NaN, "end": 2, "reason": "x"}', "first .*integer"),
    ('{"first": null, "end": 2, "reason": "x"}', "first .*integer"),
    ('{"first": [1], "end": 2, "reason": "x"}', "first .*integer"),
    ("null", "line 2"),
    ("\udcff", "not JSON"),
]


@pytest.mark.parametrize(("wrong", "message"), ODD)
def test_a_line_that_is_not_as_it_should_be_is_named(ledger: Path, wrong: str, message: str) -> None:
    content = f"{line()}\n{wrong}\n{line()}\n".encode(errors="surrogateescape")
    ledger.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_ledger(ledger)
    assert f"correct or delete line 2 of {ledger}" in str(caught.value)
    odd: list[str] = []
    assert len(read_ledger(ledger, odd)) == 2 and odd == [str(caught.value)]


def test_an_object_over_two_lines_is_two_wrong_lines(ledger: Path) -> None:
    ledger.write_text(line()[:20] + "\n" + line()[20:] + "\n" + line() + line() + "\n")
    odd: list[str] = []
    assert read_ledger(ledger, odd) == [] and len(odd) == 3


VALUES = (
    st.none()
    | st.integers(-1, 9)
    | st.sampled_from([2**62, 2**63, -(10**30), "x", "", [], [[1, 2]], [[2, 1]], True])
)
LINES = st.lists(
    st.sampled_from([line(), line() * 2, '{"first": 1, "end": 2, "reason": "x"}', "", " ", "{"])
    | st.dictionaries(st.sampled_from([*IDENTITY, "first", "end", "released", "time"]), VALUES).map(
        json.dumps
    )
)


@settings(deadline=None, max_examples=examples(100))
@given(LINES, st.integers(0, 9))
def test_every_line_is_an_entry_or_a_problem_however_often_the_ledger_is_read(
    lines: list[str], some: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "skips.jsonl"
        path.write_text("".join(text + "\n" for text in lines[:some]))
        (again := SkipLedger(path)).read()
        path.write_text("".join(text + "\n" for text in lines))
        odd: list[str] = []
        entries = Ledger.read(path, odd).entries
        assert len(entries) + len(odd) == sum(bool(text.strip()) for text in lines)
        assert all(e.tokens if isinstance(e, SampleEntry) else e.first < e.end for e in entries)
        excluded, problems = again.read()
        assert problems == odd and ranges_of(excluded) == ranges_of(Ledger(entries).exclusions)


def ranges_of(excluded: Exclusions) -> list[dict[Any, Any]]:
    by_name = [{None: excluded.positions}, excluded.swapped, excluded.tokens]
    return [excluded.counts, *({name: skips.ranges for name, skips in some.items()} for some in by_name)]


def test_what_is_known_is_not_read_again(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million old lines cost a look at their bytes, whatever is added, and by whom."""
    parsed: list[int] = []
    real = skip_ledger.parse_lines
    monkeypatch.setattr(
        skip_ledger, "parse_lines", lambda path, new, *rest: parsed.append(len(new)) or real(path, new, *rest)
    )
    append_all(ledger, [SkipEntry(first=n, end=n + 1, reason="x") for n in range(0, 2000, 2)])
    again = SkipLedger(ledger)
    first, odd = again.read()
    assert first.lines == 1000 and first.positions.count() == 1000 and not odd
    size = ledger.stat().st_size
    append(ledger, SampleEntry(**IDENTITY))
    with ledger.open("a") as file:
        file.write("{not a line\n")
    second, odd = again.read()
    assert sum(parsed) == ledger.stat().st_size and parsed[-1] == ledger.stat().st_size - size
    assert second.lines == 1001 and "line 1002 is not JSON" in odd[0]
    assert again.read() == (second, odd) and sum(parsed) == ledger.stat().st_size
    with ledger.open("a") as file:
        file.write('{"first": 1, "end": 2, "reason": "no end of line"}')
    third, odd = again.read()
    assert third.lines == 1002 and third.positions.count() == 1001 and len(odd) == 1
    assert again.read()[0].lines == 1002  # counted once
    with ledger.open("a") as file:
        file.write('\n{"first": 3, "e')
    assert again.read()[0].lines == 1002
    # Whoever takes lines back changes what is known, also where the file has grown since.
    ledger.write_text(
        "\n" + "".join(f'{{"first": {n}, "end": {n + 1}, "reason": "other"}}\n' for n in range(3000))
    )
    whole, odd = again.read()
    assert whole.lines == 3000 and whole.positions.ranges == [(0, 3000)] and not whole.tokens and not odd
    ledger.unlink()
    assert again.read()[0].lines == 0


def test_the_lines_of_many_samples_stay_short(ledger: Path) -> None:
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
    append_all(ledger, entries)
    lines, _ = jsonl.read(ledger)
    assert max(map(len, lines)) < 1 << 18
    assert Ledger.read(ledger).exclusions.tokens.keys() == {
        Identity("web", "f" * 64),
        Identity("code", "e" * 64),
    }
