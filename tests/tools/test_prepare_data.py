"""The command line as its users meet it: every command, its errors, Ctrl-C, and a killed process."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megastable_tools.commands.prepare import app
from megastable_tools.prepare import stdlib
from tests.data.texts import EOD_NAME, documents, hugging_face_file, sentencepiece_file, source_code
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
    trained = result(
        "tokenizer",
        "--input",
        "in",
        "--output",
        "my.model",
        "--vocab-size",
        400,
        "--model",
        "unigram",
        cwd=folder,
    )
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


def test_foreign_shards_are_adopted_with_a_hugging_face_tokenizer(folder: Path) -> None:
    tokenizer = hugging_face_file(folder)
    made = result(
        "shards", "--input", "in", "--output", "out", "--tokenizer", tokenizer, "--eod", EOD_NAME, cwd=folder
    )
    (folder / "out" / "manifest.json").unlink()
    adopted = result("manifest", "out", "--tokenizer", tokenizer, "--eod", 0, "--validation", 0.1, cwd=folder)
    assert (adopted["action"], adopted["shards"]) == ("adopted", made["shards"])
    assert result("verify", "out", cwd=folder)["fingerprint"] == adopted["fingerprint"]


def test_what_is_left_out_is_named_whatever_its_name(tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "in", sentencepiece_file(tmp_path)
    folder.mkdir()
    (folder / os.fsdecode(b"\xff\x1b[31m.txt")).write_text("text")
    hidden = [f".{number}" for number in range(5)]
    for name in (*hidden, os.fsdecode(b"\xfe\n.png")):
        (folder / name).write_bytes(b"\0")
    arguments = ("shards", "--input", "in", "--tokenizer", tokenizer, "--workers", 1)
    shown = run(*arguments, "--output", "one", cwd=tmp_path)
    assert shown.returncode == 0
    assert (
        "left out: 5 hidden files and folders (in/.0, in/.1, in/.2, and 2 more: --json has all)"
        in shown.stdout
    )
    assert "left out: 1 binary file (in/\\udcfe\\n.png)" in shown.stdout
    made = result(*arguments, "--output", "two", cwd=tmp_path)
    assert made["left_out"] == {"hidden files and folders": 5, "binary files": 1}
    assert made["left_out_files"] == {
        "hidden files and folders": [f"in/{name}" for name in hidden],
        "binary files": ["in/\udcfe\n.png"],
    }
    (tmp_path / "source.py").write_text(source_code())
    train = ("tokenizer", "--input", "in", "--input", "source.py", "--vocab-size", 400)
    trained = result(*train, "--output", "my.model", cwd=tmp_path)
    assert trained["left_out_files"] == made["left_out_files"]
    one = run(
        *arguments[:2],
        folder / os.fsdecode(b"\xff\x1b[31m.txt"),
        *arguments[3:],
        "--output",
        "3",
        cwd=tmp_path,
    )
    assert (one.returncode, one.stderr) == (0, "")
    refused = run(*arguments, "--output", os.fsdecode(b"\xff"), cwd=tmp_path)
    assert refused.returncode == 2
    assert "the name \\udcff is not plain text: give another with --name" in refused.stderr


def test_options_choose_files_columns_and_the_type_of_ids(tmp_path: Path) -> None:
    tokenizer = sentencepiece_file(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("id,story\n1,one\n2,two\n")
    (tmp_path / "in" / "b.txt").write_text("not this")
    made = result(
        *("shards", "--input", "in", "--glob", "*.csv", "--glob", "a*", "--key", "story", "--output", "out"),
        *("--tokenizer", tokenizer, "--workers", 1, "--validation", 0),
        cwd=tmp_path,
    )
    assert made["documents"] == {"train": 2}
    (tmp_path / "ids").mkdir()
    (tmp_path / "ids" / "train.bin").write_bytes(b"\5\0\2\0")
    adopt = ("manifest", "ids", "--tokenizer", tokenizer, "--output", "adopted")
    refused = run(*adopt, cwd=tmp_path)
    assert refused.returncode == 2 and "--raw uint16" in refused.stderr
    adopted = result(*adopt, "--raw", "uint16", cwd=tmp_path)
    assert result("verify", "adopted", cwd=tmp_path)["fingerprint"] == adopted["fingerprint"]


@pytest.mark.slow
def test_the_embedded_corpus_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part of it; all of it is made in tests/data/test_stdlib.py."""
    part = stdlib.stdlib_files()[::10]
    monkeypatch.setattr(stdlib, "stdlib_files", lambda: part)
    options = ("stdlib", "--output", "stdlib", "--vocab-size", 1024, "--workers", 2)
    assert [result(*options, cwd=tmp_path)["action"] for _ in range(2)] == ["prepared", "reused"]
    assert os.listdir(tmp_path) == ["stdlib"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("shards", "--input", "nowhere", "--output", "o", "--tokenizer", "t.model"),
            "t.model cannot be read",
        ),
        (("verify", "in"), "is not a prepared corpus"),
        (("manifest", "in", "--tokenizer", "in"), "found neither"),
        (
            ("tokenizer", "--input", "in", "--output", "t", "--vocab-size", 99999),
            "too small for a vocabulary",
        ),
        (
            ("tokenizer", "--input", "in", "--output", "t", "--vocab-size", 400, "--model", "wordpiece"),
            "--model",
        ),
    ],
)
def test_bad_input_is_a_message_and_2(folder: Path, arguments: tuple[object, ...], message: str) -> None:
    done = run(*arguments, cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(folder) == ["in"]


def test_help_shows_examples(tmp_path: Path) -> None:
    """The first of it by a process of its own."""
    shown = subprocess.run(command("--help"), cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert shown.returncode == 0
    for name in ("tokenizer", "shards", "stdlib", "manifest", "verify"):
        assert f"megastable prepare {name} " in shown.stdout
        one = run(name, "--help", cwd=tmp_path)
        assert one.returncode == 0
        assert f"megastable prepare {name} " in one.stdout


@pytest.mark.slow
def test_a_terminal_sees_a_bar(folder: Path) -> None:
    tokenizer = sentencepiece_file(folder)
    main, terminal = pty.openpty()
    arguments = ("shards", "--input", "in", "--output", "out", "--tokenizer", tokenizer, "--workers", 1)
    done = subprocess.run(
        command(*arguments), cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=terminal
    )
    shown = os.read(main, 1 << 16).decode()
    os.close(main)
    os.close(terminal)
    assert done.returncode == 0
    assert "preparing" in shown
    assert "documents/s" in shown
    assert "tokens/s" in shown


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
