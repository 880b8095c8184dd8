"""The numbers of a curve of losses over learning rates."""

from __future__ import annotations

import math

import pytest

from megastable_tools.study.lr_sensitivity import (
    LrCurve,
    edges,
    lr_sensitivity,
    optimum,
    slope,
    trends,
    usable,
)
from megastable_tools.study.trial import TrialResult

CURVE = {1e-4: 5.0, 1e-3: 4.0, 1e-2: 3.9, 1e-1: 4.4, 1.0: 8.0}


def parabola(*rates: float, at: float, low: float = 3.0) -> dict[float, float]:
    return {rate: low + 0.3 * math.log(rate / at) ** 2 for rate in rates}


def test_sensitivity_is_the_mean_excess_over_the_best() -> None:
    assert lr_sensitivity(CURVE) == pytest.approx((1.1 + 0.1 + 0.0 + 0.5 + 4.1) / 5)
    assert lr_sensitivity({1e-3: 2.0, 1e-2: 2.0}) == 0


@pytest.mark.parametrize("rates", [(1e-3, 2e-3, 4e-3), (1e-4, 1e-3, 3e-3, 2e-2)])
def test_the_best_rate_is_between_those_tried(rates: tuple[float, ...]) -> None:
    found = optimum(parabola(*rates, at=2.3e-3))
    assert found.rate == pytest.approx(2.3e-3) and found.inside


def test_at_an_end_the_best_rate_may_lie_beyond() -> None:
    rates = (1e-3, 2e-3, 4e-3)
    assert [optimum(parabola(*rates, at=at)).inside for at in (1e-4, 1.0)] == [False, False]
    assert [optimum(parabola(*rates, at=at)).rate for at in (1e-4, 1.0)] == [1e-3, 4e-3]
    assert optimum(dict.fromkeys(rates, 1.0)).rate == 1e-3


def test_usable_rates_end_where_the_loss_leaves_the_margin() -> None:
    found = usable(CURVE, 0.25)
    # 0.15 of the way from 4.0 to 5.0, and half of that from 3.9 to 4.4, in the logarithm of the rate.
    assert found.lowest == pytest.approx(10**-3.15) and found.highest == pytest.approx(10**-1.5)
    assert not found.open_below and not found.open_above
    assert found.factor == pytest.approx(10**1.65)


def test_a_curve_that_ends_before_it_leaves_is_open() -> None:
    found = usable({1e-3: 4.0, 1e-2: 3.9, 1e-1: 3.95}, 0.2)
    assert (found.lowest, found.highest, found.open_below, found.open_above) == (1e-3, 1e-1, True, True)


def test_what_is_good_beyond_the_edge_does_not_count() -> None:
    island = {1e-3: 4.0, 1e-2: 6.0, 1e-1: 4.05}
    assert usable(island, 0.1).highest < 1e-2
    assert edges(island, 0.1) == (1e-3, 1e-2)


def test_edges_are_the_best_the_last_usable_and_the_next() -> None:
    assert edges(CURVE, 0.25) == (1e-2, 1e-1)
    assert edges(CURVE, 0.6) == (1e-2, 1e-1, 1.0)
    assert edges({1e-3: 4.0, 1e-2: 3.0}, 0.1) == (1e-2,)  # there is no next


def test_slope() -> None:
    assert slope([0, 1, 2], [1, 3, 5]) == 2 and slope([0, 1, 2], [0, 3, 0]) == 0
    assert math.isnan(slope([1, 1], [2, 3])) and math.isnan(slope([1], [2]))


def curve(width: int, losses: dict[float, float], name: str = "none") -> LrCurve:
    runs = {rate: TrialResult((loss,), 9.0, math.nan, 1.0, width**2) for rate, loss in losses.items()}
    return LrCurve(name, width, {1: runs}, (1,))


def test_trends_over_widths() -> None:
    rates = (1e-4, 1e-3, 1e-2, 1e-1)
    halved = [curve(width, parabola(*rates, at=0.4 / width)) for width in (64, 128, 256)]
    [found] = trends(halved)
    assert found.best_rate == pytest.approx(-1)
    expected = slope([6, 7, 8], [c.sensitivities[0] for c in halved])
    assert found.sensitivity == pytest.approx(expected) and found.sensitivity != 0
    ends = [curve(width, dict.fromkeys(rates, 1.0)) for width in (64, 128)]
    assert math.isnan(trends(ends)[0].best_rate)


def test_a_diverged_run_counts_as_its_initialization() -> None:
    found = curve(64, {1e-3: 4.0, 1e-2: math.inf, 1e-1: 12.0})
    assert found.mean == {1e-3: 4.0, 1e-2: 9.0, 1e-1: 9.0} and found.diverged == [1e-2, 1e-1]
    assert found.sensitivities == [pytest.approx(10 / 3)]


def test_more_seeds_give_the_highest_rate_a_spread() -> None:
    def run(loss: float) -> TrialResult:
        return TrialResult((loss,), 9.0, math.nan, 1.0, 1)

    seeds = {1: {1e-3: 4.2, 1e-2: 4.0, 1e-1: 5.0}, 2: {1e-2: 4.0, 1e-1: 4.5}, 3: {1e-2: 3.9, 1e-1: 8.9}}
    found = LrCurve("none", 64, {s: {r: run(x) for r, x in of.items()} for s, of in seeds.items()}, (1,))
    assert found.highest(0.5) == pytest.approx([10**-1.5, 1e-1, 1e-2 * 10**0.1])
    assert list(found.mean) == [1e-3, 1e-2, 1e-1]  # of the whole seed alone
