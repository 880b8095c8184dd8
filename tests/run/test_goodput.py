"""Where the time of a run goes: every second once, in order, under its name."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.run.events.reading import event_of
from megastable.run.goodput.lifecycle import Lifecycle
from megastable.run.goodput.step_times import NO_STEPS, StepTimes
from megastable.run.goodput.time_account import TimeAccount, TimeKind
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
        life.hear(event_of(event))
    found = life.snapshot(max(e["time"] for e in events) if now is None else now, progress)
    assert found is not None
    return found


def shown(found: TimeAccount) -> list[tuple[str, float, float]]:
    return [(s.kind.value, round(s.begin, 3), round(s.end, 3)) for s in found.spans()]


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


def test_a_run_without_trouble() -> None:
    found = account([*BEGIN, *END], steps(1, 20, 105.5))
    assert shown(found) == [
        ("start_up", 100, 105.5), ("training", 105.5, 125.5), ("between_steps", 125.5, 126),
        ("ending", 126, 128.5),
    ]  # fmt: skip
    assert found.wall == 28.5 and found.goodput() == pytest.approx(20 / 28.5)


def test_what_lies_between_steps_is_told_by_its_events() -> None:
    rows = [*steps(1, 5, 106), *steps(6, 10, 115), *steps(11, 15, 120.2), *steps(16, 20, 130)]
    more = [
        at(113, "evaluated", step=5, loss=3.0, samples=8, seconds=1.5),
        at(
            116, "checkpoint", step=5, name="step-5", bytes=1, seconds=2, blocked=1
        ),  # written in the background
    ]
    found = account([*BEGIN, *more], rows, now=135)
    assert shown(found) == [
        ("start_up", 100, 106), ("training", 106, 111), ("checkpointing", 111, 111.5), ("evaluation", 111.5, 113),
        ("checkpointing", 113, 115), ("training", 115, 125.2), ("stalled", 125.2, 130), ("training", 130, 135),
    ]  # fmt: skip
    # 0.2 s between steps 10 and 11 need no explanation, and are no training.
    assert found.seconds()[K.BETWEEN] == pytest.approx(0.2)
    assert found.seconds()[K.TRAINING] == pytest.approx(20)


def test_a_checkpoint_that_was_waited_for_and_an_evaluation_right_after_a_step() -> None:
    more = [
        at(111.1, "evaluated", step=5, loss=3.0, samples=8, seconds=0.1),
        at(112.9, "checkpoint", step=5, name="step-5", bytes=1, seconds=1.7, blocked=1.7),
    ]
    found = account([*BEGIN, *more], [*steps(1, 5, 106), *steps(6, 10, 113)], now=118)
    assert shown(found)[1:5] == [
        ("training", 106, 111), ("evaluation", 111, 111.1), ("checkpointing", 111.1, 113), ("training", 113, 118),
    ]  # fmt: skip


def test_an_evaluation_of_before_its_seconds_were_journaled() -> None:
    more = [at(113, "evaluated", step=5, loss=3.0, samples=8)]
    found = account([*BEGIN, *more], [*steps(1, 5, 106), *steps(6, 10, 113.5)], now=118)
    assert ("evaluation", 111, 113) in shown(found)


KILLED = [
    at(130, "ended", attempt=1, clock=20, silent=3.0, signal=9, hung=False, what="SIGKILL", host="b"),
    at(130.01, "incident", what="opened", number=1, summary={"number": 1, "verdict": "crash", "cause": "process"}),
    at(130.5, "restart", attempt=1, reason="SIGKILL", delay=4.0),
    at(140.5, "hosts_awaited", attempt=1, hosts=["c"], reason="waiting for c"),
    at(150.5, "hosts_awaited", attempt=1, hosts=[], reason="all 2 hosts are there"),
    at(151.5, "launched", attempt=2),
    at(158.5, "training", step=10, cursor=0, world=2),
]  # fmt: skip


def test_a_killed_rank_costs_the_time_until_its_steps_are_done_again() -> None:
    rows = [*steps(1, 15, 106), *steps(11, 30, 158.5)]  # the records of steps 16 to 20 were lost
    found = account([*BEGIN, *KILLED], rows, now=178.5)
    assert shown(found)[1:] == [
        ("training", 106, 127), ("ending", 127, 130.5), ("pause", 130.5, 134.5),
        ("waiting_for_hosts", 134.5, 150.5), ("start_up", 150.5, 158.5), ("redone", 158.5, 168.5),
        ("training", 168.5, 178.5),
    ]  # fmt: skip
    lost = {kind: (cause, number, host) for kind, cause, number, host in found.lost()}
    for kind in (K.ENDING, K.PAUSE, K.REDONE):
        assert lost[kind] == ("SIGKILL", 1, "b")
    assert lost[K.HOSTS] == ("SIGKILL", 1, "c")
    assert found.seconds()[K.REDONE] == 10 and found.seconds()[K.HOSTS] == 16
    assert {span.attempt for span in found.spans() if span.kind is K.REDONE} == {2}


def test_a_rank_that_is_killed_again_while_steps_are_done_again() -> None:
    again = at(
        166.5, "ended", attempt=2, clock=22, silent=0.0, signal=9, hung=False, what="SIGKILL", host="b"
    )
    rows = [
        *steps(1, 20, 106),
        *steps(11, 14, 158.5, 0.5),
    ]  # of steps 15 to 22, which took 6 s, there is no record
    found = account([*BEGIN, *KILLED, again], rows)
    assert shown(found)[-2:] == [("redone", 158.5, 165), ("training", 165, 166.5)]


def test_what_is_done_again_is_known_without_records() -> None:
    """Of a process that hung before anything was recorded, its end says how far it had come."""
    events = [
        *BEGIN,
        at(160, "hang", attempt=1, phase="step", waited=30.0, limit=30.0, step=None, silent=[], stacks=[]),
        at(161, "ended", attempt=1, clock=20, silent=31.0, hung=True, what="hang", host="b"),
        at(162, "launched", attempt=2),
        at(170, "training", step=10, cursor=0, world=2),
    ]
    found = account(events, steps(11, 25, 170), now=185)
    assert shown(found)[-2:] == [("redone", 170, 180), ("training", 180, 185)]


def test_a_pause_that_is_cut_short() -> None:
    ends = at(132, "supervisor", what="ended", code=75, reason="stopped between two attempts")
    found = account([*BEGIN, *KILLED[:3], ends], steps(1, 20, 106), now=140)
    assert shown(found)[-2:] == [("pause", 130.5, 132), ("not_running", 132, 140)]


def test_an_incident_of_another_supervisor_is_no_work_of_the_training_nor_blamed_for_what_came_before() -> (
    None
):
    summary = {"number": 2, "verdict": "crash", "cause": "process"}
    took_over = [
        at(159, "incident", what="restarted", number=1, summary={"number": 1, "verdict": "crash"}),
        at(160.6, "supervisor", what="took over", pid=3, host="a"),
        at(160.6, "incident", what="opened", number=2, summary=summary),
    ]
    rows = [*steps(1, 20, 106), *steps(11, 12, 158.5), *steps(13, 30, 160.7)]
    found = account([*BEGIN, *KILLED, *took_over], rows, now=178.7)
    assert found.seconds()[K.RECOVERY] == 0
    assert (K.REDONE, "SIGKILL", 1, "b") in found.lost()


def test_a_supervisor_that_died_while_ranks_start() -> None:
    events = [*BEGIN[:2], at(103, "supervisor", what="took over", pid=3, host="a"), BEGIN[2]]
    assert shown(account(events, steps(1, 5, 106), now=111)) == [
        ("start_up", 100, 106),
        ("training", 106, 111),
    ]


def test_a_hang_is_charged_to_its_host_from_the_last_progress_on() -> None:
    events = [
        *BEGIN,
        at(160, "hang", attempt=1, phase="step", waited=30.0, limit=30.0, step=20, silent=[], stacks=[]),
        at(161, "ended", attempt=1, clock=20, silent=31.0, hung=True, what="hang of rank 1", host="b"),
        at(161.1, "incident", what="opened", number=4, summary={"number": 4, "verdict": "hang"}),
    ]
    found = account(events, steps(1, 20, 106))
    assert shown(found)[1:4] == [("training", 106, 126), ("unknown", 126, 130), ("hang", 130, 160)]
    lost = found.lost()
    assert lost[(K.HANG, "hang", 4, "b")] == (pytest.approx(30), 1)


def test_a_rewind_is_recovery_and_what_follows_is_done_again_because_of_it() -> None:
    spike = {"number": 7, "verdict": "spike", "cause": "data"}
    rows = [*steps(1, 12, 106), *steps(9, 20, 121)]
    rows[4] = (5, 111, 1.0, False)
    events = [
        *BEGIN,
        at(118.5, "incident", what="opened", number=7, summary=spike),
        at(120, "incident", what="rewound", number=7, to_step=8, summary=spike),
    ]
    found = account(events, rows, now=133)
    assert shown(found)[1:] == [
        ("training", 106, 110), ("refused", 110, 111), ("training", 111, 118), ("recovery", 118, 121),
        ("redone", 121, 125), ("training", 125, 133),
    ]  # fmt: skip
    lost = found.lost()
    assert lost[(K.RECOVERY, "spike, data", 7, "")][0] == 3
    assert lost[(K.REDONE, "spike, data", 7, "")][0] == 4


def test_a_run_that_is_stopped_and_started_again_is_not_running_meanwhile() -> None:
    events = [
        *BEGIN,
        at(120, "stopped", step=10, cursor=80),
        at(121, "ended", attempt=1, clock=10, silent=1.0, code=75, what=""),
        at(121.5, "supervisor", what="ended", code=75),
        at(1002, "supervisor", what="started", pid=2, host="a", seconds=2.0),
        at(1003, "launched", attempt=2),
        at(1010, "training", step=10, cursor=80, world=2),
    ]
    found = account(events, [*steps(1, 10, 106), *steps(11, 12, 1010)])
    assert shown(found)[2:6] == [
        ("checkpointing", 116, 120), ("ending", 120, 121.5), ("not_running", 121.5, 1000),
        ("start_up", 1000, 1010),
    ]  # fmt: skip
    assert (K.NOT_RUNNING, "stopped", None, "") in found.lost() and found.seconds()[K.REDONE] == 0


def test_processes_without_a_supervisor() -> None:
    events = [
        at(10, "training", step=0, cursor=0, world=2, seconds=5.0),
        at(100, "training", step=5, cursor=0, world=2, seconds=6.0),  # the one of before was killed
        at(110, "finished", steps=12),
        at(200, "training", step=12, cursor=0, world=2),  # an older version, with more steps to do
    ]
    found = account(events, [*steps(1, 8, 10), *steps(6, 12, 101)], now=203)
    assert shown(found) == [
        ("start_up", 5, 10), ("training", 10, 18), ("not_running", 18, 94), ("start_up", 94, 101), ("redone", 101, 104),
        ("training", 104, 108), ("unknown", 108, 110), ("not_running", 110, 200), ("start_up", 200, 203),
    ]  # fmt: skip


def test_of_a_machine_that_went_off_nobody_ran() -> None:
    """Supervisor and ranks died together; the next supervisor finds an attempt without an end."""
    events = [
        *BEGIN,
        at(500, "supervisor", what="took over", pid=3, host="a"),
        at(501, "ended", attempt=1, clock=22, silent=373.0, what="vanished", host="a"),
    ]
    found = account(events, steps(1, 20, 106))
    assert shown(found)[-3:] == [("training", 106, 128), ("not_running", 128, 500), ("ending", 500, 501)]


def test_a_supervisor_that_died_while_ranks_train_costs_nothing() -> None:
    events = [*BEGIN, at(115, "supervisor", what="took over", pid=3, host="a"), *END]
    assert (
        account(events, steps(1, 20, 105.5)).seconds()
        == account([*BEGIN, *END], steps(1, 20, 105.5)).seconds()
    )


def test_a_step_that_takes_far_longer_than_its_neighbours_stalls() -> None:
    rows = [(n, 106.0 + n + (20 if n > 7 else 0) + 9, 21.0 if n == 8 else 10.0 if n == 1 else 1.0, True)
            for n in range(1, 16)]  # fmt: skip
    found = account(BEGIN, rows, now=150)
    assert shown(found)[:5] == [
        ("start_up", 100, 115), ("training", 115, 122), ("stalled", 122, 142), ("training", 142, 150),
    ]  # fmt: skip


def test_missing_records_are_unknown_time() -> None:
    rows = [*steps(1, 5, 106), *steps(16, 20, 121)]
    assert shown(account(BEGIN, rows, now=126))[1:] == [
        ("training", 106, 111), ("unknown", 111, 121), ("training", 121, 126),
    ]  # fmt: skip


def test_records_that_are_missing_are_unknown_however_short_the_time() -> None:
    rows = [*steps(1, 5, 106), *steps(16, 20, 111.3)]
    assert ("unknown", 111, 111.3) in shown(account(BEGIN, rows, now=116.3))


def test_without_any_records_only_the_journal_is_believed() -> None:
    more = [
        at(110, "evaluated", step=4, loss=3.0, samples=8),
        at(115, "evaluated", step=9, loss=3.0, seconds=1.0),
    ]
    assert shown(account([*BEGIN, *more, *END])) == [
        ("start_up", 100, 105), ("unknown", 105, 114), ("evaluation", 114, 115), ("unknown", 115, 126),
        ("ending", 126, 128.5),
    ]  # fmt: skip
    # A process that was lost before its first records were written: how far it had come is known.
    assert shown(account([*BEGIN, KILLED[0]]))[1] == ("training", 105, 127)
    never = {**KILLED[0], "clock": 0}
    assert shown(account([*BEGIN, never])) == [("start_up", 100, 127), ("ending", 127, 130)]


def test_steps_that_are_not_recorded_yet_are_known_by_the_progress() -> None:
    told = {"phase": "step", "step": 9, "time": 114.0}
    found = account(BEGIN, steps(1, 5, 106), now=116, **told)
    assert found.seconds()[K.TRAINING] == pytest.approx(8) and shown(found)[-1] == ("unknown", 114, 116)
    found = account(BEGIN, steps(1, 5, 106), now=130, phase="evaluate", step=5, time=111.0)
    assert shown(found)[-1] == ("evaluation", 111, 130)


# Whatever a journal says


NAMES = (
    "supervisor launched training ended hang restart hosts_awaited stopped finished unstable handover evaluated "
    "checkpoint checkpoint_failed incident discard_examined samples_examined"
)
MOMENT = st.floats(0, 1000)
NUMBER = st.one_of(st.none(), st.integers(0, 40))
EVENT = st.fixed_dictionaries(
    {
        "event": st.sampled_from(
            f"{NAMES} resumed nonsense".split()
        ),
        "time": MOMENT,
    },
    optional={
        "what": st.sampled_from(["started", "took over", "ended", "opened", "rewound", "closed", "", "SIGKILL"]),
        "step": NUMBER, "attempt": NUMBER, "clock": NUMBER, "number": NUMBER, "code": NUMBER,
        "seconds": st.one_of(st.none(), st.floats(-10, 100), st.just("nan")), "silent": st.floats(-5, 500),
        "waited": st.floats(-5, 500), "delay": st.floats(-5, 500), "hung": st.booleans(),
        "hosts": st.lists(st.sampled_from("ab"), max_size=2), "host": st.sampled_from("ab"),
    },
)  # fmt: skip
ROW = st.tuples(st.integers(1, 40), MOMENT, st.floats(0, 200), st.booleans())


@pytest.mark.slow
@settings(max_examples=examples(400), deadline=None)
@given(
    st.lists(EVENT, min_size=1, max_size=25), st.lists(ROW, max_size=25), st.booleans(), MOMENT,
    st.fixed_dictionaries(
        {}, optional={"phase": st.sampled_from(["step", "evaluate"]), "step": NUMBER, "time": MOMENT}
    ),
)  # fmt: skip
def test_every_second_once(
    events: list[dict[str, Any]], rows: list[Row], in_order: bool, now: float, progress: dict[str, Any]
) -> None:
    if in_order:
        events.sort(key=lambda e: float(e["time"]))
    found = account(events, rows, now, **progress)
    assert np.all(np.diff(found.at) >= 0) and len(found.kind) == len(found.charge) == len(found.at) - 1
    assert sum(found.seconds().values()) == pytest.approx(found.wall, abs=1e-6)
    spans = list(found.spans())
    assert [s.begin for s in spans[1:]] == [s.end for s in spans[:-1]]
    assert all(s.end > s.begin and s.seconds > -1e-9 for s in spans)
    if spans:
        assert (spans[0].begin, spans[-1].end) == (found.begin, found.end)
    for kind, seconds in found.seconds().items():
        told = sum(s.seconds if s.kind is kind else 0 for s in spans)
        told += sum(s.between for s in spans) if kind is K.BETWEEN else 0
        assert told == pytest.approx(seconds, abs=1e-6)
    first, last = float(events[0]["time"]), max(float(e["time"]) for e in events)
    assert found.begin <= first and found.end >= max(first, min(now, last))


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(EVENT, min_size=1, max_size=25), st.lists(ROW, max_size=25), st.data())
def test_a_look_changes_nothing(events: list[dict[str, Any]], rows: list[Row], data: st.DataObject) -> None:
    events.sort(key=lambda e: float(e["time"]))
    life = Lifecycle()
    life.steps = steps_of(rows)
    for event in events:
        life.hear(event_of(event))
        if data.draw(st.booleans()):
            life.snapshot(data.draw(MOMENT))
    looked, never = life.snapshot(1000.0), account(events, rows, 1000.0)
    assert looked is not None and shown(looked) == shown(never)


# Files


def run_of(folder: Path, events: Sequence[dict[str, Any]], rows: Sequence[Row]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "steps").mkdir(exist_ok=True)
    (folder / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    taken = [record(n, time=t, seconds=s, applied=a) for n, t, s, a in rows]
    write(folder / "steps", taken, 5)
    return folder


def test_a_run_directory(tmp_path: Path) -> None:
    run = run_of(tmp_path, [*BEGIN, *END], steps(1, 20, 105.5))
    found, problems = read_account(run)
    assert shown(found) == shown(account([*BEGIN, *END], steps(1, 20, 105.5))) and problems == []
    # Another clock: what is dead ends with its last sign of life, what lives now.
    assert read_account(run, alive=True)[0].end > found.end == 128.5


def test_damaged_files_are_told_and_their_time_is_unknown(tmp_path: Path) -> None:
    run = run_of(tmp_path, [*BEGIN, *END], steps(1, 20, 105.5))
    second = sorted((run / "steps").iterdir())[1]
    second.write_bytes(second.read_bytes()[:100])
    with (run / "journal.jsonl").open("a") as journal:
        journal.write("no event\n" + '{"time": 129, "event": "supervisor", "what": "sta')
    found, problems = read_account(run)
    assert ("unknown", 110.5, 115.5) in shown(found) and found.wall == 28.5
    assert "1 damaged line" in problems[0] and second.name in problems[1] and "is unknown" in problems[1]


@pytest.mark.parametrize("what", ["none", "empty", "torn"])
def test_without_a_journal_there_is_no_account(what: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    if what != "none":
        run_of(run, [], [])
        (run / "journal.jsonl").write_text("" if what == "empty" else '{"time": 12')
    if what == "none":
        run_of(tmp_path / "bare", BEGIN, [])
        assert "no step records" in read_account(tmp_path / "bare")[1][0]
    with pytest.raises(DataError, match="no such directory" if what == "none" else "journal.jsonl: no event"):
        read_account(run)


def test_a_watch_sees_what_a_first_look_sees(tmp_path: Path) -> None:
    events, rows = [*BEGIN, *KILLED], [*steps(1, 15, 106), *steps(11, 30, 158.5)]
    watch = GoodputWatch(tmp_path)
    assert watch.look(alive=True) is None
    for upto in range(1, len(events) + 1):
        moment = events[upto]["time"] if upto < len(events) else 1e9
        run_of(tmp_path, events[:upto], [row for row in rows if row[1] < moment])
        watch.look(alive=False)
    seen = watch.look(alive=False)
    assert seen is not None and shown(seen) == shown(read_account(tmp_path)[0])


def test_a_look_of_a_moment_ago_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, [*BEGIN, *END[:1]], steps(1, 20, 105.5))
    watch = GoodputWatch(run)
    before = watch.account(alive=False)
    run_of(tmp_path, [*BEGIN, *END], [])
    assert watch.account(alive=False) is before
    moment = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    after = watch.account(alive=False)
    assert before is not None and after is not None and after.wall == before.wall + 2.5


def test_records_that_come_late(tmp_path: Path) -> None:
    """As of a disk that was full."""
    run = run_of(tmp_path, [*BEGIN, *END], steps(1, 20, 105.5))
    first = sorted((run / "steps").iterdir())[0]
    content = first.read_bytes()
    first.unlink()
    before, watch = GoodputWatch(run).look(alive=False), GoodputWatch(run)
    watch._files.look()
    first.write_bytes(content)
    after = watch.look(alive=False)
    assert before is not None and after is not None
    assert before.seconds()[K.TRAINING] == pytest.approx(15)
    assert after.seconds()[K.TRAINING] == pytest.approx(20)


def test_a_note_after_the_end_is_no_time_of_the_run() -> None:
    events = [at(0.0, "training", step=0), at(10.0, "finished", step=10)]
    rows = steps(1, 10, 0.0)
    later = at(5000.0, "note", step=10, who="ann", text="done")
    assert shown(account(events, rows)) == shown(account([*events, later], rows, now=10.0))
