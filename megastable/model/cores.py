"""Attention cores: causal softmax(q k^T * scale) v inside documents and windows, as the plain reference and as fused
kernels.

Shapes: q [b, q, s, d], k and v [b, k, s, d] -> [b, q, s, d]; b micro-batch, q query heads, k key/value heads, s
sequence, d head width. A core gets the `AttentionScores` of its block, and what it `prepare`d from them and from
segments, int32 [b, s]: with those a token attends only to tokens of its own segment. GQA: Ainslie et al.,
arXiv:2305.13245.
"""

from __future__ import annotations

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
from megastable.model.kernels import FULL, AttentionScores, compute_in_parts, softcap


def _segments(
    segments: Tensor | None, scores: AttentionScores, length: int, device: torch.device
) -> Tensor | None:
    return segments


@dataclass(frozen=True)
class Core:
    """run(q, k, v, documents, scores=FULL); documents: prepare(segments or None, scores, length, device), the same for
    all blocks with these scores. fused: whether ring attention may use a fused kernel in its place."""

    run: Callable[..., Tensor]
    prepare: Callable[[Tensor | None, AttentionScores, int, torch.device], Any] = _segments
    fused: bool = True


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
ELEMENTS = 2**24  # scores of a part of `plain_attention`: 64 MiB in fp32


def attention_mask(
    segments: Tensor | None, scores: AttentionScores, length: int, device: torch.device
) -> Tensor | None:
    """bool [b or 1, 1, s, s]: causal, in the window and inside one document; None: causal, and nothing else."""
    if segments is None:
        return None if scores.window is None else _mask(scores, length, device)
    return _mask(scores, length, device) & (segments[:, :, None] == segments[:, None, :]).unsqueeze(1)


@lru_cache(maxsize=4)
def _mask(scores: AttentionScores, length: int, device: torch.device) -> Tensor:
    token_index = torch.arange(length, device=device)
    return scores.make_mask(token_index, token_index)[None, None]


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scores: AttentionScores = FULL
) -> Tensor:
    """In plain fp32, scores and all. documents: segments [b, s]."""
    return _of_queries(q, 0, k, v, documents, scores)


def _of_queries(
    q: Tensor, first: int, k: Tensor, v: Tensor, documents: Tensor | None, scores: AttentionScores
) -> Tensor:
    """`reference_attention` of the queries from position `first` on: q [b, q, n, d] -> the same shape."""
    group_size, (query_count, d), device = q.shape[1] // k.shape[1], q.shape[2:], q.device
    k, v = k.repeat_interleave(group_size, 1).float(), v.repeat_interleave(group_size, 1).float()
    capped_logits = softcap(q.float() @ k.transpose(-2, -1) * scores.score_factor(d), scores.cap)
    query_positions = torch.arange(first, first + query_count, device=device)
    allowed = scores.make_mask(query_positions, torch.arange(k.shape[2], device=device))
    if documents is not None:
        allowed = allowed & (documents[:, None, query_positions, None] == documents[:, None, None, :])
    return (capped_logits.masked_fill(~allowed, -torch.inf).softmax(-1) @ v).to(q.dtype)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scores: AttentionScores = FULL
) -> Tensor:
    """`reference_attention` a few queries at a time: by no fused kernel, in about as little memory as one needs."""

    def of_queries(part: Tensor, first: int, keys: Tensor, values: Tensor) -> Tensor:
        return _of_queries(part, first, keys, values, documents, scores)

    samples, heads, length = q.shape[:3]
    return compute_in_parts(of_queries, q, (k, v), max(1, ELEMENTS // (samples * heads * length)), (2, 2))


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | BlockMask | None, scores: AttentionScores = FULL
) -> Tensor:
    """torch's fused kernels (fp32 softmax inside). documents: a mask of s x s, or on a GPU the result of
    `make_block_mask`."""
    scale = scores.scale
    group_size, on_gpu = q.shape[1] // k.shape[1], q.device.type == "cuda"
    if isinstance(documents, BlockMask):
        # Compiled, or FlexAttention writes out all scores. Inside a compiled block it becomes a part of it.
        flex_kernel: Any = flex_attention if torch.compiler.is_compiling() else _flex()
        score_modifier = None if scores.cap is None else _capped(scores.cap)
        return flex_kernel(
            q, k, v, block_mask=documents, enable_gqa=group_size > 1, scale=scale, score_mod=score_modifier
        )
    assert scores.cap is None, "numerics.choose takes another core where logits are capped"
    if group_size > 1 and not (on_gpu and q.dtype in GROUPED):
        # For other dtypes torch would fall back to the unfused kernel, with its scores [b, q, s, s].
        k, v, group_size = k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1), 1
    if not on_gpu:
        # Like all products on a CPU that would emulate bf16.
        wide_q, k, v = (x.to(torch.float32 if is_cast(q) else q.dtype) for x in (q, k, v))
        y = F.scaled_dot_product_attention(
            wide_q, k, v, attn_mask=documents, is_causal=documents is None, scale=scale
        )
        return y.to(q.dtype)
    with sdpa_kernel(FUSED, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group_size > 1, scale=scale)


