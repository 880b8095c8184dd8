"""`megastable plan` as its users meet it: what it prints, its JSON and picture, its exit codes, and without torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megastable.config.recipe import load_recipe
from megastable_tools.commands.plan import app

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "launch/recipes/125m.yaml"
SEVEN = ROOT / "launch/recipes/7b.yaml"


def plan(*arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr), in this process: what ends it is what would end a process."""
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120", "TERM": "dumb"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def result(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    code, _, err = plan(*arguments, "--output", tmp_path / "plan.json")
    assert (code, err) == (0, "")
    return dict(json.loads((tmp_path / "plan.json").read_text()))


def test_it_prints_memory_time_cost_and_suggestions() -> None:
    code, out, err = plan(SMALL, "--gpus", 8)
    assert (code, err) == (0, "")
    assert "vocabulary 32,000, as the recipe's comment says" in out
    assert "on 8 x H100 SXM 80 GB" in out and "fits: " in out and "GiB are left" in out
    for word in ("weights", "activations", "host memory", "matrix products", "MFU", "days, $"):
        assert word in out
    (bar,) = re.findall(r"^\[([WGMOALBr.]+)\]$", out, re.M)
    assert len(bar) == 72 and set("GAr.") <= set(bar)
    commands = re.findall(r"^\d: (.+)$", out, re.M)
    assert len(commands) == 5 and len(set(commands)) == 5
    # What is printed can be said.
    for said in commands:
        if said != "the recipe unchanged":
            load_recipe(SMALL, said.split())


def test_a_bar_that_is_too_long_shows_where_the_gpu_ends() -> None:
    code, out, _ = plan(SEVEN, "--gpus", 8, "train.micro_batch=8", "parallel.recompute=none", "--fixed")
    assert code == 1 and "does not fit: " in out and "too much" in out
    (bar,) = re.findall(r"^\[([WGMOALBr|]+)\]\s*$", out, re.M)
    assert len(bar) == 73 and 0 < bar.index("|") < 72
    said = re.findall(r"would fit with (\S+):", out)
    assert any(one.startswith("train.micro_batch=") for one in said) and "parallel.recompute=full" in said
    # And it does.
    for one in said:
        assert (
            plan(SEVEN, "--gpus", 8, "train.micro_batch=8", "parallel.recompute=none", one, "--fixed")[0] == 0
        )


def test_the_fewest_gpus_are_taken_and_said() -> None:
    code, out, _ = plan(SEVEN, "--fixed")
    (number,) = re.findall(r"--gpus is not given: (\d+), the fewest", out)
    assert code == 0 and f"on {number} x" in out
    assert plan(SEVEN, "--fixed", "--gpus", number)[0] == 0
    assert int(number) == 2 or plan(SEVEN, "--fixed", "--gpus", int(number) // 2)[0] == 1


# The vocabulary


# Suggestions


# Where nothing is possible, or fits


def test_what_fits_nowhere_ends_with_1_and_says_where_it_would() -> None:
    code, out, _ = plan(SEVEN, "--gpus", 1, "parallel.tensor=1", "parallel.sequence=false")
    assert code == 1 and "NOTHING FITS on 1 GPU. Nearest is" in out and "GiB too much" in out
    (number,) = re.findall(r"GPUs it fits: --gpus (\d+)", out)
    assert plan(SEVEN, "--gpus", number)[0] == 0


# FP8


# Pictures


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.yaml"], "no.yaml: no such recipe"),
        ([SMALL, "model.layer=2"], "did you mean model.layers"),
        ([SMALL, "--cluster", "no.yaml"], "no.yaml"),
        ([SMALL, "--tokens", "many"], "--tokens many: a number such as 15T"),
        ([SMALL, "--fp8", "precision.kind=fp16"], "--fp8: Transformer Engine's FP8 is beside bf16"),
        ([SMALL, "--gpus", "8", "precision.fp8=current", "precision.kind=fp32"], "is emulated, and slower"),
        ([SMALL, "--plot", "plan.txt"], "--plot plan.txt: a name ending in .png"),
        ([SMALL, "--gpus", "1" + 29 * "0"], "less than or equal to 1"),
        ([SMALL, "--gpus", "8", "--cluster", "launch/clusters/a100.yaml", "--fp8"], "does not compute in it"),
        ([SMALL, "--gpus", "8", "deepspeed=no.json"], "deepspeed=no.json: no such file"),
        ([SMALL, "--gpus", "8", "--output", "no/such/folder/x.json"], "there is no directory no/such/folder"),
    ],
)
def test_bad_input(arguments: list[object], message: str) -> None:
    code, _, err = plan(*arguments)
    assert code == 2 and message in " ".join(err.split()) and "Traceback" not in err


def test_it_imports_neither_torch_nor_pictures(tmp_path: Path) -> None:
    """Which is what makes it answer within seconds."""
    code = (
        "import runpy, sys\n"
        "sys.argv = ['plan.py', *sys.argv[1:]]\n"
        "try: runpy.run_module('megastable', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print('LOADED', *sorted({'torch', 'deepspeed', 'matplotlib', 'pyarrow'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, "plan", SMALL, "--gpus", "8", "--output", tmp_path / "x.json"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED"
