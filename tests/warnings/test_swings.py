"""A loss that swings is told within three periods; noise, steps, spikes, bumps and drifts are not."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
import pytest

from megastable.config.stability import TrendsConfig
from megastable.run.events.stability_events import TrendEvent
from megastable.warnings.swings import LONGEST, PERIODS
from megastable.warnings.trends import SWINGS, Trends, TrendsState

SIGMA, START = 0.05, 300
Floats = npt.NDArray[np.float64]


def judge(losses: Floats) -> list[TrendEvent]:
    trends = Trends(TrendsConfig(), 64)
    return [event for step, loss in enumerate(losses, 1) for event in trends.trained(step, float(loss))]


def falling(steps: int, seed: int) -> Floats:
    return 2.5 + 3 * np.exp(-np.arange(steps) / 200) + np.random.default_rng(seed).normal(0, SIGMA, steps)


def swinging(period: int, amplitude: float, seed: int, periods: float = 3.0) -> Floats:
    losses = falling(START + round(periods * period) + 1, seed)
    t = np.arange(len(losses) - START)
    losses[START:] += amplitude * SIGMA * np.sin(2 * np.pi * t / period + seed)
    return losses


@pytest.mark.parametrize("period", [4, 5, 6, 8, 11, 14, 19, 26, 35, 48, 64, 85, 115, 155, 200])
def test_a_swing_is_told_within_three_periods(period: int) -> None:
    for seed in range(3):
        told = judge(swinging(period, 5.0, seed))
        assert [event["what"] for event in told] == ["warned"]
        (event,) = told
        assert event["signal"] == SWINGS and event["step"] > START + period
        assert event["numbers"]["period"] == pytest.approx(period, rel=0.15, abs=1)


def test_it_is_over_after_three_periods_without() -> None:
    losses = np.concatenate([swinging(20, 6.0, 0, 6), 2.5 + np.random.default_rng(9).normal(0, SIGMA, 300)])
    assert [event["what"] for event in judge(losses)] == ["warned", "over"]


def healthy(kind: str, seed: int, steps: int) -> Floats:
    random, t = np.random.default_rng(seed), np.arange(steps)
    noise = random.normal(0, SIGMA, steps)
    if kind == "heavy tails":
        noise = SIGMA * random.standard_t(3, steps)
    if kind == "correlated":
        for i in range(1, steps):
            noise[i] += 0.6 * noise[i - 1]
    if kind == "levels":
        noise += np.repeat(random.normal(0, 0.3, -(-steps // 250)), 250)[:steps]
    if kind == "spikes":
        noise += np.where(random.random(steps) < 1 / 300, 8 * SIGMA, 0)
    if kind == "changing width":
        noise *= np.exp(np.sin(t / 300))
    if kind == "visits":
        noise += 0.3 * (t % 400 < 40)
    if kind == "drift":
        noise += random.normal(0, 0.004, steps).cumsum()
    return 2.5 + 4 * np.exp(-t / 2000) + noise


KINDS = ["plain", "heavy tails", "correlated", "levels", "spikes", "changing width", "visits", "drift"]


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_losses_do_not_swing(kind: str) -> None:
    assert judge(healthy(kind, 1, 1500)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_no_warning_in_sixty_thousand_healthy_steps(kind: str, seed: int) -> None:
    assert judge(healthy(kind, seed, 20_000)) == []


def test_a_stored_state_goes_on_as_if_it_had_not_been() -> None:
    losses, trends, told = swinging(12, 6.0, 1), Trends(TrendsConfig(), 64), list[TrendEvent]()
    for step, loss in enumerate(losses, 1):
        told += trends.trained(step, float(loss))
        if step % 100 == 0:
            saved = json.loads(json.dumps(trends.state_dict()))
            trends = Trends(TrendsConfig(), 64)
            trends.load_state_dict(saved)
    assert [e.fields for e in told] == [e.fields for e in judge(losses)] and told
    assert len(TrendsState.model_validate(trends.state_dict()).losses) == min(len(losses), LONGEST)
    assert max(PERIODS) == 200 and min(PERIODS) == 4
