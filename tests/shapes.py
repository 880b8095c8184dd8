"""What tests/reference.py must know of a model, from its configuration."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from tests.reference import Experts, Shape


def shape_of(c: ModelConfig, seed: int = 0) -> Shape:
    """Written out once more: no property of the configuration is used where the papers have a formula. seed: of the
    run, for dropout; a sample's position is its number in the batch."""
    assert c.vocab_size is not None
    rope: dict[str, Any] = {}
    if (s := c.rope_scaling) is not None:
        assert s.kind == "linear" or s.original_length is not None
        if s.kind == "linear":
            rope["linear"] = s.factor
        elif s.kind == "llama3":
            rope["llama3"] = (s.factor, s.low_freq_factor, s.high_freq_factor, s.original_length)
        else:
            magnitude = s.attention_factor or 0.1 * math.log(s.factor) + 1
            rope["yarn"] = (s.factor, s.beta_slow, s.beta_fast, s.original_length, magnitude)
    width = c.head_dim or c.hidden // c.heads
    scale, branch, logits = c.attention_scale, 1.0, 1.0
    if c.mup is not None:
        scale = math.sqrt(c.mup.base_head_dim or width) / width
        branch = (c.mup.base_layers or c.layers) / c.layers
        logits = c.mup.base_width / c.hidden
    experts = None
    if (e := c.experts) is not None:
        experts = Experts(
            e.count, e.top_k, e.gate == "sigmoid", e.normalize, e.scale, e.bias_rate, e.balance_loss,
            e.balance_over == "step", e.router_z_loss,
        )  # fmt: skip
    return Shape(
        c.layers, c.heads, c.kv_heads or c.heads, width, c.vocab_size,
        theta=c.rope_theta, eps=c.norm_eps, z=c.z_loss, qk_norm=c.qk_norm, norms=c.norms, mixed_share=c.mixed_share,
        branch_steps=c.branch_steps, norm_scaling=c.norm_scaling, centered=c.zero_centered_norms, scale=scale,
        attention_cap=c.attention_softcap, cap=c.logit_softcap, window=c.window, full_every=c.full_attention_every,
        gelu=c.activation == "gelu", clamp=c.swiglu_clamp,
        embedding_scale=math.sqrt(c.hidden) if c.embedding_scale == "sqrt_hidden" else c.embedding_scale,
        branch_scale=branch, logit_scale=logits, tied=c.tied, experts=experts,
        kept=partial(kept, share=c.dropout, seed=seed) if c.dropout else None, **rope,
    )  # fmt: skip


def kept(samples: Tensor, tokens: int, width: int, place: int, share: float, seed: int) -> Tensor:
    """Factors of dropout, fp32 [b, s, h], by model/block_parts.py's definition in unsigned 64-bit numbers."""

    def mixed(x: Any) -> Any:
        for factor in (0x7F51AFD7ED558CCD, 0x44CEB9FE1A85EC53):
            x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
        return x ^ (x >> np.uint64(33))

    def numbers(n: int) -> Any:
        return np.arange(n, dtype=np.uint64)

    with np.errstate(over="ignore"):
        keys = mixed(samples.numpy().astype(np.uint64) * np.uint64(0x5851F42D4C957F2D) + np.uint64(seed))
        rows = keys[:, None] + numbers(tokens) * np.uint64(0x14057B7EF767814F)
        rows = mixed(rows + np.uint64(place) * np.uint64(0x2545F4914F6CDD1D))
        bits = mixed(rows[..., None] + numbers(width) * np.uint64(0x1E3779B97F4A7C15)) >> np.uint64(40)
    return torch.from_numpy((bits >= round(share * 2**24)).astype(np.float32)) / (1 - share)


def rates_of(c: RunConfig, weights: dict[str, Tensor]) -> dict[str, tuple[float, float, float]]:
    """Factors of rate, decay and epsilon of every parameter, as `reference.AdamW` takes them."""
    mup, found = c.model.mup, {}
    wide = c.model.hidden / mup.base_width if mup else 1.0
    deep = c.model.layers / mup.base_layers if mup and mup.base_layers else 1.0
    for name, weight in weights.items():
        decays = weight.dim() > 1 and (c.optimizer.decay_embeddings or name != "embedding.weight")
        hidden = wide if weight.dim() > 1 and "blocks" in name else 1.0
        found[name] = 1 / hidden, hidden if decays else 0.0, 1 / (wide * deep)
    return found
