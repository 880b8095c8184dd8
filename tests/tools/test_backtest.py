"""The backtest's command line: tables, files and pictures of a trace or of a run, and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megastable.commands.backtest import app
from megastable.run.directory import RunDirectory
from megastable.run.records import Recorder
from tests.conftest import tiny
from tests.guard.traces import SyntheticRun, healthy, spike
from tests.run.test_records import record
from tests.tools.cli import Done, call

FIRST, LENGTH = 200, 40


Call = Callable[..., Done]


@pytest.fixture
def backtest(tmp_path: Path) -> Call:
    return partial(call, app, cwd=tmp_path)


def refuse(backtest: Call, *arguments: object) -> str:
    done = backtest(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    return done.stderr


def write(path: Path, run: SyntheticRun) -> Path:
    lines = [f"{s.step},{s.loss},{'' if s.grad_norm is None else s.grad_norm}" for s in run]
    path.write_text("\n".join(["step,loss,grad_norm", *lines]) + "\n")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.csv", spike(healthy(320, seed=1), FIRST, length=LENGTH))


def decisions(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())
    assert all(list(row) == ["step", "verdict", "action", "reason", "reset"] for row in found)
    return list(found)


def actions(path: Path) -> list[str]:
    return [row["action"] for row in decisions(path) if row["action"] not in ("apply", "discard")]


def test_a_trace(backtest: Call, trace: Path) -> None:
    out = trace.with_name("out.json")
    result = backtest(trace, "--output", out)
    assert (result.returncode, result.stderr) == (0, "")
    found = decisions(out)
    assert [row["step"] for row in found] == list(range(320))
    (rewind,) = [row for row in found if row["action"] == "rewind"]
    assert FIRST <= rewind["step"] <= FIRST + 5 and rewind["reason"]
    assert found[0] == {"step": 0, "verdict": "healthy", "action": "apply", "reason": "", "reset": False}
    for part in (str(trace), "│ rewind", "320 steps; ", "1 rewind", "part of the excursion"):
        assert part in result.stdout


def recorded_run(root: Path, **stability: Any) -> Path:
    """A run that went back from step 205 to 195: what it did again is harmless, as the recording says, too."""
    run = RunDirectory(root)
    root.mkdir()
    run.freeze_recipe(tiny(root / "corpus that is gone", root, stability=stability), [], {})
    calm = healthy(320, seed=1)
    bad = spike(calm, FIRST, length=LENGTH)
    recorder = Recorder(run.steps, 50)
    run.steps.mkdir()
    passes = [(bad, range(205)), (calm, range(195, 320))]
    for number, (values, steps) in enumerate(passes):
        assert values.norm is not None
        for step in steps:
            norm = float(values.norm[step])
            time = 1000.0 * number + step
            recorder.add_records(record(step, time, loss=float(values.loss[step]), grad_norm=norm, lr=1e-3))
    recorder.flush_records()
    return root


def test_a_run_is_judged_by_what_it_met_first(backtest: Call, tmp_path: Path) -> None:
    run, out = recorded_run(tmp_path / "run"), tmp_path / "out.json"
    before = sorted(run.rglob("*"))
    result = backtest(run, "--output", out)
    assert (result.returncode, result.stderr) == (0, "")
    assert [row["step"] for row in decisions(out)] == list(range(320))
    assert actions(out) == ["rewind"]
    assert sorted(run.rglob("*")) == before


# Pictures


# Errors


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.steps=5"], "train.steps=5: only stability.KEY=VALUE has an influence"),
        (["stability.policy.discards=2", "model.layers=3"], "model.layers=3: only stability"),
        (["other.csv"], "other.csv: only stability"),
        (["stability.policy.discard=2"], "unknown key; did you mean stability.policy.discards"),
        (["stability.policy.discards=-1"], "stability.policy.discards=-1: "),
        (["stability.policy.discards=many"], "stability.policy.discards='many': "),
        (["stability.policy.discards"], "an override is written key=value"),
        (["stability.policy=3"], "stability.policy"),
        (["stability..x=3"], "an override is written key=value"),
    ],
)
def test_bad_overrides(
    overrides: list[str], message: str, backtest: Call, trace: Path, tmp_path: Path
) -> None:
    assert message in refuse(backtest, trace, *overrides)
    assert message in refuse(backtest, recorded_run(tmp_path / "run"), *overrides)


def test_bad_sources(backtest: Call, tmp_path: Path) -> None:
    assert "none.csv cannot be read" in refuse(backtest, tmp_path / "none.csv")
    (tmp_path / "bad.csv").write_text("step,loss\n1,2\n0,2\n")
    assert "bad.csv line 3: step 0 after 1" in refuse(backtest, tmp_path / "bad.csv")
    for name in ("steps", "."):
        (tmp_path / "run" / name).mkdir(parents=True, exist_ok=True)
        assert "no step records in" in refuse(backtest, tmp_path / "run")
    run = recorded_run(tmp_path / "whole")
    files = sorted((run / "steps").iterdir())
    content = files[0].read_bytes()
    files[0].write_bytes(content[:-50])
    assert f"{files[0]}: not a readable record file" in refuse(backtest, run)
    files[0].write_bytes(content)
    (run / "recipe.yaml").write_text("config: {modell: {}}\nmanifests: []\n")
    assert "modell: unknown key" in refuse(backtest, run)
    (run / "recipe.yaml").unlink()
    assert "recipe.yaml: no such recipe" in refuse(backtest, run)
