"""Parameter groups: what decays, and muP's rates, decay and epsilon."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megastable.config.model import ModelConfig
from megastable.config.optimizers import OptimizerConfig
from megastable.config.tree import RunConfig
from megastable.model.gpt import GPT
from megastable.optim.build import parameter_groups
from megastable.parallel.sharding import placement_of
from megastable.parallel.topology import TensorParallel

SIZES: dict[str, Any] = dict(layers=6, hidden=64, heads=4, ffn=128, vocab_size=100, vocab_multiple=4)


def by_name(optimizer: dict[str, Any], **model: Any) -> dict[str, dict[str, Any]]:
    """Settings of every parameter."""
    m = ModelConfig(**SIZES | model)
    with torch.device("meta"):
        gpt = GPT(m, TensorParallel(), "none", None)
    groups = parameter_groups(gpt.parameters(), OptimizerConfig(**optimizer), m)
    assert all(group["params"] for group in groups)
    found = {
        placement_of(p).name: {k: v for k, v in g.items() if k != "params"}
        for g in groups
        for p in g["params"]
    }
    assert len(found) == len(list(gpt.parameters()))
    return found


def test_matrices_decay_and_vectors_do_not() -> None:
    for name, settings in by_name({"weight_decay": 0.1}, qkv_bias=True, norms="both").items():
        vector = "norm" in name or name.endswith("bias")
        assert settings == {"weight_decay": 0.0 if vector else 0.1}, name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_embeddings_without_decay(tied: bool, name: str) -> None:
    found = by_name({"name": name, "decay_embeddings": False}, tied=tied)
    assert found["embedding.weight"]["weight_decay"] == 0.0
    assert tied or found["head.weight"]["weight_decay"] == 0.1
    assert found["blocks.0.mlp.down.weight"]["weight_decay"] == 0.1


@pytest.mark.parametrize("base_layers", [None, 2])
def test_mup(base_layers: int | None) -> None:
    """Width 4 times, depth 3 times the base's."""
    found = by_name({"weight_decay": 0.1, "eps": 1e-8}, mup={"base_width": 16, "base_layers": base_layers})
    for name, settings in found.items():
        hidden = name.startswith("blocks.") and "norm" not in name
        assert settings["lr_scale"] == (0.25 if hidden else 1.0), name
        decay = 0.4 if hidden else 0.0 if "norm" in name else 0.1
        assert settings["weight_decay"] == pytest.approx(decay), name
        assert settings["eps"] == pytest.approx(1e-8 / (4 * (3 if base_layers else 1))), name


@pytest.mark.parametrize("name", ["sgd", "muon", "lamb", "adafactor"])
def test_an_optimizer_without_adams_rates_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"model.mup with optimizer.name={name}"):
        RunConfig.model_validate({"model": SIZES | {"mup": {"base_width": 16}}, "optimizer": {"name": name}})
