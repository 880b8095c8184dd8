"""Whatever trackers do, training goes on and the process ends: they hang, fail, do not keep up, or are gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.events.training_events import ConfigChanged
from megastable.run.log import RunLog
from megastable.run.tracker_memory import TrackerMemory
from megastable.training.trackers.curves import by_statistic
from megastable.training.trackers.lane import Lane
from megastable.training.trackers.points import (
    LayersPoint,
    RunPoint,
    StepPoint,
    UndonePoint,
    line_of,
    point_of,
)
from megastable.training.trackers.relay import ToldSteps, TrackerNotes
from megastable.training.trackers.tensorboard_tracker import folder_of
from megastable.training.tracking import Tracking, run_point
from tests.journal import note
from tests.training.tracked_run import configured, process, record, steps, until


def point(step: int, applied: bool = True, tokens: int = 10) -> StepPoint:
    return StepPoint(step, step * tokens, float(step), applied, {"train/loss": 1.0 / step})


class Recording:
    """A tracker that keeps what it is told. wait: before each step."""

    def __init__(self, wait: threading.Event | None = None, wrong: bool = False) -> None:
        self.told: list[Any] = []
        self.wait, self.wrong = wait, wrong

    def step(self, point: StepPoint) -> None:
        if self.wait is not None:
            self.wait.wait()
        if self.wrong:
            raise SystemExit("no such project")
        self.told.append(point)

    validation = layers = undone = note = step

    def flush(self) -> None:
        self.told.append("flush")

    def close(self, status: str) -> None:
        self.told.append(status)


def test_a_tracker_gets_everything_in_order() -> None:
    tracker, said = Recording(), list[str]()
    lane = Lane("x", lambda: tracker, said.append, 10)
    for n in range(1, 101):
        lane.put(point(n))
    lane.close("finished")
    assert until(lambda: lane.over) and not lane.failed and not said
    assert [p.step for p in tracker.told[:-1]] == list(range(1, 101)) and tracker.told[-1] == "finished"


def test_one_that_hangs_is_given_up_with_one_warning() -> None:
    said, never = list[str](), threading.Event()
    lane = Lane("x", lambda: Recording(never), said.append, 0.05, room=10)
    begin = time.monotonic()
    for n in range(1, 1000):
        lane.put(point(n))
    assert time.monotonic() - begin < 1.0 and lane.dropped >= 980
    assert until(lambda: lane.check() or lane.over)
    lane.put(point(1))
    lane.check()
    assert lane.failed and [line[:9] for line in said] == ["tracker x", "tracker x"]
    assert "does not keep up" in said[0] and "given up: it has not answered" in said[1]
    never.set()


def test_one_that_fails_is_given_up_with_its_reason() -> None:
    said = list[str]()
    lane = Lane("x", lambda: Recording(wrong=True), said.append, 10)
    lane.put(point(1))
    assert until(lambda: lane.failed)
    assert said == ["tracker x is given up: no such project. Training goes on without it"]


def test_a_missing_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megastable.training.trackers import tracker

    monkeypatch.setitem(tracker.TRACKERS, "wandb", "no_such_module:X")
    run = RunPoint("n", str(tmp_path), 0, 0, 0.0)
    with pytest.raises(tracker.TrackerError, match=r"bash launch/install\.sh wandb"):
        tracker.opened("wandb", tracker.Setting(run, "wandb"))


def tracking(root: Path, said: list[str], command: str, timeout: int = 60, room: int = 100) -> Tracking:
    root.mkdir(exist_ok=True)
    config, run = configured(["command"], command, timeout), RunDirectory(root)
    return Tracking(config.logging, run, run_point(config, run, 0, 0, None), said.append, room)


@pytest.mark.slow
def test_a_program_that_never_reads_holds_up_nothing(tmp_path: Path) -> None:
    """It is given up, the process of the trackers ends, and what it started with it."""
    said = list[str]()
    pid = tmp_path / "pid"
    t = tracking(tmp_path / "run", said, f"sh -c 'echo $$ > {pid}; exec sleep 1000'", timeout=1, room=10_000)
    assert until(pid.exists) and until(lambda: pid.read_text())
    for n in range(1, 2000):  # more than a pipe has room for
        t.step(record(n, 1.0), n)
    assert until(lambda: said)
    begin = time.monotonic()
    t.close()
    assert time.monotonic() - begin < 6
    assert [line for line in said if "given up" in line] == [
        "WARNING: tracker command is given up: it has not answered for 1 s (logging.tracker_timeout). Training goes on "
        "without it"
    ]
    assert until(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists())


def test_trackers_that_stand_still_or_are_gone_hold_up_nothing(tmp_path: Path) -> None:
    said = list[str]()
    t = tracking(tmp_path / "run", said, "cat")
    assert t._process is not None
    os.kill(t._process.pid, signal.SIGSTOP)
    begin = time.perf_counter()
    for n in range(1, 5000):
        t.step(record(n, 1.0), n)
    assert (time.perf_counter() - begin) / 5000 < 0.001
    begin = time.monotonic()
    t.close(seconds=0.3)
    assert time.monotonic() - begin < 2
    assert said[0] == "WARNING: trackers do not keep up: 100 records wait, more are dropped"
    os.kill(t._process.pid, signal.SIGKILL)
    assert until(lambda: len(said) > 1) and "the process of the trackers is gone" in said[-1]
    t.step(record(1, 1.0), 1)
    t.close()


@pytest.mark.slow
def test_a_crash_of_the_training_tells_the_rest(tmp_path: Path) -> None:
    """Its end closes the pipe. The next process undoes what it repeats, though nobody told."""
    root, said = tmp_path / "run", list[str]()
    config = configured(["jsonl"])
    run = RunDirectory(root)
    root.mkdir()
    t = Tracking(config.logging, run, run_point(config, run, 0, 0, None), said.append)
    steps(dict.fromkeys(range(1, 9), 1.0))(t, RunLog(run))
    assert until(t._queue.empty) and t._process is not None
    time.sleep(0.05)
    t._stdin().close()
    t._process.wait(30)
    assert process(root, config, 5, [steps({6: 2.0})]) == []
    rows = [json.loads(line) for line in (root / "trackers/records.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if r["record"] == "step"] == [*range(1, 9), 6]
    assert [(r["step"], r["last"]) for r in rows if r["record"] == "undone"] == [(6, 8)]
    t._over = True


def test_no_tracker_needs_no_process(tmp_path: Path) -> None:
    config, run = configured([]), RunDirectory(tmp_path)
    t = Tracking(config.logging, run, run_point(config, run, 0, 0, None), print)
    t.step(record(1, 1.0), 1)
    t.close()
    assert t._process is None and not list(tmp_path.iterdir())


def test_steps_that_come_again_undo_those_before() -> None:
    told = ToldSteps()
    assert [told.advance(point(n, applied=n != 4)) for n in range(1, 6)] == [None] * 5
    undone = told.advance(point(3))
    assert isinstance(undone, UndonePoint) and (undone.step, undone.last, undone.tokens) == (3, 5, 30)
    assert [p.step for p in undone.points] == [3, 5]  # 4 was refused: it did nothing
    assert told.advance(point(4)) is None and told.advance(point(5)) is None
    again = ToldSteps.load(json.loads(json.dumps(told.model_dump())))
    assert again.last == 5 and again.go_back(5, 1000, 0.0) is None
    later = again.go_back(3, 1000, 0.0)
    assert later is not None and [p.step for p in later.points] == [4, 5] and later.tokens == 40
    assert [ToldSteps.load(x).last for x in (None, [], {"last": "x"}, {"last": 3, "points": [1]})] == [0] * 4


def test_lines_are_read_back() -> None:
    given = [
        RunPoint("näme", "/x", 3, 4, 5.0, config={"a.b": 1}), point(3), LayersPoint(3, 4.0, {"update_ratio/a": 0.1}),
    ]  # fmt: skip
    assert [point_of(line_of(p)) for p in given] == given
    line = line_of(StepPoint(1, 2, 3.0, False, {"train/loss": float("nan"), "train/grad_norm": float("inf")}))
    assert json.loads(line)["train/loss"] == "nan"
    found = point_of(line)
    assert isinstance(found, StepPoint) and str(found.values["train/loss"]) == "nan"
    assert [point_of(line) for line in ("", "[]", "{", '{"record": "later"}', '{"record": "step"}')] == [
        None
    ] * 5


def test_every_event_becomes_a_note_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    log = RunLog(run)
    notes = TrackerNotes(run.journal)
    assert list(notes.new()) == []
    for n in (1, 2):
        log.emit(IncidentEvent(what="opened", step=n, number=n, reason="bad", summary={"number": n}))
    assert [(note.step, note.incident) for note in notes.new()] == [(1, 1), (2, 2)] and list(
        notes.new()
    ) == []
    later = TrackerNotes(run.journal, notes.read)
    log.emit(IncidentEvent(what="closed", step=9, number=2, summary={"number": 2, "outcome": "healed"}))
    (note,) = later.new()
    assert (
        note.story == "**Incident 2**\n\n- step 2: opened: bad\n- step 9: closed: healed\n"
        and later.incidents == 2
    )
    log.emit(IncidentEvent(what="attributed", number=2, cause="data", summary={"number": 2, "step": 8}))
    assert [(note.step, note.text) for note in later.new()] == [(8, "incident 2: cause: data")]
    # A person repaired it: the rest was told already.
    run.journal.write_bytes(b"\n".join(run.journal.read_bytes().splitlines()[1:]) + b"\n")
    assert list(later.new()) == []
    log.emit(IncidentEvent(what="opened", step=11, number=3, summary={"number": 3}))
    assert [note.incident for note in later.new()] == [3]


def test_a_change_of_a_key_that_may_hold_a_secret_is_no_note(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    log, notes = RunLog(run), TrackerNotes(run.journal)
    secret = [
        "logging.tracker_command: a -> curl -H hunter2",
        "eval.command: None -> hunter2",
        "eval: None -> hunter2",
    ]
    secret += ["supervise.metrics_port: 9137 -> 9200", "supervise: None -> hunter2"]
    log.emit(ConfigChanged(changes=[*secret, "train.steps: 10 -> 20", "eval.interval: 1 -> 2"]))
    log.emit(ConfigChanged(changes=secret))
    assert [note.text for note in notes.new()] == [
        "recipe changed: train.steps: 10 -> 20; eval.interval: 1 -> 2"
    ]


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [
        (["finished"], [], "finished"),  # opened once more, for scores that came later
        (["finished"], ["training"], "failed"),  # continued, and so far without an end
        (["stopped"], [], "failed"),
        ([], ["training", "stopped"], "stopped"),
        (["stopped"], ["training", "finished"], "finished"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, before: list[str], after: list[str], status: str) -> None:
    run = RunDirectory(tmp_path)
    for name in before:
        note(run, name, steps=1)
    told = TrackerNotes(run.journal)
    list(told.new())
    later = TrackerNotes(run.journal, told.read)
    for name in after:
        note(run, name, steps=1)
    list(later.new())
    assert later.status == status


def test_a_copied_run_is_another_one_and_a_moved_one_is_not(tmp_path: Path) -> None:
    old, moved, copied = (tmp_path / name for name in ("old", "moved", "copied"))
    (old / "trackers").mkdir(parents=True)
    TrackerMemory(old, "wandb").keep(id="x")
    assert TrackerMemory(old, "wandb").facts["id"] == "x"
    shutil.copytree(old, copied)
    assert TrackerMemory(copied, "wandb").facts == {}
    old.rename(moved)
    assert TrackerMemory(moved, "wandb").facts["id"] == "x"


@pytest.mark.parametrize("name", ["..", "/etc", "a/../b", "", ".", "x" * 300, "ж" * 100, "\x00\n", " . "])
def test_any_name_is_a_folder_inside(name: str, tmp_path: Path) -> None:
    folder = tmp_path / folder_of(name)
    folder.mkdir()
    assert folder.resolve().parent == tmp_path.resolve() and folder_of(folder.name) == folder.name


def test_distributions_are_of_what_can_be_drawn() -> None:
    given = {
        "gradient_rms/a": 0.01,
        "gradient_rms/b": 0.0,
        "activation_max/a": 3.0,
        "activation_max/b": float("inf"),
    }
    assert by_statistic(given) == {"log10_gradient_rms": [-2.0], "activation_max": [3.0]}
