"""What all commands share: `megastable X`: help, version, completion, JSON and exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megastable import __version__
from megastable.commands.root import COMMANDS, PANELS, app, load_command
from tests.checkpoint.states import make_run
from tests.forensics.shelves import Plain
from tests.forensics.shelves import corpus as write_shards
from tests.generate.runs import corpus_with_tokenizer
from tests.tools.cli import Done, call

ROOT = Path(__file__).parents[2]
# They take longer to import than half a second's help may take. (typer itself imports pydantic.)
HEAVY = {
    "deepspeed", "jinja2", "matplotlib", "numpy", "pandas", "psutil", "pyarrow", "sentencepiece", "tokenizers",
    "torch", "transformers", "yaml",
}  # fmt: skip


def leaves(name: str) -> Iterator[tuple[list[str], Any]]:
    """Every command below `name` that does something, and the words that lead to it."""
    command = load_command(name)
    below = getattr(command, "commands", None)
    if below is None:
        yield [name], command
    else:
        yield from (([name, word], one) for word, one in below.items())


LEAVES = [(words, command) for name in COMMANDS for words, command in leaves(name)]


def megastable(*arguments: object, cwd: Path = ROOT) -> Done:
    return call(app, *arguments, cwd=cwd)


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints on stdout."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb"} | environment,
    )  # fmt: skip
    return done.stdout


# Help


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = "import sys; from megastable.cli import main\ntry: main('--help')\nexcept SystemExit: pass\n"
    out = python(f"{code}print(*sorted(n for n in sys.modules if n.startswith('megastable.')))")
    assert all(f" {name} " in out for name in COMMANDS)
    modules = {name.removeprefix("megastable.") for name in out.splitlines()[-1].split()}
    assert {name for names in PANELS.values() for name in names} == set(COMMANDS)
    assert modules == {
        "base", "base.errors", "base.process", "base.text", "cli", "commands", "commands.app", "commands.root"
    }  # fmt: skip


def test_help_of_every_command_imports_nothing_heavy() -> None:
    asked = [[*words, "-h"] for words, _ in LEAVES] + [[name, "--help"] for name in COMMANDS]
    code = f"""
import sys
from megastable.commands.root import build_command
for words in {asked!r}:
    try:
        build_command().main(words, prog_name="megastable")
    except SystemExit as end:
        assert end.code == 0, words
    found = {HEAVY!r} & set(sys.modules)
    assert not found, (words, found)
