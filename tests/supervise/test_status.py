"""What `status` tells of a run directory: torn, half there, lied to by clocks, or held by the living."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megastable.base import errors
from megastable.base.errors import DataError
from megastable.config.tree import RunConfig
from megastable.run.directory import as_json
from megastable.supervise.standing import State
from megastable.supervise.status import RunWatch, Status, collect_facts, exit_code, read_status
from tests.supervise.runs import held, incident, journal

HERE = socket.gethostname()
STARTED = {"event": "supervisor", "what": "started", "pid": 11, "host": HERE}
TRAINING = {"event": "training", "step": 0, "cursor": 0, "world": 2}
NOW = 2000.0


def ended(code: int, reason: str = "") -> dict[str, Any]:
    return {"event": "supervisor", "what": "ended", "code": code, "reason": reason}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with a recipe of 50 steps."""
    root = tmp_path / "runs" / "small"
    root.mkdir(parents=True)
    config = RunConfig.model_validate({"train": {"steps": 50, "global_batch": 64}, "run": {"dir": root}})
    (root / "recipe.yaml").write_text(
        yaml.safe_dump({"config": config.model_dump(mode="json"), "manifests": []})
    )
    return root


def progress(run: Path, **values: Any) -> None:
    told = {
        "attempt": None, "pid": 22, "host": HERE, "time": NOW - 1, "phase": "step", "step": 10, "steps": 50,
        "cursor": 640, "loss": 3.5, "grad_norm": 0.7, "lr": 1e-3, "tokens_per_second": 1e4, "seconds": 2.0,
        "applied": True, "world": 2,
    }  # fmt: skip
    path = run / "progress.json"
    path.write_text(json.dumps(told | values))
    os.utime(path, (NOW - 1, NOW - 1))


def look(run: Path) -> Status:
    return RunWatch(run, lambda: NOW).read_status()


@contextmanager
def alive(run: Path, *who: str) -> Iterator[None]:
    with ExitStack() as stack:
        for name in who:
            stack.enter_context(held(run / {"supervisor": ".supervisor.lock", "trainer": ".lock"}[name]))
        yield


@pytest.mark.parametrize(
    ("events", "who", "phase", "state", "code"),
    [
        ([], "", "", State.NEW, 75),
        ([STARTED], "supervisor", "", State.STARTING, 0),
        ([STARTED, {"event": "launched", "attempt": 1}], "supervisor", "", State.STARTING, 0),
        ([STARTED, {"event": "launched", "attempt": 1}], "supervisor trainer", "starting", State.STARTING, 0),
        ([TRAINING], "trainer", "step", State.RUNNING, 0),
        ([TRAINING], "trainer", "", State.RUNNING, 0),
        ([STARTED, TRAINING], "supervisor trainer", "evaluate", State.RUNNING, 0),
        ([STARTED, TRAINING, {"event": "hang", "waited": 99}], "supervisor trainer", "step", State.HUNG, 0),
        ([TRAINING, {"event": "ended", "attempt": 1, "code": 1}], "supervisor", "step", State.WAITING, 0),
        # Rank 0 was killed a moment ago: nothing is loaded.
        ([STARTED, {"event": "launched", "attempt": 1}, TRAINING], "supervisor", "step", State.WAITING, 0),
        ([STARTED, TRAINING, {"event": "resumed"}], "supervisor", "starting", State.WAITING, 0),
        ([STARTED, TRAINING, STARTED | {"what": "took over"}], "supervisor", "", State.STARTING, 0),
        ([TRAINING, {"event": "restart", "delay": 60}], "supervisor", "", State.WAITING, 0),
        ([TRAINING, {"event": "hosts_awaited", "reason": "for second"}], "supervisor", "", State.WAITING, 0),
        ([TRAINING, {"event": "handover", "step": 9}], "supervisor", "ended", State.WAITING, 0),
        ([TRAINING, {"event": "handover", "step": 9}], "", "ended", State.INTERRUPTED, 78),
        ([TRAINING, {"event": "finished", "steps": 50}], "", "ended", State.FINISHED, 0),
        ([TRAINING, {"event": "finished", "steps": 50}], "supervisor", "ended", State.FINISHED, 0),
        ([TRAINING, {"event": "stopped", "step": 9}], "", "ended", State.STOPPED, 75),
        ([TRAINING, {"event": "stopped", "step": 9}, ended(75)], "", "", State.STOPPED, 75),
        ([TRAINING, {"event": "stopped", "step": 9}, ended(75), STARTED], "supervisor", "", State.STARTING, 0),
        ([TRAINING, {"event": "unstable", "step": 9}], "", "", State.FAILED, 76),
        ([TRAINING, ended(76, "three times the same")], "", "", State.FAILED, 76),
        ([TRAINING, ended(77)], "", "", State.FAILED, 77),
        ([ended(2, "no such corpus")], "", "", State.FAILED, 2),
        # After the supervisor's end somebody went on without one.
        ([TRAINING, ended(76), TRAINING, {"event": "finished", "steps": 50}], "", "", State.FINISHED, 0),
        ([TRAINING, ended(76), TRAINING], "", "", State.INTERRUPTED, 1),
        ([TRAINING], "", "step", State.INTERRUPTED, 1),
        ([STARTED], "", "", State.INTERRUPTED, 1),
    ],
)  # fmt: skip
def test_status_has_the_state_and_its_exit_code(
    events: list[dict[str, Any]], who: str, phase: str, state: State, code: int, run: Path
) -> None:
    journal(run, *events, begin=NOW - 100)
    if phase:
        progress(run, phase=phase)
    with alive(run, *who.split()):
        status = look(run)
    assert (status.state, exit_code(status)) == (state, code)
    assert status.advice
    json.loads(as_json(collect_facts(status)))


