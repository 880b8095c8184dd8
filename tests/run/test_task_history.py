"""Which evaluations of tasks there were, and which scores have fallen."""

from __future__ import annotations

import random

import pytest

from megastable.run.events.training_events import TasksEvaluated, TasksFailed, TasksSkipped
from megastable.run.task_history import LESS_IS_BETTER, ScoreDrop, TaskHistory


def evaluated(step: int, **scores: float) -> TasksEvaluated:
    return TasksEvaluated(checkpoint="c", of_step=step, manifest="m", tokens=1, scores=scores, seconds=1.0)


def after(scores: list[float], name: str = "acc") -> ScoreDrop | None:
    history = TaskHistory()
    for n, score in enumerate(scores):
        history.add(evaluated(n + 1, **{name: score}))
    return history.summary().drops.get(name)


def test_events_are_counted() -> None:
    history = TaskHistory()
    named = {"checkpoint": "c", "manifest": "m", "reason": "r"}
    assert history.summary().counts == {"evaluated": 0, "failed": 0, "skipped": 0}
    history.add(TasksFailed(of_step=10, seconds=1.0, **named))
    history.add(TasksFailed(of_step=20, seconds=1.0, **named))
    found = history.summary()
    assert (found.step, found.scores, found.settled, found.failures) == (0, {}, 20, 2)
    history.add(TasksSkipped(of_step=30, **named))
    assert (history.summary().settled, history.summary().failures) == (30, 2)
    history.add(evaluated(40, acc=0.5))
    found = history.summary()
    assert (found.step, found.scores, found.settled, found.failures) == (40, {"acc": 0.5}, 40, 0)
    assert found.counts == {"evaluated": 1, "failed": 2, "skipped": 1}


def test_a_score_that_collapses_has_fallen_after_two_evaluations() -> None:
    good = [0.30, 0.33, 0.35, 0.38, 0.40, 0.41, 0.43]
    once, twice = after([*good, 0.1]), after([*good, 0.1, 0.12])
    assert once is not None and once.ratio == 0  # the median of 0.41, 0.43 and 0.1 is the best so far
    assert twice is not None and twice.ratio == pytest.approx((0.41 - 0.12) / 0.41) and twice.sigmas > 10


def test_a_perplexity_that_rises_has_fallen_behind() -> None:
    falling = [30.0, 25.0, 21.0, 18.0, 16.0, 15.0]
    steady, risen = after(falling, "wiki/perplexity"), after([*falling, 29.0, 30.0], "wiki/perplexity")
    assert steady == ScoreDrop(0.0, 0.0)
    assert risen is not None and risen.ratio == pytest.approx((29 - 16) / 16) and risen.sigmas > 2


def test_a_noisy_task_at_chance_has_not() -> None:
    """100 questions with four answers, 30 evaluations, 200 runs: a fifth below the best is common, four standard
    deviations are not."""
    dice, below, fallen = random.Random(1), 0, 0
    for _ in range(200):
        drop = after([sum(dice.random() < 0.25 for _ in range(100)) / 100 for _ in range(30)])
        assert drop is not None
        below += drop.ratio > 0.2
        fallen += drop.ratio > 0.2 and drop.sigmas > 4
    assert below > 20 and fallen <= 1


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ([0.5, 0.1, 0.1, 0.1], None),  # too few to know the noise
        ([0.0] * 9, None),  # nothing to fall from
        ([0.5] * 6, ScoreDrop(0.0, 0.0)),
        ([0.5] * 9 + [0.25] * 2, ScoreDrop(0.5, float("inf"))),  # without any noise
        ([0.5] * 6 + [float("nan"), float("inf")], ScoreDrop(0.0, 0.0)),
        ([float("nan")] * 9, None),
        ([-4.0] * 9 + [-6.0] * 2, ScoreDrop(0.5, float("inf"))),  # a log likelihood
    ],
)
def test_limits(scores: list[float], wanted: ScoreDrop | None) -> None:
    assert after(scores) == wanted


def test_a_task_that_is_no_longer_evaluated_has_no_drop() -> None:
    history = TaskHistory()
    for step in range(8):
        history.add(evaluated(step, a=0.5, b=0.5))
    history.add(evaluated(9, a=0.5))
    assert set(history.summary().drops) == {"a"}


def test_by_its_name_less_is_better() -> None:
    less = (
        "wiki/word_perplexity",
        "wiki/bits_per_byte",
        "perplexity",
        "x/Brier_score",
        "wmt/ter",
        "a/loss,strict",
    )
    more = (
        "arc/acc",
        "arc/acc_norm",
        "gsm8k/exact_match,strict-match",
        "lossless/acc",
        "x/counter",
        "wmt/bleu",
    )
    assert all(LESS_IS_BETTER.fullmatch(name) for name in less)
    assert not any(LESS_IS_BETTER.fullmatch(name) for name in more)
