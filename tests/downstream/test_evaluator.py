"""Checkpoints are evaluated by a program of the recipe: once, the newest first, and whatever the program does."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from megastable.checkpoint.plain import load_plain
from megastable.config.tree import RunConfig
from megastable.downstream import evaluator
from megastable.downstream.due_checkpoints import SavedCheckpoint
from megastable.downstream.evaluator import Evaluator, Leaving, saved
from megastable.model.loss import cross_entropy
from megastable.run.directory import RunDirectory
from tests.conftest import tiny
from tests.convert.huggingface.conftest import VOCABULARY, text_corpus, tokenizer
from tests.distributed import run_ranks
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


def train(config: RunConfig) -> int:
    from megastable.train import train

    return train(config, Path("recipe.yaml"))


@pytest.fixture(scope="module")
def trained(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A complete run with a checkpoint of every second step; its journal is the tests'."""
    config = tiny(
        text_corpus, tmp_path_factory.mktemp("trained") / "run", model={"vocab_size": VOCABULARY},
        train={"steps": STEPS}, checkpoint={"interval": 2, "keep": 9}, precision={"kind": "fp32"},
    )  # fmt: skip
    assert run_ranks(1, train, config) == [0]
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
    Evaluator(config, run, os.getppid()).watch()
    return told(run)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_the_newest_is_evaluated_with_the_loss_of_the_plain_model(trained: RunConfig, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = run_of(trained)
    config = asking(trained, python(LOSS, "{model}", "{results}"), dtype="fp32", scratch=tmp_path / "scratch")
    *passed, found = evaluate(config, run)
    assert [(one["event"], one["checkpoint"], one["reason"]) for one in passed] == [
        ("tasks_skipped", "step-2", "step-6 is there already"), ("tasks_skipped", "step-4", "step-6 is there already"),
    ]  # fmt: skip
    assert (found["event"], found["checkpoint"], found["of_step"]) == ("tasks_evaluated", "step-6", 6)
    assert found["tokens"] == STEPS * 8 * 32 and set(found["scores"]) == {"ids/loss"}
    model = load_plain(run.checkpoints / "step-6")
    ids = torch.arange(1, 41)[None]
    with torch.no_grad():
        losses = cross_entropy(model(ids[:, :-1]), ids[:, 1:], model.vocabulary)[0]
    assert found["scores"]["ids/loss"] == pytest.approx(float(losses.mean()), abs=1e-4)
    # Another process evaluates nothing twice, and leaves nothing behind.
    assert evaluate(config, run) == [*passed, found]
    assert not list((tmp_path / "scratch").iterdir())


def test_a_program_that_fails_is_told_of_and_not_tried_again(trained: RunConfig) -> None:
    run = run_of(trained)
    code = "import sys; sys.exit('no such task')"
    config = asking(trained, python(code, "{results}", "{model}"), interval=STEPS)
    (found,) = evaluate(config, run)
    assert found["event"] == "tasks_failed"
    assert found["reason"] == "the program ended with code 1: no such task"
    assert evaluate(config, run) == [found] and not (run.root / "evaluation").exists()


def test_a_program_that_hangs_is_ended_with_all_that_it_started(trained: RunConfig, tmp_path: Path) -> None:
    run = run_of(trained)
    config = asking(trained, python(HANG, str(tmp_path / "pid"), "{model}{results}"), timeout=3.0)
    started, words = Evaluator(config, run, os.getppid()), config.eval.words(Path("m"), Path("r"), 6)
    with pytest.raises(Exception, match="the program was not done after 3 s, and was ended"):
        started._run("the program", words)
    pid = int((tmp_path / "pid").read_text())
    until(lambda: gone(pid))


def test_a_disk_that_is_nearly_full_is_left_to_training(
    trained: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(trained)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(evaluator.shutil, "disk_usage", lambda path: usage)
    config = asking(trained, python(SCORE, "{results}", "{step}", "{model}"), interval=STEPS)
    (found,) = evaluate(config, run)
    assert found["event"] == "tasks_failed" and "make room, or set eval.scratch" in found["reason"]


def test_a_checkpoint_that_was_deleted_is_told_of(trained: RunConfig) -> None:
    run = run_of(trained)
    config = asking(trained, python(SCORE, "{results}", "{step}", "{model}"))
    Evaluator(config, run, os.getppid())._evaluate(SavedCheckpoint("step-3", 3, "m"))
    (found,) = told(run)
    assert found["event"] == "tasks_failed" and found["checkpoint"] == "step-3"


def test_one_at_a_time(trained: RunConfig) -> None:
    run = run_of(trained)
    config = asking(trained, python(HANG, "/dev/null", "{model}{results}"))
    with evaluator.durable.hold(run.root / ".evaluation.lock") as held:  # type: ignore[union-attr]
        assert held is not None
        with pytest.raises(Exception, match="another process evaluates this run already"):
            Evaluator(config, run, os.getppid()).watch()


def test_a_program_that_is_not_there_is_named(trained: RunConfig) -> None:
    with pytest.raises(Exception, match="'no-such-program' is not a program"):
        evaluate(asking(trained, "no-such-program {model} {results}"), run_of(trained))


def test_it_ends_with_the_process_that_started_it(trained: RunConfig) -> None:
    run = run_of(trained)
    config = asking(trained, python(SCORE, "{results}", "{step}", "{model}"))
    with pytest.raises(Leaving):
        Evaluator(config, run, parent=1)._wait(0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_does_not_outlive_the_evaluation(trained: RunConfig, tmp_path: Path, number: int) -> None:
    """Nor is a checkpoint lost by that: the next process evaluates it."""
    run = run_of(trained)
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    config = asking(trained, python(code, str(tmp_path / "pid"), "{model}{results}"), interval=STEPS)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "megastable.downstream.evaluator", str(run.root), str(recipe)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def pid() -> int:
        if process.poll() is not None:
            assert process.stdout is not None
            pytest.fail(process.stdout.read().decode())
        text = (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""
        return int(text or 0)

    found = until(pid)
    process.send_signal(number)
    assert process.wait(PATIENCE) == (0 if number == signal.SIGTERM else -number)
    until(lambda: gone(found))
    assert told(run) == []
    assert (run.root / "evaluation").exists() == (number == signal.SIGKILL)
    (done,) = evaluate(asking(trained, python(SCORE, "{results}", "{step}", "{model}"), interval=STEPS), run)
    assert done["scores"] == {"arc/step": 6.0} and not (run.root / "evaluation").exists()


def test_checkpoints_are_known_by_their_manifests(trained: RunConfig, tmp_path: Path) -> None:
    found = sorted(saved(run_of(trained)), key=lambda one: one.step)
    assert [one.name for one in found] == ["step-2", "step-4", "step-6"]
    assert len({one.manifest for one in found}) == 3
    assert saved(RunDirectory(tmp_path)) == []


def test_a_gpu_is_hidden_unless_it_is_asked_for(trained: RunConfig, tmp_path: Path) -> None:
    environment = "os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['OMP_NUM_THREADS']"
    code = (
        f"import os, sys; seen = [{environment}, open('/proc/self/oom_score_adj').read()]; "
        "open(sys.argv[1], 'w').write(repr(seen))"
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = "3"
    for device, seen in (("cpu", ""), ("cuda:0", "3")):
        config = asking(
            trained, python(code, str(tmp_path / "seen"), "{model}{results}"), device=device, threads=2
        )
        Evaluator(config, run_of(trained), os.getppid())._run(
            "it", config.eval.words(Path("m"), Path("r"), 6)
        )
        assert (tmp_path / "seen").read_text() == repr([seen, "2", "1000\n"])
