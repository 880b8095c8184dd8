"""A new kind of text among others, by tokens alone, on texts that are made up."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.stability.novelty import FEWEST, NEIGHBOURS, NewKind, Pool, _table
from tests.tiers import examples

Int64s = npt.NDArray[np.int64]
LENGTH, WORDS = 64, 400


def scan(tokens: Int64s) -> NewKind:
    """Of samples all of which are new to the pool."""
    return Pool().scan(np.arange(len(tokens)), tokens)


def text(kinds: Int64s, seed: int) -> Int64s:
    """Samples of these kinds: each has its own forty of the words, as often as the common ones."""
    random = np.random.default_rng(seed)
    own = np.random.default_rng(99).integers(WORDS, size=(int(kinds.max()) + 1, 40))
    words = own[kinds[:, None], random.integers(40, size=(kinds.size, LENGTH + 1))]
    return np.where(random.random(words.shape) < 0.7, words, random.integers(WORDS, size=words.shape))


def ordinary(count: int, seed: int, kinds: int = 20) -> Int64s:
    """Kinds that are there at any time, some of them rare."""
    return np.minimum(kinds, np.random.default_rng(seed).zipf(1.5, count))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [300, 1000])
def test_a_new_kind_is_told_by_ten_samples(count: int, seed: int) -> None:
    kinds = ordinary(count, seed)
    late = count - 1 - np.random.default_rng(seed).choice(count // 12, 10, replace=False)
    kinds[late] = 30
    found = scan(text(kinds, seed))
    assert found.p < 8e-5
    assert np.isin(found.kind, late).mean() >= 0.6 and np.isin(late, found.kind).mean() >= 0.8
    assert np.array_equal(found.kind, np.unique(found.kind))


def test_the_few_that_came_before_are_not_of_the_new() -> None:
    kinds = ordinary(1000, 0)
    kinds[[5, 50, 500]] = kinds[-20:] = 30
    found = scan(text(kinds, 0))
    assert found.p < 8e-5 and found.kind.min() >= 750


@pytest.mark.parametrize("seed", range(4))
def test_a_kind_that_was_there_before_is_not_new(seed: int) -> None:
    kinds = ordinary(400, seed)
    kinds[np.random.default_rng(seed).choice(400, 60, replace=False)] = 30
    kinds[-10:] = np.where(np.arange(10) % 3 == 0, 30, kinds[-10:])
    assert scan(text(kinds, seed)).p > 0.01


@pytest.mark.slow
def test_chance_is_no_more_often_new_than_is_said() -> None:
    """Texts of many kinds, in any order."""
    p = np.array([scan(text(ordinary(160, seed), seed)).p for seed in range(150)])
    for level in (0.2, 0.05):
        assert (p <= level).mean() <= level + 2 * math.sqrt(level / p.size)


def test_of_equals_none_is_new() -> None:
    assert scan(np.full((400, LENGTH + 1), 7)).p == 1
    assert scan(np.arange(400)[:, None] + WORDS * np.arange(LENGTH + 1)).p == 1, "nothing in common"


@pytest.mark.parametrize("seed", range(4))
def test_from_look_to_look_only_what_is_new_is_read_and_nothing_is_forgotten(seed: int) -> None:
    """Each look finds what one that reads all anew finds around the same samples."""
    random, pool, begin, end = np.random.default_rng(seed), Pool(), 0, 200
    kinds = ordinary(600, seed)
    kinds[300:][random.random(300) < 0.3] = 30
    tokens = text(kinds, seed)
    while end < kinds.size:
        at = np.arange(begin, end)
        at = at[(at % 50 != 7) | (end % 2 == 0)]  # a sample may be in the pool, out of it, and in it again
        missing = pool.missing(at)
        assert missing.size <= 64 + at.size // 50 + 1 or begin == 0
        found = pool.scan(at, tokens[missing])
        anew, old = Pool(), np.setdiff1d(at, missing)
        anew.scan(old, tokens[old])
        again = anew.scan(at, tokens[missing])
        assert found.p == pytest.approx(again.p, rel=1e-9) and np.array_equal(found.kind, again.kind)
        end += int(random.integers(1, 64))
        begin = max(0, end - 250)
    assert pool.missing(at).size == 0


def test_the_same_pool_again_says_nothing_new() -> None:
    kinds = ordinary(300, 0)
    kinds[-10:] = 30
    tokens, at, pool = text(kinds, 0), np.arange(300), Pool()
    assert pool.scan(at, tokens).p < 8e-5
    assert pool.scan(at, tokens[:0]).p == 1


def test_a_kind_is_told_by_the_samples_that_came_since_the_last_look() -> None:
    kinds = ordinary(300, 0)
    kinds[[*range(240, 300, 4)]] = 30
    tokens, pool = text(kinds, 0), Pool()
    looks = [pool.scan(np.arange(n), tokens[pool.missing(np.arange(n))]).p for n in range(200, 301, 4)]
    assert min(looks[:10]) > 0.01 and min(looks) < 8e-5


def test_of_few_nothing_is_said() -> None:
    kinds = ordinary(FEWEST - 1, 0)
    kinds[-8:] = 30
    assert scan(text(kinds, 0)).p == 1
    assert scan(np.empty((0, LENGTH + 1), np.int64)).kind.size == 0


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(4, 9), st.data())
def test_the_chance_of_late_neighbours_is_that_of_all_draws(others: int, data: st.DataObject) -> None:
    late = data.draw(st.integers(1, others))
    k = data.draw(st.integers(1, others))
    drawn = [sum(at < late for at in draw) for draw in itertools.combinations(range(others), k)]
    for hits in range(k + 1):
        assert _table(others, late, others)[k - 1, hits] == pytest.approx(np.mean([d >= hits for d in drawn]))


def test_the_chances_of_the_largest_pool_are_probabilities() -> None:
    table = _table(1023, 255, NEIGHBOURS)
    assert (table >= 0).all() and (table <= 1 + 1e-9).all()
    assert all((np.diff(row[: k + 2]) <= 0).all() for k, row in enumerate(table))
