"""Trials in processes of their own: failures, divergence, isolation, and an end that leaves nothing behind."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megastable.base.errors import DataError
from megastable_tools.study.trial import QUIET, Trial, TrialResult
from megastable_tools.study.workers import run_trials
from tests.patience import PATIENCE

FEW = (*QUIET, "train.steps=4")


def results(recipe: Path, folder: Path, trials: list[Trial], jobs: int = 2) -> dict[str, TrialResult]:
    found: dict[str, TrialResult] = {}
    run_trials(recipe, trials, folder, jobs, lambda trial, result: found.update({trial.name: result}))
    return found


@pytest.mark.slow
def test_a_trial_does_not_disturb_the_next_one(tiny_recipe: Path, tmp_path: Path) -> None:
    """The same one alone, after another kind, and beside one."""
    same, other = ("optimizer.lr=0.01",), ("model.layers=1", "precision.kind=fp32", "optimizer.name=sgd")
    trials = [Trial(str(i), (*FEW, *(same if i % 2 == 0 else other))) for i in range(4)]
    alone = results(tiny_recipe, tmp_path / "a", trials[:1], 1)["0"]
    found = results(tiny_recipe, tmp_path / "b", trials, 2)
    assert found["0"].losses == found["2"].losses == alone.losses != found["1"].losses


@pytest.mark.slow
def test_divergence_is_a_result(tiny_recipe: Path, tmp_path: Path) -> None:
    """Weights beyond fp16's range: nan from some step on, and the run goes on to its end."""
    broken = (*FEW, "train.steps=8", "precision.kind=fp16", "optimizer.lr=1e7", "schedule.warmup_steps=1")
    found = results(tiny_recipe, tmp_path / "a", [Trial("x", broken)])["x"]
    assert len(found.losses) == 8 and math.isfinite(found.losses[0]) and found.final == math.inf
    assert found.diverged and found.capped == found.first


def test_a_model_that_is_broken_from_the_start_is_no_result(tiny_recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="first batch"):
        results(
            tiny_recipe, tmp_path / "a", [Trial("x", (*FEW, "precision.kind=fp16", "model.init_std=1e30"))]
        )


def test_a_run_that_fails_names_its_output(tiny_recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"(?s)run bad ended with code 2:.*no.* a prepared corpus.*bad/output\.log"
    ) as told:
        results(tiny_recipe, tmp_path / "a", [Trial("bad", (*FEW, "data.corpora.0.path=none"))])
    log = str(told.value).rsplit(": ", 1)[1]
    assert "none" in Path(log).read_text()


def test_the_leavings_of_a_killed_study_are_no_obstacle(tiny_recipe: Path, tmp_path: Path) -> None:
    half = tmp_path / "a/x"
    (half / "steps").mkdir(parents=True)
    (half / "recipe.yaml").write_text("{")
    assert math.isfinite(results(tiny_recipe, tmp_path / "a", [Trial("x", FEW)])["x"].final)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_runs_end_with_the_study(how: signal.Signals, tiny_recipe: Path, tmp_path: Path) -> None:
    """Ctrl-C on a terminal goes to the whole process group; a kill to the study alone. Both leave what goes on."""
    given = [
        "study",
        "compare",
        str(tiny_recipe),
        "--of",
        "",
        "--of",
        "model.z_loss=0",
        "--seeds",
        "1",
        "--jobs",
        "2",
    ]
    command = [
        sys.executable,
        "-m",
        "megastable.cli",
        *given,
        "--output",
        str(tmp_path / "a"),
        "train.steps=1000000",
    ]
    study = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        runs = tmp_path / "a/runs"
        progress = [runs / f"{i}-s1/progress.json" for i in range(2)]
        _wait(lambda: all('"phase": "step"' in _text(path) for path in progress))
        (os.killpg if how is signal.SIGINT else os.kill)(study.pid, how)
        said = study.communicate(timeout=PATIENCE)[1]
        assert study.returncode == (130 if how is signal.SIGINT else -how)
        assert said == ("interrupted\n" if how is signal.SIGINT else "")
        _wait(lambda: not _running(runs))
        assert json.loads((tmp_path / "a/study.json").read_text())["kind"] == "compare"
    finally:
        study.kill()


def _running(folder: Path) -> bool:
    """Whether a process has its output there."""
    for fd in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if str(fd.readlink()).startswith(str(folder)):
                return True
        except OSError:
            continue
    return False


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _wait(until: object) -> None:
    assert callable(until)
    end = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < end
        time.sleep(0.05)
