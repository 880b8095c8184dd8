"""Initial weights: a function of seed and name, the same whole tensors under every layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megastable.config.model import ModelConfig
from megastable.model import init
from megastable.model.experts import ExpertMLP
from megastable.model.gpt import GPT, Block, list_layers
from megastable.model.init import ParameterPart, fill_parts, whole_weight
from megastable.parallel.sharding import Placement, cut_shard, placement_of
from megastable.parallel.topology import TensorParallel
from tests.tiers import examples


def config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = dict(
        layers=3, hidden=64, heads=8, kv_heads=4, ffn=96, vocab_size=250, vocab_multiple=64, init_std=0.02
    )
    return ModelConfig(**fields | changes)


def weights(
    c: ModelConfig, tp: TensorParallel | None = None, seed: int = 1
) -> dict[str, tuple[Tensor, Placement]]:
    model = GPT(c, tp or TensorParallel(), "none", seed)
    return {placement_of(p).name: (p.detach(), placement_of(p)) for p in model.parameters()}


# Whole matrices of a model of width 256 (8 heads of 32, 4 of keys), MLP of 512, 256 rows of vocabulary, 4 blocks.
@pytest.mark.parametrize(
    ("changes", "qkv", "out", "gate_up", "down", "embedding", "head"),
    [
        ({}, 0.02, 0.02 / 8**0.5, 0.02, 0.02 / 8**0.5, 0.02, 0.02),
        ({"residual_init": "same"}, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02),
        ({"residual_init": "zero"}, 0.02, 0.0, 0.02, 0.0, 0.02, 0.02),
        ({"init": "fan_in"}, 1 / 16, 1 / 16 / 8**0.5, 1 / 16, 512**-0.5 / 8**0.5, 0.02, 1 / 16),
        (
            {"init": "xavier", "residual_init": "same"},
            ((2 / 512) ** 0.5, (2 / 384) ** 0.5, (2 / 384) ** 0.5), (2 / 512) ** 0.5,
            (2 / 768) ** 0.5, (2 / 768) ** 0.5, 0.02, (2 / 512) ** 0.5,
        ),
        ({"init": "small"}, *[(2 / 1280) ** 0.5, (2 / 1280 / 8) ** 0.5] * 2, 0.02, (2 / 1280) ** 0.5),
        ({"mup": {"base_width": 64, "zero_output": True}}, 0.01, 0.01 / 8**0.5, 0.01, 0.01 / 8**0.5, 0.02, 0.0),
        (
            {"mup": {"base_width": 64, "base_layers": 2}},
            0.01, 0.01 / 4**0.5, 0.01, 0.01 / 4**0.5, 0.02, 0.02,
        ),
        ({"norms": "deep"}, (0.02, 0.02, 0.02 * 32**-0.25), *[0.02 * 32**-0.25] * 3, 0.02, 0.02),
    ],
    ids=["normal", "same", "zero", "fan-in", "xavier", "small", "mup", "completep", "deep"],
)  # fmt: skip
def test_standard_deviations_of_every_choice(
    changes: dict[str, Any],
    qkv: float | tuple[float, float, float],
    out: float,
    gate_up: float,
    down: float,
    embedding: float,
    head: float,
) -> None:
    c = config(layers=4, hidden=256, ffn=512, **changes)
    made = {name: w for name, (w, _) in weights(c).items() if w.dim() > 1}
    wanted = {
        "attention.out": out,
        "mlp.gate_up": gate_up,
        "mlp.down": down,
        "embedding": embedding,
        "head": head,
    }
    parts = qkv if isinstance(qkv, tuple) else (qkv, qkv, qkv)
    for i in range(4):
        whole = made.pop(f"blocks.{i}.attention.qkv.weight").split((256, 128, 128))
        made |= {f"{i}.{which}.weight": part for which, part in zip(("q", "k", "v"), whole, strict=True)}
    wanted |= dict(zip((".q", ".k", ".v"), parts, strict=True))
    for name, w in made.items():
        (std,) = (value for ending, value in wanted.items() if name.endswith(f"{ending}.weight"))
        assert float(w.std()) == pytest.approx(std, rel=5 / math.sqrt(2 * w.numel())), name


def strength_of_mlp(c: ModelConfig) -> float:
    """Standard deviation of what the first block's MLP adds, of normal inputs; weights of choices are even."""
    model = GPT(c, TensorParallel(), "none", 1)
    (mlp,) = (part.mlp for part in model.modules() if isinstance(part, Block))
    if isinstance(mlp, ExpertMLP):
        torch.nn.init.zeros_(mlp.router.weight)
    x = torch.randn(64, 4, c.hidden, generator=torch.Generator().manual_seed(1))
    return mlp(x).std().item()


