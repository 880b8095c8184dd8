"""Causal self-attention with grouped queries, QK-norm before RoPE, optionally inside documents.

Shapes: s sequence, b micro-batch, q query heads and k key/value heads of this tensor rank, d head width.
QK-norm: Henry et al., arXiv:2010.04245; Dehghani et al., arXiv:2302.05442; over the width of all
heads: OLMo 2, arXiv:2501.00656 section 3. GQA: Ainslie et al., arXiv:2305.13245.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megastable.config import ModelConfig
from megastable.model.norm import RMSNorm, SplitRMSNorm
from megastable.model.rope import document_positions, rope_table, rotate
from megastable.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megastable.parallel.topology import TensorParallel


def document_mask(segments: Tensor) -> Tensor:
    """What may attend to what: bool [b, 1, s, s], causal and inside one document. segments: [b, s]."""
    s = segments.shape[1]
    causal = torch.ones(s, s, dtype=torch.bool, device=segments.device).tril()
    return (causal & (segments[:, :, None] == segments[:, None, :])).unsqueeze(1)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v in plain fp32. q [b, q, s, d], k and v [b, k, s, d] -> [b, q, s, d]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1).float(), v.repeat_interleave(groups, 1).float()
    scores = q.float() @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    allowed = (
        torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril() if mask is None else mask
    )
    return (scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v).to(q.dtype)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`reference_attention` by torch's fused kernels (fp32 softmax inside)."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and (mask is not None or q.device.type == "cpu"):
        # Of the fused kernels only those of GPUs without a mask know grouped queries; with the others torch would
        # fall back to the unfused one, and its scores [b, q, s, s].
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        groups = 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=groups > 1
    )


BACKENDS = {"reference": reference_attention, "sdpa": sdpa_attention}


def _head_norm(
    config: ModelConfig, heads: int, tp: TensorParallel, name: str
) -> RMSNorm | SplitRMSNorm | None:
    d = config.head_width
    if config.qk_norm == "full":
        return SplitRMSNorm(heads * d, config.norm_eps, tp, name)
    return RMSNorm(d, config.norm_eps, tp, name, partial=True) if config.qk_norm else None


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    """x [s, b, heads, d], by the head or whole."""
    if isinstance(norm, SplitRMSNorm):
        return norm(x.flatten(2)).view_as(x)
    return x if norm is None else norm(x)


class Attention(nn.Module):
    """x [s, b, hidden] (or its sequence shard) -> the same shape."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, name: str, recompute_core: bool) -> None:
        super().__init__()
        d = self.width = config.head_width
        self.q_heads, self.k_heads = config.heads // tp.size, config.key_value_heads // tp.size
        self.theta = config.rope_theta
        self.recompute_core = recompute_core
        self.core = BACKENDS[config.attention]
        # Shown q [b, q, s, d], k [b, k, s, d] and segments of a step that is looked at; see probe.py.
        self.observe: Callable[[Tensor, Tensor, Tensor | None], None] | None = None
        kv = config.key_value_heads * d
        self.qkv = ColumnParallelLinear(config.hidden, (config.heads * d, kv, kv), tp, f"{name}.qkv")
        self.q_norm = _head_norm(config, config.heads, tp, f"{name}.q_norm")
        self.k_norm = _head_norm(config, config.key_value_heads, tp, f"{name}.k_norm")
        self.out = RowParallelLinear(config.heads * d, config.hidden, tp, f"{name}.out")

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, b, q, d], keys and values [s, b, k, d], normed, not yet rotated."""
        qkv = self.qkv(x)
        s, b, _ = qkv.shape
        q, k, v = qkv.view(s, b, -1, self.width).split((self.q_heads, self.k_heads, self.k_heads), dim=2)
        return _normed(q, self.q_norm), _normed(k, self.k_norm), v

    def forward(self, x: Tensor, segments: Tensor | None) -> Tensor:
        q, k, v = self.heads(x)
        s, b = q.shape[:2]
        cos, sin = rope_table(s, self.width, self.theta, x.device)
        if segments is None:
            cos, sin, mask = cos[:, None, None], sin[:, None, None], None
        else:
            position = document_positions(segments).t()  # [s, b]
            cos, sin, mask = cos[position][:, :, None], sin[position][:, :, None], document_mask(segments)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        if self.observe is not None:
            self.observe(q, k, segments)
        if self.recompute_core and torch.is_grad_enabled():
            # No dropout anywhere: there is no random state to save and bring back.
            y = checkpoint(self.core, q, k, v, mask, use_reentrant=False, preserve_rng_state=False)
        else:
            y = self.core(q, k, v, mask)
        return self.out(y.permute(2, 0, 1, 3).reshape(s, b, -1))
