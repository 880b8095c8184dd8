"""The command line as its users meet it: what it reads, what it recommends, and how it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from megastable.checkpoint.new_run import write_run
from megastable.checkpoint.whole import describe_parameters
from megastable.config.recipe import load_recipe
from megastable.config.tree import RunConfig
from megastable_tools.commands.fp8_check import app
from tests.checkpoint.states import state_of
from tests.conftest import tiny
from tests.generate.runs import PIECES, corpus_with_tokenizer

ROOT = Path(__file__).parents[2]
FAR, FFN = 2.0**18, 64
CALM = ("--recipe", "current", "--recipe", "block")  # of so few numbers delayed scales cut too large a share


def call(*arguments: object, code: int = 0) -> tuple[str, str]:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == code, (done.exit_code, done.output, done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    corpus_with_tokenizer(folder)
    return folder


def numbers(run: RunConfig) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        name: 0.1 * torch.randn(of.shape, generator=random) if len(of.shape) > 1 else torch.ones(of.shape)
        for name, of in describe_parameters(run.model).items()
    }


def written(corpus: Path, folder: Path, held: dict[str, Tensor] | None = None, **parts: Any) -> Path:
    """A run with one checkpoint of step 7. held: weights other than small random ones."""
    run = tiny(corpus, folder, **{"precision": {"kind": "bf16"}} | parts)
    run = run.model_copy(update={"model": run.model.model_copy(update={"vocab_size": PIECES})})
    weights = numbers(run) | (held or {})
    write_run(
        folder, run, state_of(), lambda name, kind: weights[name], optimizer=None, origin={"how": "test"}
    )
    return folder


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(corpus, tmp_path_factory.mktemp("runs") / "healthy")


def test_a_healthy_run_is_stable_as_it_is(run: Path, tmp_path: Path) -> None:
    files = tmp_path / "fp8.json", tmp_path / "fp8.png"
    out, _ = call(run, *CALM, "--samples", 4, "--output", files[0], "--plot", files[1])
    assert f"{run}/checkpoints/step-7: step 7, " in out and "bfloat16 on cpu" in out
    assert "validation samples of the run" in out or "training samples from position" in out
    found = json.loads(files[0].read_text())
    assert found["stable"] and found["best"] in ("current", "block")
    assert found["overrides"] == [f"precision.fp8.recipe={found['best']}"]
    assert out.rstrip().endswith(found["overrides"][0])
    assert [recipe["recipe"] for recipe in found["recipes"]] == ["current", "block"]
    for recipe in found["recipes"]:
        assert recipe["stable"] and recipe["keep"] == {} and recipe["kept"] is None
        assert recipe["everything"]["change"] == pytest.approx(recipe["everything"]["loss"] - found["loss"])
        assert len(recipe["layers"]) == 2 * 4
        tensor = recipe["layers"][0]["tensors"]["input"]
        assert tensor["decibels"] == pytest.approx(-20 * np.log10(tensor["error"])) and tensor["largest"] > 0
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_a_planted_layer_is_named_with_what_to_copy(corpus: Path, tmp_path: Path) -> None:
    held = numbers(
        tiny(corpus, tmp_path, model=tiny(corpus, tmp_path).model.model_dump() | {"vocab_size": PIECES})
    )
    up, down = (held[f"blocks.1.mlp.{name}.weight"] for name in ("gate_up", "down"))
    up[FFN + 3] /= FAR
    down[:, 3] *= FAR
    run = written(
        corpus,
        tmp_path / "planted",
        held,
        precision={"kind": "bf16", "fp8": {"recipe": "block", "keep_first": 1}},
    )
    out, _ = call(run, "--recipe", "current", "--samples", 4, "--all", "--output", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    (recipe,) = found["recipes"]
    assert list(recipe["keep"]) == ["blocks.1.mlp.down"]
    assert recipe["kept"]["kl"] < recipe["everything"]["kl"] / 3
    # What the run says already would stay: it is unsaid.
    assert out.rstrip().endswith(
        "precision.fp8.recipe=current precision.fp8.keep_first=0 precision.fp8.keep=[blocks.1.mlp.down]"
    )
    assert "current: keep 1 layer of 8 out of FP8" in out and "of its weight become zero" in out
    assert "every tensor, the worst first" in out
    # And it can be copied.
    changed = load_recipe(run / "recipe.yaml", found["overrides"]).precision.fp8
    assert changed is not None and (changed.recipe, changed.keep_first) == ("current", 0)
    assert changed.keep == ("blocks.1.mlp.down",)


def test_mistakes_are_said_and_end_with_2(corpus: Path, run: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    weights = damaged / "checkpoints/step-7/rank-00000.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    sixteen = written(corpus, tmp_path / "sixteen", precision={"kind": "fp16"})
    broken = written(corpus, tmp_path / "broken", {"blocks.0.mlp.down.weight": torch.full((32, FFN), 3e38)})
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("too short")
    binary.write_bytes(b"\xff\xfe\x00")
    cases: list[tuple[tuple[object, ...], str]] = [
        ((tmp_path / "nothing",), "is neither a checkpoint nor"),
        ((run / "checkpoints/step-9",), "there is no such checkpoint"),
        ((damaged / "checkpoints/step-7",), "rank-00000.safetensors"),
        ((sixteen,), "add --dtype bf16"),
        ((broken, "--recipe", "current"), "not finite without FP8"),
        ((run, "--text", short), "too short for"),
        ((run, "--text", binary), "not UTF-8"),
        ((run, "--text", tmp_path / "none.txt"), "cannot be read: No such file"),
        ((run, "--plot", tmp_path / "a.bmp"), "a name ending in"),
        ((run, "--output", tmp_path / "no/a.json"), "there is no directory"),
        ((run, "--device", "nonsense"), "cannot be used"),
    ]
    for arguments, words in cases:
        out, err = call(*arguments, code=2)
        assert err.splitlines()[-1].startswith("error: ") and words in err, (arguments, err)
    for wrong in (("--recipe", "nvfp4"), ("--samples", 0), ("--dtype", "fp16")):
        call(run, *wrong, code=2)
    # Asked how it would be, a run in fp16 is told what to change.
    out, _ = call(sixteen, "--dtype", "bf16", "--recipe", "block", "--samples", 2)
    assert "precision.fp8.recipe=block precision.kind=bf16" in out
