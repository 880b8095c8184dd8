"""What `status` tells of a run directory: torn, half there, lied to by clocks, or held by the living."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import shutil
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
from megastable.supervise.standing import State
from megastable.supervise.status import RunWatch, Status, as_json, exit_code, read_status
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
    return RunWatch(run, lambda: NOW).status()


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
def test_the_state_and_its_exit_code(
    events: list[dict[str, Any]], who: str, phase: str, state: State, code: int, run: Path
) -> None:
    journal(run, *events, begin=NOW - 100)
    if phase:
        progress(run, phase=phase)
    with alive(run, *who.split()):
        status = look(run)
    assert (status.state, exit_code(status)) == (state, code)
    assert status.advice
    json.loads(as_json(status))


@pytest.mark.parametrize(
    ("age", "who", "state"),
    [(1.0, "", State.RUNNING), (1e5, "", State.INTERRUPTED), (1.0, "supervisor", State.WAITING)],
)
def test_locks_that_are_not_shared_between_hosts(age: float, who: str, state: State, run: Path) -> None:
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
def test_a_file_system_without_locks(
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


def test_a_supervisor_that_is_gone_can_be_replaced(run: Path) -> None:
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


def test_the_command_to_go_on_is_the_one_it_was_started_with(run: Path) -> None:
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


def test_of_a_run_that_was_copied_the_copy_goes_on_and_not_the_original(run: Path, tmp_path: Path) -> None:
    event = {
        "event": "supervisor", "what": "started", "pid": 1, "host": "a", "module": "megastable.train",
        "recipe": "launch/recipes/7b.yaml", "overrides": [f"run.dir={run}", "train.steps=9"], "given": [],
    }  # fmt: skip
    journal(run, event, ended(errors.STOPPED))
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert f"run.dir={copy}" in look(copy).advice and f"run.dir={run} " not in look(copy).advice
    assert f"run.dir={run} " in look(run).advice


def test_logs_are_named_only_where_there_are_some(run: Path) -> None:
    journal(run, STARTED, ended(errors.FAILED, "host b: its name leads to no address"))
    assert look(run).advice.startswith("mend the cause, then: megastable")
    assert look(run).reason == "host b: its name leads to no address"
    (run / "logs").mkdir()
    assert look(run).advice.startswith(f"read {run / 'logs'} and mend the cause, then: megastable")


def test_a_run_whose_journal_cannot_be_read_is_not_called_new(run: Path) -> None:
    (run / "journal.jsonl").unlink(missing_ok=True)
    (run / "journal.jsonl").mkdir()  # root can read any file
    status = look(run)
    assert status.state is State.UNKNOWN and exit_code(status) == errors.FAILED
    assert "journal.jsonl cannot be read" in status.reason and status.advice.startswith("make ")


def test_the_numbers_of_a_running_run(run: Path) -> None:
    journal(
        run,
        STARTED | {"host": "node-1"},
        {"event": "launched", "attempt": 1},
        TRAINING,
        {"event": "evaluated", "step": 5, "loss": 3.9},
        {"event": "checkpoint", "step": 5, "name": "step-5", "bytes": 1000, "seconds": 0.1},
        {"event": "discarded", "step": 8, "reason": "far out"},
        incident(1, what="attributed", cause="data", actions=["rewind"], steps_lost=3, batches_discarded=1),
        incident(1, what="closed", cause="data", actions=["rewind"], steps_lost=3, outcome="healed"),
        {
            "event": "ended",
            "attempt": 1,
            "signal": 9,
            "failure": "rank 1 on node-2 was killed by signal 9",
            "step": 9,
        },
        {"event": "restart", "attempt": 2, "reason": "killed", "delay": 0.0},
        {"event": "host_left_out", "host": "node-2", "until": NOW + 60, "wholly": False, "strikes": 1},
        {"event": "host_left_out", "host": "node-3", "until": NOW - 60, "wholly": False, "strikes": 1},
        {"event": "launched", "attempt": 2, "hosts": ["node-1", "node-4"]},
        TRAINING | {"step": 5},
    )
    for step in (3, 5, 7):
        (run / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (run / "checkpoints" / f"step-{step}" / "manifest.json").write_text("{}")
    (run / "checkpoints" / "step-9").mkdir()  # not complete
    (run / "checkpoints" / "suspect-step-8").mkdir()
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
    assert s.attempts[0].failure == "rank 1 on node-2 was killed by signal 9" and s.attempts[0].step == 9
    (case,) = s.incidents
    assert (case.cause, case.action, case.outcome) == ("data", "rewind", "healed")
    assert [(c.name, c.size) for c in s.checkpoints] == [("step-7", None), ("step-5", 1000), ("step-3", None)]
    assert s.validation == ((5, 3.9),)
    assert json.loads(as_json(s))["steps_lost"] == 3


def test_an_alert_is_shown_until_it_is_over(run: Path) -> None:
    begun = {"event": "alert", "what": "begun", "step": 1200, "reason": "the 8 rewinds are spent"}
    journal(run, STARTED, TRAINING, incident(3, actions=["rewind", "alert"]) | begun)
    with alive(run, "supervisor", "trainer"):
        seen = look(run)
        assert seen.alert == "since step 1,200: the 8 rewinds are spent"
        assert seen.incidents[-1].action == "alert" and seen.state is State.RUNNING
        journal(run, {"event": "alert", "what": "over", "step": 1300})
        assert look(run).alert == ""


def test_what_an_earlier_attempt_wrote_is_not_of_this_one(run: Path) -> None:
    journal(run, STARTED, {"event": "launched", "attempt": 3}, begin=NOW - 5)
    progress(run, attempt=2)
    with alive(run, "supervisor", "trainer"):
        s = look(run)
    assert s.state is State.STARTING and s.trainer.pid is None and s.phase == "" and s.step == 10


@pytest.mark.parametrize(
    ("age", "seconds", "state"), [(20, 1, State.RUNNING), (40, 1, State.HUNG), (40, 9, State.RUNNING)]
)
def test_no_progress_is_noticed_by_the_run_s_own_pace(
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


def test_clocks_that_jump_make_no_negative_ages_and_no_hangs(run: Path) -> None:
    journal(run, TRAINING | {"time": NOW + 1e6}, {"event": "evaluated", "step": 2, "loss": 1.0, "time": -5.0})
    progress(run, time=NOW + 5e5)
    with alive(run, "trainer"):
        s = look(run)
    assert s.state is State.RUNNING and s.age == 0.0
    progress(run, time="nan")
    with alive(run, "trainer"):
        assert look(run).age == 1.0  # the file's own time


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"step": ',
        b"[]",
        b"\xff\xfe",
        b'{"step": "x", "loss": [], "phase": 3}',
        b'{"step": 1e999, "applied": 7}',
        b'{"seconds": "inf", "step": ' + b"9" * 40 + b"}",
    ],
)
def test_a_progress_file_that_is_none(content: bytes, run: Path) -> None:
    journal(run, TRAINING, {"event": "checkpoint", "step": 4, "name": "step-4"})
    (run / "progress.json").write_bytes(content)
    with alive(run, "trainer"):
        s = look(run)
    assert s.step == 4 and s.loss is None and s.eta is None


def test_losses_that_are_not_finite_are_shown(run: Path) -> None:
    journal(run, TRAINING)
    progress(run, loss="nan", grad_norm="inf")
    s = look(run)
    assert s.loss != s.loss and s.grad_norm == float("inf")
    assert json.loads(as_json(s))["loss"] == "nan"


def test_a_torn_and_damaged_journal(run: Path) -> None:
    journal(run, TRAINING)
    with (run / "journal.jsonl").open("ab") as file:
        file.write(b'rubbish\n{"event": "evaluated", "step": 3, "loss": 2.0}\n{"event": "finis')
    s = look(run)
    assert s.validation == ((3, 2.0),) and s.state is State.INTERRUPTED
    assert len(s.problems) == 1 and "1 damaged lines" in s.problems[0]


@pytest.mark.parametrize("recipe", [b"", b"config: [", b"config: {}", b"\xff", b"config: {train: 3}"])
def test_a_recipe_that_is_none_is_said(recipe: bytes, run: Path) -> None:
    (run / "recipe.yaml").write_bytes(recipe)
    journal(run, TRAINING)
    s = look(run)
    assert s.steps is None and "recipe.yaml" in s.problems[0]


def test_steps_of_a_batch_warmup_are_counted_by_their_samples(run: Path) -> None:
    """At position 640 a step has 16 samples: 40 more steps have, and the last 10 have 64."""
    warmup = {"start": 16, "increment": 48, "tokens": 1280 * 2048}
    tree = {"train": {"steps": 90, "global_batch": 64, "batch_warmup": warmup}, "run": {"dir": run}}
    config = RunConfig.model_validate(tree).model_dump(mode="json")
    (run / "recipe.yaml").write_text(yaml.safe_dump({"config": config, "manifests": []}))
    journal(run, TRAINING)
    with alive(run, "trainer"):
        progress(run, step=40, cursor=640, seconds=2.0)
        s = look(run)
    assert s.rate == 2.0 and s.tokens_per_second == 16 * 2048 / 2.0
    assert s.eta == 2.0 * (40 + 10 * 64 / 16)
    config["train"]["batch_warmup"]["start"] = 64  # by hand: no size is left to grow to
    (run / "recipe.yaml").write_text(yaml.safe_dump({"config": config, "manifests": [1]}))
    assert "recipe.yaml" in look(run).problems[0]


def records(run: Path, first: int, losses: list[float], stamp: int) -> None:
    (run / "steps").mkdir(exist_ok=True)
    steps = list(range(first, first + len(losses)))
    table = pa.table({"step": steps, "loss": losses, "seconds": [0.5] * len(losses), "other": steps})
    pq.write_table(table, run / "steps" / f"{first:08d}-{steps[-1]:08d}-{stamp}.parquet")


def test_recent_losses_come_from_the_records_and_from_what_was_seen(run: Path) -> None:
    journal(run, TRAINING)
    records(run, 1, [5.0, 4.0, 9.0], 1000)
    records(run, 3, [3.0], 2000)  # done again
    (run / "steps" / "00000009-00000009-3000.parquet").write_bytes(b"half a file")
    watch = RunWatch(run, lambda: NOW)
    assert watch.status().recent == ((1, 5.0), (2, 4.0), (3, 3.0))
    assert watch.status().rate == 0.5 and watch.status().tokens_per_second == 64 * 2048 / 0.5
    with alive(run, "trainer"):
        for step in range(4, 10):
            progress(run, step=step, loss=step / 10, seconds=4.0)
            status = watch.status()
        assert status.recent[2:] == ((3, 3.0), *((step, step / 10) for step in range(4, 10)))
        assert status.rate == 4.0
        # Back to an earlier step: what came after it is undone.
        progress(run, step=2, loss=4.5)
        assert watch.status().recent == ((1, 5.0), (2, 4.5))


def test_a_watch_reads_only_what_is_new_and_a_mended_journal_again(run: Path) -> None:
    journal(run, TRAINING, {"event": "discarded", "step": 3})
    watch = RunWatch(run)
    assert watch.status().refused == 1
    journal(run, {"event": "discarded", "step": 4})
    assert watch.status().refused == 2 and watch.status().refused == 2
    lines = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    (run / "journal.jsonl").write_text("".join(lines[:2]))
    assert watch.status().refused == 1
    (run / "journal.jsonl").write_text("")
    assert watch.status().refused == 1  # about to be written
    journal(run, TRAINING)
    assert watch.status().refused == 0


def test_locks_are_only_looked_at(run: Path) -> None:
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
def test_a_finished_run_whose_journal_is_gone(
    summary: dict[str, Any] | None, state: State, code: int, run: Path
) -> None:
    if summary is not None:
        (run / "summary.json").write_text(json.dumps(summary))
    progress(run, step=50)
    status = look(run)
    assert (status.state, exit_code(status)) == (state, code)
    journal(run, TRAINING)  # somebody trained it on, and is gone: the journal knows better
    assert look(run).state is State.INTERRUPTED


def test_no_run_is_an_error_that_helps(run: Path, tmp_path: Path) -> None:
    journal(run, TRAINING)
    with pytest.raises(DataError, match=r"no such directory: give the directory of a run"):
        read_status(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no such directory"):
        read_status(run / "recipe.yaml")
    with pytest.raises(DataError, match=r"not the directory of a run: those below it are: small"):
        read_status(run.parent)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"not the directory of a run: give one"):
        read_status(tmp_path / "empty")


def test_what_a_run_says_is_made_visible(run: Path) -> None:
    evil = "\x1b[2J\r\n\u202ex [bold]"
    journal(
        run,
        STARTED | {"host": evil},
        {"event": "launched", "attempt": 1},
        {"event": "ended", "attempt": 1, "failure": evil},
        {"event": evil},
        incident(1, cause=evil, verdict=evil, failure=evil, actions=[evil]),
        {"event": "warning", "step": 1, "text": evil},
        ended(76, evil),
    )
    progress(run, host=evil, phase=evil)
    found = list(texts(json.loads(as_json(look(run)))))
    assert all(text.isprintable() for text in found)
    assert sum("\\x1b[2J\\r\\n\\u202ex [bold]" in text for text in found) > 8


def texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        yield from (key for key in tree)
        tree = list(tree.values())
    if isinstance(tree, list):
        for part in tree:
            yield from texts(part)
    elif isinstance(tree, str):
        yield tree
