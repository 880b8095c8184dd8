"""Other data, starts without warm-up, and what must not hide behind them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megastable.config.stability import StabilityConfig
from megastable_guard.actions import Action
from megastable_guard.detector import Detector
from megastable_guard.guard import BacktestDecision, Recorded, simulate
from megastable_guard.guard_config import DetectorConfig
from megastable_guard.signals import Verdict
from tests.guard import traces
from tests.guard.traces import Run

SEEDS = range(4)


def judged(run: Run, data: dict[int, str] | None = None) -> list[BacktestDecision]:
    """data: from which step on which."""
    name, rows = None, []
    for s in run:
        name = (data or {}).get(s.step, name)
        rows.append(Recorded(s.step, s.loss, s.grad_norm, data=name))
    return list(simulate(rows, StabilityConfig(), interval=10, keep=4))


def acted(found: list[BacktestDecision]) -> list[int]:
    return [j.step for j in found if j.action is not Action.APPLY]


def resets(found: list[BacktestDecision]) -> list[int]:
    return [j.step for j in found if j.reset]


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("sigmas", [4.0, 8.0, 14.0])
@pytest.mark.parametrize("norm", [0.8, 1.0, 1.3])
def test_a_level_that_comes_and_stays_and_goes_again_is_learnt(seed: int, sigmas: float, norm: float) -> None:
    run = traces.healthy(1400, seed)
    for start in (500, 1000):
        run = traces.plus(run, start, np.full(250, 0.03 * sigmas), norm)
    found = judged(run)
    assert acted(found) == []
    assert len(resets(found)) <= 4
    if sigmas > 4:
        assert any(500 < step < 580 for step in resets(found))
        assert all(j.verdict is Verdict.HEALTHY for j in found[580:740])


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rise", [0.2, 0.9, 2.0])
def test_a_change_of_the_data_that_is_known_of_is_no_incident(seed: int, rise: float) -> None:
    run = traces.plus(traces.healthy(900, seed), 500, np.full(400, rise), 1.3)
    found = judged(run, {0: "web", 500: "code"})
    assert acted(found) == []
    assert len(resets(found)) == 1
    if rise > 0.5:
        assert acted(judged(run))  # nobody said so


@pytest.mark.parametrize("seed", SEEDS)
def test_a_jump_of_loss_and_norm_where_the_data_changes_is_a_spike(seed: int) -> None:
    run = traces.plus(traces.healthy(600, seed), 500, np.full(100, 0.3), 3.5)
    found = judged(run, {0: "web", 500: "code"})
    (rewind,) = [j for j in found if j.action is Action.REWIND]
    assert 500 <= rewind.step <= 505 and rewind.verdict is Verdict.SPIKE


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("start", [120, 500])
@pytest.mark.parametrize("steps", [2, 3])
def test_bad_tokens_of_one_nat_are_seen_at_once_whatever_the_norm(seed: int, start: int, steps: int) -> None:
    found = judged(traces.plus(traces.healthy(start + 50, seed), start, np.full(steps, 1.0)))
    assert start + 1 in [j.step for j in found if j.action is Action.REWIND]


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("height", [1.0, 2.0, 4.0, 12.0])
@pytest.mark.parametrize(("up", "down"), [(10, 50), (30, 150), (50, 300)])
@pytest.mark.parametrize("start", [2, 25])
def test_a_start_that_heals_by_itself_is_let_alone(
    seed: int, height: float, up: int, down: int, start: int
) -> None:
    rise = np.concatenate([np.linspace(0.0, height, up), np.linspace(height, 0.0, down)])
    noise = 0.05 * np.random.default_rng(seed).standard_normal(len(rise)) * (1 + rise)
    run = traces.plus(traces.healthy(500, seed), start, rise + noise, 3.0)
    found = judged(run)
    assert [j for j in found if j.action not in (Action.APPLY, Action.DISCARD)] == []
    assert len(acted(found)) <= 1


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rate", [0.0, 0.01])
@pytest.mark.parametrize("start", [3, 30])
def test_a_start_that_does_not_heal_is_noticed(seed: int, rate: float, start: int) -> None:
    """It rises by four nats and stays, or goes on rising."""
    left = 400 - start
    rise = np.minimum(np.arange(left) / 5.0, 4.0) + rate * np.arange(left)
    smooth = 3.0 + 8.0 * (1.0 + np.arange(start, 400) / 20.0) ** -0.5
    found = judged(traces.plus(traces.healthy(400, seed), start, rise + smooth[0] - smooth))
    first = next(j for j in found if j.action not in (Action.APPLY, Action.DISCARD))
    assert first.step <= start + 140 and first.verdict is Verdict.DRIFT and "does not turn" in first.reason


def test_a_change_of_the_data_at_a_refused_step_is_remembered() -> None:
    detector = Detector(DetectorConfig())
    run = traces.plus(traces.healthy(600, 0), 500, np.full(100, 1.0))
    verdicts = set()
    for s in run:
        if s.step == 500:
            s = replace(s, loss=float("nan"), mixed=True)
        verdicts.add(detector.observe(s).verdict)
    assert verdicts <= {Verdict.HEALTHY, Verdict.SHIFT, Verdict.NON_FINITE, Verdict.OUTLIER}
    assert Verdict.SHIFT in verdicts


@pytest.mark.parametrize("seed", SEEDS)
def test_other_data_are_no_excuse_for_a_gross_batch(seed: int) -> None:
    """While another level of the loss is taken for that of other data, a step far out in loss and norm is refused."""
    run = traces.plus(traces.healthy(700, seed, noise=0.03), 500, np.full(200, 0.3))
    run = traces.plus(run, 515, np.full(1, 3.0), 60.0)
    found = judged(run)
    assert found[514].verdict is Verdict.SHIFT and found[515].action is Action.DISCARD
    assert Action.REWIND not in {j.action for j in found}
