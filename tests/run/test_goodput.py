"""Where the time of a run goes: every second once, in order, under its name; capacity that was missing; GPU-hours."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.run.events.reading import event_of
from megastable.run.goodput.lifecycle import Lifecycle
from megastable.run.goodput.process_time import NO_STEPS, StepTimes
from megastable.run.goodput.time_account import TimeAccount, TimeKind, TimeSpan, count_hours
from megastable.run.goodput.watching import GoodputWatch, read_account
from tests.run.test_records import record, write
from tests.tiers import examples

K = TimeKind
Row = tuple[int, float, float, bool]


def steps_of(rows: Sequence[Row]) -> StepTimes:
    if not rows:
        return NO_STEPS
    step, time, seconds, applied = map(np.array, zip(*sorted(rows, key=lambda row: row[1]), strict=True))
    return StepTimes(step, time, seconds.astype(float), applied, np.zeros(len(rows), np.int64))


def account(
    events: Sequence[dict[str, Any]], rows: Sequence[Row] = (), now: float | None = None, **progress: Any
) -> TimeAccount:
    life = Lifecycle()
    life.steps = steps_of(rows)
    for event in events:
        life.hear_event(event_of(event))
    found = life.account_until(max(e["time"] for e in events) if now is None else now, progress)
    assert found is not None
    return found


def shown(found: TimeAccount) -> list[tuple[str, float, float]]:
    return [(s.kind.value, round(s.begin, 3), round(s.end, 3)) for s in found.list_spans()]


def at(time: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": event, **fields}


def steps(first: int, last: int, begin: float, seconds: float = 1.0) -> list[Row]:
    """Steps that take a second each, without anything in between."""
    return [(n, begin + seconds * (n - first + 1), seconds, True) for n in range(first, last + 1)]


BEGIN = [
    at(100, "supervisor", what="started", pid=1, host="a"),
    at(101, "launched", attempt=1),
    at(105, "training", step=0, cursor=0, world=2, seconds=3.5),
]
END = [
    at(126, "finished", steps=20),
    at(128, "ended", attempt=1, clock=20, silent=2.0, code=0, what=""),
    at(128.5, "supervisor", what="ended", code=0, reason="complete"),
]
KILLED = [
    at(130, "ended", attempt=1, clock=20, silent=3.0, signal=9, hung=False, what="SIGKILL", host="b"),
    at(130.01, "incident", what="opened", number=1, summary={"number": 1, "verdict": "crash", "cause": "process"}),
    at(130.5, "restart", attempt=1, reason="SIGKILL", delay=4.0),
    at(140.5, "hosts_awaited", attempt=1, hosts=["c"], reason="waiting for c"),
    at(150.5, "hosts_awaited", attempt=1, hosts=[], reason="all 2 hosts are there"),
    at(151.5, "launched", attempt=2),
    at(158.5, "training", step=10, cursor=0, world=2),
]  # fmt: skip
HUNG = at(160, "hang", attempt=1, phase="step", waited=30.0, limit=30.0, step=20, silent=[], stacks=[])
SPIKE = {"number": 7, "verdict": "spike", "cause": "data"}
STOPPED = [
    *BEGIN, at(120, "stopped", step=10, cursor=80),
    at(121, "ended", attempt=1, clock=10, silent=1.0, code=75, what=""), at(121.5, "supervisor", what="ended", code=75),
    at(1002, "supervisor", what="started", pid=2, host="a", seconds=2.0), at(1003, "launched", attempt=2),
    at(1010, "training", step=10, cursor=80, world=2),
]  # fmt: skip
ALONE = [
    at(10, "training", step=0, cursor=0, world=2, seconds=5.0),
    at(100, "training", step=5, cursor=0, world=2, seconds=6.0),  # the one of before was killed
    at(110, "finished", steps=12), at(200, "training", step=12, cursor=0, world=2),
]  # fmt: skip


def evaluated(time: float, step: int, seconds: float) -> dict[str, Any]:
    return at(time, "evaluated", step=step, loss=3.0, samples=8, seconds=seconds)


def checkpoint(time: float, step: int) -> dict[str, Any]:
    return at(time, "checkpoint", step=step, name=f"step-{step}", bytes=1, seconds=2, blocked=1)


def spaced(gaps: list[float], seconds: float = 1.0, begin: float = 106.0) -> list[Row]:
    """Steps with so much time between them."""
    rows, now = [], begin
    for n, gap in enumerate([0.0, *gaps], 1):
        now += gap + seconds
        rows.append((n, now, seconds, True))
    return rows


# Events, steps, now, and the spans from one on.
SPANS: dict[str, tuple[list[dict[str, Any]], list[Row], float, int, list[tuple[str, float, float]]]] = {
    "no trouble": ([*BEGIN, *END], steps(1, 20, 105.5), 128.5, 0, [
        ("start_up", 100, 105.5), ("training", 105.5, 125.5), ("between_steps", 125.5, 126), ("ending", 126, 128.5),
    ]),
    "a checkpoint is written in the background, and a gap is explained by nothing": (
        [*BEGIN, evaluated(113, 5, 1.5), checkpoint(116, 5)],
        [*steps(1, 5, 106), *steps(6, 10, 115), *steps(11, 15, 120.2), *steps(16, 20, 130)], 135, 0, [
            ("start_up", 100, 106), ("training", 106, 111), ("checkpointing", 111, 111.5), ("evaluation", 111.5, 113),
            ("checkpointing", 113, 115), ("training", 115, 125.2), ("stalled", 125.2, 130), ("training", 130, 135),
        ]),
    "a checkpoint was waited for": (
        [*BEGIN, evaluated(111.1, 5, 0.1), checkpoint(112.9, 5)], [*steps(1, 5, 106), *steps(6, 10, 113)], 118, 1,
        [("training", 106, 111), ("evaluation", 111, 111.1), ("checkpointing", 111.1, 113), ("training", 113, 118)]),
    "a rank is killed, and steps 16 to 20 were not recorded": (
        [*BEGIN, *KILLED], [*steps(1, 15, 106), *steps(11, 30, 158.5)], 178.5, 1, [
            ("training", 106, 127), ("ending", 127, 130.5), ("pause", 130.5, 134.5),
            ("waiting_for_hosts", 134.5, 150.5), ("start_up", 150.5, 158.5), ("redone", 158.5, 168.5),
            ("training", 168.5, 178.5),
        ]),
    "killed again, with steps 15 to 22 not recorded": (
        [*BEGIN, *KILLED, at(166.5, "ended", attempt=2, clock=22, silent=0.0, signal=9, hung=False, what="SIGKILL")],
        [*steps(1, 20, 106), *steps(11, 14, 158.5, 0.5)], 166.5, -2,
        [("redone", 158.5, 165), ("training", 165, 166.5)]),
    "a hang before any record": (
        [*BEGIN, {**HUNG, "step": None}, at(161, "ended", attempt=1, clock=20, silent=31.0, hung=True, what="hang"),
         at(162, "launched", attempt=2), at(170, "training", step=10, cursor=0, world=2)],
        steps(11, 25, 170), 185, -2, [("redone", 170, 180), ("training", 180, 185)]),
    "a pause is cut short": (
        [*BEGIN, *KILLED[:3], at(132, "supervisor", what="ended", code=75, reason="stopped between two attempts")],
        steps(1, 20, 106), 140, -2, [("pause", 130.5, 132), ("not_running", 132, 140)]),
    "a supervisor died while ranks start": (
        [*BEGIN[:2], at(103, "supervisor", what="took over", pid=3, host="a"), BEGIN[2]], steps(1, 5, 106), 111, 0,
        [("start_up", 100, 106), ("training", 106, 111)]),
    "a rewind": (
        [*BEGIN, at(118.5, "incident", what="opened", number=7, summary=SPIKE),
         at(120, "incident", what="rewound", number=7, to_step=8, summary=SPIKE)],
        [*steps(1, 4, 106), (5, 111, 1.0, False), *steps(6, 12, 111), *steps(9, 20, 121)], 133, 1, [
            ("training", 106, 110), ("refused", 110, 111), ("training", 111, 118), ("recovery", 118, 121),
            ("redone", 121, 125), ("training", 125, 133),
        ]),
    "stopped and started again": (STOPPED, [*steps(1, 10, 106), *steps(11, 12, 1010)], 1010, 2, [
        ("checkpointing", 116, 120), ("ending", 120, 121.5), ("not_running", 121.5, 1000), ("start_up", 1000, 1010),
    ]),
    "without a supervisor": (ALONE, [*steps(1, 8, 10), *steps(6, 12, 101)], 203, 0, [
        ("start_up", 5, 10), ("training", 10, 18), ("not_running", 18, 94), ("start_up", 94, 101),
        ("redone", 101, 104), ("training", 104, 108), ("unknown", 108, 110), ("not_running", 110, 200),
        ("start_up", 200, 203),
    ]),
    "a machine went off, and nobody ran": (
        [*BEGIN, at(500, "supervisor", what="took over", pid=3, host="a"),
         at(501, "ended", attempt=1, clock=22, silent=373.0, what="vanished", host="a")], steps(1, 20, 106), 501, -3,
        [("training", 106, 128), ("not_running", 128, 500), ("ending", 500, 501)]),
    "a step takes far longer than its neighbours": (
        BEGIN, [(n, 106.0 + n + (20 if n > 7 else 0) + 9, 21.0 if n == 8 else 10.0 if n == 1 else 1.0, True)
                for n in range(1, 16)], 150, 0,
        [("start_up", 100, 115), ("training", 115, 122), ("stalled", 122, 142), ("training", 142, 150)]),
    "records are missing": (BEGIN, [*steps(1, 5, 106), *steps(16, 20, 111.3)], 150, 1, [
        ("training", 106, 111), ("unknown", 111, 111.3), ("training", 111.3, 116.3), ("unknown", 116.3, 150),
    ]),
    "no records": ([*BEGIN, evaluated(115, 9, 1.0), *END], [], 128.5, 0, [
        ("start_up", 100, 105), ("unknown", 105, 114), ("evaluation", 114, 115), ("unknown", 115, 126),
        ("ending", 126, 128.5),
    ]),
    "lost before its first records": ([*BEGIN, KILLED[0]], [], 130, 1, [("training", 105, 127), ("ending", 127, 130)]),
    "no step at all": ([*BEGIN, {**KILLED[0], "clock": 0}], [], 130, 0, [("start_up", 100, 127), ("ending", 127, 130)]),
    "only the excess of a gap is stalled": (BEGIN, spaced([0.25] * 6 + [20.25] + [0.25] * 6), 143.25, 1, [
        ("training", 106, 114.5), ("stalled", 114.5, 134.5), ("between_steps", 134.5, 134.75),
        ("training", 134.75, 143.25),
    ]),
    "what evaluations do not explain": (
        [*BEGIN, evaluated(119, 10, 3.0), evaluated(132, 20, 2.0)],
        [*steps(1, 10, 106), *steps(11, 20, 119.1), *steps(21, 30, 150)], 160, 1, [
            ("training", 106, 116), ("evaluation", 116, 119), ("between_steps", 119, 119.1),
            ("training", 119.1, 129.1), ("stalled", 129.1, 130), ("evaluation", 130, 132), ("stalled", 132, 150),
            ("training", 150, 160),
        ]),
}  # fmt: skip


@pytest.mark.parametrize("case", SPANS)
def test_account_names_every_second(case: str) -> None:
    events, rows, now, first, wanted = SPANS[case]
    found = account(events, rows, now)
    assert shown(found)[first:][: len(wanted)] == wanted
    assert sum(found.sum_seconds().values()) == pytest.approx(found.wall)


def test_account_charges_lost_time_to_cause_incident_and_host() -> None:
    found = account([*BEGIN, *KILLED], [*steps(1, 15, 106), *steps(11, 30, 158.5)], now=178.5)
    lost = {kind: (cause, number, host) for kind, cause, number, host in found.sum_losses()}
    assert [lost[kind] for kind in (K.ENDING, K.PAUSE, K.REDONE)] == [("SIGKILL", 1, "b")] * 3
    assert lost[K.HOSTS] == ("SIGKILL", 1, "c") and found.compute_goodput() == pytest.approx(31 / found.wall)
    assert {span.attempt for span in found.list_spans() if span.kind is K.REDONE} == {2}
    hung = [*BEGIN, HUNG, at(161, "ended", attempt=1, clock=20, silent=31.0, hung=True, what="hang of 1", host="b"),
            at(161.1, "incident", what="opened", number=4, summary={"number": 4, "verdict": "hang"})]  # fmt: skip
    assert account(hung, steps(1, 20, 106)).sum_losses()[(K.HANG, "hang", 4, "b")] == (pytest.approx(30), 1)
    events, rows, now, *_ = SPANS["a rewind"]
    lost_by = account(events, rows, now).sum_losses()
    assert [lost_by[(kind, "spike, data", 7, "")][0] for kind in (K.RECOVERY, K.REDONE)] == [3, 4]
    stopped = account(STOPPED, [*steps(1, 10, 106), *steps(11, 12, 1010)])
    assert (K.NOT_RUNNING, "stopped", None, "") in stopped.sum_losses() and stopped.sum_seconds()[
        K.REDONE
    ] == 0


def test_account_knows_unrecorded_steps_by_the_progress() -> None:
    found = account(BEGIN, steps(1, 5, 106), now=116, phase="step", step=9, time=114.0)
    assert found.sum_seconds()[K.TRAINING] == pytest.approx(8) and shown(found)[-1] == ("unknown", 114, 116)
    found = account(BEGIN, steps(1, 5, 106), now=130, phase="evaluate", step=5, time=111.0)
    assert shown(found)[-1] == ("evaluation", 111, 130)


def test_account_leaves_notes_and_a_dead_supervisor_out() -> None:
    rows = steps(1, 20, 105.5)
    later = [at(115, "supervisor", what="took over", pid=3, host="a")]
    note = at(5000.0, "note", step=10, who="ann", text="done")
    assert account([*BEGIN, *later, *END], rows).sum_seconds() == account([*BEGIN, *END], rows).sum_seconds()
    assert shown(account([*BEGIN, *END, note], rows, now=128.5)) == shown(account([*BEGIN, *END], rows))


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.125, 0.375, 0.75, 1.5, 4.0, 60.0]), max_size=40),
    st.sampled_from([0.125, 1.0, 8.0]), st.floats(0, 100),
)  # fmt: skip
def test_account_of_gaps_is_that_of_a_slow_reference(gaps: list[float], seconds: float, rest: float) -> None:
    rows = spaced(gaps, seconds)
    found = account(BEGIN, rows, now=rows[-1][1] + rest).sum_seconds()
    usual = median(gaps) if len(rows) >= 5 else 0.0
    late = [g for g in gaps if g > max(0.5, seconds, 5 * usual, usual + 1)]
    unknown = rest if rest > max(0.5, seconds) else 0.0
    assert found[K.STALLED] == pytest.approx(sum(late) - len(late) * usual)
    assert found[K.TRAINING] == pytest.approx(len(rows) * seconds)
    assert found[K.UNKNOWN] == pytest.approx(unknown)
    assert found[K.BETWEEN] == pytest.approx(sum(gaps) - found[K.STALLED] + rest - unknown)


# Whatever a journal says


NAMES = (
    "supervisor launched training ended hang restart hosts_awaited stopped finished unstable handover evaluated "
    "checkpoint checkpoint_failed incident discard_examined samples_examined resumed nonsense"
).split()
MOMENT = st.floats(0, 1000)
NUMBER = st.one_of(st.none(), st.integers(0, 40))
EVENT = st.fixed_dictionaries(
    {"event": st.sampled_from(NAMES), "time": MOMENT},
    optional={
        "what": st.sampled_from(["started", "took over", "ended", "opened", "rewound", "closed", "", "SIGKILL"]),
        "step": NUMBER, "attempt": NUMBER, "clock": NUMBER, "number": NUMBER, "code": NUMBER,
        "seconds": st.one_of(st.none(), st.floats(-10, 100), st.just("nan")), "silent": st.floats(-5, 500),
        "waited": st.floats(-5, 500), "delay": st.floats(-5, 500), "hung": st.booleans(),
        "hosts": st.lists(st.sampled_from("ab"), max_size=2), "host": st.sampled_from("ab"),
    },
)  # fmt: skip
ROW = st.tuples(st.integers(1, 40), MOMENT, st.floats(0, 200), st.booleans())
PROGRESS = {"phase": st.sampled_from(["step", "evaluate"]), "step": NUMBER, "time": MOMENT}


@pytest.mark.slow
@settings(max_examples=examples(400), deadline=None)
@given(
    st.lists(EVENT, min_size=1, max_size=25), st.lists(ROW, max_size=25), st.booleans(), MOMENT,
    st.fixed_dictionaries({}, optional=PROGRESS),
)  # fmt: skip
def test_account_has_every_second_once(
    events: list[dict[str, Any]], rows: list[Row], in_order: bool, now: float, progress: dict[str, Any]
) -> None:
    if in_order:
        events.sort(key=lambda e: float(e["time"]))
    found = account(events, rows, now, **progress)
    assert np.all(np.diff(found.at) >= 0) and len(found.kind) == len(found.charge) == len(found.at) - 1
    assert sum(found.sum_seconds().values()) == pytest.approx(found.wall, abs=1e-6)
    spans = list(found.list_spans())
    assert [s.begin for s in spans[1:]] == [s.end for s in spans[:-1]]
    assert all(s.end > s.begin and s.seconds > -1e-9 for s in spans)
    if spans:
        assert (spans[0].begin, spans[-1].end) == (found.begin, found.end)
    for kind, seconds in found.sum_seconds().items():
        told = sum(s.seconds if s.kind is kind else 0 for s in spans)
        told += sum(s.between for s in spans) if kind is K.BETWEEN else 0
        assert told == pytest.approx(seconds, abs=1e-6)
    first, last = float(events[0]["time"]), max(float(e["time"]) for e in events)
    assert found.begin <= first and found.end >= max(first, min(now, last))


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(EVENT, min_size=1, max_size=25), st.lists(ROW, max_size=25), st.data())
def test_snapshot_changes_nothing(events: list[dict[str, Any]], rows: list[Row], data: st.DataObject) -> None:
    events.sort(key=lambda e: float(e["time"]))
    life = Lifecycle()
    life.steps = steps_of(rows)
    for event in events:
        life.hear_event(event_of(event))
        if data.draw(st.booleans()):
            life.account_until(data.draw(MOMENT))
    looked, never = life.account_until(1000.0), account(events, rows, 1000.0)
    assert looked is not None and shown(looked) == shown(never)


# Files


def run_of(folder: Path, events: Sequence[dict[str, Any]], rows: Sequence[Row]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "steps").mkdir(exist_ok=True)
    (folder / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    taken = [record(n, time=t, seconds=s, applied=a) for n, t, s, a in rows]
    write(folder / "steps", taken, 5)
    return folder


def test_read_account_of_a_directory_names_what_is_damaged(tmp_path: Path) -> None:
    run = run_of(tmp_path, [*BEGIN, *END], steps(1, 20, 105.5))
    found, problems = read_account(run)
    assert shown(found) == shown(account([*BEGIN, *END], steps(1, 20, 105.5))) and problems == []
    # Another clock: what is dead ends with its last sign of life, what lives now.
    assert read_account(run, alive=True)[0].end > found.end == 128.5
    second = sorted((run / "steps").iterdir())[1]
    second.write_bytes(second.read_bytes()[:100])
    with (run / "journal.jsonl").open("a") as journal:
        journal.write("no event\n" + '{"time": 129, "event": "supervisor", "what": "sta')
    found, problems = read_account(run)
    assert ("unknown", 110.5, 115.5) in shown(found) and found.wall == 28.5
    assert "1 damaged line" in problems[0] and second.name in problems[1] and "is unknown" in problems[1]


@pytest.mark.parametrize("what", ["none", "empty", "torn"])
def test_read_account_refuses_what_has_no_journal(what: str, tmp_path: Path) -> None:
    if what != "none":
        run_of(tmp_path / "run", [], [])
        (tmp_path / "run" / "journal.jsonl").write_text("" if what == "empty" else '{"time": 12')
    with pytest.raises(DataError, match="no such directory" if what == "none" else "journal.jsonl: no event"):
        read_account(tmp_path / "run")


def test_watch_sees_what_a_first_look_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, rows = [*BEGIN, *KILLED], [*steps(1, 15, 106), *steps(11, 30, 158.5)]
    watch = GoodputWatch(tmp_path)
    assert watch.look_again(alive=True) is None
    for upto in range(1, len(events) + 1):
        moment = events[upto]["time"] if upto < len(events) else 1e9
        run_of(tmp_path, events[:upto], [row for row in rows if row[1] < moment])
        watch.look_again(alive=False)
    seen = watch.look_again(alive=False)
    assert seen is not None and shown(seen) == shown(read_account(tmp_path)[0])
    # What was looked at a moment ago is not looked at again.
    before = watch.account_lately(alive=False)
    run_of(tmp_path, [*events, at(300, "finished", steps=30)], rows)
    assert watch.account_lately(alive=False) is before
    moment = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    after = watch.account_lately(alive=False)
    assert before is not None and after is not None and after.end == 300 > before.end


# Runs on fewer hosts than wanted


GROWN = [
    at(100, "supervisor", what="started", pid=1, host="a"), at(101, "launched", attempt=1, hosts=["a", "b"]),
    at(105, "training", step=0, cursor=0, world=8),
    at(125, "ended", attempt=1, clock=20, silent=0.0, what="host gone", host="b"),
    at(125.1, "incident", what="opened", number=3, summary={"number": 3, "verdict": "crash", "cause": "hardware"}),
    at(125.2, "restart", attempt=1, reason="host gone", delay=0.0),
    at(130, "hosts_awaited", attempt=1, hosts=["b"], reason="waiting for b (gone)"),
    at(245, "hosts_awaited", attempt=1, hosts=[], reason="going on with 1 of 2 hosts: a"),
    at(246, "launched", attempt=2, hosts=["a"]), at(255, "training", step=20, cursor=0, world=4),
    at(297, "stopped", step=60, cursor=80), at(298, "ended", attempt=2, clock=60, silent=1.0, code=75, what=""),
    at(299, "restart", attempt=2, reason="2 hosts can take part", delay=0.0),
    at(300, "launched", attempt=3, hosts=["a", "b"]), at(310, "training", step=60, cursor=80, world=8),
]  # fmt: skip
GROWN_STEPS = [*steps(1, 20, 105), *steps(21, 60, 255), *steps(61, 100, 310)]


def test_account_charges_growing_again_to_the_failure_that_took_the_hosts() -> None:
    lost = account(GROWN, GROWN_STEPS, now=350).sum_losses()
    assert "stopped" not in {cause for _, cause, *_ in lost} and (K.ENDING, "growing", 3, "b") in lost
    assert [lost[(kind, "growing", 3, "b")][0] for kind in (K.START_UP, K.CHECKPOINTING)] == [11, 2]
    told = "c is 4 times as slow as the others, and is replaced"
    events = [*GROWN[:-3], at(299, "restart", attempt=2, reason=told, delay=0.0), *GROWN[-2:]]
    assert (K.START_UP, told, None, "") in account(events, GROWN_STEPS, now=350).sum_losses()


def test_account_measures_the_capacity_that_was_missing() -> None:
    found = account(GROWN, GROWN_STEPS, now=350)
    assert found.sum_seconds()[K.TRAINING] == 100 and sum(found.sum_seconds().values()) == found.wall == 250
    assert found.measure_missing() == found.list_facts()["smaller"] == pytest.approx(40 * 0.5 / 250)
    assert {s.missing for s in found.list_spans() if s.kind is K.TRAINING} == {0.0, 0.5}
    unequal = [dict(e) for e in GROWN]
    unequal[2]["world"] = unequal[-1]["world"] = 5  # host a has 4 ranks, b one
    assert account(unequal, GROWN_STEPS, now=350).measure_missing() == pytest.approx(40 * 0.2 / 250)
    for more, wanted in (({}, 0.0), ({"wanted": 4}, 0.5 * 20 / 25)):  # hosts that were never there
        events = [BEGIN[0], at(101, "launched", attempt=1, hosts=["a", "b"], **more), BEGIN[2]]
        assert account(events, steps(1, 20, 105), now=125).measure_missing() == pytest.approx(wanted)
    # Who starts a smaller run misses nothing.
    again = [*GROWN[:5], at(243, "supervisor", what="started", pid=2, host="a"), *GROWN[8:]]
    assert account(again, GROWN_STEPS[:60], now=299).measure_missing() == 0
    alone = [at(10, "training", step=0, world=8), at(50, "training", step=20, world=4)]
    assert account(alone, [*steps(1, 20, 10), *steps(21, 40, 50)], now=70).measure_missing() == 0


def test_gpu_hours_count_the_ranks_of_each_attempt_while_processes_existed() -> None:
    def span(begin: float, end: float, kind: TimeKind, between: float = 0.0) -> TimeSpan:
        return TimeSpan(begin * 3600, end * 3600, kind, "", None, "", 1, between=between * 3600)

    spans = [span(0, 1, K.START_UP), span(1, 3, K.TRAINING, 0.5), span(3, 4, K.ENDING), span(4, 9, K.NOT_RUNNING),
             span(9, 10, K.START_UP), span(10, 12, K.TRAINING)]  # fmt: skip
    # Eight ranks for four hours, nobody for five, four ranks for three.
    found = count_hours(spans, [(3600, 8), (36_000, 4)])
    assert found == (pytest.approx(8 * 4 + 4 * 3), pytest.approx(8 * 1.5 + 4 * 2))
    assert count_hours(spans[:2], [(0.0, 2), (3600, None)]) == (6, 3)
    assert count_hours(spans, [(0.0, None)]) is None and count_hours(spans, []) is None
