"""The verdict on suspects, from what two branches have shown."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable_guard.trials import (
    GAIN,
    HARM,
    HELD_OUT,
    NOTHING,
    OTHER_DATA,
    TOLERANCE,
    WITHOUT_BAD,
    WITHOUT_CORPUS,
    BranchLosses,
    HarmTrial,
    TrialVerdict,
    choose_held_out,
    choose_remedy,
    find_rare_tokens,
    find_repetition,
    harms_anyway,
    is_clear,
    is_harmless,
    judge_corpus,
    judge_trial,
    replace_samples,
)
from tests.tiers import examples

VOCABULARY = 1000
SPREAD = 0.5 * np.random.default_rng(1).standard_normal(64)
NOISE = 0.01 * np.random.default_rng(2).standard_normal((4, 64))


def coming_at(cost: float, level: float = 4.0, present: float = 0.0) -> BranchLosses:
    """Losses of data to come that costs so much more after the suspects; present: by how much the state of now is worse
    than the control's."""
    usual = level + SPREAD
    return BranchLosses(
        usual + cost + NOISE[0], usual + NOISE[1], usual + NOISE[2], usual + present + NOISE[3]
    )


def judge(cost: float, learnt: float, kind: float = 5.0, present: float = 0.0) -> HarmTrial:
    """A trial as of `coming_at`, in which suspects that were held out cost so much less after the others. kind: their
    loss after the control."""
    held_out = kind + SPREAD - learnt, kind + SPREAD + NOISE[0]
    return judge_trial(coming_at(cost, present=present), held_out, VOCABULARY, 128, 16)


@pytest.mark.parametrize(
    ("cost", "learnt", "verdict"),
    [
        (-0.3, 1.0, TrialVerdict.NEW),  # a switch to code
        (-0.3, 0.0, TrialVerdict.NEW),
        (0.0, 1.0, TrialVerdict.NEW),  # a visit that is nearly over
        (0.2, 0.0, TrialVerdict.BAD),
        (0.2, 1.0, TrialVerdict.MIXED),
        (0.0, 0.0, TrialVerdict.NOISE),
        (0.005, 0.03, TrialVerdict.NOISE),  # too little to tell
        (math.inf, 0.0, TrialVerdict.BAD),
        (math.nan, 0.0, TrialVerdict.BAD),  # no longer finite
    ],
)
def test_the_table(cost: float, learnt: float, verdict: TrialVerdict) -> None:
    found = judge(cost, learnt)
    assert found.verdict is verdict and not found.damaged
    assert found.pays == (cost == -0.3) and str(found.steps) in found.reason


def test_what_is_known_memorised_or_still_guessed_teaches_nothing() -> None:
    nothing = np.zeros(64, dtype=bool)
    held_out = np.full(64, 0.1), 5.0 + SPREAD
    known = judge_trial(coming_at(0.2), held_out, VOCABULARY, 128, 16, (True, nothing))
    assert known.verdict is TrialVerdict.BAD and known.learnt == 0.0
    assert judge_trial(coming_at(0.2), held_out, VOCABULARY, 128, 16).verdict is TrialVerdict.MIXED
    guessed = math.log(VOCABULARY)
    assert judge(0.2, 3.0, kind=guessed + 3.2).verdict is TrialVerdict.BAD
    assert judge(0.2, 3.0, kind=guessed + 1.5).verdict is TrialVerdict.MIXED
    # Nor does data to come that is memorised: one sentence again and again, which is a third of it.
    usual, repeats = 4.0 + SPREAD, np.arange(64) % 3 == 0
    coming = BranchLosses(np.where(repeats, 0.5, usual + 0.1), usual, usual, usual)
    assert judge_trial(coming, held_out, VOCABULARY, 128, 16, (False, nothing)).pays
    found = judge_trial(coming, held_out, VOCABULARY, 128, 16, (True, repeats))
    assert found.verdict is TrialVerdict.BAD and found.cost == pytest.approx(0.1 * 2 / 3, abs=0.01)


def texts(count: int, length: int, words: int, seed: int) -> np.ndarray:
    """Token ids as of text: each is drawn from a few that often follow the one before."""
    chance, found = np.random.default_rng(seed), np.empty((count, length), dtype=np.int32)
    after = np.random.default_rng(0).integers(0, words, (words, 8))
    for row in found:
        row[0] = chance.integers(words)
        for i in range(1, length):
            row[i] = after[row[i - 1], chance.integers(8)]
    return found