def make_block_mask(
    segments: Tensor | None, scores: AttentionScores, length: int, device: torch.device
) -> BlockMask | None:
    """The block mask of FlexAttention (arXiv:2412.05496): which blocks of queries attend to which blocks of keys. None:
    other kernels can do it."""
    if segments is None:
        return None if scores.cap is None and scores.window is None else _seen(scores.window, length, device)
    window_length = length if scores.window is None else scores.window

    def inside(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < window_length) & (segments[b, q] == segments[b, k])

    # Once per micro-batch. Not compiled: the s x s mask exists for a moment, in bool.
    return create_block_mask(inside, len(segments), None, length, length, device=device)


@lru_cache(maxsize=8)
def _seen(window: int | None, length: int, device: torch.device) -> BlockMask:
    window_reach = length if window is None else window

    def inside(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < window_reach)

    return create_block_mask(inside, None, None, length, length, device=device)


@lru_cache(maxsize=4)
def _capped(cap: float) -> Callable[..., Tensor]:
    def modified(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return modified


def _sdpa_mask(segments: Tensor | None, scores: AttentionScores, length: int, device: torch.device) -> Any:
    return (make_block_mask if device.type == "cuda" else attention_mask)(segments, scores, length, device)


@lru_cache(maxsize=1)
def _flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@torch.compiler.disable
def te_attention(q: Tensor, k: Tensor, v: Tensor, documents: None, scores: AttentionScores = FULL) -> Tensor:
    """Transformer Engine's kernels, which support neither segments nor caps."""
    assert documents is None and scores.cap is None, "numerics.choose takes another core for these"
    te_core = _te_core(q.shape[1], k.shape[1], q.shape[-1], scores)
    # It needs the sequence first, which is how q, k and v lie in memory.
    y = te_core(*(x.permute(2, 0, 1, 3) for x in (q, k, v)))
    return y.unflatten(-1, (q.shape[1], q.shape[-1])).permute(1, 2, 0, 3)


@lru_cache(maxsize=8)
def _te_core(heads: int, groups: int, width: int, scores: AttentionScores) -> Callable[..., Tensor]:
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        heads, width, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal",
        softmax_scale=scores.score_factor(width), window_size=None if scores.window is None else (scores.window - 1, 0),
    )  # fmt: skip


CORES: dict[str, Core] = {
    "reference": Core(reference_attention, fused=False),
    "plain": Core(
        plain_attention, fused=False
    ),  # in place of another one that computes wrong numbers: see NumericsSwitch
    "sdpa": Core(sdpa_attention, _sdpa_mask),
    "blocked": Core(blocked_attention),
    "te": Core(te_attention),
}
