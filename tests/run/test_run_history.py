"""The fold of the journal: a long one is read briefly, which changes nothing of what is known; scores that fall."""

from __future__ import annotations

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megastable.run.events import reading
from megastable.run.events.reading import Follower, drop_refused, event_of
from megastable.run.events.training_events import TasksEvaluated, TasksFailed, TasksSkipped
from megastable.run.run_history import LESS_IS_BETTER, TAIL, RunHistory, ScoreDrop, TaskHistory
from tests.supervise.runs import incident
from tests.tiers import examples

STEPS = st.integers(1, 60)
EVENTS = st.one_of(
    st.builds(lambda s, n: {"event": "evaluated", "step": s, "loss": n}, STEPS, st.sampled_from([3.5, "nan", None])),
    st.builds(lambda s: {"event": "checkpoint", "step": s, "name": f"step-{s}", "bytes": 9, "seconds": 0.1}, STEPS),
    st.builds(lambda n, s: incident(n, "rewound") | {"to_step": s, "cursor": 8 * s}, st.integers(1, 4), STEPS),
    st.builds(lambda s: {"event": "training", "step": s, "cursor": 8 * s, "world": 2}, STEPS),
    st.sampled_from([
        {"event": "alert", "what": "begun", "step": 5, "reason": "spent"}, {"event": "finished", "steps": 99},
        {"event": "warning", "text": 'says {"time": 5, "event": "discarded", "step": 5}', "step": 0},
    ]),
)  # fmt: skip
ZEROED = b'{"time": 7.0, "event": "discarded", "step": 5, "l\0\0\0": 9}\n'
ODD = st.sampled_from([
    b'{"time": 7.0, "event": "discarded", "step": 5, "verd{"time": 8.0, "event": "discarded", "step": 6}\n',  # merged
    b'{"time": 7.0, "event": "evaluated", "step": 5, "lo\n', b"\n", b"not JSON\n", b"\0" * 40 + b"}\n",
    ZEROED, b'{"event": "discarded", "step": 5}\n',
])  # fmt: skip
REFUSED = st.integers(1, 90).map(
    lambda n: [{"event": "discarded", "step": s, "reason": "a {b}"} for s in range(n)]
)


def lines_of(story: list[Any]) -> list[bytes]:
    """Events a third of a second apart; what is bytes already stays."""
    return [
        one if isinstance(one, bytes) else json.dumps({"time": 1000 + n / 3} | one).encode() + b"\n"
        for n, one in enumerate(story)
    ]


@given(
    st.lists(st.one_of(REFUSED, EVENTS.map(lambda one: [one]), ODD.map(lambda one: [one])), max_size=20),
    st.sampled_from([300, 2000, 8000]),
    st.integers(1, 3),
)
@example(
    [[{"event": "discarded", "step": 5}] * 90, [ZEROED], [{"event": "discarded", "step": 5}] * 90], 5000, 1
)
@settings(max_examples=examples(200), deadline=None)
def test_history_knows_the_same_by_a_brief_reading(story: list[list[Any]], block: int, pieces: int) -> None:
    lines = lines_of([one for part in story for one in part])
    with TemporaryDirectory() as folder, patch.object(reading, "BLOCK", block):
        path = Path(folder) / "journal.jsonl"
        followers, histories = (Follower(path), Follower(path, brief=True)), (RunHistory(), RunHistory())
        for piece in range(pieces):
            with path.open("ab") as file:
                file.writelines(lines[piece * len(lines) // pieces : (piece + 1) * len(lines) // pieces])
            for follower, history in zip(followers, histories, strict=True):
                for event in follower.stream_events():
                    history.add_event(event)
                history.count = history.passed_over = 0
            assert repr(vars(histories[0])) == repr(vars(histories[1]))
            assert followers[0].damaged == followers[1].damaged


def test_drop_refused_passes_over_most_of_a_long_journal() -> None:
    """Else nothing would be won; this is what a status of a million lines rests on."""
    content = b"".join(lines_of([{"event": "discarded", "step": n} for n in range(5000)]))
    lines, refused = drop_refused(content)
    assert (len(lines), refused) == (TAIL + 1, 5000 - TAIL - 1)


SCALARS = st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.none() | SCALARS | st.just({"number": "x"}) | st.just([1])
KEYS = """time what step steps to_step loss attempt code signal hung number summary bytes name world seconds delay
reason waited host until strikes of_step""".split()
KINDS = """training resumed evaluated checkpoint checkpoint_rejected discarded incident handover unstable stopped
finished supervisor launched ended hang restart hook_failed warning would host_left_out tasks_evaluated""".split()


@settings(deadline=None, max_examples=examples(150))
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(KEYS), VALUES)), max_size=6)
)
def test_history_takes_any_event(events: list[tuple[str, dict[str, Any]]]) -> None:
    history = RunHistory(most_lines=9)
    for kind, values in events:
        history.add_event(event_of({"event": kind, **values}))
    assert [event.event for event in history.tail] == [line.name for line in history.lines]
    assert all(line.text and line.text.isprintable() for line in history.lines)


