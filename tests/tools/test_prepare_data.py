"""The command line as its users meet it: every command, its errors, Ctrl-C, and a killed process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megastable_tools.commands.prepare import app
from tests.data.texts import documents, sentencepiece_file
from tests.patience import PATIENCE
from tests.tools.cli import Done, call

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "xterm"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "megastable", "prepare", *map(str, arguments)]


def run(*arguments: object, cwd: Path) -> Done:
    return call(app, *arguments, cwd=cwd)


def result(*arguments: object, cwd: Path) -> dict[str, object]:
    done = run(*arguments, "--json", cwd=cwd)
    # On a busy machine it tells of its progress.
    assert done.returncode == 0 and all(line.startswith("prepared ") for line in done.stderr.splitlines())
    return dict(json.loads(done.stdout))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for number, text in enumerate(documents(60)):
        (tmp_path / "in" / f"{number}.txt").write_text(text)
    return tmp_path


def test_from_text_to_a_verified_corpus_and_its_damage(folder: Path) -> None:
    options = ("--input", "in", "--output", "my.model", "--vocab-size", 400, "--model", "unigram")
    trained = result("tokenizer", *options, cwd=folder)
    assert (trained["kind"], trained["vocab_size"]) == ("sentencepiece", 400)
    shards = ("shards", "--input", "in", "--output", "out", "--tokenizer", "my.model")
    made = result(*shards, "--validation", 0.2, "--workers", 2, cwd=folder)
    assert isinstance(made["documents"], dict)
    assert sum(made["documents"].values()) == 60
    verified = result("verify", "out", cwd=folder)
    assert (verified["action"], verified["fingerprint"]) == ("verified", made["fingerprint"])

    for again in (shards, ("tokenizer", "--input", "in", "--output", "my.model", "--vocab-size", 400)):
        refused = run(*again, cwd=folder)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith("error: ")
        assert "--overwrite" in refused.stderr
    replaced = run(*shards, "--overwrite", cwd=folder)
    assert replaced.returncode == 0
    assert "prepared out: 2 shards" in replaced.stdout

    shard = folder / "out" / "out-train-00000.bin"
    shard.write_bytes(b"\1\0" + shard.read_bytes()[2:])
    damaged = run("verify", "out", cwd=folder)
    assert damaged.returncode == 2
    assert "out-train-00000.bin is not the file that the manifest describes" in damaged.stderr
    assert "Traceback" not in damaged.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("shards", "--input", "nowhere", "--output", "o", "--tokenizer", "t.model"), "t.model cannot be read"),
        (("verify", "in"), "is not a prepared corpus"),
        (("manifest", "in", "--tokenizer", "in"), "found neither"),
        (("tokenizer", "--input", "in", "--output", "t", "--vocab-size", 99999), "too small for a vocabulary"),
        (("tokenizer", "--input", "in", "--output", "t", "--vocab-size", 4, "--model", "wordpiece"), "--model"),
    ],
)  # fmt: skip
def test_bad_input_is_a_message_and_2(folder: Path, arguments: tuple[object, ...], message: str) -> None:
    done = run(*arguments, cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(folder) == ["in"]


@contextmanager
def in_the_middle(directory: Path) -> Iterator[psutil.Popen]:
    """A run with two workers that has encoded a part of its input and waits for the rest."""
    tokenizer = sentencepiece_file(directory)
    os.mkfifo(directory / "slow.jsonl")
    arguments = (
        "shards",
        "--input",
        "slow.jsonl",
        "--output",
        "out",
        "--tokenizer",
        tokenizer.name,
        "--workers",
        2,
    )
    process = psutil.Popen(
        command(*arguments),
        cwd=directory,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever started the tests in the background has made them, and so all below them, deaf to it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        with (directory / "slow.jsonl").open("w") as pipe:
            for text in documents(20, 50_000) * 10:  # 10 MB, more than may be in flight
                pipe.write(json.dumps({"text": text}) + "\n")
            pipe.flush()
            yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def names(directory: Path) -> list[str]:
    return sorted(path.name.split(".tmp-")[0] for path in directory.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE + 60)
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with in_the_middle(tmp_path) as process:
        workers = process.children(recursive=True)
        assert len(workers) >= 2
        assert names(tmp_path) == ["out", "slow.jsonl", "tokenizer.model"]  # out.tmp-...
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    *progress, last = errors.splitlines()
    assert (process.returncode, last) == (130, "interrupted")
    # On a busy machine it has told of its progress.
    assert all(line.startswith("prepared ") for line in progress)
    assert names(tmp_path) == ["slow.jsonl", "tokenizer.model"]
    assert not psutil.wait_procs(workers, timeout=PATIENCE)[1]


@pytest.mark.slow
def test_after_a_kill_no_worker_lives_on_and_the_next_run_cleans_up(tmp_path: Path) -> None:
    with in_the_middle(tmp_path) as process:
        workers = process.children(recursive=True)
        assert len(workers) >= 2
        process.kill()
        process.wait()
    assert not psutil.wait_procs(workers, timeout=PATIENCE)[1]
    assert names(tmp_path) == ["out", "slow.jsonl", "tokenizer.model"]
    assert not (tmp_path / "out").exists()
    (tmp_path / "slow.jsonl").unlink()
    (tmp_path / "a.txt").write_text("some text")
    made = result(
        "shards", "--input", "a.txt", "--output", "out", "--tokenizer", "tokenizer.model", cwd=tmp_path
    )
    assert made["documents"] == {"train": 1}
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "out", "tokenizer.model"]
