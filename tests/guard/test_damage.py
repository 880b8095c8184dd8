"""When a rise of the probe is more than usual, and when the norm of a tensor moves as no update moves it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megastable_guard.damage import (
    FASTER,
    KNOWN,
    KNOWN_PACES,
    LEAST,
    REST,
    ProbeTrend,
    Rise,
    TensorJump,
    TensorLook,
    TensorNorms,
    TensorPaces,
)

SAMPLES = np.random.default_rng(1).normal(4.0, 0.6, 32)
BETA2, EVERY = 0.95, 25
NAME = "blocks.2.weight"


def falling(looks: int, noise: float = 0.003, seed: int = 0) -> tuple[ProbeTrend, list[Rise | None]]:
    """A run whose probe falls, looked at every ten steps; each sample by a little more or less."""
    random, trend = np.random.default_rng(seed), ProbeTrend()
    found = [
        trend.judge_look(10 * look, SAMPLES + 2.0 * math.exp(-look / 8) + random.normal(0, noise, 32))
        for look in range(1, looks + 1)
    ]
    return trend, found


@pytest.mark.parametrize("seed", range(5))
def test_damage_is_seen_nowhere_in_a_healthy_run(seed: int) -> None:
    assert not any(falling(200, 0.01, seed)[1])
    looked_at(200, seed=seed)


@pytest.mark.parametrize("nats", [0.04, 0.3, math.inf, math.nan])
def test_probe_rise_is_seen_at_one_look_and_again_until_it_is_dealt_with(nats: float) -> None:
    trend, _ = falling(30)
    known = np.array(trend.looks[-1][1])
    assert trend.judge_look(305, known + np.where(np.arange(32) == 3, 0.3, 0.0)) is None  # one sample is none
    trend.forget_after(300)
    for step in (310, 320):
        rise = trend.judge_look(step, known + nats)
        assert rise is not None and (rise.before, rise.step) == (300, step)
        assert LEAST <= rise.limit < 0.04 and "from step 300" in rise.reason
    trend.accept_rise(330, known + math.inf)  # never the level
    assert trend.judge_look(330, known + 0.3) is not None
    trend.forget_after(299)
    assert trend.looks[-1][0] == 290 and trend.judge_look(300, known) is None


@pytest.mark.parametrize(("looks", "seen"), [(KNOWN + 2, False), (KNOWN + 3, True)])
def test_probe_rise_needs_a_start_that_is_known(looks: int, seen: bool) -> None:
    trend, _ = falling(looks)
    assert (trend.judge_look(10 * looks + 10, np.array(trend.looks[-1][1]) + 0.9) is not None) == seen


@pytest.mark.parametrize("seed", range(3))
def test_probe_rise_is_seen_while_the_loss_falls_as_fast(seed: int) -> None:
    """From step 80 to 90 the loss falls by 0.09 nats: damage of as much leaves it where it was."""
    before, fallen = (
        np.array(falling(8, 0.003, seed)[0].looks[-1][1]),
        2.0 * (math.exp(-1) - math.exp(-9 / 8)),
    )
    rise = falling(8, 0.003, seed)[0].judge_look(90, before - fallen + 0.09)
    assert rise is not None and abs(rise.change) < 0.02 and rise.nats == pytest.approx(0.09, abs=0.02)
    assert falling(8, 0.003, seed)[0].judge_look(90, before - fallen + 0.01) is None


def test_probe_that_falls_more_slowly_than_three_looks_let_expect_is_no_rise() -> None:
    """Of a mixture without a fault (a sigmoid gate, seed 7), whose fourth difference was an alarm."""
    looks = {10: 6.623, 20: 5.935, 25: 5.731, 30: 5.561, 40: 5.181, 50: 4.814, 60: 4.563, 70: 4.348}
    trend = ProbeTrend()
    for step, loss in looks.items():
        assert trend.judge_look(step, np.full(64, loss)) is None
    rise = trend.judge_look(80, np.full(64, looks[70] + 0.1))  # but this is
    assert rise is not None and rise.before == 70


def test_probe_rise_that_was_no_damage_is_the_level_and_the_next_is_judged_later() -> None:
    trend, _ = falling(30)
    known = np.array(trend.looks[-1][1])
    for times in (1, 2):
        step = trend.looks[-1][0] + 90
        assert trend.judge_look(step, known + 0.5 * times) is not None
        trend.accept_rise(step, known + 0.5 * times)
        rest = REST * 2**times
        assert trend.judge_look(step + rest - 1, known + 2) is None
        trend.forget_after(step)
        assert trend.judge_look(step + rest, known + 2) is not None
    step = trend.looks[-1][0] + 10 * REST * 2**2  # a long time without one
    trend.accept_rise(step, known + 2)
    assert trend.judge_look(step + 2 * REST, known + 4) is not None


def test_probe_rise_right_after_a_change_that_a_person_made_is_its_effect() -> None:
    """The same rise is one before it, and well after it."""
    told = []
    for changed in (None, 150, 100):
        trend, losses = ProbeTrend(), np.full(8, 4.0)
        for step in range(10, 200, 10):
            if step == changed:
                trend.pause.hold_until_settled(step)
            if step == 180:
                losses = losses + 0.2
            told += [(changed, found.step) for found in [trend.judge_look(step, losses)] if found is not None]
    assert told == [(None, 180), (None, 190), (100, 180), (100, 190)]


@pytest.mark.parametrize("stop", [1, 3, 30, 31, 40])
def test_probe_trend_that_is_stored_goes_on_as_if_it_had_not_been(stop: int) -> None:
    def judged(stored: bool) -> list[Rise | None]:
        random, trend, found = np.random.default_rng(5), ProbeTrend(), list[Rise | None]()
        for look in range(1, 60):
            losses = SAMPLES + 2.0 * math.exp(-look / 8) + random.normal(0, 0.003, 32) + 0.4 * (look > 30)
            found.append(trend.judge_look(10 * look, losses))
            if look == 35:
                trend.accept_rise(10 * look, losses)
            if stored and look == stop:
                trend = ProbeTrend.model_validate_json(trend.model_dump_json())
        return found

    assert judged(True) == judged(False)
    assert sum(rise is not None for rise in judged(True)) == 5  # from the rise on, until it was accepted


# Tensors


def looked_at(looks: int, seed: int = 0) -> tuple[TensorPaces, dict[str, TensorNorms]]:
    """A healthy run: tensors grow at their own paces, second moments scatter and fall. No look is a jump."""
    random, paces = np.random.default_rng(seed), TensorPaces()
    for look in range(looks):
        norms = {
            f"blocks.{i}.weight": TensorNorms(
                5 + (1 + i) * (1 - math.exp(-look / 10)) * random.uniform(0.9, 1.1),
                math.exp(-0.02 * look + random.normal(0, 0.2)),
            )
            for i in range(4)
        }
        assert paces.judge_look(TensorLook(EVERY * look, 0.1 * look, EVERY * look, norms), BETA2) is None
    return paces, norms


def judge(
    paces: TensorPaces,
    looks: int,
    norms: dict[str, TensorNorms],
    updates: int = EVERY,
    beta2: float | None = BETA2,
) -> TensorJump | None:
    return paces.judge_look(
        TensorLook(EVERY * looks, 0.1 * looks, EVERY * (looks - 1) + updates, norms), beta2
    )


def times(norms: dict[str, TensorNorms], factor: float) -> dict[str, TensorNorms]:
    return {name: n._replace(weight=factor * n.weight) for name, n in norms.items()}


@pytest.mark.parametrize("factor", [0.0, 0.5, 3.0, math.inf, math.nan])
def test_tensor_jump_is_named_until_it_is_dealt_with(factor: float) -> None:
    paces, norms = looked_at(20)
    spoilt = norms | {NAME: norms[NAME]._replace(weight=factor * norms[NAME].weight)}
    for _ in range(2):
        jump = judge(paces, 20, spoilt)
        assert jump is not None
        assert (jump.tensor, jump.kind, jump.before, jump.step) == (NAME, "weight", 475, 500)
        assert f"weights of {NAME}" in jump.reason and f"{FASTER:g} times as fast" in jump.reason
    assert not jump.is_repeated(norms)
    if math.isfinite(factor):
        assert jump.is_repeated(spoilt)
    paces.accept_jump(TensorLook(500, 2.0, 500, norms))
    assert judge(paces, 21, norms) is None


@pytest.mark.parametrize("unused", [10, 60])
def test_a_tensor_without_gradients_for_a_while_has_not_jumped(unused: int) -> None:
    """An expert that no token chooses only decays; its second moments vanish, in fp32 all at once."""
    paces, norms = looked_at(20)
    for look in range(20, 20 + unused):
        faded_moment = norms[NAME].second_moment * BETA2**EVERY  # type: ignore[operator]
        faded_norms = TensorNorms(0.9999 * norms[NAME].weight, faded_moment if faded_moment > 1e-21 else 0.0)
        norms = norms | {NAME: faded_norms}
        assert judge(paces, look, norms) is None
    used_again = norms | {NAME: TensorNorms(1.06 * norms[NAME].weight, 1.0)}
    assert judge(paces, 20 + unused, used_again) is None
    jump = judge(paces, 21 + unused, times(used_again, 3.0))
    assert jump is not None and jump.kind == "weight"


@pytest.mark.parametrize(
    ("factor", "updates", "beta2", "seen"),
    [
        (BETA2**EVERY, EVERY, BETA2, False),
        (0.01, 10 * EVERY, BETA2, False),  # so many updates may have forgotten that
        (0.01, 5, BETA2, True),
        (0.01, 5, None, False),  # an optimizer without such averages
        (1e6, EVERY, BETA2, False),  # one gradient can do that
    ],
)
def test_tensor_jump_of_second_moments_is_what_they_cannot_forget(
    factor: float, updates: int, beta2: float | None, seen: bool
) -> None:
    paces, norms = looked_at(20)
    was = norms[NAME].second_moment
    assert was is not None
    jump = judge(paces, 20, norms | {NAME: norms[NAME]._replace(second_moment=factor * was)}, updates, beta2)
    assert (jump is not None and jump.kind == "second_moment") == seen


def test_tensor_jump_needs_a_pace_and_updates_and_a_look_since_the_rewind() -> None:
    for looks, seen in ((KNOWN_PACES, False), (KNOWN_PACES + 1, True)):
        paces, norms = looked_at(looks)
        assert (judge(paces, looks, times(norms, 10)) is not None) == seen
    paces, norms = looked_at(20)
    assert paces.judge_look(TensorLook(500, 1.9, EVERY * 19, times(norms, 10)), BETA2) is None
    paces, norms = looked_at(20)
    paces.forget_after(450)
    assert judge(paces, 20, times(norms, 10)) is None
    paces.forget_after(500)
    assert judge(paces, 21, times(norms, 200)) is not None


@pytest.mark.parametrize("looks", [1, 2, 20])
def test_tensor_paces_that_are_stored_judge_as_before(looks: int) -> None:
    paces, norms = looked_at(looks)
    norms |= {"embedding.weight": TensorNorms(math.nan, None)}
    paces.accept_jump(TensorLook(500, 2.0, 500, norms))
    again = TensorPaces.model_validate_json(paces.model_dump_json())
    assert again.model_dump_json() == paces.model_dump_json()
    for step in range(21, 30):
        assert repr(judge(again, step, times(norms, 10))) == repr(judge(paces, step, times(norms, 10)))
