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
from megastable_tools.forensics.scanning import duplicates, near
from megastable_tools.forensics.scanning.duplicates import (
    COPY,
    HASHED,
    find_exact,
    read_copies,
    sort_copies,
    write_copies,
)
from megastable_tools.forensics.scanning.minhash import (
    BINS,
    GRAM,
    band_keys,
    banding,
    estimate,
    mix,
    signatures,
    similarities,
)
from megastable_tools.forensics.scanning.near import BAND, SMALL, find_near, sign
from megastable_tools.forensics.scanning.near import _candidates as candidates
from megastable_tools.forensics.scanning.near import _Groups as Groups
from megastable_tools.forensics.scanning.units import units
from tests.forensics.shelves import Plain, write
from tests.tiers import examples


def hashed(values: list[int], empty: Sequence[int] = ()) -> np.ndarray:
    """A record for each document, whose hash is made of its value."""
    records = np.zeros(len(values), HASHED)
    records["high"] = mix(np.array(values, np.uint64))
    records["low"], records["document"] = np.array(values, np.uint64) % 3, np.arange(len(values))
    records["tokens"] = [0 if number in empty else 7 for number in range(len(values))]
    return records


@settings(max_examples=examples(40))
@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 4), st.integers(1, 7), st.data())
def test_every_document_but_the_first_of_its_hash_is_a_copy(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], parts: int, size: int, data: st.DataObject
) -> None:
    """However often the documents are read, and in whichever parts they come."""
    empty = data.draw(st.lists(st.integers(0, max(len(values) - 1, 0)), unique=True, max_size=5))
    first: dict[int, int] = {}
    expected = {}
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


def test_a_foreign_file_of_copies_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "copies.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="scan again"):
        read_copies(tmp_path / "copies.parquet")


def sets(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[at : at + GRAM]) for at in range(len(tokens) - GRAM + 1)}


def jaccard(one: list[int], other: list[int]) -> float:
    a, b = sets(one), sets(other)
    return len(a & b) / len(a | b) if a | b else 1.0


@given(st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=6), st.data())
def test_similarity_is_that_of_sets_of_5_grams(documents: list[list[int]], data: st.DataObject) -> None:
    number = st.integers(0, len(documents) - 1)
    pairs = data.draw(st.lists(st.tuples(number, number), max_size=12))
    tokens = np.array([token for document in documents for token in document], np.int32)
    edges = np.cumsum([0, *map(len, documents)])
    one, other = np.array(pairs, np.int64).reshape(-1, 2).T
    found = similarities(tokens, edges, one, other).tolist()
    assert found == [jaccard(documents[a], documents[b]) for a, b in pairs]


def mutated(random: np.random.Generator, tokens: np.ndarray, share: float) -> np.ndarray:
    changed = tokens.copy()
    where = random.random(len(tokens)) < share
    changed[where] = random.integers(0, 60_000, int(where.sum()))
    return changed


@pytest.mark.parametrize("length", [12, 60, 300, 3000])
def test_signatures_estimate_similarity_for_short_and_long_documents(length: int) -> None:
    random = np.random.default_rng(length)
    documents, true = [], []
    for number in range(120):
        tokens = random.integers(0, 60_000, length)
        other = mutated(random, tokens, (number % 12) / 60)
        documents += [tokens, other]
        true.append(jaccard(tokens.tolist(), other.tolist()))
    edges = np.cumsum([0, *map(len, documents)])
    table = signatures([(np.concatenate(documents), edges, np.arange(len(documents)))], len(documents))
    assert table.shape == (240, BINS)
    error = estimate(table[::2], table[1::2]) - true
    spread = 0.06 if length >= 300 else 0.2  # few 5-grams fill few bins, the others repeat them
    assert abs(error.mean()) < 0.02
    assert error.std() < spread
    same = np.array(true) == 1.0
    assert same.any() and (error[same] == 0).all()


