"""Slow signals: each told when it moves against its own history, once, and never of noise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import settings as checked
from hypothesis import strategies as st

from megastable.config.stability import TrendsConfig
from megastable.run.events.stability_events import TrendEvent
from megastable.warnings.trends import LONGEST, OSCILLATION, SWINGS, VALIDATION, Trends, TrendsState
from tests.tiers import examples

CONFIG = TrendsConfig()
WIDTH, RATE = 256, 1e-3
Floats = npt.NDArray[np.float64]
Rows = dict[str, dict[str, float]]
Change = Callable[[Rows, int], None]  # rows and looks since the fault began
BLOCKS, PARTS = ("blocks.0", "blocks.1"), ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")


def healthy(look: int) -> Rows:
    """Two blocks; a wobble of 20 % from look to look, as of single samples."""
    wobble = 1 + 0.2 * math.sin(2.3 * look)
    rows: Rows = {f"{block}.{part}.weight": weight(0.1 * wobble) for block in BLOCKS for part in PARTS}
    for block in BLOCKS:
        rows[block] = {"entropy": 3.0 * wobble, "logit": 12.0 * wobble, "added": 0.5 * wobble}
        rows[block] |= {"focus": 1.5 * wobble, "qkv": wobble, "projection": 0.3 * wobble, "ffn": 0.5 * wobble}
    rows["embedding.weight"] = {**weight(0.1), "stale": 0.0}
    rows["head.weight"] = {**weight(0.1), "stale": 0.0}
    return rows


def weight(gradient: float) -> dict[str, float]:
    return {"weight": 10.0, "update": 0.05, "gradient": gradient, "numel": 1e4}


def run(
    change: Change | None = None, looks: int = 40, fault: int = 20, trends: Trends | None = None
) -> list[tuple[int, TrendEvent]]:
    """What is told at which look; `change` from look `fault` on."""
    judge, found = trends or Trends(CONFIG, WIDTH), list[tuple[int, TrendEvent]]()
    for look in range(1, looks + 1):
        rows = healthy(look)
        if change is not None and look >= fault:
            change(rows, look - fault + 1)
        step = CONFIG.start + look * CONFIG.interval
        found += [(look, trend) for trend in judge.judge_look(step, RATE, rows)]
    return found


def restored(saved: dict[str, Any]) -> Trends:
    judge = Trends(CONFIG, WIDTH)
    judge.load_state_dict(json.loads(json.dumps(saved)))
    return judge


def names(found: list[tuple[int, TrendEvent]]) -> list[str]:
    return [trend.signal for _, trend in found]


def times(row: str, key: str, factor: float) -> Change:
    """A number grows by a factor from look to look."""
    return lambda rows, n: rows[row].update({key: rows[row][key] * factor**n})


def is_set(row: str, key: str, value: Callable[[int], float]) -> Change:
    return lambda rows, n: rows[row].update({key: value(n)})


def of_weights(key: str, change: Callable[[float, int], float], kind: str = "weight") -> Change:
    """Of every weight whose name has `kind` in it: its number, and looks since the fault began."""

    def changed(rows: Rows, n: int) -> None:
        for name, row in rows.items():
            if kind in name and key in row:
                row[key] = change(row[key], n)

    return changed


def dying(rows: Rows, n: int) -> None:
    for part in ("attention.qkv", "mlp.gate_up"):
        rows[f"blocks.0.{part}.weight"]["gradient"] *= 0.8**n


TOO_LARGE = 2 * CONFIG.update_change * 2 / math.sqrt(WIDTH) * 10.0
collapse, steep = times("blocks.1", "entropy", 0.85), of_weights("gradient", lambda x, n: x * 1.15**n)
FAULTS: dict[str, tuple[Change, str, str]] = {
    "collapse": (collapse, "entropy", "blocks.1 has fallen"),
    "flat": (times("blocks.1", "focus", 0.85), "flatness", "attention of blocks.1 goes back to uniform"),
    "growing": (times("blocks.1", "ffn", 1.5), "outputs", "the output of the MLP of blocks.1 has grown"),
    "logits": (times("blocks.1", "logit", 1.3), "logits", "blocks.1 is"),
    "steep": (steep, "gradients", "the gradient norm has grown from"),
    # Something adds as much again as the updates: the norm grows by 1.3 times their sum.
    "straight": (of_weights("weight", lambda x, n: x + 1.3 * 0.05 * CONFIG.interval * n, "attention"), "weights",
                 "the attention weights"),
    "large": (of_weights("update", lambda x, n: TOO_LARGE, "mlp"), "updates", "changes the mlp weights by"),
    # Far below the learning rate, as with an eps that outweighs the second moment.
    "small": (of_weights("update", lambda x, n: 1e-4 * RATE * 1e2), "updates", "eps outweighs"),
    "stale": (is_set("embedding.weight", "stale", lambda n: 3 * CONFIG.stale_share), "tokens",
              "0.6% of the embedding's rows"),
    "dying": (dying, "layers", "blocks.0 passes on less"),
    "nothing added": (is_set("blocks.0", "added", lambda n: CONFIG.layer_added / 2), "layers",
                      "blocks.0 adds no more than"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_signal_is_told_once_with_its_remedy_and_not_of_a_single_look(name: str) -> None:
    change, signal, text = FAULTS[name]
    ((look, trend),) = run(change)
    assert (trend.signal, trend.what) == (signal, "warned") and text in trend.text and trend.remedy
    assert 20 + CONFIG.confirm - 1 <= look <= 30
    assert trend.numbers and all(math.isfinite(value) for value in trend.numbers.values())
    if name not in ("straight", "small"):
        assert run(lambda rows, n: change(rows, 12) if n == 1 else None) == []


def test_a_block_with_experts_that_fades_is_told() -> None:
    def fade(rows: Rows, n: int) -> None:
        dying(rows, max(n - 19, 0))  # it has experts from the first look on
        for part in ("gate_up", "down"):
            of_dense = rows.pop(f"blocks.0.mlp.{part}.weight")
            for number in range(3):
                rows[f"blocks.0.mlp.experts.{number}.{part}.weight"] = of_dense
            rows["blocks.0.mlp.router.weight"] = weight(0.1)

    ((look, trend),) = run(fade, fault=1)
    assert trend.signal == "layers" and "blocks.0 passes on less" in trend.text and 20 < look <= 30


@pytest.mark.parametrize("name", sorted(FAULTS.keys() - {"straight", "small", "nothing added"}))
def test_signal_is_over_when_it_has_recovered_and_told_again_when_it_comes_back(name: str) -> None:
    change, signal, _ = FAULTS[name]
    judge = Trends(CONFIG, WIDTH)
    first = run(lambda rows, n: change(rows, n) if n <= 10 else None, looks=60, trends=judge)
    assert [(t.signal, t.what) for _, t in first] == [(signal, "warned"), (signal, "over")]
    assert judge.standing == []
    assert names(run(change, looks=30, fault=1, trends=judge)) == [signal]
    assert [told.startswith("step ") for told in judge.standing] == [True]


@pytest.mark.parametrize(
    ("change", "fault", "looks"),
    [
        (None, 20, 400),  # a healthy run
        # Attention of healthy runs sharpens over thousands of steps, and was never sharp before.
        (is_set("blocks.1", "entropy", lambda n: 3 * 0.998**n), 20, 600),
        (is_set("blocks.1", "entropy", lambda n: 0.3), 1, 40),
        (is_set("blocks.1", "focus", lambda n: 0.9 * CONFIG.focus_floor / n), 1, 40),
        (is_set("blocks.1", "focus", lambda n: 2.0 - 1.95 * 0.9**n), 1, 100),
        # Outputs that grow ever more slowly: in proportion to the time, and to its root; or have grown once.
        (is_set("blocks.1", "ffn", lambda n: 0.1 * (4.0 + n) / 25), 1, 200),
        (is_set("blocks.1", "ffn", lambda n: 0.1 * ((4.0 + n) / 50) ** 0.5), 1, 200),
        (times("blocks.1", "qkv", 1.0001), 1, 100),
        # Large logits that do not grow, and small ones that do.
        (is_set("blocks.1", "logit", lambda n: 300.0), 1, 40),
        (is_set("blocks.1", "logit", lambda n: min(19.0, 1.1**n)), 1, 40),
        # A gradient that doubles within thousands of steps, as where the loss no longer falls.
        (of_weights("gradient", lambda x, n: 0.1 * 2 ** (n / 160)), 1, 400),
        # A norm may grow by all of its updates, as of parameters that start at zero; one that hardly grows is no trend.
        (of_weights("weight", lambda x, n: x + 0.05 * CONFIG.interval * n, "attention"), 20, 40),
        # The block that is worst changes from look to look.
        (lambda rows, n: of_weights("update", lambda x, n: TOO_LARGE, ("attention", "mlp")[n % 2])(rows, n), 20, 40),
    ],
)  # fmt: skip
def test_signal_is_silent(change: Change | None, fault: int, looks: int) -> None:
    assert run(change, looks, fault) == []


def test_signal_of_rare_tokens_is_beyond_their_usual_share() -> None:
    """Of a large vocabulary; the limit is a factor of it."""
    usual, judge = 0.9 * CONFIG.stale_share, Trends(CONFIG, WIDTH)
    assert run(is_set("head.weight", "stale", lambda n: usual), fault=1, trends=judge) == []
    saved = judge.state_dict()
    for factor, told in ((3.9, []), (4.1, ["tokens"])):
        share = is_set("head.weight", "stale", lambda n, f=factor: f * usual)  # type: ignore[misc]
        assert names(run(share, fault=1, looks=6, trends=restored(saved))) == told


def test_signal_of_small_updates_needs_an_optimizer_with_updates_like_adams() -> None:
    """LAMB changes a weight by the rate times its norm: far less than the rate per element."""
    judge, small = Trends(CONFIG, WIDTH), FAULTS["small"][0]
    for look in range(1, 20):
        small(rows := healthy(look), look)
        assert judge.judge_look(100 + 25 * look, None, rows) == []


def test_signal_stands_until_the_last_of_its_places_is_over() -> None:
    def one_by_one(rows: Rows, n: int) -> None:
        rows["blocks.0"]["entropy"] *= 0.4 if n < 30 else 1.0
        rows["blocks.1"]["entropy"] *= 0.4 if 10 <= n < 20 else 1.0

    judge = Trends(CONFIG, WIDTH)
    first, second = run(one_by_one, looks=45, trends=judge)
    assert "blocks.0 has fallen" in first[1].text and "blocks.1 has fallen" in second[1].text
    assert first[1].what == second[1].what == "warned" and first[0] < 29 < second[0] < 35
    (standing,) = judge.standing
    assert "blocks.0" in standing and "other" not in standing
    ((_, over),) = run(looks=10, trends=judge)
    assert over.what == "over" and judge.standing == [] and judge.state.streaks == {}


def of_logits(value: Callable[[int], float], noise: float, seed: int) -> list[tuple[int, TrendEvent]]:
    """What is told of a logit, a function of the step, up to 10,000."""
    judge, random, found = Trends(CONFIG, WIDTH), Random(seed), list[tuple[int, TrendEvent]]()
    for step in range(125, 2025, 25):
        if value(step) < 1e4:
            logit = value(step) * math.exp(noise * random.gauss(0, 1))
            found += [(step, t) for t in judge.judge_look(step, None, {"blocks.0": {"logit": logit}})]
    return found


@pytest.mark.quick("0.0-0.01", "0.05-0.02")
@pytest.mark.parametrize("rate", [0.001, 0.006, 0.01, 0.02])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_logit_that_saturates_is_not_extrapolated(rate: float, noise: float) -> None:
    """A logistic curve up to 40, from anywhere in the grid of looks."""
    for shift in range(0, 100, 5):
        curve = partial(lambda step, at: 40 / (1 + math.exp(-rate * (step - at))), at=900 + shift)
        assert of_logits(curve, noise, shift) == []


@pytest.mark.parametrize(("rate", "within"), [(0.004, 600), (0.01, 200), (0.02, 100)])
def test_logit_that_grows_on_is_told_once_and_early(rate: float, within: int) -> None:
    """Exponential from step 200 on; single samples scatter by 5 %."""
    for seed in range(10):
        ((step, trend),) = of_logits(lambda s: 10 * math.exp(rate * max(0, s - 200)), 0.05, seed)
        assert trend.what == "warned" and step <= 200 + within
        assert trend.numbers["logit"] < 100


def test_begin_again_gives_other_data_levels_of_their_own() -> None:
    """Attention of longer samples and losses of another mix are not compared with those before."""
    judge = Trends(CONFIG, WIDTH)
    assert run(trends=judge) == []
    evaluated(judge, [(3.0, 3.0), (2.0, 2.5)])
    saved = judge.state_dict()
    judge.begin_again()

    def another_level(rows: Rows, n: int) -> None:
        rows["blocks.1"]["entropy"] = 0.5
        steep(rows, 10)

    assert run(another_level, fault=1, trends=judge) == []
    assert evaluated(judge, [(2.2, 2.4), (2.3, 2.3), (2.1, 2.2)], first=3) == []
    assert len(judge.state.evaluations) == 3
    assert len(judge.state.series["passed blocks.0"].steps) == CONFIG.window
    judge.rewound(350, saved)
    # Back before the change, with what was evaluated up to there: it came after the snapshot, and is not repeated.
    assert [e.step for e in judge.state.evaluations] == [100, 200, 300]
    assert max(judge.state.series["entropy blocks.1"].values) > 1


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_signal_breaks_on_no_number(value: float) -> None:
    for key in ("entropy", "focus", "logit", "ffn", "added", "weight", "gradient", "update", "stale"):
        judge = Trends(CONFIG, WIDTH)
        odd = of_weights(key, lambda x, n: value, "")
        run(odd, looks=6, fault=1, trends=judge)
        assert TrendsState.model_validate_json(judge.state.model_dump_json()) is not None


@given(st.integers(1, 39), st.sampled_from(sorted(FAULTS)), st.booleans())
@checked(deadline=None, max_examples=examples(40))
def test_trends_go_on_over_a_resume_or_a_rewind_bit_for_bit(at: int, name: str, rewound: bool) -> None:
    change, _, _ = FAULTS[name]
    whole, judge = Trends(CONFIG, WIDTH), Trends(CONFIG, WIDTH)
    told, again, rows_at = list[Any](), list[Any](), list[Rows]()
    for look in range(1, 41):
        rows_at.append(healthy(look))
        if look >= 20:
            change(rows_at[-1], look - 19)
        told += whole.judge_look(100 + 25 * look, RATE, rows_at[-1])
    for look in range(1, at + 1):
        again += judge.judge_look(100 + 25 * look, RATE, rows_at[look - 1])
    saved = judge.state_dict()
    if rewound:  # after steps that are undone
        for look in range(at + 1, 41):
            judge.judge_look(100 + 25 * look, RATE, rows_at[0])
        judge.rewound(100 + 25 * at, saved)
    else:
        judge = restored(saved)
    for look in range(at + 1, 41):
        again += judge.judge_look(100 + 25 * look, RATE, rows_at[look - 1])
    assert again == told and judge.state == whole.state


# Evaluations


def evaluated(judge: Trends, losses: list[tuple[float, float]], first: int = 1) -> list[TrendEvent]:
    return [
        trend
        for n, (validation, training) in enumerate(losses, first)
        for trend in judge.judge_evaluation(100 * n, validation, [training] * 5)
    ]


# Validation losses every 10 steps, as recorded: 2 layers of 128 on the standard library's source, a constant rate.
HEALTHY = [
    6.355, 5.667, 5.255, 4.973, 4.804, 4.653, 4.492, 4.408, 4.341, 4.239, 4.099, 3.988, 3.950, 3.865, 3.798, 3.793,
    3.761, 3.716, 3.666, 3.639,
]  # fmt: skip
# The same every 5 steps at a rate of 0.09 without QK-norm, up to step 125.
UNSTEADY = [
    7.968, 7.306, 6.806, 6.340, 6.152, 5.872, 5.920, 5.877, 5.840, 5.894, 5.886, 5.817, 5.811, 5.765, 5.745, 5.769,
    5.722, 5.806, 5.661, 5.661, 5.635, 5.732, 5.659, 5.625, 5.625,
]  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "signal", "told"),
    [
        ([(3.0, 3.0), (2.9, 2.8), (2.95, 2.7), (3.0, 2.6)], VALIDATION, ["warned"]),  # over-fitting
        ([(3.0, 3.0), (2.9, 2.8), (2.95, 2.7), (3.0, 2.6), (2.8, 2.5), (2.7, 2.4)], VALIDATION, ["warned", "over"]),
        ([(3.0, 3.0), (2.9, 2.8), (2.95, 2.9), (3.0, 3.0)], VALIDATION, []),  # both rise
        ([(3.0, 3.0), (2.9, 2.8), (2.95, 2.7), (2.89, 2.6)], VALIDATION, []),  # once
        ([(3.0, 3.0), (2.9, 2.8), (2.915, 2.7), (2.915, 2.6)], VALIDATION, []),  # within the noise
        ([(math.nan, 3.0), (2.9, math.nan), (math.inf, 2.0)], VALIDATION, []),
        ([3.0, 2.8, 2.9, 2.8, 2.9, 2.8], OSCILLATION, ["warned"]),
        ([3.0, 2.8, 2.9, 2.7, 2.6, 2.5, 2.4, 2.3, 2.2, 2.1], OSCILLATION, []),  # once: a spike that is over
        ([3.0, 2.8, 2.84, 2.8, 2.84, 2.8, 2.84], OSCILLATION, []),  # within the noise
        ([3.0, 2.8, 2.7, 2.8, 2.9, 3.0, 3.1], OSCILLATION, []),  # a rise is another signal
        ([3.0, 2.8, 2.9, 2.8, 2.9, 2.8, *(2.7 - 0.1 * n for n in range(12))], OSCILLATION, ["warned", "over"]),
        (HEALTHY, OSCILLATION, []),
        (UNSTEADY, OSCILLATION, ["warned"]),
    ],
)  # fmt: skip
def test_evaluations_tell_over_fitting_and_oscillation(
    losses: list[Any], signal: str, told: list[str]
) -> None:
    pairs = [loss if isinstance(loss, tuple) else (loss, 6.0) for loss in losses]
    found = evaluated(Trends(CONFIG, WIDTH), pairs)
    assert [(trend.signal, trend.what) for trend in found] == [(signal, what) for what in told]


# A loss that swings

SIGMA, START = 0.05, 300


def judge_losses(losses: Floats) -> list[TrendEvent]:
    trends = Trends(TrendsConfig(), 64)
    return [event for step, loss in enumerate(losses, 1) for event in trends.judge_loss(step, float(loss))]


def swinging(period: int, amplitude: float, seed: int, periods: float = 3.0) -> Floats:
    count = START + round(periods * period) + 1
    losses = 2.5 + 3 * np.exp(-np.arange(count) / 200) + np.random.default_rng(seed).normal(0, SIGMA, count)
    losses[START:] += amplitude * SIGMA * np.sin(2 * np.pi * np.arange(count - START) / period + seed)
    return losses


@pytest.mark.parametrize("period", [4, 5, 6, 8, 11, 14, 19, 26, 35, 48, 64, 85, 115, 155, 200])
def test_swing_is_told_within_three_periods(period: int) -> None:
    for seed in range(3):
        (event,) = judge_losses(swinging(period, 5.0, seed))
        assert (event.what, event.signal) == ("warned", SWINGS) and event["step"] > START + period
        assert event["numbers"]["period"] == pytest.approx(period, rel=0.15, abs=1)


def test_swing_is_over_after_three_periods_without_also_in_the_next_process() -> None:
    losses = np.concatenate([swinging(20, 6.0, 0, 6), 2.5 + np.random.default_rng(9).normal(0, SIGMA, 300)])
    told = judge_losses(losses)
    assert [event["what"] for event in told] == ["warned", "over"]
    trends, again = Trends(TrendsConfig(), 64), list[TrendEvent]()
    for step, loss in enumerate(losses, 1):
        again += trends.judge_loss(step, float(loss))
        if step % 100 == 0:
            trends = restored(trends.state_dict())
    assert [e.fields for e in again] == [e.fields for e in told]
    assert len(trends.state.losses) == min(len(losses), LONGEST)


NOISES: dict[str, Callable[[np.random.Generator, Floats, Floats], Floats]] = {
    "plain": lambda random, t, noise: noise,
    "heavy tails": lambda random, t, noise: SIGMA * random.standard_t(3, t.size),
    "levels": lambda random, t, noise: noise + np.repeat(random.normal(0, 0.3, t.size), 250)[: t.size],
    "spikes": lambda random, t, noise: noise + np.where(random.random(t.size) < 1 / 300, 8 * SIGMA, 0),
    "changing width": lambda random, t, noise: noise * np.exp(np.sin(t / 300)),
    "visits": lambda random, t, noise: noise + 0.3 * (t % 400 < 40),
    "drift": lambda random, t, noise: noise + random.normal(0, 0.004, t.size).cumsum(),
}


@pytest.mark.parametrize("kind", NOISES)
def test_swing_is_not_told_of_healthy_losses(kind: str) -> None:
    random, t = np.random.default_rng(1), np.arange(1500.0)
    noise = NOISES[kind](random, t, random.normal(0, SIGMA, t.size))
    assert judge_losses(2.5 + 4 * np.exp(-t / 2000) + noise) == []
