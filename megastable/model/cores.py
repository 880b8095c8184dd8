"""Attention cores: causal softmax(q k^T / sqrt(d)) v inside documents, as the plain reference and as fused kernels.

Shapes: q [b, q, s, d], k and v [b, k, s, d] -> [b, q, s, d]; b micro-batch, q query heads, k key/value heads, s
sequence, d head width. With attention restricted to documents a core also gets what it `prepare`d from segments, int32
[b, s]: a token attends only to tokens of its own segment. GQA: Ainslie et al., arXiv:2305.13245.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megastable.base.products import is_cast
from megastable.model.blocked import blocked_attention


@dataclass(frozen=True)
class Core:
    """run(q, k, v, documents); documents: None, or prepare(segments), which is the same for all layers."""

    run: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    prepare: Callable[[Tensor], Any] = lambda segments: segments


# cuDNN's kernel is the fastest on Hopper; if it refuses, torch tries the next.
FUSED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Dtypes of the fused GPU kernels that support grouped queries: cuDNN's and flash attention. The one for fp32
# (EFFICIENT_ATTENTION) does not.
GROUPED = (torch.bfloat16, torch.float16)


def document_mask(segments: Tensor) -> Tensor:
    """Attention mask: bool [b, 1, s, s], causal and inside one document. segments: [b, s]."""
    s = segments.shape[1]
    causal = torch.ones(s, s, dtype=torch.bool, device=segments.device).tril()
    return (causal & (segments[:, :, None] == segments[:, None, :])).unsqueeze(1)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
    """In plain fp32, scores and all."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1).float(), v.repeat_interleave(groups, 1).float()
    scores = q.float() @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if segments is None:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    else:
        allowed = document_mask(segments)
    return (scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v).to(q.dtype)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | BlockMask | None) -> Tensor:
    """torch's fused kernels (fp32 softmax inside). documents: a mask of s x s, or on a GPU the result of `see`."""
    groups, on_gpu = q.shape[1] // k.shape[1], q.device.type == "cuda"
    if isinstance(documents, BlockMask):
        # Compiled, or FlexAttention writes out all scores. Inside a compiled block it becomes a part of it.
        flex: Any = flex_attention if torch.compiler.is_compiling() else _flex()
        return flex(q, k, v, block_mask=documents, enable_gqa=groups > 1)
    if groups > 1 and not (on_gpu and q.dtype in GROUPED):
        # For other dtypes torch would fall back to the unfused kernel, with its scores [b, q, s, s].
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    if not on_gpu:
        dtype = torch.float32 if is_cast(q) else q.dtype  # like all products on a CPU that would emulate bf16
        core = F.scaled_dot_product_attention
        out = core(q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=documents, is_causal=documents is None)
        return out.to(q.dtype)
    with sdpa_kernel(FUSED, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)


def see(segments: Tensor) -> BlockMask:
    """The block mask of FlexAttention (arXiv:2412.05496): which blocks of queries attend to which blocks of keys."""

    def inside(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (segments[b, q] == segments[b, k])

    b, s = segments.shape
    # Once per micro-batch. Not compiled: the s x s mask exists for a moment, in bool.
    return create_block_mask(inside, b, None, s, s, device=segments.device)


@lru_cache(maxsize=1)
def _flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@torch.compiler.disable
def te_attention(q: Tensor, k: Tensor, v: Tensor, documents: None) -> Tensor:
    """Transformer Engine's kernels, which do not support segments."""
    assert documents is None, "kernel_choice.choose takes another core where documents are kept apart"
    core = _te_core(q.shape[1], k.shape[1], q.shape[-1])
    # It needs the sequence first, which is how q, k and v lie in memory.
    y = core(*(x.permute(2, 0, 1, 3) for x in (q, k, v)))
    return y.unflatten(-1, (q.shape[1], q.shape[-1])).permute(1, 2, 0, 3)


@lru_cache(maxsize=8)
def _te_core(heads: int, groups: int, width: int) -> Callable[..., Tensor]:
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        heads, width, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal"
    )


CORES: dict[str, Core] = {
    "reference": Core(reference_attention),
    "sdpa": Core(sdpa_attention, lambda segments: (see if segments.is_cuda else document_mask)(segments)),
    "blocked": Core(blocked_attention),
    "te": Core(te_attention),
}