@settings(max_examples=examples(25))
@given(st.lists(st.lists(st.integers(0, 9), max_size=25), min_size=1, max_size=8), st.integers(5, 30))
def test_documents_cut_into_parts_have_the_same_signatures(documents: list[list[int]], size: int) -> None:
    """As `near` reads them: what is cut repeats 4 tokens; a 5-gram never crosses from one document to the next."""
    tokens = np.array([token for document in documents for token in document], np.uint16)
    edges = np.cumsum([0, *map(len, documents)])
    parts, begin = [], 0
    while begin < len(tokens):
        stop = min(begin + size, len(tokens))
        first = int(np.searchsorted(edges, begin, side="right")) - 1
        last = int(np.searchsorted(edges, stop))
        cut = edges[last] > stop
        local = np.clip(edges[first : last + 1], begin, stop) - begin
        parts.append((tokens[begin:stop], local, np.arange(first, last)))
        begin = stop - (GRAM - 1 if cut else 0)
    table = signatures(parts, len(documents))
    for number, document in enumerate(documents):
        alone = signatures([(np.array(document, np.uint16), np.array([0, len(document)]), np.array([0]))], 1)
        assert np.array_equal(table[number], alone[0])
        assert table[number].any() or len(sets(document)) == 0


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 0.99])
def test_bands_find_pairs_that_are_as_alike_as_asked_for(threshold: float) -> None:
    bands, rows = banding(threshold)
    assert bands * rows <= BINS
    random = np.random.default_rng(0)
    one = random.integers(0, 65_536, (4000, BINS)).astype(np.uint16)
    other = np.where(random.random(one.shape) < threshold, one, random.integers(0, 65_536, one.shape))
    met = (band_keys(one, bands, rows) == band_keys(other.astype(np.uint16), bands, rows)).any(axis=1)
    assert met.mean() > 0.985
    far = random.integers(0, 65_536, one.shape).astype(np.uint16)
    assert (band_keys(one, bands, rows) == band_keys(far, bands, rows)).any(axis=1).mean() < 0.01 or rows == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=60))
def test_candidates_of_small_buckets_are_all_pairs_and_of_large_ones_connected(
    entries: list[tuple[int, int]],
) -> None:
    part = np.array(entries, dtype=BAND)
    found = {(one, other) for one, other in candidates(part).tolist()}
    buckets: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}
    for key, document in entries:
        buckets.setdefault(key, set()).add(document)
        sizes[key] = sizes.get(key, 0) + 1
    for key, documents in buckets.items():
        pairs = {(one, other) for one in documents for other in documents if one < other}
        if sizes[key] <= SMALL:
            assert pairs <= found
        groups = Groups()
        for one, other in pairs & found:
            groups.join(one, other)
        assert len({groups.root(document) for document in documents}) == 1
    everything = [{(a, b) for a in some for b in some if a < b} for some in buckets.values()]
    assert found <= set().union(*everything)


@given(st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25)), max_size=40))
def test_groups_are_the_connected_parts_with_their_first_document(pairs: list[tuple[int, int]]) -> None:
    groups, label = Groups(), list(range(26))
    for one, other in pairs:
        groups.join(one, other)
        low, high = sorted((label[one], label[other]))
        label = [low if mark == high else mark for mark in label]
    expected = [[number, mark] for number, mark in enumerate(label) if number != mark]
    assert groups.members().tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 3])
def test_near_duplicates_of_shards_are_those_of_a_plain_comparison(
    tmp_path: Path, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets of 5-grams of all pairs: nothing is found that is not as alike, and next to nothing is missed."""
    monkeypatch.setattr(near, "count_passes", lambda size: passes)
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
    found = list(units(shards, 3000))
    for unit in found:
        sign(unit, tmp_path)
    copies = np.zeros(2, COPY)
    copies["document"], copies["of"] = [len(documents) - 2, len(documents) - 1], 8
    written = find_near(shards, found, tmp_path, copies, 0.8)
    assert sort_copies([copies, written])["document"].tolist()[-2:] == copies["document"].tolist()
    groups, alike = Groups(), {}
    for b in range(len(documents) - 2):
        for a in range(b):
            alike[a, b] = jaccard(documents[a], documents[b])
            if min(len(documents[a]), len(documents[b])) >= GRAM and alike[a, b] >= 0.8:
                groups.join(a, b)
    expected = dict(groups.members().tolist())
    got = dict(zip(written["document"].tolist(), written["of"].tolist()))
    assert len(expected) > 30
    assert got.keys() <= expected.keys()
    assert sum(expected[document] == first for document, first in got.items()) >= 0.97 * len(expected)
    assert len(written) == len(got)
    for copy in written:
        exact_value = alike[int(copy["of"]), int(copy["document"])]
        assert copy["similarity"] == pytest.approx(exact_value, abs=1e-6 if exact_value >= 0.8 else 0.2)
        assert copy["tokens"] == len(documents[int(copy["document"])])
