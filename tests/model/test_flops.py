"""Counts of parameters and operations, against the real model and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megastable.config.model import ModelConfig
from megastable.model.flops import flops_per_token, parameters
from megastable.model.gpt import GPT
from megastable.model.kernels import Kernels
from megastable.model.loss import LossFunction
from megastable.model.sizes import block_cost, keys_seen, layer_costs
from megastable.parallel.topology import TensorParallel

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "grouped": {"kv_heads": 1},
    "wide-heads": {"head_dim": 24, "kv_heads": 2},
    "no-qk-norm": {"qk_norm": False},
    "olmo2": {"qk_norm": "full", "norms": "after", "kv_heads": 2},
    "default-ffn": {"ffn": None},
    "both": {"norms": "both"},
    "deep": {"norms": "deep"},
    "qwen2": {"qk_norm": False, "qkv_bias": True, "kv_heads": 2, "head_dim": 24},
}


def config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = dict(
        layers=3, hidden=32, heads=4, ffn=48, sequence_length=16, vocab_size=100, vocab_multiple=64,
    )  # fmt: skip
    return ModelConfig(**fields | changes)


def model(c: ModelConfig) -> GPT:
    return GPT(c, TensorParallel(), "none", 0, LossFunction(100, 0.0, TensorParallel()), Kernels("reference"))


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_model(name: str) -> None:
    c = config(**SHAPES[name])
    assert parameters(c) == sum(p.numel() for p in model(c).parameters())


@pytest.mark.parametrize("name", ["plain", "tied", "wide-heads", "olmo2", "qwen2"])
def test_flops_are_what_torch_counts(name: str) -> None:
    """Forward and backward of every matrix product, the whole attention square as the reference computes it."""
    c = config(**SHAPES[name])
    tokens = torch.zeros(2, c.sequence_length, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with counter:
        model(c)(tokens, tokens).backward()
    assert counter.get_total_flops() == flops_per_token(c, causal=False) * tokens.numel()


@pytest.mark.parametrize("window", range(1, 17))
def test_keys_of_a_window_by_hand(window: int) -> None:
    """Token i sees min(i + 1, window) keys. As the half square leaves out half of its diagonal, the area of a band
    leaves out half a pair for each key of the window."""
    pairs = sum(min(i + 1, window) for i in range(16))
    assert keys_seen(16, window) * 16 == pairs - window / 2
    assert keys_seen(16, None) * 16 == 16 * 16 / 2


def test_windows_by_hand() -> None:
    """Every third block sees all."""
    windowed, full = config(window=4, full_attention_every=3), config()
    for causal in (False, True):
        less = flops_per_token(full, causal) - flops_per_token(windowed, causal)
        each = 12 * 32 * (16 / 2 - keys_seen(16, 4)) * (1 if causal else 2)
        assert less == pytest.approx(2 * each)


@pytest.mark.parametrize("window", [16, 17, 1000])
def test_a_window_as_long_as_the_sample_is_none(window: int) -> None:
    assert flops_per_token(config(window=window), True) == flops_per_token(config(), True)


def test_costs_of_layers_follow_the_windows() -> None:
    costs = [cost for cost, is_block in layer_costs(config(window=4, full_attention_every=3)) if is_block]
    assert costs[0] == costs[1] < costs[2] == block_cost(config(), 0)
    assert costs[2] - costs[0] == 2 * 32 * (16 / 2 - keys_seen(16, 4))


def test_qwen_2_5_05b_by_hand() -> None:
    """494,032,768 parameters, as its card's files hold."""
    c = ModelConfig(
        layers=24, hidden=896, heads=14, kv_heads=2, ffn=4864, vocab_size=151_936, qk_norm=False, qkv_bias=True,
        tied=True,
    )  # fmt: skip
    assert parameters(c) == 494_032_768


def test_llama_2_7b_by_hand() -> None:
    """Its 6,738,415,616 parameters are published; the operations follow from its shape."""
    c = ModelConfig(
        layers=32, hidden=4096, heads=32, ffn=11008, sequence_length=4096, vocab_size=32_000, qk_norm=False
    )
    assert parameters(c) == 6_738_415_616
    products = 6_738_415_616 - 32_000 * 4096 - 65 * 4096  # without the embedding and the norms
    square = 4 * 4096 * 4096 * 3 * 32  # two products of 2 s d in every layer, forward and twice backward
    assert flops_per_token(c, causal=False) == 6 * products + square
    assert flops_per_token(c, causal=True) == 6 * products + square / 2
