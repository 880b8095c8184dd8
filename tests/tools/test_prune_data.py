"""The command line as its users meet it: from a list to a corpus without these documents, and to the proof."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from megastable_tools.commands.prune import app
from tests.forensics.shelves import Plain, corpus
from tests.tools.cli import Done, call

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "xterm"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "megastable", "prune", *map(str, arguments)]


def run(*arguments: object, cwd: Path, code: int = 0) -> Done:
    done = call(app, *arguments, cwd=cwd)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shards = [Plain(name, [[([n + 1, n + 2], 0)] for n in range(5)]) for name in ("a", "b")]
    splits = {"train": [("a", 0, 5), ("b", 0, 4)], "validation": [("b", 4, 5)]}
    corpus(tmp_path / "corpus", shards, splits, "uint16")
    (tmp_path / "list.txt").write_text("a 1\nb 0\nb 4\n")
    return tmp_path


def test_from_a_list_to_the_proof(folder: Path) -> None:
    refused = run("plan", "corpus", "--list", "list.txt", "--output", "bad.txt", cwd=folder, code=2).stderr
    assert "3 documents of 10 (30.000%), 6 tokens of 20 (30.000%): more than 5 % of it" in refused
    assert "--most 30%" in refused and not (folder / "bad.txt").exists()
    most = "--most", "30%"
    planned = run("plan", "corpus", "--list", "list.txt", "--output", "bad.txt", *most, cwd=folder).stdout
    assert "bad.txt takes 3 documents of 10 (30.000%), 6 tokens of 20 (30.000%); " in planned
    refused = run("apply", "bad.txt", "pruned", cwd=folder, code=2).stderr
    assert "more than 5 % of it" in refused
    refused = run("apply", "bad.txt", "pruned", *most, cwd=folder, code=2).stderr
    assert "nothing of the split 'validation': delete its line 12" in refused
    assert not (folder / "pruned").exists()
    lines = (folder / "bad.txt").read_text().splitlines()
    (folder / "bad.txt").write_text("\n".join(lines[:-1]))
    told = run("apply", "bad.txt", "pruned", *most, cwd=folder).stdout.splitlines()
    assert told == [
        "bad.txt takes 2 documents of 10 (20.000%), 4 tokens of 20 (20.000%)",
        "pruned pruned: 2 documents and 4 tokens are gone, 8 documents and 16 tokens are left",
    ]
    proof = json.loads(run("verify", "pruned", "--plan", "bad.txt", "--json", cwd=folder).stdout)
    assert proof == {
        "documents": 8, "tokens": 16, "gone": 2, "gone_tokens": 4, "cut": 0, "added": 0,
        "original": str(folder.resolve() / "corpus"),
    }  # fmt: skip
    with (folder / "pruned" / "a.bin").open("r+b") as file:
        file.write(b"\x09")
    damaged = run("verify", "pruned", cwd=folder, code=2)
    assert damaged.stdout == ""
    assert "pruned/a.bin is not the file that the manifest describes" in damaged.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan corpus", "no documents are selected"),
        ("plan nowhere --list list.txt", "nowhere"),
        ("plan corpus --list list.txt --output list.txt", "list.txt exists already"),
        ("plan corpus --incident runs/none:1", "runs/none"),
        ("plan corpus --scan nowhere --kind noise", "nowhere"),
        ("apply list.txt pruned", "does not name its corpus"),
        ("apply list.txt pruned --corpus corpus", "no fingerprint"),
        ("apply nowhere pruned", "there is no such plan"),
        ("verify corpus", "is not a pruned corpus"),
        ("plan corpus --list list.txt --most 5", "give a share of the corpus, such as 5% or 0.05"),
        ("apply list.txt pruned --most none", "give a share of the corpus"),
    ],
)
def test_mistakes(folder: Path, arguments: str, message: str) -> None:
    before = sorted(os.listdir(folder))
    assert message in run(*arguments.split(), cwd=folder, code=2).stderr
    assert sorted(os.listdir(folder)) == before
