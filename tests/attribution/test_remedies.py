"""A remedy is chosen only if it is clearly better than none, and the least intrusive of those that are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.attribution.harm import GAIN, HARM
from megastable.attribution.remedies import (
    NOTHING,
    OTHER_DATA,
    TOLERANCE,
    WITHOUT_BAD,
    WITHOUT_CORPUS,
    choose_remedy,
    find_rare_tokens,
    harms_anyway,
    judge_corpus,
)

BASE = np.random.default_rng(1).normal(4.0, 1.0, 64)
NAMES = (NOTHING, OTHER_DATA, "rewarm", "clip", "cut_lr")


def at(level: float, noise: float = 0.0, seed: int = 2) -> np.ndarray:
    """Losses of the same samples, by `level` nats higher."""
    return BASE + level + noise * np.random.default_rng(seed).normal(size=BASE.size)


def chosen(**levels: float) -> str:
    names = {"nothing": NOTHING, "other": OTHER_DATA}
    return choose_remedy({names.get(name, name): at(level) for name, level in levels.items()}, 26).chosen


@pytest.mark.parametrize(
    ("levels", "name"),
    [
        ({"nothing": 0.3, "other": 0.31, "rewarm": 0.1, "clip": 0.2, "cut_lr": 0.0}, "cut_lr"),
        ({"nothing": 0.3, "other": 0.31, "rewarm": 0.1, "clip": 0.0, "cut_lr": -0.9 * TOLERANCE}, "clip"),
        ({"nothing": 0.0, "other": 0.01, "rewarm": -0.9 * HARM, "cut_lr": 0.2}, NOTHING),
        ({"nothing": 0.4, "other": 0.0, "rewarm": 0.1, "cut_lr": 0.2}, OTHER_DATA),
        # A remedy that wins over the same data but not over other data takes nothing off the samples.
        ({"nothing": 0.4, "other": 0.005, "rewarm": 0.0, "cut_lr": 0.2}, OTHER_DATA),
        ({"nothing": 0.4, "other": 0.4, "rewarm": np.inf, "cut_lr": 0.2}, "cut_lr"),
        ({"nothing": np.nan, "other": np.inf, "rewarm": 1.0, "cut_lr": 0.5}, "cut_lr"),
        ({"nothing": np.nan, "other": np.inf, "rewarm": np.nan, "cut_lr": np.inf}, NOTHING),
    ],
)
def test_the_least_intrusive_that_is_clearly_better_wins(levels: dict[str, float], name: str) -> None:
    assert chosen(**levels) == name


def test_what_is_not_clear_is_no_win() -> None:
    branches = {NOTHING: at(0.05), OTHER_DATA: at(0.05), "cut_lr": at(0.0, noise=1.0)}
    assert not choose_remedy(branches, 26).has_remedy
    # A more intrusive one whose lead is noise does not win over a less intrusive one.
    branches = {NOTHING: at(0.5), OTHER_DATA: at(0.5), "rewarm": at(0.0), "cut_lr": at(-0.05, noise=0.4)}
    assert choose_remedy(branches, 26).chosen == "rewarm"


def test_a_choice_tells_why() -> None:
    trial = choose_remedy({NOTHING: at(0.3), OTHER_DATA: at(0.2), "rewarm": at(0.0)}, 26)
    assert "0.200 ± 0.000 nats easier than without any" in trial.reason and trial.gain == pytest.approx(0.2)
    none = choose_remedy({NOTHING: at(0.0), OTHER_DATA: at(0.2), "rewarm": at(0.0)}, 26)
    assert none.reason.endswith("no remedy is clearly better than nothing") and not none.has_remedy


@given(st.lists(st.floats(-2, 2), min_size=5, max_size=5))
def test_no_choice_is_clearly_worse_than_another(levels: list[float]) -> None:
    branches = {name: at(level) for name, level in zip(NAMES, levels, strict=True)}
    trial = choose_remedy(branches, 16)
    level, best = dict(zip(NAMES, levels, strict=True)), min(levels)
    assert level[trial.chosen] <= best + max(TOLERANCE, HARM) + 1e-9
    without = min(level[NOTHING], level[OTHER_DATA])
    assert not trial.has_remedy or level[trial.chosen] < without - HARM + 1e-9


def test_other_data_that_does_no_harm_needs_no_remedy() -> None:
    before = at(0.0)
    assert not harms_anyway(at(-0.2), before) and not harms_anyway(at(0.9 * HARM), before)
    assert not harms_anyway(at(0.05, noise=1.0), before)
    assert harms_anyway(at(0.05), before) and harms_anyway(at(np.nan), before)


@pytest.mark.parametrize(
    ("without", "control", "before", "helps"),
    [
        (at(0.0), at(0.9 * GAIN), at(0.0), False),
        (at(0.0), at(1.1 * GAIN), at(0.0), True),
        (at(0.0, noise=0.5), at(0.1), at(0.0), False),  # not clear
        (at(0.0, noise=0.1), at(0.1), at(0.0), True),
        (at(0.1), at(0.0), at(0.0), False),
        (at(0.0), at(np.nan), at(0.0), True),
        (at(np.inf), at(np.nan), at(0.0), False),
        (at(0.0)[:1], at(1.0)[:1], at(0.0)[:1], False),  # one sample shows nothing
        (at(0.0)[:0], at(0.0)[:0], at(0.0)[:0], False),
        (at(-0.29), at(-0.2), at(0.0), False),  # half as many again are read of them
        (at(-0.32), at(-0.2), at(0.0), True),
    ],
)
def test_a_corpus_is_left_out_only_if_that_clearly_helps_the_others(
    without: np.ndarray, control: np.ndarray, before: np.ndarray, helps: bool
) -> None:
    trial = judge_corpus("web", without, control, before, 1.5, 16)
    assert trial.helps is helps and trial.chosen == (WITHOUT_CORPUS if helps else WITHOUT_BAD)
    assert "16 steps without corpus web" in trial.reason
    assert trial.reason.endswith("it is left out" if helps else "it is kept")


def test_tokens_that_were_rare_are_those_that_are_far_more_frequent_now() -> None:
    random = np.random.default_rng(0)
    ordinary = random.integers(0, 50, (32, 64), dtype=np.int32)
    window = random.integers(0, 50, (16, 64), dtype=np.int32)
    assert find_rare_tokens(window, ordinary) == []
    window[:3, :20], window[5, :6], window[6, :3] = 77, 60, 61
    assert find_rare_tokens(window, ordinary) == [77, 60]  # three are too few
    ordinary[:4, :16] = 77
    assert find_rare_tokens(window, ordinary) == [60]
    assert find_rare_tokens(window[:0], ordinary) == [] and find_rare_tokens(ordinary, window[:0]) != []
