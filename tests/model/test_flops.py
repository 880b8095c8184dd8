"""Counts of parameters and operations, against the real model and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megastable.config.model import ModelConfig
from megastable.model.gpt import GPT
from megastable.model.kernels import Kernels
from megastable.model.loss import LossFunction
from megastable.model.sizes import count_parameters, flops_per_token
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
    assert count_parameters(c) == sum(p.numel() for p in model(c).parameters())


@pytest.mark.parametrize("name", ["plain", "tied", "wide-heads", "olmo2", "qwen2"])
def test_flops_are_what_torch_counts(name: str) -> None:
    """Forward and backward of every matrix product, the whole attention square as the reference computes it."""
    c = config(**SHAPES[name])
    tokens = torch.zeros(2, c.sequence_length, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with counter:
        model(c)(tokens, tokens).backward()
    assert counter.get_total_flops() == flops_per_token(c, causal=False) * tokens.numel()


def test_flops_of_llama_2_7b_by_hand() -> None:
    """Its 6,738,415,616 parameters are published; the operations follow from its shape."""
    c = ModelConfig(
        layers=32, hidden=4096, heads=32, ffn=11008, sequence_length=4096, vocab_size=32_000, qk_norm=False
    )
    assert count_parameters(c) == 6_738_415_616
    products = 6_738_415_616 - 32_000 * 4096 - 65 * 4096  # without the embedding and the norms
    square = 4 * 4096 * 4096 * 3 * 32  # two products of 2 s d in every layer, forward and twice backward
    assert flops_per_token(c, causal=False) == 6 * products + square
    assert flops_per_token(c, causal=True) == 6 * products + square / 2
