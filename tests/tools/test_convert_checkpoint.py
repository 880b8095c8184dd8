"""The command line as its users meet it: out, checked, and in again as a run that trains."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from click.testing import Result
from typer.testing import CliRunner

from megastable.checkpoint import store
from megastable.checkpoint.new_run import write_run
from megastable.checkpoint.whole import describe_parameters
from megastable.config.tree import RunConfig
from megastable.data.manifest import adopt_shards
from megastable.data.shards import ShardWriter
from megastable_tools.commands.convert import app
from megastable_tools.convert.huggingface.tokenizer_export import real_text
from megastable_tools.prepare.corpus_tokenizer import train_sentencepiece

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
    adopt_shards(corpus, tokenizer.info, validation=0.1).save_manifest(corpus)
    tree = {
        "model": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "sequence_length": 32, "vocab_size": 400},
        "data": {"corpora": [{"path": str(corpus)}]},
        "train": {"steps": 2, "global_batch": 4, "micro_batch": 2, "eval_samples": 4},
        "logging": {"trackers": [], "peak_tflops": 1.0}, "precision": {"kind": "fp32"},
    }  # fmt: skip
    (folder / "base.yaml").write_text(yaml.safe_dump(tree))
    config = RunConfig.model_validate(tree)
    drawn = torch.Generator().manual_seed(0)
    weights = {
        n: 0.2 * torch.randn(d.shape, generator=drawn) for n, d in describe_parameters(config.model).items()
    }
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