def history_of(*events: dict[str, Any]) -> RunHistory:
    history = RunHistory()
    for event in events:
        history.add_event(event_of(event))
    return history


def test_history_does_not_count_what_later_events_undo() -> None:
    stopped, training = {"event": "stopped", "step": 7}, {"event": "training", "step": 7, "world": 1}
    assert history_of(stopped).goodbye is not None and history_of(stopped, training).goodbye is None
    measured = [{"event": "evaluated", "step": step, "loss": 1.0} for step in (6, 7, 8)]
    assert [one.undone for one in history_of(*measured, training).evaluations] == [False, False, True]
    left_out, proven = {"event": "host_left_out", "host": "b"}, {"event": "host_proven", "host": "b"}
    assert history_of(left_out, proven).proven == {"b"} and not history_of(left_out, proven, left_out).proven
    damaged, launched = (
        {"event": "checkpoint_rejected", "name": "step-9"},
        {"event": "launched", "attempt": 1},
    )
    assert history_of(damaged).rejected == 9 and history_of(damaged, launched).rejected == 0
    assert history_of(training, {"event": "finished", "steps": 9}).step == 9


# Scores of tasks


def evaluated(step: int, **scores: float) -> TasksEvaluated:
    return TasksEvaluated(checkpoint="c", of_step=step, manifest="m", tokens=1, scores=scores, seconds=1.0)


def after(scores: list[float], name: str = "acc") -> ScoreDrop | None:
    history = TaskHistory()
    for n, score in enumerate(scores):
        history.add_event(evaluated(n + 1, **{name: score}))
    return history.summarize_tasks().drops.get(name)


def test_history_forgets_warnings_of_steps_that_are_undone() -> None:
    told = [
        {
            "event": "trend",
            "what": "warned",
            "step": step,
            "signal": signal,
            "text": "x",
            "remedy": "",
            "numbers": {},
        }
        for step, signal in ((4, "expert_load"), (9, "expert_bias"))
    ]
    assert [*history_of(*told).trends] == ["expert_load", "expert_bias"]
    undone = incident(1, "rewound") | {"to_step": 5, "cursor": 40}
    assert [*history_of(*told, undone).trends] == ["expert_load"]


def test_task_history_counts_events_and_forgets_tasks_that_are_no_longer_evaluated() -> None:
    history = TaskHistory()
    named = {"checkpoint": "c", "manifest": "m", "reason": "r"}
    for failed in (10, 20):
        history.add_event(TasksFailed(of_step=failed, seconds=1.0, **named))
    history.add_event(TasksSkipped(of_step=30, **named))
    found = history.summarize_tasks()
    assert (found.step, found.scores, found.settled, found.failures) == (0, {}, 30, 2)
    for step in range(40, 48):
        history.add_event(evaluated(step, a=0.5, b=0.5))
    history.add_event(evaluated(48, a=0.5))
    found = history.summarize_tasks()
    assert (found.step, found.scores, found.settled, found.failures) == (48, {"a": 0.5}, 48, 0)
    assert found.counts == {"evaluated": 9, "failed": 2, "skipped": 1} and set(found.drops) == {"a"}


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
        ([0.30, 0.33, 0.35, 0.38, 0.40, 0.41, 0.43, 0.1], ScoreDrop(0.0, 0.0)),  # once: the median is not it
    ],
)
def test_task_history_tells_how_far_a_score_fell(scores: list[float], wanted: ScoreDrop | None) -> None:
    assert after(scores) == wanted


def test_task_history_knows_a_collapse_from_noise() -> None:
    """100 questions with four answers, 30 evaluations, 200 runs: a fifth below the best is common, four standard
    deviations are not."""
    fell = after([0.30, 0.33, 0.35, 0.38, 0.40, 0.41, 0.43, 0.1, 0.12])
    assert fell is not None and fell.ratio == pytest.approx((0.41 - 0.12) / 0.41) and fell.sigmas > 10
    rose = after([30.0, 25.0, 21.0, 18.0, 16.0, 15.0, 29.0, 30.0], "wiki/perplexity")
    assert rose is not None and rose.ratio == pytest.approx((29 - 16) / 16) and rose.sigmas > 2
    dice, below, fallen = random.Random(1), 0, 0
    for _ in range(200):
        drop = after([sum(dice.random() < 0.25 for _ in range(100)) / 100 for _ in range(30)])
        assert drop is not None
        below += drop.ratio > 0.2
        fallen += drop.ratio > 0.2 and drop.sigmas > 4
    assert below > 20 and fallen <= 1


def test_less_is_better_by_the_name() -> None:
    less = "wiki/word_perplexity wiki/bits_per_byte perplexity x/Brier_score wmt/ter a/loss,strict".split()
    more = "arc/acc arc/acc_norm gsm8k/exact_match,strict-match lossless/acc x/counter wmt/bleu".split()
    assert all(map(LESS_IS_BETTER.fullmatch, less)) and not any(map(LESS_IS_BETTER.fullmatch, more))
