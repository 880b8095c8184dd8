"""The command line as its users meet it: out, checked, and in again as a run that trains."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from click.testing import Result
from typer.testing import CliRunner

from megastable.checkpoint import store
from megastable.checkpoint.new_run import write_run
from megastable.checkpoint.whole import parameters
from megastable.config.tree import RunConfig
from megastable.data.manifest import adopt
from megastable.data.shards import ShardWriter
from megastable_tools.commands.convert import app
from megastable_tools.convert.huggingface.tokenizer_export import real_text
from megastable_tools.prepare.train_tokenizer import train_sentencepiece
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "dumb"}


def run(*arguments: object, cwd: Path, code: int = 0) -> Result:
    """In this process: a new one would import everything again."""
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, the recipe base.yaml, and runs/a with a checkpoint."""
    folder = tmp_path_factory.mktemp("convert")
    text = real_text()[:30_000]
    corpus = folder / "corpus"
    tokenizer = train_sentencepiece([text], corpus / "tokenizer.model", 400)
    with ShardWriter(corpus / "part-0", 400) as writer:
        for first in range(0, len(text), 1000):
            writer.add_document(np.array([*tokenizer.encode(text[first : first + 1000]), tokenizer.eod]))
    adopt(corpus, tokenizer.info, validation=0.1).save(corpus)
    tree = {
        "model": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "sequence_length": 32, "vocab_size": 400},
        "data": {"corpora": [{"path": str(corpus)}]},
        "train": {"steps": 2, "global_batch": 4, "micro_batch": 2, "eval_samples": 4},
        "logging": {"trackers": [], "peak_tflops": 1.0}, "precision": {"kind": "fp32"},
    }  # fmt: skip
    (folder / "base.yaml").write_text(yaml.safe_dump(tree))
    config = RunConfig.model_validate(tree)
    drawn = torch.Generator().manual_seed(0)
    weights = {n: 0.2 * torch.randn(d.shape, generator=drawn) for n, d in parameters(config.model).items()}
    layout = store.LayoutState(tensor=1, pipeline=1, data=1, zero=1, precision="fp32")
    state = store.RunState(step=5, order_fingerprint="0" * 64, layout=layout)
    write_run(folder / "runs/a", config, state, lambda name, _: weights[name], optimizer=None, origin={})
    return folder


