"""A long journal is skimmed: what is left out changes nothing of how the run stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.run.events import follow
from megastable.run.events.follow import Follower
from megastable.run.events.reading import KINDS
from megastable.supervise.journal_skim import skim
from megastable.supervise.journal_view import JournalView
from tests.supervise.runs import incident
from tests.tiers import examples

STEPS = st.integers(1, 60)
LOSSES = st.one_of(st.floats(-1e3, 1e3), st.sampled_from(["nan", "inf", None]))
FEW = st.integers(1, 4)
# Shapes of the lines of real journals; the writer puts time and event first, and mostly the step behind them.
EVENTS = st.one_of(
    st.builds(lambda s: {"event": "discarded", "step": s, "loss": 8.5, "reason": "a {b} c"}, STEPS),
    st.builds(lambda s, loss: {"event": "evaluated", "step": s, "loss": loss, "samples": 8}, STEPS, LOSSES),
    st.builds(
        lambda s, n, size: {"event": "checkpoint", "step": s, "name": f"step-{n}", "bytes": size, "seconds": 0.1},
        STEPS, STEPS, st.sampled_from([1, 10**9, None, 1.5]),
    ),
    st.builds(lambda s: {"event": "checkpoint_healthy", "step": s, "name": f"step-{s}"}, STEPS),
    st.builds(lambda s: {"event": "samples_examined", "step": s, "first": s, "last": s, "reason": "nobody"}, STEPS),
    st.builds(lambda n, what: incident(n, what), FEW, st.sampled_from(["opened", "attributed", "closed"])),
    st.builds(lambda n, s: incident(n, "rewound") | {"to_step": s, "cursor": 8 * s}, FEW, STEPS),
    st.builds(lambda s: {"event": "training", "step": s, "cursor": 8 * s, "world": 2}, STEPS),
    st.builds(lambda n: {"event": "launched", "attempt": n, "command": ["x"]}, FEW),
    st.builds(lambda n: {"event": "ended", "attempt": n, "code": 1, "failure": "boom", "step": None}, FEW),
    st.builds(lambda n: {"event": "restart", "attempt": n, "reason": "again", "delay": 0.0}, FEW),
    st.builds(lambda n: {"event": "hosts_awaited", "attempt": n, "reason": "waiting for second"}, FEW),
    st.sampled_from([
        {"event": "supervisor", "what": "started", "pid": 1, "host": "h"}, {"event": "stopped", "step": 3},
        {"event": "finished", "steps": 99}, {"event": "alert", "what": "begun", "step": 5, "reason": "spent"},
        {"event": "alert", "what": "over"}, {"event": "hang", "step": 7, "waited": 40}, {"event": "unknown", "step": 2},
        {"event": "warning", "text": 'says "event": "discarded", "step": 5', "step": 0},
    ]),
)  # fmt: skip
ODD = st.sampled_from([
    b'{"time": 7.0, "event": "discarded", "step": 5, "verd{"time": 8.0, "event": "discarded", "step": 6}\n',  # merged
    b'{"time": 7.0, "event": "evaluated", "step": 5, "lo\n', b"\n", b"not JSON\n", b"}\n", b"\0" * 40 + b"}\n",
    b'{"event": "discarded", "step": 5}\n', b'{"time": "x", "event": "discarded", "step": 5}\n', b"[1]\n",
    b'{"time": 7.0, "event": "discarded", "step": 5, "l\0\0\0": 9}\n',
    b'{"time": 7.0, "event": "discarded", "step": 5} \n',
])  # fmt: skip


def stretch(one: Any, count: int) -> list[Any]:
    """The same event again and again, from step to step; every other time of another name."""
    if isinstance(one, bytes) or not isinstance(one.get("step"), int):
        return [one]
    steps = range(one["step"], one["step"] + count)
    return [one | {"step": s} | ({"name": f"step-{s // 2}"} if "name" in one else {}) for s in steps]


STORIES = st.lists(
    st.builds(stretch, st.one_of(*[EVENTS] * 9, ODD), st.sampled_from([1, 1, 1, 2, 25, 50])), max_size=20
).map(lambda parts: [one for part in parts for one in part])


def lines_of(story: list[Any]) -> list[bytes]:
    """Events a third of a second apart; what is bytes already stays."""
    return [
        one if isinstance(one, bytes) else json.dumps({"time": 1000 + n / 3} | one).encode() + b"\n"
        for n, one in enumerate(story)
    ]


def read(follower: Follower, told: JournalView) -> str:
    for event in follower.stream():
        told.add(event)
    told.incidents = dict(sorted(told.incidents.items()))  # in which order they are told
    return repr((told, follower.damaged, follower.starts))


@given(STORIES, st.sampled_from([300, 2000, 8000, 20_000]), st.integers(1, 3))
@settings(max_examples=examples(200), deadline=None)
def test_the_view_is_the_same_as_of_a_full_read(story: list[Any], block: int, pieces: int) -> None:
    same(lines_of(story), block, pieces)


REFUSED = {"event": "discarded", "step": 900, "loss": 9.0}


@pytest.mark.parametrize(
    "before",
    [
        [],
        stretch({"event": "evaluated", "step": 5, "loss": 3.5}, 25),
        stretch({"event": "checkpoint", "step": 5, "name": "", "bytes": 7}, 50),
        [
            one
            for size in (7, 1.5)  # the second is none: the sizes of before count
            for one in stretch({"event": "checkpoint", "step": 5, "name": "", "bytes": size}, 50)
        ],
        [b'{"time": 7.0, "event": "discarded", "step": 5, "l\0\0\0": 9}\n'],
        [incident(n, "opened") for n in (3, 1, 2, 1)],
    ],
)
@pytest.mark.parametrize("count", [1, 29, 90])
def test_what_stands_before_many_lines_that_are_left_out_counts(before: list[Any], count: int) -> None:
    lines = lines_of([*before, *stretch(REFUSED, count), {"event": "unknown"}])
    same(lines, block=sum(map(len, lines)), pieces=1)


def same(lines: list[bytes], block: int, pieces: int) -> None:
    """A full reading and a skimming one, of a file that grows in so many pieces."""
    with TemporaryDirectory() as folder, patch.object(follow, "BLOCK", block):
        path = Path(folder) / "journal.jsonl"
        followers, views = (Follower(path), Follower(path, skim)), (JournalView(), JournalView())
        for piece in range(pieces):
            with path.open("ab") as file:
                file.writelines(lines[piece * len(lines) // pieces : (piece + 1) * len(lines) // pieces])
            full, skimmed = map(read, followers, views)
            assert full == skimmed


def journal_of(count: int, one: Callable[[int], dict[str, Any]]) -> bytes:
    return b"".join(lines_of([one(n) for n in range(count)]))


def test_most_of_a_long_journal_is_left_out() -> None:
    """Else nothing would be won; this is what a status of a million lines rests on."""
    refused = journal_of(5000, lambda n: {"event": "discarded", "step": n, "loss": 9.0})
    chosen, counted = skim(refused)
    assert len(chosen) + counted == 5000 and len(chosen) < 40
    healthy = journal_of(5000, lambda n: {"event": "checkpoint_healthy", "step": n, "name": f"step-{n}"})
    assert len(skim(healthy)[0]) < 40 and skim(healthy)[1] == 0
    cases = journal_of(5000, lambda n: incident(n // 1000, "attributed") if n < 4000 else REFUSED)
    assert len(skim(cases)[0]) < 40


@pytest.mark.parametrize("kind", ["discarded", "checkpoint_healthy", "discard_examined", "samples_examined"])
def test_what_is_left_out_is_told_of_in_words_when_it_is_new(kind: str) -> None:
    assert kind in KINDS  # the newest of them are kept for that
