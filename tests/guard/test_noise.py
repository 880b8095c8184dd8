"""What is done about healthy runs: nothing, whatever their noise. `megastable bench noise` has the long ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.noise import FAULTS, autoregressive, count_actions, measure_delays
from megastable.config.stability import StabilityConfig
from megastable_guard.actions import Action
from megastable_guard.robust import LENGTH, Scatter
from megastable_guard.step_judge import Recorded, simulate_guard
from tests.guard import traces

CONFIG = StabilityConfig()
KEPT = {"interval": CONFIG.snapshots.interval, "keep": CONFIG.snapshots.keep}
STEPS = 4000


@pytest.mark.quick("bursts-True", "ar-0.7-True")
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize(
    "kind", ["ar-0.7", "levels-20", "levels-200", "heteroscedastic", "bursts", "changes", "changes-ar-0.4"]
)
def test_next_to_nothing_is_done_in_a_healthy_run(kind: str, norms: bool) -> None:
    found = count_actions(kind, STEPS, [1], CONFIG, norms)
    assert found.irreversible == 0
    assert found.rewinds <= 1 and found.discards <= 2


@pytest.mark.parametrize("seed", range(3))
def test_two_hard_batches_where_no_norm_tells_are_no_spike(seed: int) -> None:
    run = replace(traces.plus(traces.healthy(520, seed), 500, np.full(2, 0.21)), norm=None)
    rows = [Recorded(s.step, s.loss) for s in run]
    assert Action.REWIND not in {judged.action for judged in simulate_guard(rows, CONFIG, **KEPT)}


@pytest.mark.quick("True")
@pytest.mark.parametrize("norms", [True, False])
def test_planted_faults_are_acted_on_in_time(norms: bool) -> None:
    """What is done about noise is only half: whoever does nothing raises no false alarm."""
    for kind in ("white", "student-t3"):
        found = {d.fault: d for d in measure_delays(kind, 6, 1, CONFIG, norms)}
        assert set(found) == set(FAULTS) and all(d.planted == 6 for d in found.values())
        assert found["spike-10"].in_time == found["spike-20"].in_time == 6
        assert found["climb-0.25"].in_time >= 5
        assert found["spike-6"].in_time >= (6 if norms else 3)


@pytest.mark.parametrize("rho", [0.0, 0.4, 0.7])
def test_the_long_run_variance_is_measured(rho: float) -> None:
    """Of an autoregression, up to the lags that an average reaches."""
    kept = 1.0 - 2.0 / (LENGTH + 1)
    expected = (1 + kept * rho) / (1 - kept * rho)
    scatter = Scatter()
    for value in autoregressive(rho)(20_000, np.random.default_rng(0)):
        scatter.add_residual(float(value), 10_000)
    assert scatter.widening_factor(1.0, 100.0) == pytest.approx(math.sqrt(expected), rel=0.1)


@given(st.lists(st.floats(allow_nan=False), max_size=60))
def test_a_factor_is_one_at_least_and_no_residual_breaks_it(residuals: list[float]) -> None:
    scatter = Scatter()
    for value in residuals:
        scatter.add_residual(value, 1000)
    assert 1.0 <= scatter.widening_factor(2.5, 3.0) <= 3.0
    assert Scatter.model_validate_json(scatter.model_dump_json()) == scatter
