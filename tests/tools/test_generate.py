"""The command line as its users meet it: a prompt in, text or JSON out; at a terminal, a loop."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megastable_tools.commands.generate import app
from tests.generate.runs import run_with_tokenizer
from tests.patience import PATIENCE
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("RUN",), ("byte 1 is no UTF-8",)),
        (("nothing", "--prompt", "a"), ("nothing is neither a checkpoint nor",)),
    ],
)
def test_bad_input_is_named_and_ends_with_2(
    run: Path, arguments: tuple[object, ...], words: tuple[str, ...]
) -> None:
    given = [run if argument == "RUN" else argument for argument in arguments]
    out, err = generate(*given, code=2, given=b"a\xff")
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    for word in words:
        assert word in err


def test_help_has_examples() -> None:
    out, _ = generate("--help")
    assert "Continue a prompt" in out and "--number 3 --seed 1" in out


@pytest.mark.slow
@pytest.mark.timeout(5 * PATIENCE + 60)
def test_a_terminal_has_a_loop_with_a_prompt(run: Path) -> None:
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        command(run, "--max-tokens", 5, "--temperature", 0),
        env=ENVIRONMENT, stdin=secondary, stdout=secondary, stderr=secondary, close_fds=True,
    )  # fmt: skip
    os.close(secondary)
    shown = ""

    def wait_for(text: str, count: int) -> None:
        nonlocal shown
        end = time.monotonic() + PATIENCE
        while shown.count(text) < count:
            assert time.monotonic() < end, shown
            shown += os.read(primary, 4096).decode(errors="replace")

    try:
        wait_for("> ", 1)
        assert "a base model. It does not answer" in shown
        os.write(primary, b"def f(\n")
        wait_for("5 tokens, ", 1)
        os.write(primary, b"\n")
        wait_for("5 tokens, ", 2)
        wait_for("> ", 3)
        os.write(primary, b"\x04")
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(primary)
    assert "\x1b[1mdef f(\x1b[0m" in shown and "Traceback" not in shown


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(run: Path) -> None:
    line = " ".join(command(run, "--prompt", "a", "--past-eod", "--max-tokens", 1000))
    done = subprocess.run(["bash", "-c", f"{line} | head -c 5"], env=ENVIRONMENT, capture_output=True)
    assert len(done.stdout) == 5 and b"Traceback" not in done.stderr and b"rror" not in done.stderr