@pytest.mark.parametrize(
    ("age", "who", "state"),
    [(1.0, "", State.RUNNING), (1e5, "", State.INTERRUPTED), (1.0, "supervisor", State.WAITING)],
)
def test_status_where_locks_are_not_shared_between_hosts(
    age: float, who: str, state: State, run: Path
) -> None:
    """A free lock of another host proves nothing while something moves; a held one proves that they are shared."""
    journal(run, STARTED | {"host": "node-1"}, TRAINING, begin=NOW - age - 1)
    progress(run, time=NOW - age, host="node-2")
    os.utime(run / "progress.json", (NOW - age, NOW - age))
    with alive(run, *who.split()):
        s = look(run)
    assert s.state is state
    if state is State.RUNNING:
        assert s.trainer.alive is None and "cannot be told" in s.reason and s.advice == "nothing to do"
    journal(run, ended(2, "no such corpus"))
    assert look(run).state is State.FAILED


@pytest.mark.parametrize(("age", "state", "code"), [(1.0, State.RUNNING, 0), (3 * 86400.0, State.UNKNOWN, 1)])
def test_status_on_a_file_system_without_locks(
    age: float, state: State, code: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    journal(run, STARTED | {"host": "node-1"}, TRAINING, begin=NOW - age - 1)
    progress(run, time=NOW - age)
    os.utime(run / "progress.json", (NOW - age, NOW - age))
    for name in (".lock", ".supervisor.lock"):
        (run / name).touch()
    monkeypatch.setattr(fcntl, "flock", none)
    s = look(run)
    assert (s.state, exit_code(s)) == (state, code) and "cannot be told" in s.reason
    if state is State.UNKNOWN:
        assert s.advice.startswith("look on node-1") and "megastable supervise" in s.advice
    journal(run, {"event": "finished", "steps": 50}, begin=NOW)
    assert look(run).state is State.FINISHED


def test_advice_is_to_replace_a_supervisor_that_is_gone(run: Path) -> None:
    journal(run, TRAINING, begin=NOW - 50)
    progress(run)
    with alive(run, "trainer"):
        assert look(run).advice == "nothing to do"  # it never had one
        journal(run, STARTED, TRAINING, begin=NOW - 40)
        s = look(run)
        assert s.state is State.RUNNING and "supervisor is gone" in s.reason
        assert "the same command takes it over" in s.advice and "megastable supervise" in s.advice
        journal(run, {"event": "hang", "waited": 99}, begin=NOW - 40)
        assert "a supervisor ends it and starts it again: megastable supervise" in look(run).advice


def test_advice_has_the_command_that_the_run_was_started_with(run: Path) -> None:
    how: dict[str, Any] = {
        "recipe": "launch/recipes/7b.yaml", "overrides": ["train.steps=9", f"run.dir={run}", "data.note=a b"],
        "given": ["--hostfile", "my hosts", "--exclude", "node-3"], "module": "megastable.train",
    }  # fmt: skip
    journal(run, STARTED | how, TRAINING, {"event": "stopped", "step": 3}, ended(75))
    command = ["megastable", "supervise", how["recipe"], *how["overrides"], "--", *how["given"]]
    assert look(run).advice == f"to go on: {shlex.join(command)}"
    # One in whose directory it was made, and another program for the ranks.
    journal(run, STARTED | how | {"overrides": [], "given": [], "module": "tests.it"}, ended(76))
    assert look(run).advice.endswith(
        f"megastable supervise launch/recipes/7b.yaml {shlex.quote(f'run.dir={run}')} --module tests.it"
    )
    # Of an older version, or damaged: the recipe of the run itself.
    journal(run, STARTED | {"recipe": 7, "overrides": "x", "given": {}}, ended(76))
    assert look(run).advice.endswith(shlex.join([str(run / "recipe.yaml"), f"run.dir={run}"]))


def test_status_has_the_numbers_of_a_running_run(run: Path) -> None:
    closed = {"cause": "data", "actions": ["rewind"], "steps_lost": 3}
    failure = "rank 1 on node-2 was killed by signal 9"
    left_out = {"event": "host_left_out", "wholly": False, "strikes": 1}
    journal(
        run, STARTED | {"host": "node-1"}, {"event": "launched", "attempt": 1}, TRAINING,
        {"event": "evaluated", "step": 5, "loss": 3.9},
        {"event": "checkpoint", "step": 5, "name": "step-5", "bytes": 1000, "seconds": 0.1},
        {"event": "discarded", "step": 8, "reason": "far out"},
        incident(1, what="attributed", batches_discarded=1, **closed),
        incident(1, what="closed", outcome="healed", **closed),
        {"event": "ended", "attempt": 1, "signal": 9, "failure": failure, "step": 9},
        {"event": "restart", "attempt": 2, "reason": "killed", "delay": 0.0},
        left_out | {"host": "node-2", "until": NOW + 60}, left_out | {"host": "node-3", "until": NOW - 60},
        {"event": "launched", "attempt": 2, "hosts": ["node-1", "node-4"]}, TRAINING | {"step": 5},
    )  # fmt: skip
    for step in (3, 5, 7):
        (run / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (run / "checkpoints" / f"step-{step}" / "manifest.json").write_text("{}")
    (run / "checkpoints" / "step-9").mkdir()  # not complete
    progress(run, attempt=2, applied=False, host="node-2")
    with alive(run, "supervisor", "trainer"):
        s = look(run)
    assert (s.state, s.step, s.steps, s.loss, s.lr, s.applied) == (State.RUNNING, 10, 50, 3.5, 1e-3, False)
    assert (s.age, s.rate, s.eta, s.world, s.cursor) == (1.0, 2.0, 80.0, 2, 640)
    assert s.tokens_per_second == 64 * 2048 / s.rate  # at that rate, not at the last step's
    assert (s.supervisor.alive, s.supervisor.pid, s.supervisor.host) == (True, 11, "node-1")
    assert (s.trainer.alive, s.trainer.pid, s.trainer.host) == (True, 22, "node-2")
    assert (s.attempt, s.starts, s.restarts, s.refused, s.steps_lost) == (2, 2, {"killed": 1}, 1, 3)
    assert s.hosts == ("node-1", "node-4") and s.left_out == {"node-2": NOW + 60}
    assert s.attempts[0].failure == failure and s.attempts[0].step == 9
    (case,) = s.incidents
    assert (case.cause, case.action, case.outcome) == ("data", "rewind", "healed")
    assert [(c.name, c.size) for c in s.checkpoints] == [("step-7", None), ("step-5", 1000), ("step-3", None)]
    assert s.validation == ((5, 3.9),)


def test_status_takes_nothing_from_an_earlier_attempt(run: Path) -> None:
    journal(run, STARTED, {"event": "launched", "attempt": 3}, begin=NOW - 5)
    progress(run, attempt=2)
    with alive(run, "supervisor", "trainer"):
        s = look(run)
    assert s.state is State.STARTING and s.trainer.pid is None and s.phase == "" and s.step == 10


@pytest.mark.parametrize(
    ("age", "seconds", "state"), [(20, 1, State.RUNNING), (40, 1, State.HUNG), (40, 9, State.RUNNING)]
)
def test_status_notices_no_progress_by_the_runs_own_pace(
    age: float, seconds: float, state: State, run: Path
) -> None:
    """The limits of supervise.*: ten steps, at least 30 seconds."""
    journal(run, TRAINING, begin=NOW - 1000)
    progress(run, time=NOW - age, seconds=seconds)
    os.utime(run / "progress.json", (NOW - age, NOW - age))
    with alive(run, "trainer"):
        s = look(run)
    assert s.state is state and s.age == age
    # What the supervisor writes meanwhile is no progress.
    journal(run, {"event": "hook_failed", "kind": "webhook", "problem": "x"}, begin=NOW)
    with alive(run, "trainer"):
        assert look(run).state is state


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"step": ',
        b"[]",
        b"\xff\xfe",
        b'{"step": "x", "loss": [], "phase": 3}',
        b'{"step": 1e999, "applied": 7}',
    ],
)
def test_status_survives_a_progress_file_that_is_none(content: bytes, run: Path) -> None:
    journal(run, TRAINING, {"event": "checkpoint", "step": 4, "name": "step-4"})
    (run / "progress.json").write_bytes(content)
    with alive(run, "trainer"):
        s = look(run)
    assert s.step == 4 and s.loss is None and s.eta is None


