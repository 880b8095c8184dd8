"""The command line as its users meet it: a prompt in, text or JSON out; at a terminal, a loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megastable_tools.commands.generate import app
from tests.generate.runs import run_with_tokenizer
from tests.tools.cli import call

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "COLUMNS": "100",
    "TERM": "xterm",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_with_tokenizer(tmp_path_factory.mktemp("generate"))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "megastable", "generate", *map(str, arguments)]


def generate(*arguments: object, code: int = 0, given: bytes = b"") -> tuple[str, str]:
    done = call(app, *arguments, cwd=ROOT, columns=100, given=given)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_a_pipe_is_continued_as_text_and_as_json(run: Path) -> None:
    """The text by a process of its own."""
    asked = command(run, "--max-tokens", 8, "--seed", 1)
    alone = subprocess.run(asked, env=ENVIRONMENT, capture_output=True, input="def f(\n", text=True)
    assert alone.returncode == 0 and "seed 1; " in alone.stderr and "tokens/s" in alone.stderr
    wanted = ("--prompt", "def f(", "--max-tokens", 8, "--seed", 1, "--json", "--number", 2)
    told, err = generate(run / "checkpoints/step-7", *wanted)
    answer = json.loads(told)
    assert answer["prompt"] == "def f(" and answer["step"] == 7 and err == ""
    first, second = (sample["text"].rstrip("\n") for sample in answer["samples"])
    assert first == alone.stdout.rstrip("\n") != second
