"""The backtest's command line: tables, files and pictures of a trace or of a run, and its errors."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from megastable.commands.backtest import app
from megastable.run.directory import RunDirectory
from megastable.run.records import Recorder
from tests.conftest import tiny
from tests.guard.traces import Run, healthy, spike
from tests.run.test_records import record

ROOT = Path(__file__).parents[2]
FIRST, LENGTH = 200, 40


class Call:
    """backtest(arguments...) as a user types it, in this process, in a terminal 200 columns wide."""

    def __call__(self, *arguments: object) -> Result:
        result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    def fails(self, *arguments: object) -> str:
        result = self(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
        return result.stderr


@pytest.fixture
def backtest() -> Call:
    return Call()


def write(path: Path, run: Run) -> Path:
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
    assert (result.exit_code, result.stderr) == (0, "")
    found = decisions(out)
    assert [row["step"] for row in found] == list(range(320))
    (rewind,) = [row for row in found if row["action"] == "rewind"]
    assert FIRST <= rewind["step"] <= FIRST + 5 and rewind["reason"]
    assert found[0] == {"step": 0, "verdict": "healthy", "action": "apply", "reason": "", "reset": False}
    for part in (str(trace), "│ rewind", "320 steps; ", "1 rewind", "part of the excursion"):
        assert part in result.stdout


def test_nothing_happened(backtest: Call, tmp_path: Path) -> None:
    path = write(tmp_path / "calm.csv", healthy(120, seed=1))
    result = backtest(path)
    assert result.exit_code == 0 and result.stdout == f"{path}: 120 steps; nothing would have been done\n"
    assert os.listdir(tmp_path) == ["calm.csv"]


def test_lines_that_are_passed_over_are_said(backtest: Call, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n1,3\n2,\n3,3\n4,3\n3,2.9\n5,2.8\n")
    result = backtest(path)
    assert result.exit_code == 0 and "4 steps" in result.stdout
    assert "1 lines without a loss" in result.stderr and "a restart" in result.stderr


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ["rewind"]),
        (["stability.snapshots.interval=0"], ["handover"]),
        (["stability.policy.rewinds=0", "stability.policy.handovers=0"], ["alert"]),
        (
            [
                "stability.policy.last_resort=stop",
                "stability.policy.rewinds=0",
                "stability.policy.handovers=0",
            ],
            ["stop"],
        ),
        (["stability.detector.warmup_steps=1000"], []),
    ],
)
def test_overrides_change_the_outcome(
    overrides: list[str], expected: Sequence[str], backtest: Call, trace: Path
) -> None:
    """Before, between and after the options."""
    out = trace.with_name("out.json")
    assert backtest(trace, *overrides[:1], "--output", out, *overrides[1:]).exit_code == 0
    assert actions(out) == expected


def recorded_run(root: Path, **stability: Any) -> Path:
    """A run that went back from step 205 to 195: what it did again is harmless, as the recording says, too."""
    run = RunDirectory(root)
    root.mkdir()
    run.freeze(tiny(root / "corpus that is gone", root, stability=stability), [], {})
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
            recorder.add(record(step, time, loss=float(values.loss[step]), grad_norm=norm, lr=1e-3))
    recorder.flush()
    return root


def test_a_run_is_judged_by_what_it_met_first(backtest: Call, tmp_path: Path) -> None:
    run, out = recorded_run(tmp_path / "run"), tmp_path / "out.json"
    before = sorted(run.rglob("*"))
    result = backtest(run, "--output", out)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [row["step"] for row in decisions(out)] == list(range(320))
    assert actions(out) == ["rewind"]
    assert sorted(run.rglob("*")) == before


def test_the_thresholds_are_those_of_the_run_and_can_be_overridden(backtest: Call, tmp_path: Path) -> None:
    run, out = recorded_run(tmp_path / "run", snapshots={"interval": 0}), tmp_path / "out.json"
    assert backtest(run, "--output", out).exit_code == 0
    assert actions(out) == ["handover"]
    assert backtest(run, "--output", out, "stability.snapshots.interval=10").exit_code == 0
    assert actions(out) == ["rewind"]


def test_an_overflow_of_fp16_is_not_judged(backtest: Call, tmp_path: Path) -> None:
    """The loss scale comes down by it, from 2^16 on: many steps in a row, and no incident. At scale 1 it is one."""
    run, out = tmp_path / "run", tmp_path / "out.json"
    run.mkdir()
    RunDirectory(run).freeze(tiny(run, run, precision={"kind": "fp16"}), [], {})
    recorder = Recorder(run / "steps", 50)
    (run / "steps").mkdir()
    for step in range(40):
        overflow = {"finite": False, "grad_norm": math.inf, "applied": False} if step in (3, 4, 5, 30) else {}
        recorder.add(record(step, loss_scale=1.0 if step == 30 else 2.0 ** (16 - step // 2), **overflow))
    recorder.flush()
    assert backtest(run, "--output", out).exit_code == 0
    found = decisions(out)
    assert [row["step"] for row in found] == [s for s in range(40) if s not in (3, 4, 5)]
    assert [row["step"] for row in found if row["verdict"] == "non_finite"] == [30]


# Pictures


@pytest.mark.slow
@pytest.mark.parametrize(("name", "begin"), [("o.png", b"\x89PNG"), ("o.svg", b"<?xml"), ("o.pdf", b"%PDF")])
def test_a_picture(name: str, begin: bytes, backtest: Call, trace: Path) -> None:
    path = trace.with_name(name)
    assert backtest(trace, "--plot", path).exit_code == 0
    assert path.read_bytes().startswith(begin) and path.stat().st_size > 5000


def test_what_happened_is_in_the_picture(backtest: Call, tmp_path: Path) -> None:
    """A title with characters that mean something to matplotlib and rich; the legend names what was done."""
    (tmp_path / "[").mkdir()
    path = write(tmp_path / "[" / "x] a$b_^$ & c.csv", spike(healthy(320, seed=1), FIRST, length=LENGTH))
    result = backtest(path, "--plot", tmp_path / "o.svg")
    assert result.exit_code == 0 and "[/x] a$b" in result.stdout
    text = (tmp_path / "o.svg").read_text()
    assert "<!-- rewind -->" in text and "<!-- handover -->" not in text
    assert "x] a$b_^$ &amp; c.csv" in text


@pytest.mark.quick("rows1")
@pytest.mark.parametrize(
    "rows",
    [
        ["1,nan,nan", "2,nan,inf"],
        ["1,inf,", "2,-inf,"],
        ["1,2.5,0.5"],
        ["1,2.5,0", "2,2.5,-1"],
        ["1,1e308,1e308", "2,-1e308,1e-308", "3,2,1"],
        ["-9007199254740992,2.5,1", "9007199254740992,2.5,1"],
    ],
)
def test_a_picture_of_anything(rows: list[str], backtest: Call, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\n".join(["step,loss,grad_norm", *rows]))
    assert backtest(tmp_path / "t.csv", "--plot", tmp_path / "o.png").exit_code == 0
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


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
    assert message in backtest.fails(trace, *overrides)
    assert message in backtest.fails(recorded_run(tmp_path / "run"), *overrides)


def test_bad_sources(backtest: Call, tmp_path: Path) -> None:
    assert "none.csv cannot be read" in backtest.fails(tmp_path / "none.csv")
    (tmp_path / "bad.csv").write_text("step,loss\n1,2\n0,2\n")
    assert "bad.csv line 3: step 0 after 1" in backtest.fails(tmp_path / "bad.csv")
    for name in ("steps", "."):
        (tmp_path / "run" / name).mkdir(parents=True, exist_ok=True)
        assert "no step records in" in backtest.fails(tmp_path / "run")
    run = recorded_run(tmp_path / "whole")
    files = sorted((run / "steps").iterdir())
    content = files[0].read_bytes()
    files[0].write_bytes(content[:-50])
    assert f"{files[0]}: not a readable record file" in backtest.fails(run)
    files[0].write_bytes(content)
    (run / "recipe.yaml").write_text("config: {modell: {}}\nmanifests: []\n")
    assert "modell: unknown key" in backtest.fails(run)
    (run / "recipe.yaml").unlink()
    assert "recipe.yaml: no such recipe" in backtest.fails(run)


def test_files_that_cannot_be_written(backtest: Call, trace: Path, tmp_path: Path) -> None:
    """The decisions are shown all the same."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for option, name in (("--plot", "out.png"), ("--output", "out.json")):  # before anything is replayed
        path = tmp_path / "no" / name
        assert f"{option} {path}: there is no directory {path.parent}" in backtest.fails(trace, option, path)
    for path in (folder, tmp_path / "out.xyz"):
        assert f"--plot {path}: a name ending in .png, .svg, .pdf" in backtest.fails(trace, "--plot", path)
    result = backtest(trace, "--output", folder)
    assert result.exit_code == 2 and "1 rewind" in result.stdout
    assert result.stderr == f"error: {folder} could not be written: Is a directory\n"
    assert sorted(os.listdir(tmp_path)) == ["folder", "trace.csv"] and os.listdir(folder) == []


