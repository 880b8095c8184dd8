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

from megastable.config.recipe import load
from megastable.data.manifest import Manifest
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
    for word in (
        "weights",
        "gradients",
        "moments",
        "activations",
        "host memory",
        "matrix products",
        "MFU",
        "days, $",
    ):
        assert word in out
    (bar,) = re.findall(r"^\[([WGMOALBr.]+)\]$", out, re.M)
    assert len(bar) == 72 and set("GAr.") <= set(bar)
    commands = re.findall(r"^\d: (.+)$", out, re.M)
    assert len(commands) == 5 and len(set(commands)) == 5
    # What is printed can be said.
    for said in commands:
        if said != "the recipe unchanged":
            load(SMALL, said.split())


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


def test_rewind_points_beyond_the_hosts_memory_are_said(tmp_path: Path) -> None:
    poor = tmp_path / "poor.yaml"
    poor.write_text(
        re.sub(
            r"host_memory_gib: \d+", "host_memory_gib: 16", (ROOT / "launch/clusters/h100.yaml").read_text()
        )
    )
    code, out, _ = plan(SEVEN, "--gpus", 8, "--fixed", "--cluster", poor)
    assert code == 0 and "which do not fit" in out and "TOO MUCH" in out


def test_the_fewest_gpus_are_taken_and_said() -> None:
    code, out, _ = plan(SEVEN, "--fixed")
    (number,) = re.findall(r"--gpus is not given: (\d+), the fewest", out)
    assert code == 0 and f"on {number} x" in out
    assert plan(SEVEN, "--fixed", "--gpus", number)[0] == 0
    assert int(number) == 2 or plan(SEVEN, "--fixed", "--gpus", int(number) // 2)[0] == 1


# The vocabulary


def test_where_the_vocabulary_comes_from(corpus: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: {layers: 2, hidden: 64, heads: 2}\n")
    small = (recipe, "--fixed", "--gpus", 1)
    assert "vocabulary 128,000, assumed" in plan(*small)[1]
    assert "vocabulary 500, as --vocab says" in plan(*small, "--vocab", 500)[1]
    assert "vocabulary 600, the recipe's" in plan(*small, "model.vocab_size=600")[1]
    size = Manifest.load(corpus).tokenizer.vocab_size
    from_corpus = (*small, f"data.corpora=[{{path: {json.dumps(str(corpus))}}}]")
    assert f"vocabulary {size:,}, of the corpus" in plan(*from_corpus)[1]
    code, _, err = plan(*from_corpus, "model.vocab_size=100")
    assert code == 2 and f"100, the recipe's, is smaller than the {size} of the corpus" in err
    recipe.write_text("")
    code, _, err = plan(recipe)
    assert code == 2 and "mine.yaml is empty: " in err


# Suggestions


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["40", "80"])
def test_no_number_of_a_suggestion_is_cut_off(columns: str) -> None:
    """A pipe has 80 columns."""
    given = [str(SEVEN), "--gpus", "64", "--fp8"]
    done = CliRunner().invoke(app, given, env={"COLUMNS": columns, "TERM": "dumb"})
    table = done.stdout.partition("SUGGESTIONS")[2].partition("what to say")[0]
    assert "current" in table and "…" not in table
    rows = [line.split() for line in table.splitlines() if re.match(r" *\d+ +\d", line)]
    assert len(rows) == 5 and len({len(row) for row in rows}) == 1


def test_what_is_tight_is_marked_and_comes_last(tmp_path: Path) -> None:
    """On GPUs of which the fastest layouts leave almost nothing."""
    small = tmp_path / "small.yaml"
    small.write_text(
        re.sub(r"memory_gib: [\d.]+", "memory_gib: 42.0", (ROOT / "launch/clusters/h100.yaml").read_text())
    )
    code, out, _ = plan(SEVEN, "--gpus", 4, "--cluster", small, "--top", 50)
    table = out.partition("SUGGESTIONS")[2].partition("what to say")[0]
    left = re.findall(r"(?:none|selective|full) +([\d.]+)(!?)", table)
    tight = [bool(mark) for _, mark in left]
    assert code == 0 and tight == sorted(tight) and {True, False} == set(tight)
    assert all((float(gib) < 0.05 * 38) == bool(mark) for gib, mark in left)
    assert "! That is less than 5% of usable memory" in out


# Where nothing is possible, or fits


def test_a_recipe_that_cannot_be_laid_out_gets_suggestions() -> None:
    code, out, _ = plan(SEVEN, "--gpus", 1, "parallel.tensor=8", "parallel.pipeline=2", "model.layers=4")
    assert code == 0 and "layout is not possible here: 1 rank cannot be laid out" in out
    assert "parallel.tensor=1 parallel.pipeline=1" in out
    code, _, err = plan(SEVEN, "--gpus", 1, "parallel.tensor=8", "--fixed")
    assert code == 2 and "1 rank cannot be laid out" in err


def test_what_fits_nowhere_ends_with_1_and_says_where_it_would() -> None:
    code, out, _ = plan(SEVEN, "--gpus", 1, "parallel.tensor=1", "parallel.sequence=false")
    assert code == 1 and "NOTHING FITS on 1 GPU. Nearest is" in out and "GiB too much" in out
    (number,) = re.findall(r"GPUs it fits: --gpus (\d+)", out)
    assert plan(SEVEN, "--gpus", number)[0] == 0


def test_a_number_of_gpus_that_divides_nothing() -> None:
    code, out, _ = plan(SEVEN, "--gpus", 77)
    assert code == 1 and "NO LAYOUT IS POSSIBLE on 77 GPUs" in out and "--gpus 72" in out


# FP8


# Pictures


@pytest.mark.slow
def test_a_picture(tmp_path: Path) -> None:
    for arguments in ((SMALL, "--gpus", 8, "--fixed"), (SEVEN, "--gpus", 16, "parallel.pipeline=4")):
        code, _, err = plan(*arguments, "--plot", tmp_path / "plan.png")
        assert (code, err) == (0, "")
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "plan.png").unlink()


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.yaml"], "no.yaml: no such recipe"),
        ([SMALL, "model.layer=2"], "did you mean model.layers"),
        ([SMALL, "--cluster", "no.yaml"], "no.yaml"),
        ([SMALL, "--tokens", "many"], "--tokens many: a number such as 15T"),
        ([SMALL, "--tokens", "0B"], "--tokens 0B: a number such as 15T"),
        ([SMALL, "--tokens", "1e400"], "--tokens 1e400: a number such as 15T"),
        ([SMALL, "--fp8", "precision.kind=fp16"], "--fp8: Transformer Engine's FP8 is beside bf16"),
        ([SMALL, "--gpus", "8", "precision.fp8=current", "precision.kind=fp32"], "is emulated, and slower"),
        ([SMALL, "--plot", "plan.txt"], "--plot plan.txt: a name ending in .png"),
        ([SMALL, "--plot", "no/such/folder/plan.png"], "there is no directory"),
        ([SMALL, "--gpus", "0"], "greater than or equal to 1"),
        ([SMALL, "--gpus", "1" + 29 * "0"], "less than or equal to 1"),
        ([SMALL, "--gpus", "8", "--cluster", "launch/clusters/a100.yaml", "--fp8"], "does not compute in it"),
        ([SMALL, "--gpus", "8", "deepspeed=no.json"], "deepspeed=no.json: no such file"),
        (
            [SMALL, "--gpus", "7", "train.micro_batch=256", "deepspeed=no.json"],
            "deepspeed=no.json: no such file",
        ),
        ([SMALL, "--gpus", "8", "precision.fp8.backend=emulated"], "leave precision.fp8 out"),
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
    command = [
        sys.executable,
        "-c",
        code,
        "plan",
        SMALL,
        "--gpus",
        "8",
        "--output",
        tmp_path / "x.json",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED"


def test_another_batch_where_none_divides() -> None:
    code, out, _ = plan("launch/recipes/7b.yaml", "--gpus", "10000")
    assert code == 1
    said = next(line for line in out.splitlines() if line.startswith("with another batch it fits:"))
    batch, *rest = said.partition(": ")[2].split()
    assert abs(int(batch.partition("=")[2]) - 1024) < 64
    code, out, _ = plan("launch/recipes/7b.yaml", "--gpus", "10000", "--fixed", batch, *rest)
    assert code == 0 and "fits:" in out


def test_rates_in_the_wrong_unit_are_refused(tmp_path: Path) -> None:
    text = Path("launch/clusters/h100.yaml").read_text()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(re.sub(r"bf16: \S+?(?=[,}\s])", "bf16: 989.0e+12", text, count=1))
    code, _, err = plan(SMALL, "--gpus", "8", "--cluster", wrong)
    assert code == 2 and "tflops.bf16" in err
