from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megastable.engine.replicas import MOST, are_equal, split_fingerprint

PRINTS = st.integers(-(1 << 63), (1 << 63) - 1)


def summed(prints: list[int]) -> list[float]:
    return [sum(column) for column in zip(*map(split_fingerprint, prints), strict=True)]


@given(PRINTS, st.integers(1, 40))
def test_equal_ones_are_equal(print_: int, ranks: int) -> None:
    assert are_equal(summed([print_] * ranks), ranks)


@given(st.lists(PRINTS, min_size=2, max_size=12))
def test_different_ones_are_not(prints: list[int]) -> None:
    assert are_equal(summed(prints), len(prints)) == (len(set(prints)) == 1)


@given(PRINTS, st.integers(0, 63))
def test_one_bit_of_one_among_very_many_shows(print_: int, bit: int) -> None:
    """The sums are exact up to the largest group."""
    ordinary, other = split_fingerprint(print_), split_fingerprint(print_ ^ (1 << bit))
    sums = [a * (MOST - 1) + b for a, b in zip(ordinary, other, strict=True)]
    assert max(sums) <= 2**53
    assert are_equal([a * MOST for a in ordinary], MOST)
    assert not are_equal(sums, MOST)
