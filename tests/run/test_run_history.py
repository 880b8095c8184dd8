"""The fold of the journal: a long one is read briefly, which changes nothing of what is known of the run."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megastable.run.events import follow
from megastable.run.events.follow import Follower, drop_refused
from megastable.run.events.reading import event_of
from megastable.run.run_history import TAIL, RunHistory
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
def test_a_brief_reading_knows_the_same(story: list[list[Any]], block: int, pieces: int) -> None:
    lines = lines_of([one for part in story for one in part])
    with TemporaryDirectory() as folder, patch.object(follow, "BLOCK", block):
        path = Path(folder) / "journal.jsonl"
        followers, histories = (Follower(path), Follower(path, brief=True)), (RunHistory(), RunHistory())
        for piece in range(pieces):
            with path.open("ab") as file:
                file.writelines(lines[piece * len(lines) // pieces : (piece + 1) * len(lines) // pieces])
            for follower, history in zip(followers, histories, strict=True):
                for event in follower.stream():
                    history.add(event)
                history.count = history.passed_over = 0
            assert repr(vars(histories[0])) == repr(vars(histories[1]))
            assert followers[0].damaged == followers[1].damaged


def test_most_of_a_long_journal_is_passed_over() -> None:
    """Else nothing would be won; this is what a status of a million lines rests on."""
    lines, refused = drop_refused(
        b"".join(lines_of([{"event": "discarded", "step": n} for n in range(5000)]))
    )
    assert (len(lines), refused) == (TAIL + 1, 5000 - TAIL - 1)


VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just({"number": "x"})
    | st.just([1])
)
KEYS = """time what step steps to_step loss attempt code signal hung number summary bytes name world seconds delay
reason waited host until strikes of_step""".split()
KINDS = """training resumed evaluated checkpoint checkpoint_rejected discarded incident handover unstable stopped
finished supervisor launched ended hang restart hook_failed warning would host_left_out tasks_evaluated""".split()


@settings(deadline=None, max_examples=examples(150))
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(KEYS), VALUES)), max_size=6)
)
def test_no_event_is_too_strange(events: list[tuple[str, dict[str, Any]]]) -> None:
    history = RunHistory(most_lines=9)
    for kind, values in events:
        history.add(event_of({"event": kind, **values}))
    assert [event.event for event in history.tail] == [line.name for line in history.lines]
    assert all(line.text and line.text.isprintable() for line in history.lines)


def history_of(*events: dict[str, Any]) -> RunHistory:
    history = RunHistory()
    for event in events:
        history.add(event_of(event))
    return history


def test_what_later_events_undo_does_not_count() -> None:
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


@pytest.mark.parametrize("hung", [True, False])
def test_restarts_are_counted_by_how_the_attempt_before_ended(hung: bool) -> None:
    history = RunHistory()
    for n in range(300):
        for kind in ("launched", "training", "evaluated", "ended", "restart"):
            history.add(
                event_of({"event": kind, "attempt": n, "step": n, "loss": 1.0, "code": 1, "hung": hung})
            )
    assert history.restarts == {"hang" if hung else "crash": 300}
    assert len(history.starts) == 300 and len(history.tail) == TAIL