def records(run: Path, first: int, losses: list[float], stamp: int) -> None:
    (run / "steps").mkdir(exist_ok=True)
    steps = list(range(first, first + len(losses)))
    table = pa.table({"step": steps, "loss": losses, "seconds": [0.5] * len(losses), "other": steps})
    pq.write_table(table, run / "steps" / f"{first:08d}-{steps[-1]:08d}-{stamp}.parquet")


def test_status_has_losses_from_records_and_from_what_was_seen(run: Path) -> None:
    journal(run, TRAINING)
    records(run, 1, [5.0, 4.0, 9.0], 1000)
    records(run, 3, [3.0], 2000)  # done again
    (run / "steps" / "00000009-00000009-3000.parquet").write_bytes(b"half a file")
    watch = RunWatch(run, lambda: NOW)
    assert watch.read_status().recent == ((1, 5.0), (2, 4.0), (3, 3.0))
    assert watch.read_status().rate == 0.5 and watch.read_status().tokens_per_second == 64 * 2048 / 0.5
    with alive(run, "trainer"):
        for step in range(4, 10):
            progress(run, step=step, loss=step / 10, seconds=4.0)
            status = watch.read_status()
        assert status.recent[2:] == ((3, 3.0), *((step, step / 10) for step in range(4, 10)))
        assert status.rate == 4.0
        # Back to an earlier step: what came after it is undone.
        progress(run, step=2, loss=4.5)
        assert watch.read_status().recent == ((1, 5.0), (2, 4.5))


