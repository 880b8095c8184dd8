from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megastable.hardware.replica_watch import find_minority

PRINTS = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.integers(2, 9), st.integers(0, 8), PRINTS, PRINTS)
def test_a_minority_is_named_and_two_are_not_judged(ranks: int, where: int, usual: int, wrong: int) -> None:
    held = dict.fromkeys(range(10, 10 + ranks), usual)
    odd = 10 + where % ranks
    held[odd] = wrong if wrong != usual else usual ^ 1
    found = find_minority(held)
    if ranks == 2:
        assert found == ((10, 11), False)
    else:
        assert found == ((odd,), True)


def test_without_a_majority_all_are_named() -> None:
    assert find_minority({0: 1, 1: 1, 2: 2, 3: 2}) == ((0, 1, 2, 3), False)
    assert find_minority({0: 1, 1: 1, 2: 1, 3: 2, 4: 3}) == ((3, 4), True)
