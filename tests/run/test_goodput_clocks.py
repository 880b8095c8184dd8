"""Hosts whose clocks differ: the account is that of clocks that agree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.run.events.reading import event_of
from megastable.run.goodput.clocks import NEAR, of_rank
from megastable.run.goodput.lifecycle import Lifecycle
from megastable.run.goodput.step_times import StepFiles, StepTimes
from megastable.run.goodput.time_account import TimeAccount
from megastable.run.goodput.watching import GoodputWatch, read_account
from tests.run.test_goodput import BEGIN, END, KILLED, K, Row, at, run_of, shown, steps, steps_of
from tests.run.test_goodput_capacity import GROWN, GROWN_STEPS
from tests.run.test_records import record, write
from tests.tiers import examples

RANK = ("training", "finished", "stopped", "evaluated", "checkpoint")  # what rank 0 writes, in these runs
Events = Sequence[dict[str, Any]]


def attempts(events: Events, rows: Sequence[Row]) -> list[int]:
    """In which attempt each row was recorded, by clocks that agree."""
    began = [(e["time"], e["attempt"]) for e in events if e["event"] == "launched"]
    return [max((n for moment, n in began if moment < row[1]), default=0) for row in rows]


def skewed(
    events: Events, ahead: Mapping[int, float], told: Mapping[int, float | None]
) -> list[dict[str, Any]]:
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
    true, numbers = steps_of(rows), np.array(attempts(events, rows), np.int64)
    late = np.array([ahead.get(n, 0.0) for n in numbers])
    told = true._replace(time=true.time + late, attempt=numbers)
    return told.rows(np.argsort(told.time, kind="stable"))


def accounts(
    events: Events, rows: Sequence[Row], ahead: Mapping[int, float], error: float = 0.0, measured: bool = True
) -> tuple[TimeAccount, TimeAccount]:
    """Of clocks that agree, and of these."""
    found = []
    for offsets in ({}, ahead):
        told = {n: seconds - error if measured else None for n, seconds in offsets.items()}
        life, heard = Lifecycle(), skewed(events, offsets, told)
        life.steps = written = recorded(events, rows, offsets)
        before = written.time.copy()
        for event in heard:
            life.hear(event_of(event))
        assert np.array_equal(written.time, before)
        account = life.snapshot(max(max(e["time"] for e in events), max(row[1] for row in rows)))
        assert account is not None
        found.append(account)
    return found[0], found[1]


LAST = [at(179, "finished", steps=30), at(180, "ended", attempt=2, clock=30, silent=1.0, code=0, what="")]
RUNS: dict[str, tuple[Events, Sequence[Row]]] = {
    "plain": ([*BEGIN, *END], steps(1, 20, 105.5)),
    "killed": ([*BEGIN, *KILLED, *LAST], [*steps(1, 15, 106), *steps(11, 30, 158.5)]),
    "hang": ([
        *BEGIN, at(113, "evaluated", step=5, loss=3.0, samples=8, seconds=1.5),
        at(116, "checkpoint", step=5, name="step-5", bytes=1, seconds=2, blocked=1),
        at(160, "hang", attempt=1, phase="step", waited=30.0, limit=30.0, step=12, silent=[], stacks=[]),
        at(161, "ended", attempt=1, clock=12, silent=31.0, hung=True, what="hang", host="b"),
        at(162, "launched", attempt=2), at(170, "training", step=10, cursor=0, world=2),
    ], [*steps(1, 5, 106), *steps(6, 12, 115), *steps(11, 25, 170)]),
    "grown": (GROWN, GROWN_STEPS),
    "rewound": ([
        *BEGIN, at(118.5, "incident", what="opened", number=7, policy={}, summary={"number": 7, "verdict": "spike"}),
        at(120, "incident", what="rewound", number=7, to_step=8, policy={}, summary={"number": 7, "verdict": "spike"}),
    ], [*steps(1, 12, 106), *steps(9, 20, 121)]),
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("ahead", [60.0, -60.0], ids=["ahead", "behind"])
def test_a_clock_a_minute_away_changes_nothing(run: str, ahead: float) -> None:
    """Within the error of the measurement, and for attempts on different hosts: their records overlap by the clock."""
    for offsets in ({1: ahead, 2: ahead, 3: ahead}, {1: ahead}, {2: ahead}, {1: ahead, 2: -ahead, 3: ahead}):
        for error in (0.0, 0.05, -0.05):
            synchronous, found = accounts(*RUNS[run], offsets, error)
            wanted, got = synchronous.seconds(), found.seconds()
            assert found.wall == pytest.approx(synchronous.wall, abs=abs(error) + 1e-6)
            for kind in K:
                # Each attempt has two boundaries with the supervisor.
                assert got[kind] == pytest.approx(wanted[kind], abs=6 * abs(error) + 1e-6), kind
            long = [[s.kind for s in a.spans() if s.seconds > 0.2] for a in (synchronous, found)]
            assert long[0] == long[1]


def test_without_a_measurement_kinds_are_wrong() -> None:
    """What the correction is for: journals of older versions."""
    synchronous, found = accounts(*RUNS["killed"], {1: -20.0}, measured=False)
    assert abs(found.seconds()[K.TRAINING] - synchronous.seconds()[K.TRAINING]) > 3
    assert sum(found.seconds().values()) == pytest.approx(found.wall)


@pytest.mark.parametrize("ahead", [0.9 * NEAR, -0.9 * NEAR, float("nan"), float("inf"), 1e10, "x", None])
def test_what_is_no_difference_is_not_corrected(ahead: Any) -> None:
    events, rows = RUNS["killed"]
    life, plain = Lifecycle(), Lifecycle()
    for told, each in ((ahead, life), (None, plain)):
        each.steps = recorded(events, rows, {})
        for event in skewed(events, {}, {1: told, 2: told}):
            each.hear(event_of(event))
    assert shown(life.snapshot(180.0)) == shown(plain.snapshot(180.0))  # type: ignore[arg-type]


def test_whoever_trains_without_a_supervisor_has_a_clock_of_its_own() -> None:
    events = [
        *skewed([*BEGIN, *END], {1: 60.0}, {1: 60.0}),
        at(150, "training", step=20, cursor=0, world=2, seconds=5.0),
    ]
    first = recorded(BEGIN, steps(1, 20, 105.5), {1: 60.0})
    life, later = Lifecycle(), steps_of(steps(21, 30, 150))
    both = StepTimes(*(np.concatenate(columns) for columns in zip(later, first, strict=True)))
    life.steps = both
    for event in events:
        life.hear(event_of(event))
    found = life.snapshot(160.0)
    assert found is not None and shown(found)[-3:] == [
        ("not_running", 128.5, 145), ("start_up", 145, 150), ("training", 150, 160),
    ]  # fmt: skip


def test_a_launch_that_was_damaged_costs_no_records() -> None:
    events, rows = RUNS["killed"]
    whole, life = Lifecycle(), Lifecycle()
    whole.steps = life.steps = recorded(events, rows, {})
    for event in map(event_of, events):
        whole.hear(event)
        if not (event.event == "launched" and event["attempt"] == 2):
            life.hear(event)
    found, wanted = life.snapshot(180.0), whole.snapshot(180.0)
    assert found is not None and wanted is not None and found.seconds() == wanted.seconds()


TICK = st.integers(0, 40 * 64).map(lambda n: n / 64)  # seconds without rounding
PIECE = st.tuples(
    TICK, TICK, st.integers(0, 8), st.integers(0, 5), st.sampled_from(["SIGKILL", "hang", "silence"])
)


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(st.lists(PIECE, min_size=1, max_size=4), st.dictionaries(
    st.integers(1, 4), st.integers(-100 * 64, 100 * 64).map(lambda n: n / 64)
))  # fmt: skip
def test_any_run_on_any_clocks_is_accounted_for_alike(
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
            events.append(
                at(now + 1, "ended", attempt=number, clock=step, silent=idle, hung=end == "hang", what=end)
            )
        now += 2
    rows = rows or [(1, now, 1.0, True)]
    synchronous, found = accounts(events, rows, ahead)
    assert shown(found) == shown(synchronous) and found.seconds() == pytest.approx(synchronous.seconds())


def test_who_wrote_an_event() -> None:
    supervisor = {"what": "opened", "number": 1, "summary": {}}
    assert not of_rank(event_of(at(1, "incident", **supervisor)))
    assert not of_rank(event_of(at(1, "incident", what="restarted", number=1, step=3, summary={})))
    assert of_rank(event_of(at(1, "incident", **supervisor, policy={})))
    assert of_rank(
        event_of(at(1, "incident", what="closed", number=1, step=3, summary={}))
    )  # a damaged checkpoint
    for name in RANK:
        assert of_rank(event_of(at(1, name)))
    for event in (*BEGIN[:2], *KILLED[:1], *KILLED[2:5]):
        assert not of_rank(event_of(event))


# Files


@pytest.mark.parametrize("ahead", [60.0, -60.0])
def test_of_a_dead_run_the_end_is_its_last_sign_of_life(ahead: float, tmp_path: Path) -> None:
    """By the supervisor's clock, whoever looks: an event, a record, or the progress."""
    rows = steps(1, 20, 105.5)
    for until, progress, end in ((3, None, 125.5), (3, 130.0, 130.0), (6, 126.0, 128.5)):
        events = [*BEGIN, *END][:until]
        run = run_of(tmp_path / f"{until} {progress}", skewed(events, {1: ahead}, {1: ahead}), [])
        write(
            run / "steps",
            [record(n, time=t + ahead, seconds=s, applied=a, attempt=1) for n, t, s, a in rows],
            5,
        )
        if progress is not None:
            told = {"attempt": 1, "phase": "step", "step": 20, "time": progress + ahead}
            (run / "progress.json").write_text(json.dumps(told))
        found, problems = read_account(run)
        assert problems == [] and found.end == end and found.seconds()[K.TRAINING] >= 20
        seen = GoodputWatch(run).look(alive=True, now=end + 4)
        assert seen is not None and seen.end == end + 4 and shown(seen)[:2] == shown(found)[:2]
        if progress == 130.0:
            assert shown(seen)[2:] == [("unknown", 125.5, 130.0), ("unknown", 130.0, 134.0)]


@pytest.mark.parametrize("back", [0.0, 30.0, 3600.0])
def test_a_clock_that_was_set_back_is_named(back: float, tmp_path: Path) -> None:
    later = [{**event, "time": event["time"] - back} for event in END]
    rows = [(n, t - back * (n > 10), s, a) for n, t, s, a in steps(1, 20, 105.5)]
    _, problems = read_account(run_of(tmp_path, [*BEGIN, *later], rows))
    assert [p for p in problems if "goes back in time by" in p] == problems
    assert len(problems) == (back > 60)
    if problems:
        assert "by 3,579 s" in problems[0]  # from the event before it to the one after


def test_records_of_before_attempts_were_recorded(tmp_path: Path) -> None:
    write(tmp_path, [record(n, time=float(n), attempt=None if n > 3 else 7) for n in range(1, 6)])
    (file,) = tmp_path.iterdir()
    files = StepFiles(tmp_path)
    files.look()
    assert files.all().attempt.tolist() == [7, 7, 7, 0, 0]
    pq.write_table(pq.read_table(file).drop_columns(["attempt"]), file)
    files = StepFiles(tmp_path)
    files.look()
    assert files.damaged == {} and files.all().attempt.tolist() == [0] * 5