def test_a_device_is_written_to_and_not_replaced(backtest: Call, trace: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert backtest(trace, "--output", pipe).exit_code == 0
    assert os.read(reader, 10).startswith(b"[") and pipe.is_fifo()
    os.close(reader)


def test_nothing_is_decided_where_stability_is_off(backtest: Call, trace: Path) -> None:
    assert "stability.enabled=false" in backtest.fails(trace, "stability.enabled=false")


def test_help_shows_examples(backtest: Call) -> None:
    shown = backtest("--help")
    assert shown.exit_code == 0
    for line in ("runs/quickstart", "trace.csv --output out.json --plot out.png", "trace.csv stability."):
        assert f"megastable backtest {line}" in shown.stdout
    nothing = backtest()
    assert nothing.exit_code == 2 and "Missing argument" in nothing.stderr


def test_it_starts_from_anywhere_as_a_process(trace: Path, tmp_path: Path) -> None:
    """... without DeepSpeed, which takes seconds to import."""
    code = "import runpy, sys; sys.argv[1:] = ['backtest', 'trace.csv']\n"
    code += "try:\n    runpy.run_module('megastable', run_name='__main__')\n"
    code += "except SystemExit as end:\n    print(end.code, 'deepspeed' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stderr == "" and "1 rewind" in done.stdout
    assert done.stdout.endswith("0 False\n")