"""
    assert python(code).count("Usage: megastable ") == len(asked)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_itself_says(name: str) -> None:
    assert str(load_command(name).help).split("\n\n")[0] == COMMANDS[name]


@pytest.mark.parametrize(("words", "command"), LEAVES, ids=[" ".join(words) for words, _ in LEAVES])
def test_every_command_has_examples_of_its_own_that_it_can_parse(words: list[str], command: Any) -> None:
    examples = [line for line in command.epilog.split("\n\n") if line.startswith("megastable ")]
    assert examples
    for example in examples:
        given = shlex.split(example.partition("      (")[0])
        assert given[1 : 1 + len(words)] == words, example
        rest = given[1 + len(words) :]
        if "-h" not in rest:
            command.make_context(words[-1], rest).close()  # raises where there is no such option


@pytest.mark.parametrize(
    "words", [[], *([name] for name in COMMANDS), ["checkpoint", "verify"]], ids=" ".join
)
def test_version(words: list[str]) -> None:
    done = megastable(*words, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"megastable {__version__}\n", "")


# Exit codes: the same damage, the same code

MISSING = [
    "status none", "goodput none", "watch none --output o", "supervise none.yaml",
    "preflight none.yaml", "train none.yaml",
    "plan none.yaml", "backtest none.csv", "fp8-check none",
    "generate none --prompt x", "prepare verify none", "prepare shards --input none --output o --tokenizer none",
    "prepare plant none o --recipe none.yaml", "prune plan none --list none", "prune verify none",
    "prune apply none o", "prune skip none none", "court none 1", "skips review none", "note none text",
    "change none optimizer.lr=1 --reason x",
    "inspect step none 1", "inspect run none", "inspect scan none",
    "checkpoint verify none", "checkpoint list none", "checkpoint show none", "checkpoint diff none none",
    "checkpoint export none o", "convert to-hf none o", "convert to-gguf none o", "convert check none none",
    "study lr-sensitivity none.yaml", "study coordinate-check none.yaml",
    "study compare none.yaml --of model.layers=1 --of model.layers=2",
    "repeat none.yaml", "bench stability --recipe none.yaml", "bench scaling --recipe none.yaml", "drill --text none",
]  # fmt: skip


@pytest.mark.parametrize("line", MISSING)
def test_what_is_not_there_is_bad_input(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    done = megastable(*line.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and "none" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [words for words, _ in LEAVES], ids=" ".join)
def test_an_option_that_there_is_not_is_bad_input(words: list[str]) -> None:
    done = megastable(*words, "--no-such-option")
    assert (done.returncode, done.stdout) == (2, "") and "--no-such-option" in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "checkpoint verify run", "checkpoint diff run run", "checkpoint export run o",
        "checkpoint reshape run o --tensor 2", "checkpoint branch run o --decay-steps 5",
        "checkpoint export-megatron run o", "convert to-hf run o --no-tokenizer", "fp8-check run",
        "generate run --prompt x",
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_bad_input(line: str, tmp_path: Path) -> None:
    weights = make_run(tmp_path / "run") / "rank-00000.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    done = megastable(*line.split(), cwd=tmp_path)
    assert done.returncode == 2 and "rank-00000.safetensors" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "o").exists()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_shards(
        tmp_path / "corpus",
        [Plain("a", [[([n + 1, n + 2], 0)] for n in range(5)])],
        {"train": [("a", 0, 5)]},
        "uint16",
    )
    (tmp_path / "list.txt").write_text("a 1\n")
    return tmp_path


# JSON

WORDS = re.compile(r"[<>~]?-?\d[\d,]*(\.\d+)? ?(%|s|ms|min|h|d|[kMGT]i?B|x \d+.*|\w+/s)|\d{1,3}(,\d{3})+")


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for below in (below for key, below in value.items() if key != "marks"):  # labels of a histogram
            yield from texts(below)
    elif isinstance(value, list):
        for below in value:
            yield from texts(below)
    elif isinstance(value, str):
        yield value


def trace(folder: Path) -> None:
    lines = [f"{step},{3 - step / 1000},1.0" for step in range(60)]
    (folder / "trace.csv").write_text("\n".join(["step,loss,grad_norm", *lines]))


@pytest.mark.quick("checkpoint list*")
@pytest.mark.parametrize(
    "line",
    [
        "checkpoint verify run", "checkpoint list run", "checkpoint show run", "checkpoint diff run run",
        "backtest trace.csv", f"plan {ROOT}/launch/recipes/125m.yaml --gpus 8 --fixed", "status run",
        "prune plan corpus --list list.txt --most 50%", "prepare verify real", "inspect scan corpus",
    ],
)  # fmt: skip
def test_json_is_all_there_is_on_stdout_and_holds_no_words_for_numbers(line: str, shards: Path) -> None:
    make_run(shards / "run")
    corpus_with_tokenizer(shards / "real")
    trace(shards)
    shown, done = megastable(*line.split(), cwd=shards), megastable(*line.split(), "--json", cwd=shards)
    if line.startswith("prune plan"):  # its plan is there already
        (shards / "prune-plan.txt").unlink()
        done = megastable(*line.split(), "--json", cwd=shards)
    assert done.returncode == shown.returncode and shown.stdout != done.stdout
    found = json.loads(done.stdout)
    assert [text for text in texts(found) if WORDS.fullmatch(text)] == []


def test_benchmarks_and_drills_need_a_checkout(tmp_path: Path) -> None:
    """As from a wheel: the package alone."""
    for package in ("megastable", "guard/megastable_guard", "tools/megastable_tools"):
        (tmp_path / Path(package).name).symlink_to(ROOT / package)
    for words in (["bench", "noise"], ["drill", "--list"]):
        code = (
            "from pathlib import Path; Path.resolve = Path.absolute; from megastable.cli import main; main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 2 and "this command needs a checkout" in done.stderr, done.stderr


# Training