def test_only_what_says_the_same_again_and_again_is_a_repetition() -> None:
    ordinary, coming = texts(40, 65, 500, 1), texts(12, 65, 500, 2)
    sentence = np.resize(texts(1, 11, 500, 3), 40 * 65).reshape(40, 65)
    coming[::3] = np.resize(sentence[0, 4:], 65)
    repeats, which = find_repetition(sentence, ordinary, coming)
    assert repeats and which.tolist() == [True, False, False] * 4
    for other in (texts(40, 65, 500, 4), np.random.default_rng(5).integers(0, 500, (40, 65), dtype=np.int32)):
        assert find_repetition(other, ordinary, coming)[0] is False
    # Some samples eight times each are not one sentence.
    assert find_repetition(np.tile(texts(5, 65, 500, 6), (8, 1)), ordinary, coming)[0] is False
    assert find_repetition(sentence[:0], ordinary, coming)[0] is False
    assert find_repetition(sentence, ordinary[:0], coming)[0] is False


def test_damage_that_the_same_steps_do_not_make() -> None:
    assert judge(0.0, 1.0, present=0.1).damaged
    assert judge(0.0, 1.0, present=math.nan).damaged
    assert not judge(0.2, 0.0, present=0.1).damaged  # the branch is as bad


def test_gross_and_few_are_trained_on_only_where_that_pays() -> None:
    trials = [judge(*of) for of in ((-0.3, 1.0), (0.0, 1.0), (0.0, 0.0), (0.2, 0.0), (0.2, 1.0))]
    assert [is_harmless(t, few=True) for t in trials] == [True, False, False, False, False]
    assert [is_harmless(t, few=False) for t in trials] == [True, True, True, False, False]
    assert [is_clear(t) for t in trials] == [False, False, False, True, True]


@given(st.sets(st.integers(0, 500), min_size=1, max_size=300), st.integers(1, 9))
@settings(max_examples=examples(100))
def test_only_suspects_are_replaced_and_half_are_held_out(chosen: set[int], fillers: int) -> None:
    suspects, batches = np.array(sorted(chosen)), list(np.arange(512).reshape(32, 16))
    held_out = choose_held_out(suspects)
    assert held_out.size == min(suspects.size // 2, HELD_OUT) == np.unique(held_out).size
    assert np.isin(held_out, suspects).all()
    replaced = replace_samples(batches, suspects, 1000 + np.arange(fillers))
    for before, after in zip(batches, replaced, strict=True):
        suspected = np.isin(before, suspects)
        assert np.array_equal(before[~suspected], after[~suspected]) and (after[suspected] >= 1000).all()
    used = np.concatenate(replaced)
    counts = np.bincount(used[used >= 1000] - 1000, minlength=fillers)
    assert counts.max() - counts.min() <= 1  # in turn
    assert np.array_equal(np.concatenate(batches), np.arange(512))  # those given are left as they were


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


def test_a_remedy_that_ends_a_warning_must_gain_less() -> None:
    branches = {
        NOTHING: at(0.008),
        OTHER_DATA: at(0.02),
        "rewarm": at(0.007),
        "clip": at(0.0),
        "cut_lr": at(-0.001),
    }
    assert choose_remedy(branches, 26).chosen == NOTHING
    assert choose_remedy(branches, 26, ["clip", "cut_lr"]).chosen == "clip"
    assert choose_remedy(branches, 26, ["rewarm", "clip"]).chosen == NOTHING  # the best one does not end it
    assert choose_remedy({**branches, "cut_lr": at(0.01)}, 26, ["clip"]).chosen == "clip"
    assert choose_remedy(branches, 26, ["clip", "cut_lr", NOTHING]).chosen == NOTHING  # ends by itself
    other = {**branches, OTHER_DATA: at(0.002)}
    trial = choose_remedy(other, 26, ["clip", "cut_lr"])
    assert trial.chosen == "clip" and trial.reason.endswith("which other data does not mend")
    assert choose_remedy(other, 26, ["clip", "cut_lr", OTHER_DATA]).chosen == OTHER_DATA
    assert choose_remedy({**branches, "clip": at(0.004)}, 26, ["clip", "cut_lr"]).chosen == "cut_lr"


def test_what_is_not_clear_is_no_win() -> None:
    branches = {NOTHING: at(0.05), OTHER_DATA: at(0.05), "cut_lr": at(0.0, noise=1.0)}
    assert not choose_remedy(branches, 26).has_remedy
    # A more intrusive one whose lead is noise does not win over a less intrusive one.
    branches = {NOTHING: at(0.5), OTHER_DATA: at(0.5), "rewarm": at(0.0), "cut_lr": at(-0.05, noise=0.4)}
    assert choose_remedy(branches, 26).chosen == "rewarm"


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
