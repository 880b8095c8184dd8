"""Where a bad region ends: probes of synthetic regions, solid and thin."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.stability import region as search
from megastable.stability.region import (
    CLEAN,
    FARTHEST,
    RISK,
    STRAY,
    Spot,
    below,
    end_in_words,
    spot,
    spread,
)

FAR = 1 << 16  # farther than a search of a run goes
grow = partial(search.grow, farthest=FAR)

BATCH = 16


def region(
    length: int, share: float = 1.0, seed: int = 0, stray: float = 0.0, limit: int = 10**9
) -> tuple[Callable[[int], int | None], list[int]]:
    """A probe of batches of which the first `length` samples are bad by `share`, and how often it was asked."""
    random, asked = np.random.default_rng(seed), list[int]()
    drawn: dict[int, int] = {}

    def probe(batch: int) -> int | None:
        if batch >= limit:
            return None
        asked.append(batch)
        inside = min(BATCH, max(0, length - batch * BATCH))
        count = random.binomial(inside, share) + random.binomial(BATCH - inside, stray)
        return drawn.setdefault(batch, int(count))

    return probe, asked


@given(st.integers(0, 20_000))
def test_a_solid_region_is_bounded_exactly_by_few_probes(length: int) -> None:
    probe, asked = region(length)
    side = grow(probe, BATCH, 1.0, budget=120)
    batches = math.ceil(length / BATCH)
    assert side.reach == batches and side.found and not side.endless
    assert len(asked) == len(set(asked)) <= 3 * math.log2(batches + 2) + 2 * CLEAN + 4


def test_five_thousand_samples_take_a_small_part_of_sixty_steps() -> None:
    """A forward pass of a batch is a third of a step."""
    probe, asked = region(5000)
    assert grow(probe, BATCH, 1.0, budget=120).reach == math.ceil(5000 / BATCH)
    assert len(asked) / 3 <= 10


@pytest.mark.parametrize(("length", "share"), [(160, 0.25), (1600, 0.25), (640, 0.5), (960, 0.125)])
def test_a_thin_region_is_followed_to_its_end(length: int, share: float) -> None:
    """... in 98 of 100 cases, with strays among the harmless: the end is within a spot of the last bad sample."""
    wrong = 0
    for seed in range(200):
        probe, _ = region(length, share, seed, STRAY)
        side = grow(probe, BATCH, share, budget=300)
        slack = spot(BATCH, share).batches
        wrong += not (side.found and abs(side.reach - length / BATCH) <= 2 * slack)
    assert wrong <= 12


def test_single_samples_that_look_ordinary_do_not_end_a_solid_region() -> None:
    """All of a window may be bad, and one in sixteen of the rest of its region look ordinary."""
    for seed in range(50):
        probe, _ = region(480, 0.94, seed, STRAY)
        assert grow(probe, BATCH, 1.0, budget=120).reach in (30, 31)


def test_clean_batches_here_and_there_do_not_end_a_region() -> None:
    """Three clean spots end it, but in a row."""
    holes = {3, 15, 63}
    assert grow(lambda n: 0 if n in holes or n >= 1000 else BATCH, BATCH, 1.0, budget=120).reach == 1000


@pytest.mark.parametrize("share", [0.125, 0.25, 0.5, 1.0])
def test_a_spot_tells_inside_from_outside_with_the_stated_error(share: float) -> None:
    look = spot(BATCH, share)
    n = look.batches * BATCH
    assert below(look.least, n, share) <= RISK and 1 - below(look.least, n, STRAY) <= RISK
    random = np.random.default_rng(0)
    inside, outside = random.binomial(n, share, 20_000), random.binomial(n, STRAY, 20_000)
    assert (inside < look.least).mean() <= 1.3 * RISK and (outside >= look.least).mean() <= 1.3 * RISK


@pytest.mark.parametrize(
    ("share", "batches", "least"), [(1.0, 1, 6), (0.5, 1, 2), (0.25, 2, 3), (0.125, 4, 3), (0.01, 16, 1)]
)
def test_a_spot_asks_for_half_way_between_the_fewest_and_the_most(
    share: float, batches: int, least: int
) -> None:
    """Of 16, harmless samples bring 2 in less than one of 100 spots; a solid region less than 10."""
    assert spot(BATCH, share) == Spot(batches, least)


def test_what_never_ends_is_told_from_what_is_long() -> None:
    probe, asked = region(10**9)
    side = grow(probe, BATCH, 1.0, budget=120)
    assert side.endless and max(asked) <= FAR and len(asked) < 20
    probe, _ = region(BATCH * FARTHEST // 8)
    assert not grow(probe, BATCH, 1.0, budget=120).endless


def test_a_solid_region_ends_at_fewer_clean_spots_where_that_is_asked_for() -> None:
    assert [len(grow(region(40)[0], BATCH, 1.0, budget=120, enough=n).clean) for n in (1, 2, 3)] == [1, 2, 3]


def test_a_clean_spot_at_the_far_end_is_no_end() -> None:
    """Nearly everything that anybody can look at is bad: that is the state, whatever the last spot says."""
    side = search.grow(lambda batch: BATCH if batch < 3 * FARTHEST // 4 else 0, BATCH, 1.0, 1000)
    assert side.endless and not side.found


@pytest.mark.parametrize("size", [16, 32, 256, 1024, 4096])
def test_what_never_ends_is_told_with_batches_of_any_size(size: int) -> None:
    """Ahead, a search reaches a number of samples, not of batches."""
    side = grow(
        lambda batch: size if batch < (1 << 20) // size else None, size, 1.0, 120, farthest=(1 << 20) // size
    )
    assert side.endless and not side.found


def test_a_spot_that_cannot_be_seen_whole_is_no_clean_one() -> None:
    """Of a region that never ends: where nobody can look any more is not where it is over."""
    look = spot(BATCH, 0.05)
    assert look.batches > 2

    def probe(batch: int, last: int) -> int | None:
        return None if batch > last else int(batch % look.batches == look.batches - 1) * BATCH

    for last in range(5 * look.batches, 9 * look.batches):
        assert grow(partial(probe, last=last), BATCH, 0.05, 1000).clean == (), last


def test_where_the_budget_ends_it_is_not_found() -> None:
    probe, asked = region(5000)
    side = grow(probe, BATCH, 1.0, budget=4)
    assert not side.found and not side.endless and len(asked) == 4
    assert grow(probe, BATCH, 1.0, budget=0).reach == 0


@given(st.integers(0, 40), st.integers(0, 40))
def test_where_the_record_ends_the_region_is_what_there_is_of_it(batches: int, limit: int) -> None:
    probe, asked = region(batches * BATCH, limit=limit)
    side = grow(probe, BATCH, 1.0, budget=1000)
    assert side.reach <= min(batches, limit) and not side.endless
    assert all(batch < limit for batch in asked)


def test_how_an_end_was_found_is_told_as_it_was() -> None:
    clean = grow(region(0)[0], BATCH, 1.0, budget=120)
    assert end_in_words(clean, 9, "x").startswith(
        "nothing is bad beyond the window: the batches 1, 2 and 4 ahead"
    )
    ended = end_in_words(grow(region(5000)[0], BATCH, 1.0, budget=120), 5009, "x")
    assert "313 batches beyond the window and ends at position 5009" in ended
    one = end_in_words(grow(region(BATCH)[0], BATCH, 1.0, budget=120), 25, "x")
    assert "it extends 1 batch beyond the window" in one and one.endswith(
        "3 probes in a row were clean (2, 4 and 8 batches ahead), and by bisection"
    )
    for budget in (0, 4):
        assert end_in_words(grow(region(5000)[0], BATCH, 1.0, budget), 9, "4 batches").endswith(
            "within 4 batches"
        )
    assert "extends beyond the search" in end_in_words(grow(region(10**9)[0], BATCH, 1.0, 120), 9, "x")


@given(st.integers(0, 50), st.integers(0, 200), st.integers(0, 300))
def test_numbers_are_spread_evenly(first: int, length: int, count: int) -> None:
    found = spread(first, first + length, count)
    assert len(set(found)) == len(found) == min(length, count)
    assert all(first <= number < first + length for number in found)
    if 4 <= len(found) < length:
        assert np.diff(np.sort(found)).max() <= 4 * length / len(found)
