"""Who was lost first, from the ends of the ranks' connections."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megastable.cluster.store import Heard
from megastable.supervise.first_silent import FirstSilent, first_silent

NOW = 1000.0
HOSTS = ("first", "first", "second", "second")


def rank(number: int, at: float, closed: float | None = None, cut: bool = False) -> Heard:
    """at, closed: seconds before `NOW`."""
    return Heard(
        number, 1, HOSTS[number], 7, NOW - at, closed=None if closed is None else NOW - closed, cut=cut
    )


def found(*ranks: Heard, spoke: tuple[int, ...] = (0, 1)) -> FirstSilent:
    return first_silent(ranks, spoke, str, NOW)


def test_a_killed_rank_ends_before_the_witnesses_and_before_those_the_launcher_ends() -> None:
    told = found(rank(0, 3.0, 2.9), rank(1, 3.1, 2.8), rank(2, 3.2, 2.0), rank(3, 3.3, 3.0))
    assert (told.ranks, told.rank, told.host) == ((3,), 3, "second")
    assert told.told == "rank 3 on second ended first, without last words"


def test_a_host_without_power_fell_silent_before_the_others() -> None:
    # second is without power 9 s before NOW; its kernel resets the connections when it is back
    told = found(
        rank(0, 4.0, 3.3), rank(1, 4.1, 3.2), rank(2, 9.1, 3.6, cut=True), rank(3, 9.9, 3.6, cut=True)
    )
    assert (told.ranks, told.rank, told.host) == ((2, 3), None, "second")
    assert told.told == "ranks 2, 3 on second fell silent 6.6 s before the others"


def test_a_host_that_is_still_away_is_silent_too() -> None:
    told = found(rank(0, 4.0, 3.3), rank(1, 4.1, 3.2), rank(2, 9.1), rank(3, 9.9))
    assert (told.ranks, told.host) == ((2, 3), "second")


def test_a_busy_rank_is_not_blamed_for_late_heartbeats() -> None:
    """Rank 2 had not spoken for 6 s when rank 3 was killed; the launcher then ended rank 2."""
    told = found(rank(0, 3.0, 2.9), rank(1, 3.1, 2.8), rank(2, 8.0, 2.0), rank(3, 3.3, 3.0))
    assert told.ranks == (3,)


def test_a_rank_that_ends_after_a_witness_followed_it() -> None:
    """Rank 3 was ended by the launcher; rank 0 had lost a rank that the store never heard of."""
    assert found(rank(0, 3.0, 2.9), rank(3, 3.3, 1.8), spoke=(0,)).ranks == ()


def test_without_a_difference_nobody_is_blamed() -> None:
    assert found().ranks == ()
    assert found(*(rank(n, 9.0) for n in range(4)), spoke=()).ranks == ()  # the store itself was cut off
    assert found(rank(0, 9.0), rank(2, 9.2), rank(3, 4.0, 3.0), spoke=(3,)).ranks == ()  # two hosts at once
    assert found(rank(0, 3.0, 2.0), rank(1, 3.0, 2.0), spoke=(0, 1)).ranks == ()


@given(
    lost=st.integers(0, 3),
    late=st.lists(st.floats(0.0, 8.0), min_size=4, max_size=4),
    after=st.lists(st.floats(0.001, 2.0), min_size=4, max_size=4),
)
def test_whoever_dies_first_is_named_however_late_the_heartbeats_are(
    lost: int, late: list[float], after: list[float]
) -> None:
    """One rank dies at 0; the others leave last words and end later."""
    ends = [0.0 if number == lost else after[number] for number in range(4)]
    ranks = [rank(n, 10 - ends[n] + late[n], 10 - ends[n]) for n in range(4)]
    told = found(*ranks, spoke=tuple(n for n in range(4) if n != lost))
    assert told.ranks == (lost,) and told.host == HOSTS[lost]
