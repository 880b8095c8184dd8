"""Causal self-attention with grouped queries, QK-norm before RoPE, optionally restricted to documents.

Shapes: s sequence, b micro-batch, q query heads and k key/value heads of this tensor rank, d head width.
QK-norm: Henry et al., arXiv:2010.04245; Dehghani et al., arXiv:2302.05442; over the width of all
heads: OLMo 2, arXiv:2501.00656 section 3. GQA: Ainslie et al., arXiv:2305.13245.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megastable.config.model import ModelConfig
from megastable.model.attention_scores import FULL, AttentionScores
from megastable.model.cores import CORES, Core
from megastable.model.highest_logits import raise_highest
from megastable.model.kernels import Kernels
from megastable.model.memo import Latest
from megastable.model.norm import RMSNorm, SplitRMSNorm
from megastable.model.rope import Rope, rope_table, rotate, rotation
from megastable.parallel.layers import ColumnParallelBias, ColumnParallelLinear, RowParallelLinear
from megastable.parallel.mappings import to_heads, to_tokens
from megastable.parallel.topology import WHOLE, ContextParallel, TensorParallel


class Places(NamedTuple):
    """Positions and documents of the tokens of a micro-batch; the same for all layers.

    cos, sin: fp32, broadcastable to [s, b, 1, d / 2]. segments [b, s] where attention is restricted to documents;
    documents: what the core prepared. keys: of dropout in both halves of the block, int64 [2, b], in training with it.
    """

    cos: Tensor
    sin: Tensor
    segments: Tensor | None = None
    documents: Any = None
    keys: Tensor | None = None


@Latest
def _rotation(segments: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    return rotation(segments, rope)


@Latest
def _prepared(segments: Tensor, core: Core, scores: AttentionScores) -> Any:
    return core.prepare(segments, scores, segments.shape[1], segments.device)


def _head_norm(
    config: ModelConfig, heads: int, tp: TensorParallel, name: str
) -> RMSNorm | SplitRMSNorm | None:
    d = config.head_width
    if config.qk_norm == "full":
        return SplitRMSNorm(heads * d, config.norm_eps, tp, name, config.zero_centered_norms)
    if not config.qk_norm:
        return None
    return RMSNorm(d, config.norm_eps, tp, name, partial=True, centered=config.zero_centered_norms)


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    """x [s, b, heads, d], normed per head or over the full width."""
    if isinstance(norm, SplitRMSNorm):
        return norm(x.flatten(2)).view_as(x)
    return x if norm is None else norm(x)


class Attention(nn.Module):
    """x [s, b, hidden] (or its sequence shard) -> the same shape.

    With context parallelism x has this rank's tokens; at the core q, k and v have all tokens of this rank's heads.
    scores: how the logits are made.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        name: str,
        recompute_core: bool,
        kernels: Kernels,
        cp: ContextParallel = WHOLE,
        scores: AttentionScores = FULL,
    ) -> None:
        super().__init__()
        self.cp, self.scores = cp, scores
        d = self.width = config.head_width
        self.q_heads, self.k_heads = config.heads // tp.size, config.key_value_heads // tp.size
        self.rope = Rope.of(config)
        self.recompute_core = recompute_core
        self.core = CORES[kernels.attention]
        kv = config.key_value_heads * d
        sections = config.heads * d, kv, kv
        self.qkv = ColumnParallelLinear(config.hidden, sections, tp, f"{name}.qkv")
        self.qkv_bias = ColumnParallelBias(sections, tp, f"{name}.qkv") if config.qkv_bias else None
        self.q_norm = _head_norm(config, config.heads, tp, f"{name}.q_norm")
        self.k_norm = _head_norm(config, config.key_value_heads, tp, f"{name}.k_norm")
        self.out = RowParallelLinear(config.heads * d, config.hidden, tp, f"{name}.out")
        self.highest: Tensor | None = None  # fp32 [q / c]: raised by the logits of training steps, if set

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, b, q, d], keys and values [s, b, k, d], normed, not yet rotated."""
        return self._split(self.qkv(x))

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, b, _ = qkv.shape
        if self.qkv_bias is not None:
            qkv = self.qkv_bias(qkv)
        q, k, v = qkv.view(s, b, -1, self.width).split((self.q_heads, self.k_heads, self.k_heads), dim=2)
        return _normed(q, self.q_norm), _normed(k, self.k_norm), v

    def places(self, length: int, segments: Tensor | None, device: torch.device) -> Places:
        """Positions for a micro-batch of samples of `length` tokens."""
        scores = self.scores.within(length)
        if segments is not None:
            return Places(*_rotation(segments, self.rope), segments, _prepared(segments, self.core, scores))
        cos, sin = rope_table(length, self.rope, device)
        documents = self.core.prepare(None, scores, length, device)
        return Places(cos[:, None, None], sin[:, None, None], None, documents)

    def forward(
        self, x: Tensor, at: Places, between: Callable[[Tensor, Places], Tensor] | None = None
    ) -> Tensor:
        """between: a compiled replacement of `self.between`; see `Block.in_pieces`."""
        return self.out((between or self.between)(self.qkv(x), at))

    def rotated(self, qkv: Tensor, at: Places) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of the core: q [b, q, s, d], k and v [b, k, s, d], from qkv [s, b, (q + 2 k) d] without biases."""
        q, k, v = to_heads(*self._split(qkv), self.cp)
        rotated = rotate(q, at.cos, at.sin), rotate(k, at.cos, at.sin), v
        q, k, v = (t.permute(1, 2, 0, 3) for t in rotated)
        return q, k, v

    def between(self, qkv: Tensor, at: Places) -> Tensor:
        """From fused queries, keys and values [s, b, (q + 2 k) d] to the attention output [s, b, q d]."""
        q, k, v = self.rotated(qkv, at)
        if (
            torch.is_grad_enabled() and self.highest is not None
        ):  # in this order, evaluation is not compiled anew
            raise_highest(self.highest, q, k, at.segments, self.scores)
        if self.recompute_core and torch.is_grad_enabled():
            # No random numbers in here: there is no state to save and restore.
            y = checkpoint(
                self.core.run,
                q,
                k,
                v,
                at.documents,
                self.scores,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            y = self.core.run(q, k, v, at.documents, self.scores)
        return to_tokens(y.permute(2, 0, 1, 3), self.cp).flatten(2)
