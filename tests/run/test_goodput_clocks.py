"""Hosts whose clocks differ: the account is that of clocks that agree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.run.events.reading import event_of
from megastable.run.goodput.lifecycle import NEAR, Lifecycle, of_rank
from megastable.run.goodput.process_time import StepTimes
from megastable.run.goodput.time_account import TimeAccount
from megastable.run.goodput.watching import GoodputWatch, read_account
from tests.run.test_goodput import (
    BEGIN,
    END,
    GROWN,
    GROWN_STEPS,
    KILLED,
    SPANS,
    K,
    Row,
    at,
    run_of,
    shown,
    steps,
    steps_of,
)
from tests.run.test_records import record, write
from tests.tiers import examples

RANK = ("training", "finished", "stopped", "evaluated", "checkpoint")  # what rank 0 writes, in these runs
Events = Sequence[dict[str, Any]]


def skewed(events: Events, ahead: Mapping[int, float], told: Mapping[int, Any]) -> list[dict[str, Any]]:
    """As rank 0 of each attempt writes it whose clock is so far ahead; told: what the supervisor measured."""
    found, now = [], 0
    for event in events:
        if event["event"] == "launched":
            now = event["attempt"]
            event = {**event, "ahead": told[now]} if told.get(now) is not None else event
        if event["event"] in RANK or "policy" in event:
            event = {**event, "time": event["time"] + ahead.get(now, 0.0)}
        found.append(event)
    return found


def recorded(events: Events, rows: Sequence[Row], ahead: Mapping[int, float]) -> StepTimes:
    """Step records as they are read: in the order of the times in them."""
    rows = sorted(rows, key=lambda row: row[1])
    began = [(e["time"], e["attempt"]) for e in events if e["event"] == "launched"]
    numbers = np.array([max((n for moment, n in began if moment < row[1]), default=0) for row in rows])
    true, late = steps_of(rows), np.array([ahead.get(n, 0.0) for n in numbers])
    told = true._replace(time=true.time + late, attempt=numbers)
    return told.select_rows(np.argsort(told.time, kind="stable"))


def heard(events: Events, recorded_steps: StepTimes, now: float) -> TimeAccount:
    life = Lifecycle()
    life.steps = recorded_steps
    for event in events:
        life.hear_event(event_of(event))
    account = life.account_until(now)
    assert account is not None
    return account


def accounts(
    events: Events, rows: Sequence[Row], ahead: Mapping[int, float], error: float = 0.0, measured: bool = True
) -> tuple[TimeAccount, TimeAccount]:
    """Of clocks that agree, and of these."""
    found, now = [], max(max(e["time"] for e in events), max(row[1] for row in rows))
    for offsets in ({}, ahead):
        told = {n: seconds - error if measured else None for n, seconds in offsets.items()}
        written = recorded(events, rows, offsets)
        before = written.time.copy()
        found.append(heard(skewed(events, offsets, told), written, now))
        assert np.array_equal(written.time, before)
    return found[0], found[1]


LAST = [at(179, "finished", steps=30), at(180, "ended", attempt=2, clock=30, silent=1.0, code=0, what="")]
KILLED_STEPS = [*steps(1, 15, 106), *steps(11, 30, 158.5)]
REWOUND = [
    {**event, "policy": {}} if event["event"] == "incident" else event for event in SPANS["a rewind"][0]
]
RUNS: dict[str, tuple[Events, Sequence[Row]]] = {
    "plain": ([*BEGIN, *END], steps(1, 20, 105.5)),
    "killed": ([*BEGIN, *KILLED, *LAST], KILLED_STEPS),
    "hang": ([
        *BEGIN, at(113, "evaluated", step=5, loss=3.0, samples=8, seconds=1.5),
        at(116, "checkpoint", step=5, name="step-5", bytes=1, seconds=2, blocked=1),
        at(160, "hang", attempt=1, phase="step", waited=30.0, limit=30.0, step=12, silent=[], stacks=[]),
        at(161, "ended", attempt=1, clock=12, silent=31.0, hung=True, what="hang", host="b"),
        at(162, "launched", attempt=2), at(170, "training", step=10, cursor=0, world=2),
    ], [*steps(1, 5, 106), *steps(6, 12, 115), *steps(11, 25, 170)]),
    "grown": (GROWN, GROWN_STEPS), "rewound": (REWOUND, [*steps(1, 12, 106), *steps(9, 20, 121)]),
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_account_is_that_of_clocks_that_agree(run: str) -> None:
    """Within the error of the measurement, and for attempts on different hosts: their records overlap by the clock."""
    for offsets in (
        {1: 60.0, 2: 60.0, 3: 60.0},
        {1: -60.0, 2: -60.0},
        {1: 60.0},
        {2: -60.0},
        {1: 60.0, 2: -60.0},
    ):
        for error in (0.0, 0.05, -0.05):
            synchronous, found = accounts(*RUNS[run], offsets, error)
            wanted, got = synchronous.sum_seconds(), found.sum_seconds()
            assert found.wall == pytest.approx(synchronous.wall, abs=abs(error) + 1e-6)
            for kind in K:  # each attempt has two boundaries with the supervisor
                assert got[kind] == pytest.approx(wanted[kind], abs=6 * abs(error) + 1e-6), kind
            long = [[s.kind for s in a.list_spans() if s.seconds > 0.2] for a in (synchronous, found)]
            assert long[0] == long[1]


@pytest.mark.parametrize("ahead", [0.9 * NEAR, -0.9 * NEAR, float("nan"), float("inf"), 1e10, "x", None])
def test_account_does_not_correct_what_is_no_difference(ahead: Any) -> None:
    events, rows = RUNS["killed"]
    found = [
        heard(skewed(events, {}, {1: told, 2: told}), recorded(events, rows, {}), 180.0)
        for told in (ahead, None)
    ]
    assert shown(found[0]) == shown(found[1])


TICK = st.integers(0, 40 * 64).map(lambda n: n / 64)  # seconds without rounding
PIECE = st.tuples(
    TICK, TICK, st.integers(0, 8), st.integers(0, 5), st.sampled_from(["SIGKILL", "hang", "silence"])
)


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(st.lists(PIECE, min_size=1, max_size=4), st.dictionaries(
    st.integers(1, 4), st.integers(-100 * 64, 100 * 64).map(lambda n: n / 64)
))  # fmt: skip
def test_account_of_any_run_is_the_same_on_any_clocks(
    pieces: list[tuple[float, float, int, int, str]], ahead: dict[int, float]
) -> None:
    ahead = {n: seconds for n, seconds in ahead.items() if abs(seconds) >= NEAR}
    now, step, rows = 1000.0, 0, list[Row]()
    events = [at(now, "supervisor", what="started", pid=1, host="a")]
    for number, (start, idle, count, back, end) in enumerate(pieces, 1):
        events += [at(now + 1, "launched", attempt=number)]
        now, step = now + 2 + start, max(0, step - back)
        events.append(at(now, "training", step=step, cursor=0, world=2))
        for n in range(count):
            now += 1 + idle / 8 * (n == 2)
            step += 1
            rows.append((step, now, 1.0, n != 3))
            if n == 4:
                now += 2
                events.append(at(now, "evaluated", step=step, loss=3.0, seconds=1.0))
        now += 4 + idle
        if end == "hang":
            events.append(at(now, "hang", attempt=number, phase="step", waited=idle, step=step))
        if end != "silence" or number == len(pieces):
            told = {"silent": idle, "hung": end == "hang", "what": end}
            events.append(at(now + 1, "ended", attempt=number, clock=step, **told))
        now += 2
    synchronous, found = accounts(events, rows or [(1, now, 1.0, True)], ahead)
    assert shown(found) == shown(synchronous) and found.sum_seconds() == pytest.approx(
        synchronous.sum_seconds()
    )


def test_of_rank_tells_who_wrote_an_event() -> None:
    told = {"what": "opened", "number": 1, "summary": {}}
    ranks = [*(at(1, name) for name in RANK), at(1, "incident", **told, policy={}),
             at(1, "incident", what="closed", number=1, step=3, summary={})]  # fmt: skip
    supervisors = [at(1, "incident", **told), at(1, "incident", what="restarted", number=1, step=3, summary={}),
                   *BEGIN[:2], *KILLED[:1], *KILLED[2:5]]  # fmt: skip
    assert all(map(of_rank, map(event_of, ranks))) and not any(map(of_rank, map(event_of, supervisors)))


@pytest.mark.parametrize("ahead", [60.0, -60.0])
def test_read_account_of_a_dead_run_ends_with_its_last_sign_of_life(ahead: float, tmp_path: Path) -> None:
    """By the supervisor's clock, whoever looks: an event, a record, or the progress."""
    rows = steps(1, 20, 105.5)
    for until, progress, end in ((3, None, 125.5), (3, 130.0, 130.0), (6, 126.0, 128.5)):
        events = [*BEGIN, *END][:until]
        run = run_of(tmp_path / f"{until} {progress}", skewed(events, {1: ahead}, {1: ahead}), [])
        taken = [record(n, time=t + ahead, seconds=s, applied=a, attempt=1) for n, t, s, a in rows]
        write(run / "steps", taken, 5)
        if progress is not None:
            told = {"attempt": 1, "phase": "step", "step": 20, "time": progress + ahead}
            (run / "progress.json").write_text(json.dumps(told))
        found, problems = read_account(run)
        assert problems == [] and found.end == end and found.sum_seconds()[K.TRAINING] >= 20
        seen = GoodputWatch(run).look_again(alive=True, now=end + 4)
        assert seen is not None and seen.end == end + 4 and shown(seen)[:2] == shown(found)[:2]


@pytest.mark.parametrize("back", [0.0, 30.0, 3600.0])
def test_read_account_names_a_clock_that_was_set_back(back: float, tmp_path: Path) -> None:
    later = [{**event, "time": event["time"] - back} for event in END]
    rows = [(n, t - back * (n > 10), s, a) for n, t, s, a in steps(1, 20, 105.5)]
    _, problems = read_account(run_of(tmp_path, [*BEGIN, *later], rows))
    # From the event before it to the one after.
    wanted = ["goes back in time by 3,579 s"] if back > 60 else []
    assert [words in problem for words, problem in zip(wanted, problems, strict=True)] == [True] * len(wanted)
