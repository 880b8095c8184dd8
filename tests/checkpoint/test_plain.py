"""The plain model of a checkpoint gives the losses that the run itself had, whatever layout wrote it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megastable.base.errors import CheckpointError
from megastable.checkpoint import store
from megastable.checkpoint.files import write_file
from megastable.checkpoint.plain import PlainModel, find_checkpoint, load_plain
from megastable.config import recipe
from megastable.data.corpora import open_corpora
from megastable.model.gpt import GPT
from megastable.model.loss import cross_entropy
from megastable.parallel.sharding import placement_of
from megastable.parallel.topology import TensorParallel
from tests import reference
from tests.conftest import tiny
from tests.distributed import run_ranks, train

SAMPLES = 8
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, {}),
    "tp2": (2, {"tensor": 2, "sequence": True}, {}),
    "pp2-tied": (2, {"pipeline": 2}, {"tied": True}),
    "zero3-dp2": (2, {"zero": 3}, {}),
}


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each layout, in fp32 and with the same seed."""
    folder = tmp_path_factory.mktemp("runs")
    for name, (world, parallel, model) in LAYOUTS.items():
        config = tiny(
            corpus, folder / name, parallel=parallel, model=model, precision={"kind": "fp32"},
            train={"steps": 4}, checkpoint={"interval": 2, "keep": 2},
        )  # fmt: skip
        assert run_ranks(world, train, config) == [0] * world
    return folder


def evaluated(run: Path) -> float:
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    return float([event["loss"] for event in events if event["event"] == "evaluated"][-1])


def samples(run: Path) -> torch.Tensor:
    """What the run evaluates on: int64 [n, L + 1]."""
    config = recipe.load_recipe(run / "recipe.yaml")
    source = open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed).validation
    assert source is not None
    return torch.from_numpy(source.read_samples(np.arange(SAMPLES)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_its_losses_are_those_of_the_run_and_of_the_reference(runs: Path, name: str) -> None:
    model = load_plain(runs / name / "checkpoints/step-4")
    tokens = samples(runs / name)
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    losses = cross_entropy(logits, tokens[:, 1:], model.vocabulary)[0]
    assert float(losses.mean()) == pytest.approx(evaluated(runs / name), abs=1e-6)
    c = model.config
    shape = reference.Shape(c.layers, c.heads, c.key_value_heads, c.head_width, model.vocabulary, tied=c.tied)
    weights = {placement_of(p).name: p.detach() for p in model.parameters()}
    other = reference.logits(weights, shape, tokens[:, :-1])
    expected = torch.nn.functional.cross_entropy(
        other.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    assert torch.allclose(losses.flatten(), expected, atol=1e-5, rtol=0)
    assert model.step == 4 and not model.training


def test_a_run_stands_for_its_newest_good_checkpoint(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "one", tmp_path / "run")
    assert find_checkpoint(run).name == find_checkpoint(run / "checkpoints/latest").name == "step-4"
    damage(run / "checkpoints/step-4")
    assert find_checkpoint(run).name == find_checkpoint(run / "checkpoints").name == "step-2"
    damage(run / "checkpoints/step-2")
    with pytest.raises(CheckpointError, match=r"no checkpoint there can be used.*damaged"):
        load_plain(run)


def damage(checkpoint: Path) -> None:
    path = next(checkpoint.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_what_cannot_be_used_is_named(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "one", tmp_path / "run")
    with pytest.raises(
        CheckpointError, match="step-9: there is no such checkpoint; there are step-4, step-2"
    ):
        load_plain(run / "checkpoints/step-9")
    with pytest.raises(CheckpointError, match="neither a checkpoint nor the directory of a run"):
        load_plain(tmp_path)
    (run / "checkpoints/latest").write_text("step-7")
    with pytest.raises(CheckpointError, match="names 'step-7', which is not there; there are step-4"):
        load_plain(run / "checkpoints/latest")
    damage(run / "checkpoints/step-4")
    with pytest.raises(CheckpointError, match="checksum is not the manifest's"):
        load_plain(run / "checkpoints/step-4")
    (run / "checkpoints/step-2/recipe.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"recipe\.yaml: No such file"):
        load_plain(run / "checkpoints/step-2")


@pytest.mark.parametrize(
    ("change", "message"), [({"layers": 1}, "holds 'blocks.1.*does not have"), ({"layers": 3}, "holds no parameter"),
                            ({"ffn": 96}, "in the recipe's model")]
)  # fmt: skip
def test_another_model_is_refused(runs: Path, tmp_path: Path, change: dict[str, int], message: str) -> None:
    run = shutil.copytree(runs / "one", tmp_path / "run")
    checkpoint = run / "checkpoints/step-4"
    tree = yaml.safe_load((checkpoint / store.RECIPE).read_text())
    tree["config"]["model"] |= change
    contents = store.read_contents(checkpoint)
    contents.files[store.RECIPE] = write_file(checkpoint / store.RECIPE, yaml.safe_dump(tree).encode())
    write_file(checkpoint / store.MANIFEST, contents.to_sealed_bytes())
    with pytest.raises(CheckpointError, match=message):
        load_plain(run)


def test_documents_are_kept_apart_where_training_did(corpus: Path, tmp_path: Path) -> None:
    config = tiny(corpus, tmp_path, model={"vocab_size": 250})
    model = PlainModel(GPT(config.model, TensorParallel(), "none", 0), config, tmp_path, 0, "")
    tokens = torch.randint(1, 250, (1, 8))
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        apart = model(tokens, segments)[:, 3:]
        alone = model(tokens[:, 3:])
    assert torch.allclose(apart, alone, atol=1e-6)
