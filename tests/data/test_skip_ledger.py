"""The skip ledger as columns, against the same lines one by one; and read again without what is known."""

from __future__ import annotations

import json
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
from megastable.data.skips import Identity, Skips
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
    append_all(ledger, entries)
    found = read_ledger(ledger)
    assert [e.model_copy(update={"time": None}) for e in found] == entries
    assert all(e.time is not None for e in found)
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
    assert Ledger.read(ledger).reasons == {"window": 1, "x": 1, "out": 1, "ü": 1}


ODD = [
    ("{}", "first Field required"),
    ('{"first": 1, "end": 2, "reason": "x", "documents": []}', "documents Extra"),
    (line(first=1), "first Extra"),
    (line(tokens=[]), "tokens .*at least 1"),
    (line(tokens=None), "tokens .*list"),
    (line(tokens=[[5, 5]]), "first 5 is not below end 5"),
    (line(tokens=[[9, 5], [1, 2]]), "first 9 is not below end 5"),
    (line(tokens=[[-1, 5]]), "greater than or equal to 0"),
    (line(tokens=[[1, 2**62 + 1]]), "less than or equal"),
    (line(tokens=[[1]]), "at least 2"),
    (line(tokens=[[1, 2, 3]]), "at most 2"),
    (line(tokens=[[1.5, 2]]), "integer"),
    (line(tokens=[[True, 2]]), "integer"),
    (line(tokens=[1, 2]), "tokens.0 .*list"),
    (line(tokens=[None]), "tokens.0 .*list"),
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
    (line(reason="\ud800"), "surrogates not allowed"),
    (line(reason="x").replace('"x"', "[" * 200_000 + "]" * 200_000), "not JSON"),
    (json.dumps({k: v for k, v in IDENTITY.items() if k != "tokens"}), "tokens Field required"),
    (json.dumps({k: v for k, v in IDENTITY.items() if k != "fingerprint"}), "fingerprint Field required"),
    ('{"first": 1, "end": 2, "reason": "x"}{"first": 3, "end": 4, "reason": "x"}', "not JSON"),
    ('{"first": 1, "end": 2, "reason": "\udcff"}', "not JSON"),
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


def test_two_objects_on_a_line_are_a_wrong_line(ledger: Path) -> None:
    """Also where a blank line makes as many lines of them as objects."""
    ledger.write_text(line() * 2 + "\n\n" + line() + "\n")
    odd: list[str] = []
    assert len(read_ledger(ledger, odd)) == 1 and "line 1 is not JSON" in odd[0] and len(odd) == 1


TIMES = st.none() | st.sampled_from(
    ["2026-11-22T09:46:18.123456Z", "2026-11-22T09:46:18+02:00", "2026-11-22T09:46:18", 1764000000]
    + [f"0001-01-0{day}T00:00:00{zone}" for day in (1, 3) for zone in ("", "Z", "+02:00")]
    + [f"9999-12-{day}T23:59:59{zone}" for day in (29, 31) for zone in ("", "Z", "-05:00")]
)
LARGE = st.sampled_from([2**62, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**30])
NUMBERS = st.none() | st.integers(-1, 9) | LARGE
FIELDS = {
    "first": NUMBERS, "end": NUMBERS, "reason": st.none() | st.sampled_from(["x", "", "ü", "\ud800", "}\n{"]),
    "incident": NUMBERS, "step": NUMBERS | st.just("3"),
    "corpus": st.none() | st.sampled_from(["web", "code", ""]), "fingerprint": st.none() | st.sampled_from(["f", ""]),
    "tokens": st.none() | st.lists(st.lists(st.integers(-1, 9), min_size=1, max_size=3), max_size=3),
    "documents": st.none() | st.lists(st.fixed_dictionaries({"shard": st.just("s"), "documents": st.lists(NUMBERS)})),
    "time": TIMES, "why": st.none(),
}  # fmt: skip
GOOD = st.sampled_from(
    [
        line(),
        line(tokens=[[1, 5], [3, 9]]),
        '{"first": 1, "end": 2, "reason": "x"}',
        "",
        " ",
        line() + " ",
        line() * 2,
    ]
)


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(GOOD | st.fixed_dictionaries({}, optional=FIELDS).map(json.dumps), max_size=6))
def test_columns_say_what_the_lines_say(lines: list[str]) -> None:
    """Whatever is left out or wrong: the same entries, and the same is said of the others."""
    path, content = Path("skips.jsonl"), "".join(text + "\n" for text in lines).encode()
    fast, slow = list[str](), list[str]()
    found = Ledger(
        skip_ledger.pa.concat_tables([Ledger.of([]).table, *skip_ledger._tables(path, content, 0, 0, fast)])
    )
    by_line = Ledger(skip_ledger._by_line(path, content, 0, slow)) if content else Ledger.of([])
    assert found.table.equals(by_line.table) and fast == slow


def test_what_is_known_is_not_read_again(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million old lines cost a look at their bytes, whatever is added, and by whom."""
    parsed: list[int] = []
    real = skip_ledger._columns
    monkeypatch.setattr(skip_ledger, "_columns", lambda block: parsed.append(len(block)) or real(block))
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


@pytest.mark.parametrize("kind", ["positions", "samples"])
def test_many_lines_cost_as_much_each_as_few(
    ledger: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger of many lines is read as columns: not one of them becomes an object."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(skip_ledger, "parse", refuse)
    of = (lambda n: line(tokens=[[n, n + 1]])) if kind == "samples" else (
        lambda n: json.dumps({"first": n, "end": n + 1, "reason": "x"})
    )  # fmt: skip
    ledger.write_text("".join(of(2 * n) + "\n" for n in range(50_000)))
    found = Ledger.read(ledger).exclusions
    skips = found.positions if kind == "positions" else found.tokens[Identity("web", "f00")]
    assert skips.count() == 50_000


@pytest.mark.parametrize("wrong", ["", "{not a line", line(time="2026-11-22T09:46:18")])
def test_a_wrong_line_costs_a_few_that_are_read_one_by_one(
    ledger: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all others of its block; and it is named by its number."""
    parsed: list[int] = []
    real = skip_ledger.parse
    monkeypatch.setattr(skip_ledger, "parse", lambda *given: parsed.append(given[1]) or real(*given))
    lines = [line(tokens=[[2 * n, 2 * n + 1]]) for n in range(20_000)]
    ledger.write_text("\n".join([*lines[:7000], wrong, *lines[7000:]]) + "\n")
    odd: list[str] = []
    found = Ledger.read(ledger, odd).exclusions
    assert found.lines == 20_000 + wrong.startswith('{"corpus')
    assert (
        Skips.of((2 * n, 2 * n + 1) for n in range(20_000))
        .mask(found.tokens[Identity("web", "f00")].edges[:, 0])
        .all()
    )
    assert len(parsed) <= 200 and [f"line 7001 of {ledger}" in text for text in odd] == (
        [True] if wrong == "{not a line" else []
    )


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
