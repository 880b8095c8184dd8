"""When a rise of the probe is more than its usual changes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megastable_guard.damage import KNOWN, LEAST, REST, ProbeTrend, Rise

SAMPLES = np.random.default_rng(1).normal(4.0, 0.6, 32)


def falling(looks: int, noise: float = 0.003, seed: int = 0) -> tuple[ProbeTrend, list[Rise | None]]:
    """A run whose probe falls, looked at every ten steps; each sample by a little more or less."""
    random, trend = np.random.default_rng(seed), ProbeTrend()
    found = [
        trend.judge(10 * look, SAMPLES + 2.0 * math.exp(-look / 8) + random.normal(0, noise, 32))
        for look in range(1, looks + 1)
    ]
    return trend, found


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_rises_nowhere(seed: int) -> None:
    assert not any(falling(200, 0.01, seed)[1])


@pytest.mark.parametrize("nats", [0.04, 0.3, math.inf, math.nan])
def test_a_rise_is_seen_at_one_look_and_again_until_it_is_dealt_with(nats: float) -> None:
    trend, _ = falling(30)
    known = np.array(trend.looks[-1][1])
    for step in (310, 320):
        rise = trend.judge(step, known + nats)
        assert rise is not None and (rise.before, rise.step) == (300, step)
        assert LEAST <= rise.limit < 0.04 and "from step 300" in rise.reason
    trend.rewind(299)
    assert trend.looks[-1][0] == 290
    assert trend.judge(300, known) is None


def test_one_sample_is_no_rise() -> None:
    trend, _ = falling(30)
    assert trend.judge(310, np.array(trend.looks[-1][1]) + np.where(np.arange(32) == 3, 2.0, 0.0)) is None


def test_at_the_start_nothing_is_judged() -> None:
    trend, _ = falling(KNOWN + 2)
    assert trend.judge(10 * KNOWN + 30, np.array(trend.looks[-1][1]) + 0.9) is None
    trend, _ = falling(KNOWN + 3)
    assert trend.judge(10 * KNOWN + 40, np.array(trend.looks[-1][1]) + 0.9) is not None


@pytest.mark.parametrize("seed", range(3))
def test_damage_is_seen_while_the_loss_falls_as_fast(seed: int) -> None:
    """From step 80 to 90 the loss falls by 0.09 nats: damage of as much leaves it where it was."""
    trend, _ = falling(8, 0.003, seed)
    before, fallen = np.array(trend.looks[-1][1]), 2.0 * (math.exp(-1) - math.exp(-9 / 8))
    rise = trend.judge(90, before - fallen + 0.09)
    assert rise is not None and abs(rise.change) < 0.02 and rise.nats == pytest.approx(0.09, abs=0.02)
    assert "was expected" in rise.reason
    trend, _ = falling(8, 0.003, seed)
    assert trend.judge(90, before - fallen + 0.01) is None


def test_what_was_no_damage_is_the_level_and_the_next_is_judged_later() -> None:
    trend, _ = falling(30)
    known = np.array(trend.looks[-1][1])
    for times in (1, 2):
        step = trend.looks[-1][0] + 90
        assert trend.judge(step, known + 0.5 * times) is not None
        trend.accept(step, known + 0.5 * times)
        rest = REST * 2**times
        assert trend.judge(step + rest - 1, known + 2) is None
        trend.rewind(step)
        assert trend.judge(step + rest, known + 2) is not None
    step = trend.looks[-1][0] + 10 * REST * 2**2  # a long time without one
    trend.accept(step, known + 2)
    assert trend.judge(step + 2 * REST, known + 4) is not None


def test_a_look_that_is_not_finite_is_never_the_level() -> None:
    trend, _ = falling(30)
    known = np.array(trend.looks[-1][1])
    trend.accept(310, known + math.inf)
    assert trend.judge(320, known + 0.3) is not None


@pytest.mark.parametrize("stop", [1, 3, 30, 31, 40])
def test_a_trend_that_is_stored_goes_on_as_if_it_had_not_been(stop: int) -> None:
    def judged(stored: bool) -> list[Rise | None]:
        random, trend, found = np.random.default_rng(5), ProbeTrend(), list[Rise | None]()
        for look in range(1, 60):
            losses = SAMPLES + 2.0 * math.exp(-look / 8) + random.normal(0, 0.003, 32) + 0.4 * (look > 30)
            found.append(trend.judge(10 * look, losses))
            if look == 35:
                trend.accept(10 * look, losses)
            if stored and look == stop:
                trend = ProbeTrend.model_validate_json(trend.model_dump_json())
        return found

    assert judged(True) == judged(False)
    assert sum(rise is not None for rise in judged(True)) == 5  # from the rise on, until it was accepted


def test_a_rise_right_after_a_change_that_a_person_made_is_its_effect() -> None:
    """The same rise is one before it, and well after it."""
    told = []
    for changed in (None, 150, 100):
        trend, losses = ProbeTrend(), np.full(8, 4.0)
        for step in range(10, 200, 10):
            if step == changed:
                trend.pause.hold(step)
            if step == 180:
                losses = losses + 0.2
            told += [(changed, found.step) for found in [trend.judge(step, losses)] if found is not None]
    assert told == [(None, 180), (None, 190), (100, 180), (100, 190)]
