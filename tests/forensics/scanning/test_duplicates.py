"""Copies: found by partitions, against a plain reading; signatures and candidates against sets of 5-grams."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.data.shards import Shard
from megastable_tools.forensics.scanning import duplicates
from megastable_tools.forensics.scanning.duplicates import (
    COPY,
    GRAM,
    HASHED,
    find_exact,
    find_near,
    mix_bits,
    read_copies,
    sign_unit,
    similarities,
    sort_copies,
    write_copies,
)  # fmt: skip
from megastable_tools.forensics.scanning.units import split_into_units
from tests.forensics.shelves import Plain, write
from tests.tiers import examples


def hashed(values: list[int], empty: Sequence[int] = ()) -> np.ndarray:
    """A record for each document, whose hash is made of its value."""
    records = np.zeros(len(values), HASHED)
    records["high"] = mix_bits(np.array(values, np.uint64))
    records["low"], records["document"] = np.array(values, np.uint64) % 3, np.arange(len(values))
    records["tokens"] = [0 if number in empty else 7 for number in range(len(values))]
    return records


@settings(max_examples=examples(40))
@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 4), st.integers(1, 7), st.data())
def test_find_exact_names_every_document_but_the_first_of_its_hash(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], parts: int, size: int, data: st.DataObject
) -> None:
    """However often the documents are read, and in whichever parts they come."""
    empty = data.draw(st.lists(st.integers(0, max(len(values) - 1, 0)), unique=True, max_size=5))
    first, expected = dict[int, int](), {}
    for number, value in enumerate(values):
        if number not in empty and first.setdefault(value, number) != number:
            expected[number] = first[value]
    records = hashed(values, empty)
    given_parts = [records[at : at + size] for at in range(0, len(records), size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "BYTES", max(1, records.nbytes // parts))
        found = find_exact(lambda: given_parts, len(values))
    path = tmp_path_factory.mktemp("copies") / "copies.parquet"
    write_copies(path, found)
    assert read_copies(path).tolist() == found.tolist()
    assert found["document"].tolist() == sorted(expected)
    assert found["of"].tolist() == [expected[number] for number in sorted(expected)]
    assert (found["tokens"] == 7).all() and (found["similarity"] == 1).all() and not found["near"].any()
    path.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="scan again"):
        read_copies(path)


def jaccard(one: list[int], other: list[int]) -> float:
    a, b = ({tuple(of[at : at + GRAM]) for at in range(len(of) - GRAM + 1)} for of in (one, other))
    return len(a & b) / len(a | b) if a | b else 1.0


@given(st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=6), st.data())
def test_similarities_are_those_of_sets_of_5_grams(documents: list[list[int]], data: st.DataObject) -> None:
    number = st.integers(0, len(documents) - 1)
    pairs = data.draw(st.lists(st.tuples(number, number), max_size=12))
    tokens = np.array([token for document in documents for token in document], np.int32)
    one, other = np.array(pairs, np.int64).reshape(-1, 2).T
    found = similarities(tokens, np.cumsum([0, *map(len, documents)]), one, other).tolist()
    assert found == [jaccard(documents[a], documents[b]) for a, b in pairs]


def mutated(random: np.random.Generator, tokens: np.ndarray, share: float) -> np.ndarray:
    changed, where = tokens.copy(), random.random(len(tokens)) < share
    changed[where] = random.integers(0, 60_000, int(where.sum()))
    return changed


@pytest.mark.parametrize(("passes", "small"), [(1, 16), (3, 2)])
def test_find_near_finds_what_a_plain_comparison_does(
    tmp_path: Path, passes: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets of 5-grams of all pairs: nothing is found that is not as alike, and next to nothing is missed; also where
    large buckets are only chained."""
    monkeypatch.setattr(duplicates, "count_passes", lambda size: passes)
    monkeypatch.setattr(duplicates, "SMALL", small)
    monkeypatch.setattr(duplicates, "BLOCK", 500)  # documents come in parts
    random = np.random.default_rng(3)
    documents: list[list[int]] = []
    for number in range(60):
        tokens = random.integers(0, 60_000, int(random.integers(6, 400)))
        documents.append(tokens.tolist())
        for _ in range(number % 4):
            documents.append(mutated(random, tokens, random.random() / 15).tolist())
    documents[30:33] = [[], [1, 2, 3], [1, 2, 3, 4]]
    random.shuffle(documents)
    documents += [documents[8]] * 2
    shards = []
    for name, part in (("a", documents[:70]), ("b", documents[70:])):
        write(tmp_path, Plain(name, [[(tokens, 0)] for tokens in part]), "uint16")
        shards.append(Shard(tmp_path / name))
    found = list(split_into_units(shards, 3000))
    for unit in found:
        sign_unit(unit, tmp_path)
    count = len(documents) - 2
    copies = np.zeros(2, COPY)
    copies["document"], copies["of"] = [count, count + 1], 8
    written = find_near(shards, found, tmp_path, copies, 0.8)
    assert sort_copies([copies, written])["document"].tolist()[-2:] == copies["document"].tolist()
    label, alike = list(range(count)), {}
    for b in range(count):
        for a in range(b):
            alike[a, b] = jaccard(documents[a], documents[b])
            if min(len(documents[a]), len(documents[b])) >= GRAM and alike[a, b] >= 0.8:
                low, high = sorted((label[a], label[b]))
                label = [low if mark == high else mark for mark in label]
    expected = {number: mark for number, mark in enumerate(label) if number != mark}
    got = dict(zip(written["document"].tolist(), written["of"].tolist()))
    assert len(expected) > 30 and got.keys() <= expected.keys() and len(written) == len(got)
    assert sum(expected[document] == first for document, first in got.items()) >= 0.97 * len(expected)
    for copy in written:
        exact = alike[int(copy["of"]), int(copy["document"])]
        assert copy["similarity"] == pytest.approx(exact, abs=1e-6 if exact >= 0.8 else 0.2)
        assert copy["tokens"] == len(documents[int(copy["document"])])
