from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megastable.hardware.equality import MOST, columns, equal, odd_ones

PRINTS = st.integers(-(1 << 63), (1 << 63) - 1)


def summed(prints: list[int]) -> list[float]:
    return [sum(column) for column in zip(*map(columns, prints), strict=True)]


@given(PRINTS, st.integers(1, 40))
def test_equal_ones_are_equal(print_: int, ranks: int) -> None:
    assert equal(summed([print_] * ranks), ranks)


@given(st.lists(PRINTS, min_size=2, max_size=12))
def test_different_ones_are_not(prints: list[int]) -> None:
    assert equal(summed(prints), len(prints)) == (len(set(prints)) == 1)


@given(PRINTS, st.integers(0, 63))
def test_one_bit_of_one_among_very_many_shows(print_: int, bit: int) -> None:
    """The sums are exact up to the largest group."""
    ordinary, other = columns(print_), columns(print_ ^ (1 << bit))
    sums = [a * (MOST - 1) + b for a, b in zip(ordinary, other, strict=True)]
    assert max(sums) <= 2**53
    assert equal([a * MOST for a in ordinary], MOST)
    assert not equal(sums, MOST)


@given(st.integers(2, 9), st.integers(0, 8), PRINTS, PRINTS)
def test_a_minority_is_named_and_two_are_not_judged(ranks: int, where: int, usual: int, wrong: int) -> None:
    held = dict.fromkeys(range(10, 10 + ranks), usual)
    odd = 10 + where % ranks
    held[odd] = wrong if wrong != usual else usual ^ 1
    found = odd_ones(held)
    if ranks == 2:
        assert found == ((10, 11), False)
    else:
        assert found == ((odd,), True)


def test_without_a_majority_all_are_named() -> None:
    assert odd_ones({0: 1, 1: 1, 2: 2, 3: 2}) == ((0, 1, 2, 3), False)
    assert odd_ones({0: 1, 1: 1, 2: 1, 3: 2, 4: 3}) == ((3, 4), True)
