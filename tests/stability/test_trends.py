"""Slow signals: each told when it moves against its own history, once, and never of noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as checked
from hypothesis import strategies as st

from megastable.config.stability import TrendsConfig
from megastable.stability.trend_signals import SIGNALS, kind_of, slope
from megastable.stability.trends import VALIDATION, TrendNotice, Trends, TrendsState

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
    rows["embedding.weight"] = {**weight(0.1), "stale": 0.0}
    rows["head.weight"] = {**weight(0.1), "stale": 0.0}
    return rows


def weight(gradient: float) -> dict[str, float]:
    return {"weight": 10.0, "update": 0.05, "gradient": gradient, "numel": 1e4, "fresh": 1.0}


def run(
    *changes: Change, looks: int = 40, fault: int = 20, trends: Trends | None = None
) -> list[tuple[int, TrendNotice]]:
    """What is told at which look; `changes` from look `fault` on."""
    judge, found = trends or Trends(CONFIG, WIDTH), list[tuple[int, TrendNotice]]()
    for look in range(1, looks + 1):
        rows = healthy(look)
        for change in changes:
            if look >= fault:
                change(rows, look - fault + 1)
        step = CONFIG.start + look * CONFIG.interval
        found += [(look, trend) for trend in judge.measured(step, RATE, rows)]
    return found


def names(found: list[tuple[int, TrendNotice]]) -> list[str]:
    return [trend.signal for _, trend in found]


def collapse(rows: Rows, n: int) -> None:
    rows["blocks.1"]["entropy"] *= 0.85**n


def logits(rows: Rows, n: int) -> None:
    rows["blocks.1"]["logit"] *= 1.3**n


def straight(rows: Rows, n: int) -> None:
    """Every update points outwards: the norm grows by their sum."""
    for part in ("attention.qkv", "attention.out"):
        for block in ("blocks.0", "blocks.1"):
            rows[f"{block}.{part}.weight"]["weight"] += 0.05 * CONFIG.interval * n


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
    "logits": (logits, "logits", "blocks.1 is"),
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
    assert (trend.signal, trend.over) == (signal, False) and text in trend.text and trend.remedy
    assert 20 + CONFIG.confirm - 1 <= look <= 30
    assert trend.numbers and all(math.isfinite(value) for value in trend.numbers.values())


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in ("straight", "small")])
def test_a_single_look_says_nothing(name: str) -> None:
    change, _, _ = FAULTS[name]
    assert run(lambda rows, n: change(rows, 12) if n == 1 else None) == []


@pytest.mark.parametrize("name", ["collapse", "logits", "large", "stale", "dying"])
def test_it_is_over_when_it_has_recovered_and_told_again_when_it_comes_back(name: str) -> None:
    change, signal, _ = FAULTS[name]
    judge = Trends(CONFIG, WIDTH)
    first = run(lambda rows, n: change(rows, n) if n <= 10 else None, looks=60, trends=judge)
    assert [(t.signal, t.over) for _, t in first] == [(signal, False), (signal, True)]
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


def test_a_low_entropy_is_no_fall() -> None:
    assert run(lambda rows, n: rows["blocks.1"].update(entropy=0.3), fault=1) == []


def test_large_logits_that_do_not_grow_and_small_ones_that_do_say_nothing() -> None:
    assert run(lambda rows, n: rows["blocks.1"].update(logit=300.0), fault=1) == []
    assert run(lambda rows, n: rows["blocks.1"].update(logit=min(19.0, 1.1**n)), fault=1) == []


def test_a_norm_may_grow_within_its_updates() -> None:
    """Half of every update outwards is fast, and explained."""

    def half(rows: Rows, n: int) -> None:
        for name, row in rows.items():
            if "attention" in name:
                row["weight"] += 0.5 * 0.05 * CONFIG.interval * n

    assert run(half) == []


def test_a_norm_that_hardly_grows_is_no_trend_however_straight() -> None:
    def tiny(rows: Rows, n: int) -> None:
        for name, row in rows.items():
            if "attention" in name:
                row["update"] = 0.005
                row["weight"] += 0.005 * CONFIG.interval * n  # 1.2 % a look

    assert run(tiny, looks=32) == []


def test_the_usual_share_of_rare_tokens_is_no_trend() -> None:
    """Of a large vocabulary; the limit is a factor of it."""
    usual = 0.9 * CONFIG.stale_share
    judge = Trends(CONFIG, WIDTH)
    assert run(lambda rows, n: rows["head.weight"].update(stale=usual), fault=1, trends=judge) == []
    saved = judge.state
    for times, told in ((3.9, []), (4.1, ["tokens"])):
        judge, share = Trends(CONFIG, WIDTH, saved), times * usual
        found = run(
            lambda rows, n, s=share: rows["head.weight"].update(stale=s), fault=1, looks=6, trends=judge
        )
        assert names(found) == told


def test_places_that_fall_together_are_told_in_one_line() -> None:
    def both(rows: Rows, n: int) -> None:
        collapse(rows, n)
        rows["blocks.0"]["entropy"] *= 0.8**n

    ((_, trend),) = run(both)
    assert "blocks.0 has fallen" in trend.text and trend.text.endswith("and so for 1 other")


@pytest.mark.parametrize("key", ["entropy", "logit", "added", "weight", "gradient", "update", "stale"])
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
@checked(deadline=None, max_examples=40)
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
    saved = judge.state.model_dump_json()
    if rewound:  # after steps that are undone
        for look in range(at + 1, 41):
            judge.measured(100 + 25 * look, RATE, rows_at[0])
        judge.rewind(TrendsState.model_validate_json(saved), 100 + 25 * at)
    else:
        judge = Trends(CONFIG, WIDTH, TrendsState.model_validate_json(saved))
    for look in range(at + 1, 41):
        again += judge.measured(100 + 25 * look, RATE, rows_at[look - 1])
    assert again == told and judge.state == whole.state


# Evaluations


def evaluated(judge: Trends, losses: list[tuple[float, float]], first: int = 1) -> list[TrendNotice]:
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
    assert [trend.over for trend in found] == told and all(trend.signal == VALIDATION for trend in found)


def test_a_rewind_keeps_the_evaluation_of_its_step() -> None:
    """It came after the rewind point was taken, and is not repeated."""
    judge = Trends(CONFIG, WIDTH)
    evaluated(judge, [(3.0, 3.0)])
    saved = judge.state
    evaluated(judge, [(2.9, 2.8), (2.95, 2.7)], first=2)
    judge.rewind(saved, 200)
    assert [e.step for e in judge.state.evaluations] == [100, 200]


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
