"""What tests/reference.py must know of a model, from its configuration."""

from __future__ import annotations

import math
from typing import Any

from megastable.config.model import ModelConfig
from tests.reference import Shape


def shape_of(c: ModelConfig) -> Shape:
    """Written out once more: no property of the configuration is used where the papers have a formula."""
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
    return Shape(
        c.layers, c.heads, c.kv_heads or c.heads, width, c.vocab_size,
        theta=c.rope_theta, eps=c.norm_eps, z=c.z_loss, qk_norm=c.qk_norm, norms=c.norms, mixed_share=c.mixed_share,
        branch_steps=c.branch_steps, norm_scaling=c.norm_scaling, centered=c.zero_centered_norms, scale=scale,
        attention_cap=c.attention_softcap, cap=c.logit_softcap, window=c.window, full_every=c.full_attention_every,
        gelu=c.activation == "gelu", clamp=c.swiglu_clamp,
        embedding_scale=math.sqrt(c.hidden) if c.embedding_scale == "sqrt_hidden" else c.embedding_scale,
        branch_scale=branch, logit_scale=logits, tied=c.tied, **rope,
    )  # fmt: skip
