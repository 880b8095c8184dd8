"""The command line as its users meet it: from a list to a corpus without these documents, and to the proof."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xxhash

from megastable.data.manifest import Manifest
from megastable_tools.commands.prune import app
from tests.forensics.shelves import Plain, corpus
from tests.patience import PATIENCE
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


def test_for_machines(folder: Path) -> None:
    planned = run("plan", "corpus", "--list", "list.txt", "--json", "--most", "0.5", cwd=folder)
    assert json.loads(planned.stdout) == {
        "plan": "prune-plan.txt", "documents": 3, "cut": 0, "tokens": 6,
        "document_share": 0.3, "token_share": 0.3,
    }  # fmt: skip
    assert planned.stderr == ""
    text = (folder / "prune-plan.txt").read_text().splitlines()
    (folder / "prune-plan.txt").write_text("\n".join(text[:-1]))
    made = run("apply", "prune-plan.txt", "pruned", "--json", "--most", "0.5", cwd=folder)
    found = json.loads(made.stdout)
    assert (found["documents"], found["tokens_left"], made.stderr) == (2, 16, "")
    assert found == json.loads((folder / "pruned" / "pruned.json").read_text())


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


def test_help_has_examples_of_every_command() -> None:
    told = subprocess.run(command("--help"), env=ENVIRONMENT, capture_output=True, text=True).stdout
    for name in ("plan", "apply", "verify"):
        assert f"megastable prune {name} " in told
        assert run(name, "--help", cwd=ROOT).stdout


@pytest.mark.slow
def test_a_bar_and_ctrl_c(tmp_path: Path) -> None:
    """On a terminal: how far it is; after Ctrl-C nothing is left and the exit code says so."""
    shards = [Plain("a", [[([1, 2], 0)], [([3], 0)]])]
    corpus(tmp_path / "corpus", shards, {"train": [("a", 0, 2)]}, "uint16")
    # Large enough that it is still at work: a document of a gigabyte, of which next to nothing is on the disk.
    size = 1 << 29
    with (tmp_path / "corpus" / "a.bin").open("r+b") as file:
        file.truncate(2 * (size + 1))
    index = (tmp_path / "corpus" / "a.idx").read_bytes()
    lengths = size.to_bytes(4, "little") + index[38:42]
    pointers = index[42:50] + (2 * size).to_bytes(8, "little")
    (tmp_path / "corpus" / "a.idx").write_bytes(index[:34] + lengths + pointers + index[58:])
    manifest = json.loads((tmp_path / "corpus" / "manifest.json").read_text())
    manifest["shards"][0] |= {"tokens": size + 1, "bin_bytes": 2 * (size + 1)}
    manifest["shards"][0]["idx_xxh3"] = _xxh3((tmp_path / "corpus" / "a.idx").read_bytes())
    manifest["splits"]["train"][0]["tokens"] = size + 1
    (tmp_path / "corpus" / "manifest.json").write_text(json.dumps(manifest))
    fingerprint = Manifest.load(tmp_path / "corpus").fingerprint()
    (tmp_path / "plan").write_text(f"fingerprint: {fingerprint}\na 0\n")
    before = sorted(os.listdir(tmp_path))
    master, slave = pty.openpty()
    tool = command("apply", "plan", "pruned", "--corpus", "corpus", "--most", "100%")
    process = subprocess.Popen(tool, cwd=tmp_path, env=ENVIRONMENT, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while b"pruning" not in shown:
        shown += os.read(master, 4096)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    try:
        while block := os.read(master, 4096):
            shown += block
    except OSError:  # the terminal's other end is closed
        pass
    os.close(master)
    assert process.wait(PATIENCE) == 130
    assert b"interrupted" in shown and b"Traceback" not in shown
    assert sorted(os.listdir(tmp_path)) == before


def _xxh3(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)