@pytest.mark.parametrize(
    ("experts", "share"),
    [({}, 1.0), ({"scale": 2.5}, 1.0), ({"gate": "sigmoid"}, 1.0), ({"normalize": False}, 3 / 8 / 3)],
    ids=["softmax", "scale", "sigmoid", "not normalized"],
)
@pytest.mark.parametrize("kind", ["normal", "fan_in", "small"])
def test_experts_begin_together_as_strong_as_a_dense_mlp(
    kind: str, experts: dict[str, Any], share: float
) -> None:
    """Of the active width. Weights of choices that are not normalized are 1/8 each."""
    sizes = dict(hidden=128, layers=1, init=kind)
    dense = strength_of_mlp(config(**sizes, ffn=192))
    mixture = strength_of_mlp(config(**sizes, experts={"count": 8, "top_k": 3, "ffn": 64} | experts))
    wide = 3**0.5 if kind == "fan_in" and share < 1 else 1  # a narrower matrix begins larger
    assert mixture == pytest.approx(dense * share * wide, rel=0.08)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("chunk", [100, 1 << 18])
@pytest.mark.parametrize(
    "changes",
    [
        {"norms": "deep", "init": "xavier"},
        {"norms": "both", "zero_centered_norms": True},
        {"mup": {"base_width": 16}},
    ],
    ids=["deep", "zero-centered", "mup"],
)
def test_shards_of_every_choice_are_slices_of_the_whole(
    size: int, chunk: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepNorm's factor begins in the middle of a fused matrix, and of a chunk."""
    c = config(**changes)
    whole = {name: (whole_weight(p, tuple(w.shape), c, 1), p) for name, (w, p) in weights(c).items()}
    monkeypatch.setattr(init, "CHUNK", chunk)
    for rank in range(size):
        for name, (w, placement) in weights(c, TensorParallel(rank=rank, size=size)).items():
            assert torch.equal(w, cut_shard(whole[name][0], placement, rank, size)), name
            assert w.dim() > 1 or (w == (0.0 if c.zero_centered_norms else 1.0)).all()


# Drawn in chunks, by threads


@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 700))
@settings(deadline=None, max_examples=examples(150))
def test_chunks_are_the_bytes_of_the_whole(rows: int, columns: int, size: int) -> None:
    whole = torch.empty(rows, columns).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "CHUNK", size)
        at = 0
        for first, chunk in init._chunks(rows, columns, 0.02, torch.Generator().manual_seed(3)):
            assert first == at and chunk.dtype == torch.float32
            assert torch.equal(chunk, whole[first : first + len(chunk)])
            # Sixteen rows at the least where the rows are odd, and what is left over.
            assert chunk.numel() < max(size, init.BLOCK * columns) + init.BLOCK + columns
            at += len(chunk)
    assert at == rows


def parts_of(
    c: ModelConfig, tp: TensorParallel, data: int, dtype: torch.dtype
) -> dict[tuple[str, int], tuple[ParameterPart, Tensor]]:
    """Of every parameter and data rank what ZeRO 3 gives it, and the numbers that belong there; by name and rank."""
    found = {}
    for layer in list_layers(c, tp, "none"):
        for p in layer.build().parameters():
            placement, shape = placement_of(p), list(p.shape)
            if placement.dim is not None:
                shape[placement.dim] = sum(placement.sections)
            flat = cut_shard(
                whole_weight(placement, tuple(shape), c, 1), placement, tp.rank, tp.size
            ).flatten()
            size = -(-len(flat) // data)
            padded = torch.cat((flat, torch.zeros(size * data - len(flat)))).to(dtype)
            for rank in range(data):
                into = torch.full((size,), torch.nan, dtype=dtype)
                part = ParameterPart(placement, tuple(p.shape), into, rank * size)
                found[placement.name, rank] = part, padded[rank * size : (rank + 1) * size]
    return found


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("size", "data", "dtype"), [(1, 1, "float32"), (1, 3, "bfloat16"), (2, 5, "float16")]
)
def test_fill_gives_the_same_bytes_on_any_threads_and_ranks(
    threads: int, size: int, data: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "CHUNK", 1000)
    c = config(qk_norm="full", layers=1)
    for rank in range(size):
        tp = TensorParallel(rank=rank, size=size)
        made = parts_of(c, tp, data, getattr(torch, dtype))
        fill_parts([part for part, _ in made.values()], c, tp, 1, threads)
        for name, (part, wanted) in made.items():
            assert torch.equal(part.into, wanted), name
