"""Slow signals: each told when it moves against its own history, once, and never of noise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as checked
from hypothesis import strategies as st

from megastable.config.stability import TrendsConfig
from megastable.run.events.stability_events import TrendEvent
from megastable.warnings.trend_signals import SIGNALS, kind_of, slope
from megastable.warnings.trends import OSCILLATION, VALIDATION, Trends, TrendsState
from tests.tiers import examples

CONFIG = TrendsConfig()
WIDTH, RATE = 256, 1e-3
Rows = dict[str, dict[str, float]]
Change = Callable[[Rows, int], None]  # rows and looks since the fault began


def healthy(look: int) -> Rows:
    """Two blocks; a wobble of 20 % from look to look, as of single samples."""
    wobble = 1 + 0.2 * math.sin(2.3 * look)
    rows: Rows = {}
    for block in ("blocks.0", "blocks.1"):
        for part in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"):
            rows[f"{block}.{part}.weight"] = weight(0.1 * wobble)
        rows[block] = {"entropy": 3.0 * wobble, "logit": 12.0 * wobble, "added": 0.5 * wobble}
        rows[block] |= {"focus": 1.5 * wobble, "qkv": wobble, "projection": 0.3 * wobble, "ffn": 0.5 * wobble}
    rows["embedding.weight"] = {**weight(0.1), "stale": 0.0}
    rows["head.weight"] = {**weight(0.1), "stale": 0.0}
    return rows


def weight(gradient: float) -> dict[str, float]:
    return {"weight": 10.0, "update": 0.05, "gradient": gradient, "numel": 1e4}


def run(
    *changes: Change, looks: int = 40, fault: int = 20, trends: Trends | None = None
) -> list[tuple[int, TrendEvent]]:
    """What is told at which look; `changes` from look `fault` on."""
    judge, found = trends or Trends(CONFIG, WIDTH), list[tuple[int, TrendEvent]]()
    for look in range(1, looks + 1):
        rows = healthy(look)
        for change in changes:
            if look >= fault:
                change(rows, look - fault + 1)
        step = CONFIG.start + look * CONFIG.interval
        found += [(look, trend) for trend in judge.measured(step, RATE, rows)]
    return found


def restored(saved: dict[str, Any]) -> Trends:
    judge = Trends(CONFIG, WIDTH)
    judge.load_state_dict(saved)
    return judge


def names(found: list[tuple[int, TrendEvent]]) -> list[str]:
    return [trend.signal for _, trend in found]


def collapse(rows: Rows, n: int) -> None:
    rows["blocks.1"]["entropy"] *= 0.85**n


def flat(rows: Rows, n: int) -> None:
    rows["blocks.1"]["focus"] *= 0.85**n


def growing(rows: Rows, n: int) -> None:
    rows["blocks.1"]["ffn"] *= 1.5**n


def logits(rows: Rows, n: int) -> None:
    rows["blocks.1"]["logit"] *= 1.3**n


def steep(rows: Rows, n: int) -> None:
    for row in rows.values():
        if "gradient" in row:
            row["gradient"] *= 1.15**n


def straight(rows: Rows, n: int) -> None:
    """Something adds as much again as the updates: the norm grows by 1.3 times their sum."""
    for part in ("attention.qkv", "attention.out"):
        for block in ("blocks.0", "blocks.1"):
            rows[f"{block}.{part}.weight"]["weight"] += 1.3 * 0.05 * CONFIG.interval * n


def large(rows: Rows, n: int) -> None:
    for block in ("blocks.0", "blocks.1"):
        for part in ("mlp.gate_up", "mlp.down"):
            rows[f"{block}.{part}.weight"]["update"] = 2 * CONFIG.update_change * 2 / math.sqrt(WIDTH) * 10.0


def small(rows: Rows, n: int) -> None:
    """Far below the learning rate, as with an eps that outweighs the second moment."""
    for row in rows.values():
        if "update" in row:
            row["update"] = 1e-4 * RATE * math.sqrt(row["numel"])


def stale(rows: Rows, n: int) -> None:
    rows["embedding.weight"]["stale"] = 3 * CONFIG.stale_share


def dying(rows: Rows, n: int) -> None:
    for part in ("attention.qkv", "mlp.gate_up"):
        rows[f"blocks.0.{part}.weight"]["gradient"] *= 0.8**n


def nothing_added(rows: Rows, n: int) -> None:
    rows["blocks.0"]["added"] = CONFIG.layer_added / 2


FAULTS: dict[str, tuple[Change, str, str]] = {
    "collapse": (collapse, "entropy", "blocks.1 has fallen"),
    "flat": (flat, "flatness", "attention of blocks.1 goes back to uniform"),
    "growing": (growing, "outputs", "the output of the MLP of blocks.1 has grown"),
    "logits": (logits, "logits", "blocks.1 is"),
    "steep": (steep, "gradients", "the gradient norm has grown from"),
    "straight": (straight, "weights", "the attention weights"),
    "large": (large, "updates", "changes the mlp weights by"),
    "small": (small, "updates", "eps outweighs"),
    "stale": (stale, "tokens", "0.6% of the embedding's rows"),
    "dying": (dying, "layers", "blocks.0 passes on less"),
    "nothing added": (nothing_added, "layers", "blocks.0 adds no more than"),
}


def test_a_healthy_run_is_silent() -> None:
    assert run(looks=400) == []


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_told_once_with_its_remedy(name: str) -> None:
    change, signal, text = FAULTS[name]
    ((look, trend),) = run(change)
    assert (trend.signal, trend.what) == (signal, "warned") and text in trend.text and trend.remedy
    assert 20 + CONFIG.confirm - 1 <= look <= 30
    assert trend.numbers and all(math.isfinite(value) for value in trend.numbers.values())


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in ("straight", "small")])
def test_a_single_look_says_nothing(name: str) -> None:
    change, _, _ = FAULTS[name]
    assert run(lambda rows, n: change(rows, 12) if n == 1 else None) == []


@pytest.mark.parametrize(
    "name", ["collapse", "flat", "growing", "logits", "steep", "large", "stale", "dying"]
)
def test_it_is_over_when_it_has_recovered_and_told_again_when_it_comes_back(name: str) -> None:
    change, signal, _ = FAULTS[name]
    judge = Trends(CONFIG, WIDTH)
    first = run(lambda rows, n: change(rows, n) if n <= 10 else None, looks=60, trends=judge)
    assert [(t.signal, t.what) for _, t in first] == [(signal, "warned"), (signal, "over")]
    assert judge.standing == []
    assert names(run(change, looks=30, fault=1, trends=judge)) == [signal]
    (told,) = judge.standing
    assert told.startswith("step ")


def test_a_lasting_collapse_never_becomes_usual() -> None:
    ((_, trend),) = run(lambda rows, n: collapse(rows, min(n, 12)), looks=800)
    assert trend.signal == "entropy"


def test_a_slow_fall_is_no_collapse() -> None:
    """Attention of healthy runs sharpens over thousands of steps."""
    assert run(lambda rows, n: rows["blocks.1"].update(entropy=3 * 0.998**n), looks=600) == []


def test_a_gradient_that_doubles_within_thousands_of_steps_is_no_trend() -> None:
    """As it does in healthy runs, whose loss no longer falls; within a thousand steps it is one."""

    def doubles(looks: int) -> list[tuple[int, TrendEvent]]:
        def grow(rows: Rows, n: int) -> None:
            for row in rows.values():
                if "gradient" in row:
                    row["gradient"] = 0.1 * 2 ** (n / looks)

        return run(grow, looks=400, fault=1)

    assert doubles(160) == [] and names(doubles(40))[:1] == ["gradients"]


def test_attention_that_was_never_sharp_is_no_warning() -> None:
    """As at the start of training, where it is near uniform, and then sharpens."""
    assert run(lambda rows, n: rows["blocks.1"].update(focus=0.9 * CONFIG.focus_floor / n), fault=1) == []
    assert run(lambda rows, n: rows["blocks.1"].update(focus=2.0 - 1.95 * 0.9**n), fault=1, looks=100) == []


@pytest.mark.parametrize("doubles", [25, 50, 100])
def test_outputs_that_grow_ever_more_slowly_are_no_warning(doubles: int) -> None:
    """In proportion to the time, and to its root: a warning is of growth that goes on at the same rate."""
    for power in (0.5, 1.0):
        rms = 0.1 * (1.0 / doubles) ** power
        assert run(lambda rows, n, r=rms, p=power: rows["blocks.1"].update(ffn=r * (4.0 + n) ** p), fault=1,
                   looks=200) == []  # fmt: skip


def test_outputs_that_have_grown_once_are_no_warning() -> None:
    def jumped(rows: Rows, n: int) -> None:
        rows["blocks.1"]["qkv"] *= 2 * CONFIG.output_growth

    assert run(jumped, looks=100) == []


def test_a_low_entropy_is_no_fall() -> None:
    assert run(lambda rows, n: rows["blocks.1"].update(entropy=0.3), fault=1) == []


def test_large_logits_that_do_not_grow_and_small_ones_that_do_say_nothing() -> None:
    assert run(lambda rows, n: rows["blocks.1"].update(logit=300.0), fault=1) == []
    assert run(lambda rows, n: rows["blocks.1"].update(logit=min(19.0, 1.1**n)), fault=1) == []


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_norm_may_grow_by_all_of_its_updates(share: float) -> None:
    """Updates that all point straight outwards are fast, and explained: as of parameters that start at zero."""

    def outwards(rows: Rows, n: int) -> None:
        for name, row in rows.items():
            if "attention" in name:
                row["weight"] += share * 0.05 * CONFIG.interval * n

    assert run(outwards) == []


def test_a_norm_that_hardly_grows_is_no_trend_however_straight() -> None:
    def tiny(rows: Rows, n: int) -> None:
        for name, row in rows.items():
            if "attention" in name:
                row["update"] = 0.005
                row["weight"] += 1.3 * 0.005 * CONFIG.interval * n  # 1.6 % a look

    assert run(tiny, looks=32) == []


def test_the_usual_share_of_rare_tokens_is_no_trend() -> None:
    """Of a large vocabulary; the limit is a factor of it."""
    usual = 0.9 * CONFIG.stale_share
    judge = Trends(CONFIG, WIDTH)
    assert run(lambda rows, n: rows["head.weight"].update(stale=usual), fault=1, trends=judge) == []
    saved = judge.state_dict()
    for times, told in ((3.9, []), (4.1, ["tokens"])):
        judge, share = restored(saved), times * usual
        found = run(
            lambda rows, n, s=share: rows["head.weight"].update(stale=s), fault=1, looks=6, trends=judge
        )
        assert names(found) == told


@pytest.mark.parametrize("optimizer", ["of Adam's size", "another"])
def test_small_updates_are_a_warning_of_optimizers_with_updates_like_adams_only(optimizer: str) -> None:
    """LAMB changes a weight by the rate times its norm: far less than the rate per element."""
    judge, found = Trends(CONFIG, WIDTH), list[TrendEvent]()
    for look in range(1, 20):
        rows = healthy(look)
        small(rows, look)
        rate = RATE if optimizer == "of Adam's size" else None
        found += judge.measured(100 + 25 * look, rate, rows)
    assert [trend.signal for trend in found] == (["updates"] if optimizer == "of Adam's size" else [])


def test_places_that_fall_together_are_told_in_one_line() -> None:
    def both(rows: Rows, n: int) -> None:
        for block, factor in (("blocks.0", 0.3), ("blocks.1", 0.35)):
            rows[block]["entropy"] *= factor

    judge = Trends(CONFIG, WIDTH)
    ((_, trend),) = run(both, trends=judge)
    assert "blocks.0 has fallen" in trend.text and trend.text.endswith("and so for 1 other")
    assert [sentence.partition(": ")[2] for sentence in judge.standing] == [trend.text]


def test_a_place_that_stands_hides_no_other_and_the_last_ends_the_signal() -> None:
    def one_by_one(rows: Rows, n: int) -> None:
        rows["blocks.0"]["entropy"] *= 0.4 if n < 30 else 1.0
        rows["blocks.1"]["entropy"] *= 0.4 if 10 <= n < 20 else 1.0

    judge = Trends(CONFIG, WIDTH)
    (first, second) = run(one_by_one, looks=45, trends=judge)
    assert "blocks.0 has fallen" in first[1].text and "blocks.1 has fallen" in second[1].text
    assert first[1].what == second[1].what == "warned" and first[0] < 29 < second[0] < 35
    (standing,) = judge.standing
    assert "blocks.0" in standing and "other" not in standing
    ((_, over),) = run(lambda rows, n: None, looks=10, trends=judge)
    assert over.what == "over" and judge.standing == [] and judge.state.streaks == {}


def test_looks_in_a_row_are_those_of_one_place() -> None:
    """The block that is worst changes from look to look."""

    def turns(rows: Rows, n: int) -> None:
        table = ("attention", "mlp")[n % 2]
        for name, row in rows.items():
            if table in name:
                row["update"] = 2 * CONFIG.update_change * 2 / math.sqrt(WIDTH) * 10.0

    assert run(turns) == []


def of_logits(value: Callable[[int], float], noise: float, seed: int) -> list[tuple[int, TrendEvent]]:
    """What is told of a logit, a function of the step, up to 10,000."""
    judge, random, found = Trends(CONFIG, WIDTH), Random(seed), list[tuple[int, TrendEvent]]()
    for step in range(125, 2025, 25):
        if value(step) < 1e4:
            logit = value(step) * math.exp(noise * random.gauss(0, 1))
            found += [(step, t) for t in judge.measured(step, None, {"blocks.0": {"logit": logit}})]
    return found


@pytest.mark.quick("0.0-0.01", "0.05-0.02")
@pytest.mark.parametrize("rate", [0.001, 0.004, 0.006, 0.01, 0.02, 0.05])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_logit_that_saturates_is_not_extrapolated(rate: float, noise: float) -> None:
    """A logistic curve up to 40, from anywhere in the grid of looks."""
    for shift in range(0, 100, 5):
        curve = partial(lambda step, at: 40 / (1 + math.exp(-rate * (step - at))), at=900 + shift)
        assert of_logits(curve, noise, shift) == []


@pytest.mark.parametrize(("rate", "within"), [(0.004, 600), (0.006, 275), (0.01, 200), (0.02, 100)])
def test_a_logit_that_grows_on_is_told_once_and_early(rate: float, within: int) -> None:
    """Exponential from step 200 on; single samples scatter by 5 %."""
    for seed in range(10):
        ((step, trend),) = of_logits(lambda s: 10 * math.exp(rate * max(0, s - 200)), 0.05, seed)
        assert trend.what == "warned" and step <= 200 + within
        assert trend.numbers["logit"] < 100
    ((step, trend),) = of_logits(lambda s: 10 * math.exp(rate * max(0, s - 200)), 0.0, 0)
    # The level is the median of three looks.
    assert trend.numbers["logit"] == pytest.approx(10 * math.exp(rate * (step - 25 - 200)))


def test_other_data_have_levels_of_their_own() -> None:
    """Attention of longer samples and losses of another mix are not compared with those before."""
    judge = Trends(CONFIG, WIDTH)
    assert run(trends=judge) == []
    evaluated(judge, [(3.0, 3.0), (2.0, 2.5)])
    saved, passed = judge.state_dict(), "passed blocks.0"
    judge.begin_again()

    def another_level(rows: Rows, n: int) -> None:
        rows["blocks.1"]["entropy"] = 0.5
        steep(rows, 10)

    assert run(another_level, fault=1, trends=judge) == []
    assert evaluated(judge, [(2.2, 2.4), (2.3, 2.3), (2.1, 2.2)], first=3) == []
    assert len(judge.state.evaluations) == 3 and len(judge.state.series[passed].steps) == CONFIG.window
    judge.rewound(350, saved)
    # Back before the change, with what was evaluated up to there.
    assert [e.step for e in judge.state.evaluations] == [100, 200, 300]
    assert max(judge.state.series["entropy blocks.1"].values) > 1


@pytest.mark.parametrize("key", [
    "entropy", "focus", "logit", "ffn", "added", "weight", "gradient", "update", "stale"
])  # fmt: skip
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_numbers_that_say_nothing_break_nothing(key: str, value: float) -> None:
    def odd(rows: Rows, n: int) -> None:
        for row in rows.values():
            if key in row:
                row[key] = value

    judge = Trends(CONFIG, WIDTH)
    run(odd, looks=6, fault=1, trends=judge)
    assert TrendsState.model_validate_json(judge.state.model_dump_json()) is not None


def test_a_model_without_second_moments_and_blocks_is_judged_by_what_there_is() -> None:
    judge = Trends(CONFIG, WIDTH)
    for step in (125, 150, 175):
        assert judge.measured(step, RATE, {"embedding.weight": {"weight": 1.0, "numel": 10.0}}) == []


@given(st.integers(1, 39), st.sampled_from(sorted(FAULTS)), st.booleans())
@checked(deadline=None, max_examples=examples(40))
def test_a_resume_or_a_rewind_gives_the_same_warnings_bit_for_bit(at: int, name: str, rewound: bool) -> None:
    change, _, _ = FAULTS[name]
    whole, judge = Trends(CONFIG, WIDTH), Trends(CONFIG, WIDTH)
    told, again = list[Any](), list[Any]()
    rows_at: list[Rows] = []
    for look in range(1, 41):
        rows = healthy(look)
        if look >= 20:
            change(rows, look - 19)
        rows_at.append(rows)
        told += whole.measured(100 + 25 * look, RATE, rows)
    for look in range(1, at + 1):
        again += judge.measured(100 + 25 * look, RATE, rows_at[look - 1])
    saved = json.dumps(judge.state_dict())
    if rewound:  # after steps that are undone
        for look in range(at + 1, 41):
            judge.measured(100 + 25 * look, RATE, rows_at[0])
        judge.rewound(100 + 25 * at, json.loads(saved))
    else:
        judge = restored(json.loads(saved))
    for look in range(at + 1, 41):
        again += judge.measured(100 + 25 * look, RATE, rows_at[look - 1])
    assert again == told and judge.state == whole.state


# Evaluations


def evaluated(judge: Trends, losses: list[tuple[float, float]], first: int = 1) -> list[TrendEvent]:
    return [
        trend
        for n, (validation, training) in enumerate(losses, first)
        for trend in judge.evaluated(100 * n, validation, [training] * 5)
    ]


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([(3.0, 3.0), (2.9, 2.8), (2.95, 2.7), (3.0, 2.6)], [False]),  # over-fitting
        ([(3.0, 3.0), (2.9, 2.8), (2.95, 2.7), (3.0, 2.6), (2.8, 2.5), (2.7, 2.4)], [False, True]),
        ([(3.0, 3.0), (2.9, 2.8), (2.95, 2.9), (3.0, 3.0)], []),  # both rise: no over-fitting
        ([(3.0, 3.0), (2.9, 2.8), (2.95, 2.7), (2.89, 2.6)], []),  # once
        ([(3.0, 3.0), (2.9, 2.8), (2.915, 2.7), (2.915, 2.6)], []),  # within the noise
        ([(math.nan, 3.0), (2.9, math.nan), (math.inf, 2.0)], []),
    ],
)
def test_a_validation_loss_that_rises_while_the_training_loss_falls(
    losses: list[tuple[float, float]], told: list[bool]
) -> None:
    found = evaluated(Trends(CONFIG, WIDTH), losses)
    assert [trend.what == "over" for trend in found] == told and all(
        trend.signal == VALIDATION for trend in found
    )


@pytest.mark.parametrize(
    ("validation", "told"),
    [
        ([3.0, 2.8, 2.9, 2.8, 2.9, 2.8], 1),
        ([3.0, 2.8, 2.9, 2.7, 2.6, 2.5, 2.4, 2.3, 2.2, 2.1], 0),  # once: a spike that is over
        ([3.0, 2.8, 2.84, 2.8, 2.84, 2.8, 2.84], 0),  # within the noise
        ([3.0, 2.8, 2.7, 2.8, 2.9, 3.0, 3.1], 0),  # a rise is another signal
        ([3.0, 2.8, 2.9, 2.8, 2.9, 2.8, *(2.7 - 0.1 * n for n in range(12))], 2),  # and is over
    ],
)
def test_a_validation_loss_that_oscillates(validation: list[float], told: int) -> None:
    found = evaluated(Trends(CONFIG, WIDTH), [(loss, 3.0) for loss in validation])
    assert [(trend.signal, trend.what) for trend in found] == [
        (OSCILLATION, "warned"), (OSCILLATION, "over")
    ][:told]  # fmt: skip
    assert not found or found[0].numbers == {"rise": pytest.approx(0.1), "fall": pytest.approx(0.1)}


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


@pytest.mark.parametrize(("losses", "told"), [(HEALTHY, []), (UNSTEADY, [OSCILLATION])])
def test_recorded_validation_losses(losses: list[float], told: list[str]) -> None:
    assert [t.signal for t in evaluated(Trends(CONFIG, WIDTH), [(loss, 6.0) for loss in losses])] == told


def test_a_rewind_keeps_the_evaluation_of_its_step() -> None:
    """It came after the snapshot was taken, and is not repeated."""
    judge = Trends(CONFIG, WIDTH)
    evaluated(judge, [(3.0, 3.0)])
    saved = judge.state_dict()
    evaluated(judge, [(2.9, 2.8), (2.95, 2.7)], first=2)
    judge.rewound(200, saved)
    assert [e.step for e in judge.state.evaluations] == [100, 200]


def test_a_step_that_is_repeated_changes_nothing_and_what_was_saved_is_a_copy() -> None:
    judge = Trends(CONFIG, WIDTH)
    run(collapse, trends=judge)
    saved = judge.state_dict()
    judge.rewound(1100, None)
    assert judge.state_dict() == saved == TrendsState.model_validate(saved).model_dump()
    run(looks=3, trends=judge)
    assert judge.state_dict() != saved == restored(saved).state_dict()
    with pytest.raises(ValueError, match="streaks"):
        judge.load_state_dict({**saved, "streaks": None})


def test_what_is_judged_when() -> None:
    judge = Trends(CONFIG, WIDTH)
    assert [step for step in range(1, 200) if judge.looks(step)] == [125, 150, 175]


def test_kinds_of_parameters() -> None:
    kinds = {
        "embedding.weight": "embedding", "head.weight": "head", "final_norm.weight": "norm",
        "blocks.11.attention.qkv.weight": "attention", "blocks.0.attention.q_norm.weight": "norm",
        "blocks.0.mlp.down.weight": "mlp", "blocks.0.mlp_norm.weight": "norm",
    }  # fmt: skip
    assert {name: kind_of(name) for name in kinds} == kinds
    assert all(signal.remedy for signal in SIGNALS.values())


@given(st.floats(-1, 1), st.integers(0, 9))
def test_the_slope_is_robust_to_one_odd_look(by: float, odd: int) -> None:
    values = [by * step for step in range(10)]
    values[odd] += 100.0
    assert slope(list(range(10)), values) == pytest.approx(by, abs=1e-9)
