"""Checkpoints are evaluated by a program of the recipe: once, the newest first, and whatever the program does."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megastable.base.errors import DataError
from megastable.checkpoint.plain import load_plain
from megastable.config.tree import RunConfig
from megastable.model.loss import cross_entropy
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import TasksSkipped
from megastable_tools.downstream import evaluator
from megastable_tools.downstream.evaluator import (
    MOST,
    Evaluator,
    SavedCheckpoint,
    find_next_due,
    list_saved_checkpoints,
    read_scores,
    scores_of,
)  # fmt: skip
from tests.convert.huggingface.conftest import text_corpus, tokenizer
from tests.downstream.complete_run import TOKENS, complete_run, settings
from tests.full_disk import files_no_larger_than
from tests.journal import note
from tests.patience import PATIENCE, until

__all__ = ["text_corpus", "tokenizer"]  # fixtures
STEPS = 6
SCORE = "import json, sys; json.dump({'arc': {'step': int(sys.argv[2])}}, open(sys.argv[1], 'w'))"
# The loss of some tokens, by Hugging Face's own code.
LOSS = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.arange(1, 41)[None]
with torch.no_grad():
    loss = model(input_ids=ids, labels=ids).loss
found = {"loss,none": float(loss), "loss_stderr,none": 0.1, "alias": "x"}
json.dump({"results": {"ids": found}}, open(sys.argv[2], "w"))
"""
# A child of its own that hears no signal.
HANG = """
import signal, subprocess, sys, time
code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""
EVALUATION = """
import os, sys
from pathlib import Path
from megastable.config.tree import RunConfig
from megastable_tools.downstream.evaluator import Evaluator
from megastable.run.directory import RunDirectory
run, *words = sys.argv[1:]
Evaluator(RunConfig(), RunDirectory(Path(run)), os.getppid())._run("the program", words)
"""


@pytest.fixture(scope="module")
def trained(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A complete run with a checkpoint of every second step; its journal is the tests'."""
    config = settings(text_corpus, tmp_path_factory.mktemp("trained") / "run", STEPS)
    complete_run(config, range(2, STEPS + 1, 2))
    return config


def python(code: str, *more: str) -> str:
    return shlex.join([sys.executable, "-c", code, *more])


def asking(trained: RunConfig, command: str, **settings: Any) -> RunConfig:
    given = {"command": command, "interval": 2, **settings}
    return trained.model_copy(update={"eval": type(trained.eval).model_validate(given)})


def run_of(trained: RunConfig) -> RunDirectory:
    """The run, without what was journaled of evaluations before."""
    assert trained.run.dir is not None
    run = RunDirectory(trained.run.dir)
    lines = run.journal.read_text().splitlines(keepends=True)
    run.journal.write_text("".join(line for line in lines if '"tasks_' not in line))
    return run


def told(run: RunDirectory) -> list[dict[str, Any]]:
    entries = map(json.loads, run.journal.read_text().splitlines())
    return [entry for entry in entries if entry["event"].startswith("tasks_")]


