"""The detector on synthetic runs with known faults; docs/stability-method.md has the real ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megastable_guard.detector import Detector
from megastable_guard.detector_state import DetectorState
from megastable_guard.guard_config import DetectorConfig
from megastable_guard.signals import Finding, Signals, Verdict
from tests.guard import traces
from tests.tiers import examples

CONFIG = DetectorConfig()
REWINDS = {Verdict.SPIKE, Verdict.DRIFT, Verdict.PLATEAU, Verdict.OSCILLATION}
SEEDS = range(6)


def judge(run: Iterable[Signals]) -> list[Finding]:
    detector = Detector(CONFIG)
    return [detector.observe(signals) for signals in run]


def flagged(findings: Iterable[Finding]) -> list[Finding]:
    return [found for found in findings if found.verdict is not Verdict.HEALTHY]


def refused(found: Finding) -> bool:
    return found.verdict is Verdict.OUTLIER and found.severity >= 1.0


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("start", "noise"), [(120, 0.05), (400, 0.02), (400, 0.1)])
def test_nearly_every_step_of_a_spike_is_flagged_and_then_none(seed: int, start: int, noise: float) -> None:
    run = traces.spike(traces.healthy(start + 200, seed, noise=noise), start)
    found = judge(run)
    assert len(flagged(found[start : start + 40])) >= 38
    assert not flagged(found[start + 45 :])
    assert any(each.verdict is Verdict.SPIKE and each.onset >= start - 5 for each in found[start : start + 3])


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("start", [120, 500])
def test_a_slow_divergence_is_noticed(seed: int, noise: float, start: int) -> None:
    """With an ordinary norm: what tells it from other data is that it goes on climbing, by 0.01 nats a step."""
    within = 75 if noise == 0.1 else 50
    found = judge(traces.divergence(traces.healthy(start + within, seed, noise=noise), start))
    assert not flagged(found[:start])
    assert any(each.verdict in REWINDS for each in found[start:])


@pytest.mark.slow
def test_heavy_tailed_norms_raise_less_than_one_alarm_in_10_000_steps() -> None:
    runs = [
        traces.healthy(10_000, 7, tail=0.1),
        traces.healthy(10_000, 8, tail=1.0, noise=0.1),
        traces.healthy(10_000, 9, tail=0.3, exponential=True),
    ]
    assert sum(len(flagged(judge(run))) for run in runs) < 3


def test_healthy_starts_raise_none() -> None:
    for seed in range(12):
        assert not flagged(judge(traces.healthy(200, seed, noise=0.05, tail=0.3)))


def test_an_explosion_is_noticed_before_the_windows_are_full() -> None:
    run = traces.spike(traces.healthy(40, 0), 20, length=1, height=20.0)
    found = judge(run)
    assert [each.step for each in flagged(found)] == [20]
    assert refused(found[20])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "grad_norm"])
def test_one_that_is_no_number_leaves_no_trace(value: float, where: str) -> None:
    detector = Detector(CONFIG)
    for signals in traces.healthy(300, 3):
        if signals.step == 200:
            before = detector.state
            found = detector.observe(replace(signals, **{where: value}))
            assert found.verdict is Verdict.NON_FINITE and where.replace("grad_", "") in found.reason
            assert detector.state == before
        else:
            assert detector.observe(signals).verdict is Verdict.HEALTHY


@pytest.mark.quick("3.0")
@pytest.mark.parametrize("height", [0.3, 3.0, 1e5])
def test_a_single_hard_batch_never_is_a_spike(height: float) -> None:
    for seed in range(8):
        run = traces.plus(traces.healthy(420, seed), 400, np.full(1, height), 3.0)
        found = judge(run)
        assert not flagged(found[:400] + found[401:])
        assert found[400].verdict is Verdict.OUTLIER and not found[400].on_trend


def test_a_hard_batch_with_a_quiet_norm_passes_and_a_corrupted_one_is_refused() -> None:
    hard = judge(traces.plus(traces.healthy(210, 1), 200, np.full(1, 0.3)))
    corrupted = judge(traces.plus(traces.healthy(210, 1), 200, np.full(1, 0.3), 4.0))
    assert hard[200].verdict is Verdict.OUTLIER and 0.0 < hard[200].severity < 1.0
    assert refused(corrupted[200])
    assert corrupted[200].onset == 200 and "sigma" in corrupted[200].reason


def test_jumps_of_the_norm_alone_pass() -> None:
    run = traces.healthy(2000, 2)
    for start in range(300, 2000, 170):
        run = traces.plus(run, start, np.zeros(1), 13.0)
    assert not flagged(judge(run))


def test_hard_batches_that_come_often_are_learnt() -> None:
    run = traces.healthy(3000, 4)
    for start in range(300, 3000, 130):
        run = traces.plus(run, start, np.full(1, 0.03 * 35))
    found = judge(run)
    assert 1 <= sum(map(refused, found)) <= 3
    assert not any(map(refused, found[1500:]))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_norm_that_stays_up_is_noticed_before_the_loss_stands_out(seed: int) -> None:
    # As the public spikes begin: the norm doubles and triples, the loss creeps up by one to three sigma.
    creep = 0.03 * np.array([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
    run = traces.plus(traces.healthy(310, seed), 300, creep, np.array([1.6, 2.2, 2.8, 3.0, 3.0, 3.0]))
    found = judge(run)
    assert not flagged(found[:300])
    assert any(each.verdict is Verdict.SPIKE for each in found[300:306])


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_plateau_is_noticed_then_learnt_and_a_later_spike_is_seen(seed: int) -> None:
    run = traces.healthy(1300, seed)
    run = traces.plus(run, 700, np.full(600, 0.25), 2.5)
    run = traces.plus(run, 1100, np.full(10, 0.4), 2.5)
    found = judge(run)
    assert any(each.verdict in REWINDS for each in found[700:720])
    assert any(each.verdict is Verdict.PLATEAU for each in found[700:900])
    assert not flagged(found[900:1100])
    assert len(flagged(found[1100:1110])) >= 9


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_swings_without_a_shift_are_an_oscillation(seed: int, noise: float) -> None:
    found = judge(traces.swinging(traces.healthy(660, seed, noise=noise), 600, amplitude=4 * noise))
    assert not flagged(found[:600])
    assert any(each.verdict is Verdict.OSCILLATION for each in found[600:])


@pytest.mark.quick("1.0")
@pytest.mark.parametrize("depth", [0.1, 0.3, 1.0])
def test_the_way_back_from_a_shard_of_easy_text_is_no_spike(depth: float) -> None:
    for seed in SEEDS:
        run = traces.plus(traces.healthy(1400, seed), 900, np.full(190, -depth))
        assert not [each for each in judge(run) if each.verdict in REWINDS or refused(each)]


def test_a_higher_learning_rate_may_hold_a_higher_level() -> None:
    rng = np.random.default_rng(0)
    loss = 3.0 + 0.03 * rng.standard_normal(700)
    loss[300:] += np.interp(np.arange(400), [0, 150], [0.0, 0.07])  # 2 sigma, slowly
    rate = np.interp(np.arange(700), [300, 450], [1e-4, 1e-3])
    unknown = judge(Signals(step, float(value)) for step, value in enumerate(loss))
    known = judge(Signals(step, float(value), lr=float(rate[step])) for step, value in enumerate(loss))
    assert flagged(unknown)
    assert not flagged(known[:450])


def test_without_norms() -> None:
    run = replace(traces.healthy(1000, 5), norm=None)
    assert not flagged(judge(run))
    found = judge(traces.spike(run, 500, height=0.3))
    assert len(flagged(found[500:540])) >= 38


def test_a_sparse_trace_is_judged_like_a_dense_one() -> None:
    run = list(traces.spike(traces.healthy(400, 6), 300))
    dense = judge(run)
    sparse = judge(replace(signals, step=signals.step * 10 + 500) for signals in run)
    assert [each.verdict for each in dense[60:]] == [each.verdict for each in sparse[60:]]


def test_the_first_wiggle_of_a_constant_loss_is_nothing() -> None:
    wiggle = [2.0] * 200 + [2.004, 2.006, 2.005] + [2.0] * 50
    assert not flagged(judge(Signals(step, loss, 1.0) for step, loss in enumerate(wiggle)))


@settings(max_examples=examples(15))
@given(cut=st.integers(1, 330), seed=st.integers(0, 3))
def test_a_state_that_was_saved_goes_on_bit_for_bit(cut: int, seed: int) -> None:
    run = traces.spike(traces.divergence(traces.healthy(340, seed), 200, rate=0.003), 120, length=15)
    run.loss[60] = math.nan
    steps = list(run)
    through, first = Detector(CONFIG), Detector(CONFIG)
    expected = [through.observe(signals) for signals in steps]
    for signals in steps[:cut]:
        first.observe(signals)
    saved = first.state
    text = saved.model_dump_json()
    first.observe(steps[cut])
    assert saved.model_dump_json() == text  # a copy
    second = Detector(CONFIG, DetectorState.model_validate_json(text))
    assert [second.observe(signals) for signals in steps[cut:]] == expected[cut:]
    assert second.state == through.state


numbers = st.floats() | st.floats(-50, 50) | st.sampled_from([1e308, -1e308, 5e-324, 0.0, math.nan, math.inf])


@settings(max_examples=examples(60), deadline=None)
@example([(1.0, None, math.nan)])
@given(st.lists(st.tuples(numbers, st.none() | numbers, st.none() | numbers), min_size=1, max_size=150))
def test_no_number_raises_or_enters_the_window(
    steps: list[tuple[float, float | None, float | None]],
) -> None:
    detector = Detector(CONFIG)
    for signals in traces.healthy(70, 0):
        detector.observe(signals)
    for step, (loss, norm, lr) in enumerate(steps, 70):
        found = detector.observe(Signals(step, loss, norm, lr))
        assert math.isfinite(found.severity) and found.onset <= step
    state = detector.state
    assert all(abs(value) < 1e6 for value in state.loss.values + state.loss.raw)
    assert all(map(math.isfinite, state.norm.values + state.norm.raw))
    assert DetectorState.model_validate_json(state.model_dump_json()) == state


def test_a_state_is_small() -> None:
    detector = Detector(CONFIG)
    for signals in traces.spike(traces.healthy(300, 0), 280):
        detector.observe(signals)
    assert len(detector.state.model_dump_json()) < 20_000


@pytest.mark.quick("1")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_further_jump_during_an_excursion_has_an_onset_of_its_own(seed: int) -> None:
    run = traces.plus(traces.healthy(700, seed), 500, np.full(200, 0.5), 2.5)
    again = traces.plus(run, 560, np.full(20, 0.6), 2.0)
    found = judge(again)
    assert {f.onset for f in found[505:560]} == {500}
    renewed = [f for f in found[560:565] if f.onset >= 560]
    assert renewed and all(f.verdict is Verdict.SPIKE and f.severity >= 1 for f in renewed)
    assert {f.onset for f in judge(run)[505:600]} == {500}  # without it there is only the first
