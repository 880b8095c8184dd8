"""Small models with weights that say something, to generate with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megastable.checkpoint.plain import CAPPED, PlainModel
from megastable.config.model import ModelConfig
from megastable.config.tree import DataConfig, RunConfig
from megastable.model.gpt import GPT, set_updates
from megastable.model.kernels import PLAIN
from megastable.parallel.topology import TensorParallel

VOCABULARY, LENGTH = 50, 48
KINDS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one-for-all-tied": {"kv_heads": 1, "tied": True},
    "olmo2": {"qk_norm": "full", "norms": "after", "head_dim": 16},
    "qwen2": {"qk_norm": False, "qkv_bias": True, "kv_heads": None},
    "yarn": {"rope_theta": 300.0, "rope_scaling": {"kind": "yarn", "factor": 8.0, "original_length": 16}},
    "scale": {"attention_scale": 1.3},
    "windows": {"window": 7, "full_attention_every": 2},
    "capped-window": {"window": 1, "attention_softcap": 0.7, "kv_heads": 1},
    "embedding-scale": {"embedding_scale": 5.0, "norms": "after"},
    "both": {"norms": "both"},
    "mixed": {"norms": "mixed", "mixed_share": 0.5},
    "deep": {"norms": "deep"},
    "branch": {"norms": "branch"},
    "clamped-scaled": {"swiglu_clamp": 0.5, "norm_scaling": True},
    "mup": {"mup": {"base_width": 16, "base_layers": 1, "base_head_dim": 4}},
    "gemma2": {
        "layers": 3, "norms": "both", "zero_centered_norms": True, "activation": "gelu", "qk_norm": False,
        "embedding_scale": "sqrt_hidden", "tied": True, "head_dim": 16, "attention_scale": 24**-0.5,
        "attention_softcap": 2.0, "logit_softcap": 5.0, "window": 7, "full_attention_every": 2,
    },
}  # fmt: skip


def model(
    dtype: torch.dtype = torch.float32,
    vocabulary: int = VOCABULARY,
    data: DataConfig | None = None,
    **changes: Any,
) -> PlainModel:
    fields: dict[str, Any] = dict(
        layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, sequence_length=LENGTH, vocab_size=vocabulary,
        vocab_multiple=32, init_std=0.3,
    )  # fmt: skip
    run = RunConfig(model=ModelConfig(**fields | changes), data=data or DataConfig())
    kernels = CAPPED if run.model.attention_softcap else PLAIN
    gpt = GPT(run.model, TensorParallel(), "none", seed=5, kernels=kernels).to(dtype)
    set_updates(gpt, run.model, 1000)  # of 4000 of `norms=branch`
    with torch.no_grad():
        for index, p in enumerate(gpt.parameters()):
            if p.dim() == 1:
                p.copy_(1 + 0.3 * torch.sin(torch.arange(len(p)) + index))
    return PlainModel(gpt, run, Path("run/checkpoints/step-3"), 3, "0" * 32).eval()


def tokens(rows: int, count: int, seed: int = 0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, count), generator=torch.Generator().manual_seed(seed))