@pytest.mark.slow
def test_out_and_in_again(place: Path) -> None:
    told = run("to-hf", "runs/a", "out", "--shard-size", "30KB", cwd=place)
    assert "exported out: step 5 of " in told.stdout and " in bf16, " in told.stdout
    assert "the same: all " in told.stdout and "random tokens" in told.stdout
    refused = run("to-hf", "runs/a", "out", cwd=place, code=2)
    assert refused.stderr == "error: out exists already: name a new directory\n"
    checked = json.loads(run("check", "runs/a", "out", "--json", cwd=place).stdout)["check"]
    assert checked["same"] is True and checked["precision"] == "bfloat16"
    assert [row["of"] for row in checked["rows"]] == ["random tokens", "text of the validation corpus"]
    told = run("from-hf", "out", "runs/b", "--recipe", "base.yaml", "train.steps=1", cwd=place)
    assert "deepspeed --module megastable.train runs/b/recipe.yaml run.dir=runs/b" in told.stdout
    assert "the same: all " in told.stdout
    assert store.step_of(place / "runs/b/checkpoints/step-0") == 0
    # Of another checkpoint: 1, and a table that says why.
    settings = json.loads((place / "out/config.json").read_text())
    (place / "out/config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-4}))
    told = run("check", "runs/a", "out", cwd=place, code=1)
    assert "NOT THE SAME: model.norm_eps is 0.0001 in the folder" in told.stdout
    assert "; on random tokens logits differ by up to" in told.stdout
    refused = run(
        "from-hf", "out", "runs/c", "--recipe", "base.yaml", "model.sequence_length=64", cwd=place, code=2
    )
    assert "error: model.sequence_length=64 in base.yaml" in refused.stderr
    assert not (place / "runs/c").exists()


def test_mistakes_are_told_in_a_line(place: Path) -> None:
    for arguments, message in (
        (("to-hf", "runs/none", "x"), "runs/none is neither a checkpoint nor the directory of a run"),
        (("check", "runs/none", "x"), "runs/none: there is no such path"),
        (("to-hf", "runs/a", "x", "--dtype", "fp8"), "--dtype fp8: choose among bf16, fp32"),
        (("to-hf", "runs/a", "x", "--shard-size", "5TB"), "--shard-size 5TB: write a size such as 5GB"),
        (("to-hf", "runs/a", "x", "--shard-size", "9" * 400), ": write a size such as 5GB"),
        (("to-hf", "runs/a", "x" * 300), "cannot be made: File name too long"),
        (("to-hf", "runs/a", "runs/a/checkpoints/step-5/x"), "runs/a/checkpoints/step-5/x would lie in "),
        (("to-hf", "runs/a", "x", "--tokenizer", "base.yaml"), "base.yaml is not a SentencePiece model"),
        (("check", "runs/a", "runs/a"), "config.json is missing"),
        (("from-hf", "runs/a", "x", "--recipe", "base.yaml"), "config.json is missing"),
        (("to-gguf", "none", "x"), "none is not there, or no folder: give one that holds config.json"),
        (("to-gguf", "base.yaml", "x"), "base.yaml is not there, or no folder"),
        (("to-gguf", "runs/a", "x"), "config.json is missing"),
        (("to-gguf", "runs/a", "base.yaml"), "base.yaml exists already: name a new file"),
        (("to-gguf", "runs/a", "runs/a/checkpoints/x"), "runs/a/checkpoints/x would lie in "),
        (("to-gguf", "runs/a", "x" * 300), "cannot be made: File name too long"),
    ):
        refused = run(*arguments, cwd=place, code=2)
        assert refused.stderr.startswith("error: ") and message in refused.stderr
        assert not (place / "x").exists()
    assert "--recipe" in run("from-hf", "runs/a", "x", cwd=place, code=2).stderr
    for command in ("to-hf", "to-gguf", "from-hf", "check"):
        assert f"megastable convert {command}" in run(command, "--help", cwd=place).stdout


def test_that_the_package_gguf_is_missing_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    run("to-hf", "runs/a", "for-gguf", "--no-check", cwd=place)
    told = run("to-gguf", "for-gguf", "made.gguf", cwd=place, code=2).stderr
    assert told == (
        "error: the package gguf, which writes such files, is not installed: bash launch/install.sh gguf\n"
    )
    assert not (place / "made.gguf").exists()


def test_a_run_that_cannot_be_compared_does_not_stay(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("to-hf", "runs/a", "odd", "--no-check", cwd=place)
    settings = json.loads((place / "odd/config.json").read_text())
    # Not for us, but transformers refuse it.
    (place / "odd/config.json").write_text(json.dumps(settings | {"bos_token_id": "x", "use_cache": "never"}))
    told = run("from-hf", "odd", "runs/odd", "--recipe", "base.yaml", cwd=place, code=2)
    assert "cannot load it" in told.stderr
    assert not (place / "runs/odd").exists()
    run("from-hf", "odd", "runs/odd", "--recipe", "base.yaml", "--no-check", cwd=place)
    assert (place / "runs/odd").exists()


def test_what_is_not_checked_is_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = run("to-hf", "runs/a", "unchecked", "--no-check", "--no-tokenizer", cwd=place)
    assert "NOT CHECKED, as you asked" in told.stdout and "note: no tokenizer was written" in told.stdout
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else find(name, *a)
    )
    for arguments, code in ((("to-hf", "runs/a", "without"), 0), (("check", "runs/a", "unchecked"), 1)):
        told = run(*arguments, cwd=place, code=code)
        assert "WARNING: NOT CHECKED: transformers, which the check needs, is not installed" in told.stderr
    assert "NOT CHECKED" in (place / "without/README.md").read_text()


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(place: Path) -> None:
    before = sorted(path.name for path in place.iterdir())
    process = subprocess.Popen(
        [sys.executable, "-m", "megastable", "convert", "to-hf", "runs/a", "interrupted"], cwd=place, env=ENVIRONMENT,
        stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "comparing: our logits ...\n"  # written, not yet in its place
    assert any(path.name.startswith("interrupted.tmp-") for path in place.iterdir())
    process.send_signal(signal.SIGINT)
    until = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert process.returncode == 130
    assert process.stderr.read().endswith("interrupted\n")
    assert sorted(path.name for path in place.iterdir()) == before