def evaluate(config: RunConfig, run: RunDirectory) -> list[dict[str, Any]]:
    Evaluator(config, run, os.getppid()).watch_checkpoints()
    return told(run)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_evaluator_takes_the_newest_and_finds_the_loss_of_the_plain_model(
    trained: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    run = run_of(trained)
    config = asking(trained, python(LOSS, "{model}", "{results}"), dtype="fp32", scratch=tmp_path / "scratch")
    left = Evaluator(config, run, os.getppid()).folder / "model"  # by a process that was killed
    left.mkdir(parents=True)
    *passed, found = evaluate(config, run)
    assert [(one["event"], one["checkpoint"], one["reason"]) for one in passed] == [
        ("tasks_skipped", "step-2", "step-6 is there already"), ("tasks_skipped", "step-4", "step-6 is there already"),
    ]  # fmt: skip
    assert (found["event"], found["checkpoint"], found["of_step"]) == ("tasks_evaluated", "step-6", 6)
    assert found["tokens"] == STEPS * TOKENS and set(found["scores"]) == {"ids/loss"}
    model = load_plain(run.checkpoints / "step-6")
    ids = torch.arange(1, 41)[None]
    with torch.no_grad():
        losses = cross_entropy(model(ids[:, :-1]), ids[:, 1:], model.vocabulary)[0]
    assert found["scores"]["ids/loss"] == pytest.approx(float(losses.mean()), abs=1e-4)
    # Another process evaluates nothing twice, and leaves nothing behind.
    assert evaluate(config, run) == [*passed, found]
    assert not list((tmp_path / "scratch").iterdir())
    # A disk that is nearly full is left to training, a checkpoint that was deleted is told of; neither is tried again.
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(evaluator.shutil, "disk_usage", lambda path: usage)
    (failed,) = evaluate(config, run_of(trained))[-1:]
    assert failed["event"] == "tasks_failed" and "make room, or set eval.scratch" in failed["reason"]
    assert evaluate(config, run)[-1] == failed
    Evaluator(config, run, os.getppid())._evaluate(SavedCheckpoint("step-3", 3, "m"))
    assert told(run)[-1]["event"] == "tasks_failed" and told(run)[-1]["checkpoint"] == "step-3"


def test_evaluator_quotes_a_program_that_fails(trained: RunConfig) -> None:
    evaluator = Evaluator(trained, run_of(trained), os.getppid())
    for code, reason in (
        ("import sys; sys.exit('no such task')", "the program ended with code 1: no such task"),
        ("import os; os.kill(os.getpid(), 9)", "the program was killed by signal 9"),
    ):
        with pytest.raises(DataError) as raised:
            evaluator._run("the program", [sys.executable, "-c", code])
        assert str(raised.value) == reason


def test_evaluator_waits_for_a_journal_that_cannot_be_written(
    trained: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that did not know of them would evaluate the checkpoint again."""
    run, event = run_of(trained), TasksSkipped(checkpoint="step-2", of_step=2, manifest="m", reason="")
    started, waited = Evaluator(trained, run, os.getppid()), list[float]()
    with ExitStack() as full:
        full.enter_context(files_no_larger_than(run.journal.stat().st_size))

        def wait(seconds: float) -> None:
            assert told(run) == []
            waited.append(seconds)
            if len(waited) == 2:
                full.close()

        monkeypatch.setattr(started, "_wait", wait)
        monkeypatch.setattr(started.log, "console", lambda text: None)  # this process's may be a file
        started._tell(event)
    assert len(waited) == 2 and [one["checkpoint"] for one in told(run)] == ["step-2"]


def test_evaluator_ends_a_program_that_hangs_with_all_that_it_started(
    trained: RunConfig, tmp_path: Path
) -> None:
    run, pid_file, limit = run_of(trained), tmp_path / "pid", 0.5
    # On a busy machine it may have started nothing by then.
    while not pid_file.exists() or not pid_file.read_text():
        limit *= 2
        config = asking(trained, python(HANG, str(pid_file), "{model}{results}"), timeout=limit)
        words = config.eval.fill_command(Path("m"), Path("r"), 6)
        with pytest.raises(DataError, match=f"the program was not done after {limit:g} s, and was ended"):
            Evaluator(config, run, os.getppid())._run("the program", words)
    pid = int(pid_file.read_text())
    until(lambda: gone(pid))


def test_evaluator_waits_for_another_one(
    trained: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another one waits, and looks only then at what is done: that of a killed supervisor may journal scores yet."""
    run, hold = run_of(trained), evaluator.durable.lock_file
    config = asking(trained, python(SCORE, "{results}", "{step}", "{model}"), interval=STEPS)
    monkeypatch.setattr(evaluator.durable, "lock_file", lambda path: hold(path, 0.0))
    (last,) = (one for one in list_saved_checkpoints(run) if one.step == STEPS)
    with ExitStack() as other:
        held = hold(run.root / ".evaluation.lock")
        assert held is not None
        other.enter_context(held)
        started, waited = Evaluator(config, run, os.getppid()), list[float]()

        def wait(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 2:
                fields = {"checkpoint": last.name, "of_step": last.step, "manifest": last.manifest}
                note(run, "tasks_evaluated", **fields, tokens=1, scores={"a": 1.0}, seconds=1.0)
                other.close()

        monkeypatch.setattr(started, "_wait", wait)
        started.watch_checkpoints()
    assert len(waited) == 2 and capsys.readouterr().out.count("waiting for its end") == 1
    assert [one["checkpoint"] for one in told(run)] == ["step-6"]


def test_killed_evaluator_leaves_no_program(trained: RunConfig, tmp_path: Path) -> None:
    """One that is asked to end is in test_beside_a_run.py."""
    run, pid_file = run_of(trained), tmp_path / "pid"
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    words = [str(run.root), sys.executable, "-c", code, str(pid_file)]
    process = subprocess.Popen(
        [sys.executable, "-c", EVALUATION, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )

    def pid() -> int:
        if process.poll() is not None:
            assert process.stdout is not None
            pytest.fail(process.stdout.read().decode())
        return int((pid_file.read_text() if pid_file.exists() else "") or 0)

    found = until(pid)
    process.kill()
    process.wait(PATIENCE)
    until(lambda: gone(found))


def test_evaluator_hides_a_gpu_unless_it_is_asked_for(trained: RunConfig, tmp_path: Path) -> None:
    environment = "os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['OMP_NUM_THREADS']"
    code = (
        f"import os, sys; seen = [{environment}, open('/proc/self/oom_score_adj').read()]; "
        "open(sys.argv[1], 'w').write(repr(seen))"
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = "3"
    for device, seen in (("cpu", ""), ("cuda:0", "3")):
        command = python(code, str(tmp_path / "seen"), "{model}{results}")
        config = asking(trained, command, device=device, threads=2)
        words = config.eval.fill_command(Path("m"), Path("r"), 6)
        Evaluator(config, run_of(trained), os.getppid())._run("it", words)
        assert (tmp_path / "seen").read_text() == repr([seen, "2", "1000\n"])


ARC = {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 1, "sample_len": 9}
HARNESS = {"results": {"arc": ARC}, "config": {"model": "hf", "limit": 3}}


@pytest.mark.parametrize(
    ("content", "scores"),
    [
        (HARNESS, {"arc/acc": 0.5, "arc/em,strict": 1.0}),
        ({"a": 1, "b": 0.5}, {"a": 1.0, "b": 0.5}),
        ({"a": {"x": 1}, "b": "no", "c": True, "d": float("nan"), "e": None}, {"a/x": 1.0}),
        ({"results": 5}, {"results": 5.0}),
        ([1, 2], {}), (None, {}), ({}, {}), ({"results": {}}, {}),
    ],
)  # fmt: skip
def test_scores_of(content: Any, scores: dict[str, float]) -> None:
    assert scores_of(content) == scores


def test_read_scores_takes_the_newest_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no results"):
        read_scores(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/results_2026.json").write_text(json.dumps(HARNESS))
    (tmp_path / "samples.json").write_text("{")
    assert read_scores(tmp_path) == {"arc/acc": 0.5, "arc/em,strict": 1.0}
    (tmp_path / "results.json").write_text(json.dumps({str(n): n for n in range(MOST + 1)}))
    with pytest.raises(DataError, match="1,001 numbers"):
        read_scores(tmp_path)
    for text, problem in (("{", "is no JSON"), ("[1]", "has no numbers"), ("[" * 100_000, "is no JSON")):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(DataError, match=problem):
            read_scores(tmp_path)


def at(*steps: int, manifest: str = "a") -> list[SavedCheckpoint]:
    return [SavedCheckpoint(f"step-{step}", step, manifest) for step in steps]


@pytest.mark.parametrize(
    ("there", "settled", "due", "passed"),
    [
        ([], [], None, []),
        (at(25, 50, 75), [], None, []),  # before the first multiple of 100
        (at(50, 120, 150), [], 120, []),  # the first one after it
        (at(100, 200, 300), [], 300, [100, 200]),
        (at(100, 200, 300), [(300, "a")], 200, [100]),
        (at(100, 200), [(100, "a"), (200, "a")], None, []),
        (at(150), [(100, "a")], None, []),  # 100 was deleted
        (at(200, manifest="b"), [(100, "a"), (200, "a")], 200, []),  # after a rewind
        (at(950, 1000), [(900, "a")], 1000, []),  # the last one
        (at(930, 1000), [(900, "a"), (1000, "a")], None, []),
        (at(1000, 1010), [(1000, "a")], 1010, []),
    ],
)  # fmt: skip
def test_next_due(
    there: list[SavedCheckpoint], settled: list[tuple[int, str]], due: int | None, passed: list[int]
) -> None:
    found, older = find_next_due(there, settled, 100, 1000)
    assert (found.step if found else None, [one.step for one in older]) == (due, passed)
