"""The detector on synthetic runs with known faults; docs/stability-method.md has the real ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megastable.config.stability import StabilityConfig
from megastable_guard.actions import Action, Finding, Signals, Verdict
from megastable_guard.detector import Detector, DetectorState
from megastable_guard.guard_config import DetectorConfig
from megastable_guard.step_judge import BacktestDecision, Recorded, simulate_guard
from tests.guard.traces import SyntheticRun, divergence, healthy, plus, spike, swinging
from tests.tiers import examples

CONFIG = DetectorConfig()
REWINDS = {Verdict.SPIKE, Verdict.DRIFT, Verdict.PLATEAU, Verdict.OSCILLATION}
SEEDS = range(6)


def judge(run: Iterable[Signals]) -> list[Finding]:
    detector = Detector(CONFIG)
    return [detector.observe_step(signals) for signals in run]


def flagged(findings: Iterable[Finding]) -> list[Finding]:
    return [found for found in findings if found.verdict is not Verdict.HEALTHY]


def refused(found: Finding) -> bool:
    return found.verdict is Verdict.OUTLIER and found.severity >= 1.0


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("start", "noise"), [(120, 0.05), (400, 0.02), (400, 0.1)])
def test_observe_flags_nearly_every_step_of_a_spike_and_then_none(
    seed: int, start: int, noise: float
) -> None:
    found = judge(spike(healthy(start + 200, seed, noise=noise), start))
    assert len(flagged(found[start : start + 40])) >= 38
    assert not flagged(found[start + 45 :])
    assert any(each.verdict is Verdict.SPIKE and each.onset >= start - 5 for each in found[start : start + 3])
    without = judge(replace(spike(healthy(700, seed), 500, height=0.3), norm=None))
    assert not flagged(without[:500]) and len(flagged(without[500:540])) >= 38


# As the public spikes begin: the norm doubles and triples, the loss creeps up by one to three sigma.
CREEP, HEAT = 0.03 * np.array([0.5, 1.0, 1.5, 2.0, 2.5, 3.0]), np.array([1.6, 2.2, 2.8, 3.0, 3.0, 3.0])
FAULTS: dict[str, tuple[Callable[[int], SyntheticRun], int, set[Verdict]]] = {
    # With an ordinary norm: what tells it from other data is that it goes on climbing, by 0.01 nats a step.
    "divergence early": (lambda seed: divergence(healthy(170, seed, noise=0.05), 120), 120, REWINDS),
    "divergence late": (lambda seed: divergence(healthy(575, seed, noise=0.1), 500), 500, REWINDS),
    "norm up first": (lambda seed: plus(healthy(306, seed), 300, CREEP, HEAT), 300, {Verdict.SPIKE}),
    "swings": (lambda seed: swinging(healthy(660, seed), 600, amplitude=0.12), 600, {Verdict.OSCILLATION}),
    "wide swings": (lambda seed: swinging(healthy(660, seed, noise=0.1), 600, amplitude=0.4), 600,
                    {Verdict.OSCILLATION}),
}  # fmt: skip


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAULTS)
def test_observe_notices_faults_and_nothing_before(name: str, seed: int) -> None:
    run, start, verdicts = FAULTS[name]
    found = judge(run(seed))
    assert not flagged(found[:start])
    assert any(each.verdict in verdicts for each in found[start:])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "grad_norm"])
def test_observe_leaves_no_trace_of_what_is_no_number(value: float, where: str) -> None:
    detector = Detector(CONFIG)
    for signals in healthy(300, 3):
        if signals.step == 200:
            before = detector.state
            found = detector.observe_step(replace(signals, **{where: value}))
            assert found.verdict is Verdict.NON_FINITE and where.replace("grad_", "") in found.reason
            assert detector.state == before
        else:
            assert detector.observe_step(signals).verdict is Verdict.HEALTHY


@pytest.mark.quick("3.0")
@pytest.mark.parametrize("height", [0.3, 3.0, 1e5])
def test_observe_takes_no_single_hard_batch_for_a_spike(height: float) -> None:
    for seed in SEEDS:
        found = judge(plus(healthy(420, seed), 400, np.full(1, height), 3.0))
        assert not flagged(found[:400] + found[401:])
        assert found[400].verdict is Verdict.OUTLIER and not found[400].on_trend
    # With a quiet norm it passes, a corrupted one is refused; so is an explosion before the windows are full.
    hard, corrupted = (judge(plus(healthy(210, 1), 200, np.full(1, 0.3), norm))[200] for norm in (1.0, 4.0))
    assert 0.0 < hard.severity < 1.0 and refused(corrupted) and corrupted.onset == 200
    found = judge(spike(healthy(40, 0), 20, length=1, height=20.0))
    assert [each.step for each in flagged(found)] == [20] and refused(found[20])


def test_observe_learns_jumps_that_come_often_and_do_no_harm() -> None:
    norms, losses = healthy(2000, 2), healthy(3000, 4)
    for start in range(300, 2000, 170):
        norms = plus(norms, start, np.zeros(1), 13.0)
    assert not flagged(judge(norms))
    for start in range(300, 3000, 130):
        losses = plus(losses, start, np.full(1, 0.03 * 35))
    found = judge(losses)
    assert 1 <= sum(map(refused, found)) <= 3 and not any(map(refused, found[1500:]))
    wiggle = [2.0] * 200 + [2.004, 2.006, 2.005] + [2.0] * 50  # of a constant loss
    assert not flagged(judge(Signals(step, loss, 1.0) for step, loss in enumerate(wiggle)))


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", SEEDS)
def test_observe_learns_a_plateau_and_sees_a_later_spike(seed: int) -> None:
    run = plus(healthy(1300, seed), 700, np.full(600, 0.25), 2.5)
    found = judge(plus(run, 1100, np.full(10, 0.4), 2.5))
    assert any(each.verdict in REWINDS for each in found[700:720])
    assert any(each.verdict is Verdict.PLATEAU for each in found[700:900])
    assert not flagged(found[900:1100])
    assert len(flagged(found[1100:1110])) >= 9


@pytest.mark.quick("1.0")
@pytest.mark.parametrize("depth", [0.1, 0.3, 1.0])
def test_observe_takes_no_way_back_from_a_shard_of_easy_text_for_a_spike(depth: float) -> None:
    for seed in SEEDS:
        run = plus(healthy(1400, seed), 900, np.full(190, -depth))
        assert not [each for each in judge(run) if each.verdict in REWINDS or refused(each)]


def test_observe_lets_a_higher_learning_rate_hold_a_higher_level() -> None:
    loss = 3.0 + 0.03 * np.random.default_rng(0).standard_normal(700)
    loss[300:] += np.interp(np.arange(400), [0, 150], [0.0, 0.07])  # 2 sigma, slowly
    rate = np.interp(np.arange(700), [300, 450], [1e-4, 1e-3])
    unknown = judge(Signals(step, float(value)) for step, value in enumerate(loss))
    known = judge(Signals(step, float(value), lr=float(rate[step])) for step, value in enumerate(loss))
    assert flagged(unknown) and not flagged(known[:450])


@settings(max_examples=examples(15))
@given(cut=st.integers(1, 330), seed=st.integers(0, 3))
def test_detector_state_that_was_saved_goes_on_bit_for_bit(cut: int, seed: int) -> None:
    run = spike(divergence(healthy(340, seed), 200, rate=0.003), 120, length=15)
    run.loss[60] = math.nan
    steps = list(run)
    through, first = Detector(CONFIG), Detector(CONFIG)
    expected = [through.observe_step(signals) for signals in steps]
    for signals in steps[:cut]:
        first.observe_step(signals)
    saved = first.state
    text = saved.model_dump_json()
    first.observe_step(steps[cut])
    assert saved.model_dump_json() == text  # a copy
    second = Detector(CONFIG, DetectorState.model_validate_json(text))
    assert [second.observe_step(signals) for signals in steps[cut:]] == expected[cut:]
    assert second.state == through.state and len(second.state.model_dump_json()) < 20_000


numbers = st.floats() | st.floats(-50, 50) | st.sampled_from([1e308, -1e308, 5e-324, 0.0, math.nan, math.inf])


@settings(max_examples=examples(60), deadline=None)
@example([(1.0, None, math.nan)])
@given(st.lists(st.tuples(numbers, st.none() | numbers, st.none() | numbers), min_size=1, max_size=150))
def test_observe_raises_on_no_number_and_keeps_none_that_is_absurd(
    steps: list[tuple[float, float | None, float | None]],
) -> None:
    detector = Detector(CONFIG)
    for signals in healthy(70, 0):
        detector.observe_step(signals)
    for step, (loss, norm, lr) in enumerate(steps, 70):
        found = detector.observe_step(Signals(step, loss, norm, lr))
        assert math.isfinite(found.severity) and found.onset <= step
    state = detector.state
    assert all(abs(value) < 1e6 for value in state.loss.values + state.loss.raw)
    assert all(map(math.isfinite, state.norm.values + state.norm.raw))
    assert DetectorState.model_validate_json(state.model_dump_json()) == state


@pytest.mark.quick("1")
@pytest.mark.parametrize("seed", SEEDS)
def test_observe_gives_a_further_jump_during_an_excursion_an_onset_of_its_own(seed: int) -> None:
    run = plus(healthy(700, seed), 500, np.full(200, 0.5), 2.5)
    found = judge(plus(run, 560, np.full(20, 0.6), 2.0))
    assert {f.onset for f in found[505:560]} == {500}
    renewed = [f for f in found[560:565] if f.onset >= 560]
    assert renewed and all(f.verdict is Verdict.SPIKE and f.severity >= 1 for f in renewed)
    assert {f.onset for f in judge(run)[505:600]} == {500}  # without it there is only the first


# Other data, starts without warm-up, and what must not hide behind them


def judged(run: SyntheticRun, data: dict[int, str] | None = None) -> list[BacktestDecision]:
    """data: from which step on which."""
    name, rows = None, []
    for s in run:
        name = (data or {}).get(s.step, name)
        rows.append(Recorded(s.step, s.loss, s.grad_norm, data=name))
    return list(simulate_guard(rows, StabilityConfig(), interval=10, keep=4))


def acted(found: list[BacktestDecision], *but: Action) -> list[BacktestDecision]:
    return [j for j in found if j.action not in (Action.APPLY, *but)]


def resets(found: list[BacktestDecision]) -> list[int]:
    return [j.step for j in found if j.reset]


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sigmas", [4.0, 8.0, 14.0])
@pytest.mark.parametrize("norm", [0.8, 1.3])
def test_shift_that_comes_and_stays_and_goes_again_is_learnt(seed: int, sigmas: float, norm: float) -> None:
    run = healthy(1400, seed)
    for start in (500, 1000):
        run = plus(run, start, np.full(250, 0.03 * sigmas), norm)
    found = judged(run)
    assert acted(found) == [] and len(resets(found)) <= 4
    if sigmas > 4:
        assert any(500 < step < 580 for step in resets(found))
        assert all(j.verdict is Verdict.HEALTHY for j in found[580:740])


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rise", [0.2, 0.9, 2.0])
def test_shift_of_the_data_that_is_known_of_is_no_incident_but_a_jump_with_the_norm_is(
    seed: int, rise: float
) -> None:
    run, told = plus(healthy(900, seed), 500, np.full(400, rise), 1.3), {0: "web", 500: "code"}
    found = judged(run, told)
    assert acted(found) == [] and len(resets(found)) == 1
    if rise > 0.5:
        assert acted(judged(run))  # nobody said so
    jump = judged(plus(healthy(600, seed), 500, np.full(100, 0.3), 3.5), told)
    (rewind,) = [j for j in jump if j.action is Action.REWIND]
    assert 500 <= rewind.step <= 505 and rewind.verdict is Verdict.SPIKE


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("start", "steps"), [(120, 2), (500, 3)])
def test_bad_tokens_of_one_nat_are_seen_at_once_whatever_the_norm(seed: int, start: int, steps: int) -> None:
    found = judged(plus(healthy(start + 50, seed), start, np.full(steps, 1.0)))
    assert start + 1 in [j.step for j in found if j.action is Action.REWIND]
    # While another level is taken for that of other data, a step far out in loss and norm is refused all the same.
    found = judged(plus(plus(healthy(700, seed), 500, np.full(200, 0.3)), 515, np.full(1, 3.0), 60.0))
    assert found[514].verdict is Verdict.SHIFT and found[515].action is Action.DISCARD
    assert Action.REWIND not in {j.action for j in found}


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("height", [1.0, 4.0, 12.0])
@pytest.mark.parametrize(("start", "up", "down"), [(2, 10, 50), (25, 30, 150), (2, 50, 300)])
def test_start_that_heals_by_itself_is_let_alone(
    seed: int, height: float, start: int, up: int, down: int
) -> None:
    rise = np.concatenate([np.linspace(0.0, height, up), np.linspace(height, 0.0, down)])
    noise = 0.05 * np.random.default_rng(seed).standard_normal(len(rise)) * (1 + rise)
    found = judged(plus(healthy(500, seed), start, rise + noise, 3.0))
    assert acted(found, Action.DISCARD) == [] and len(acted(found)) <= 1


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("start", "rate"), [(3, 0.0), (30, 0.01)])
def test_start_that_does_not_heal_is_noticed(seed: int, start: int, rate: float) -> None:
    """It rises by four nats and stays, or goes on rising."""
    left = 400 - start
    rise = np.minimum(np.arange(left) / 5.0, 4.0) + rate * np.arange(left)
    smooth = 3.0 + 8.0 * (1.0 + np.arange(start, 400) / 20.0) ** -0.5
    found = judged(plus(healthy(400, seed), start, rise + smooth[0] - smooth))
    first = acted(found, Action.DISCARD)[0]
    assert first.step <= start + 140 and first.verdict is Verdict.DRIFT and "does not turn" in first.reason