def test_status_only_looks_at_locks(run: Path) -> None:
    journal(run, TRAINING)
    assert look(run).trainer.alive is False
    assert not (run / ".lock").exists() and not (run / ".supervisor.lock").exists()
    (run / ".lock").touch()
    assert look(run).trainer.alive is False
    with held(run / ".lock"):  # can be taken after a look
        assert look(run).trainer.alive is True
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    look(run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize(
    ("summary", "state", "code"),
    [
        ({"steps": 50}, State.FINISHED, errors.OK),
        ({"steps": 49}, State.NEW, errors.STOPPED),  # of a shorter run; it is to be trained on
        ({"steps": "x"}, State.NEW, errors.STOPPED),
        (None, State.NEW, errors.STOPPED),
    ],
)
def test_status_of_a_finished_run_whose_journal_is_gone(
    summary: dict[str, Any] | None, state: State, code: int, run: Path
) -> None:
    if summary is not None:
        (run / "summary.json").write_text(json.dumps(summary))
    progress(run, step=50)
    status = look(run)
    assert (status.state, exit_code(status)) == (state, code)
    journal(run, TRAINING)  # somebody trained it on, and is gone: the journal knows better
    assert look(run).state is State.INTERRUPTED


def test_read_status_without_a_run_is_an_error_that_helps(run: Path, tmp_path: Path) -> None:
    journal(run, TRAINING)
    (tmp_path / "empty").mkdir()
    for place, told in (
        (tmp_path / "nowhere", r"no such directory: give the directory of a run"),
        (run / "recipe.yaml", r"no such directory"),
        (run.parent, r"not the directory of a run: those below it are: small"),
        (tmp_path / "empty", r"not the directory of a run: give one"),
    ):
        with pytest.raises(DataError, match=told):
            read_status(place)


def test_status_makes_visible_what_a_run_says(run: Path) -> None:
    evil = "\x1b[2J\r\n\u202ex [bold]"
    journal(
        run, STARTED | {"host": evil}, {"event": "launched", "attempt": 1},
        {"event": "ended", "attempt": 1, "failure": evil}, {"event": evil},
        incident(1, cause=evil, verdict=evil, failure=evil, actions=[evil]),
        {"event": "warning", "step": 1, "text": evil}, ended(76, evil),
    )  # fmt: skip
    progress(run, host=evil, phase=evil)
    found = as_json(collect_facts(look(run)), indent=1)
    assert found.replace("\n", "").isprintable() and "\\x1b" in found
    assert found.count("\\\\x1b[2J\\\\r\\\\n\\\\u202ex [bold]") > 8 and "\\u001b" not in found
