"""Causal self-attention with grouped queries, QK-norm before RoPE, optionally restricted to documents.

Shapes: s sequence, b micro-batch, q query heads and k key/value heads of this tensor rank, d head width.
QK-norm: Henry et al., arXiv:2010.04245; Dehghani et al., arXiv:2302.05442; over the width of all
heads: OLMo 2, arXiv:2501.00656 section 3. GQA: Ainslie et al., arXiv:2305.13245. RoPE, half-split: Su et al.,
arXiv:2104.09864, in the `rotate_half` layout of Llama and Qwen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megastable.base.products import is_cast
from megastable.config.model import ModelConfig, RopeScalingConfig
from megastable.model.block_parts import RMSNorm, SplitRMSNorm
from megastable.model.cores import CORES, Core
from megastable.model.elementwise import Elementwise, Heads, rotate_heads
from megastable.model.kernels import FULL, AttentionScores, Kernels
from megastable.model.ring import ring_attention
from megastable.parallel.layers import ColumnParallelBias, ColumnParallelLinear, RowParallelLinear
from megastable.parallel.mappings import to_heads, to_tokens
from megastable.parallel.topology import WHOLE, ContextParallel, TensorParallel


class Rope(NamedTuple):
    """Parameters of a model's rotations. width: of a head."""

    width: int
    theta: float
    scaling: RopeScalingConfig | None = None

    @classmethod
    def from_config(cls, config: ModelConfig) -> Rope:
        return cls(config.head_width, config.rope_theta, config.rope_scaling)


def rope_frequencies(rope: Rope, device: torch.device) -> Tensor:
    """Radians per position, fp32 [width / 2], computed as in transformers (modeling_rope_utils.py)."""
    turn_exponents = torch.arange(0, rope.width, 2, dtype=torch.float32, device=device) / rope.width
    plain_rates, scaling = 1.0 / rope.theta**turn_exponents, rope.scaling
    if scaling is None:
        return plain_rates
    if scaling.kind == "linear":
        return plain_rates / scaling.factor
    assert scaling.original_length is not None
    if scaling.kind == "yarn":
        kept_share = 1 - _yarn_ramp(rope, scaling, device)
        return plain_rates / scaling.factor * (1 - kept_share) + plain_rates * kept_share
    low_factor, high_factor = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain_rates
    # 0: divided by the factor; 1: unchanged.
    kept_share = (scaling.original_length / wavelength - low_factor) / (high_factor - low_factor)
    blended_rates = (1 - kept_share) * plain_rates / scaling.factor + kept_share * plain_rates
    divided_rates = torch.where(
        wavelength > scaling.original_length / low_factor, plain_rates / scaling.factor, blended_rates
    )
    return torch.where(wavelength < scaling.original_length / high_factor, plain_rates, divided_rates)


def _yarn_ramp(rope: Rope, scaling: RopeScalingConfig, device: torch.device) -> Tensor:
    """0 for the frequencies that YaRN keeps, 1 for those that it divides, fp32 [width / 2] (arXiv:2309.00071, section
    3.2; between whole numbers, as in its authors' code)."""
    original_length = scaling.original_length
    assert original_length is not None

    def index(turns: float) -> float:
        """Of the frequency, as a real number, that turns so often in the original length."""
        return rope.width * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first_index = max(math.floor(index(scaling.beta_fast)), 0)
    last_index = min(math.ceil(index(scaling.beta_slow)), rope.width - 1)
    rate_index = torch.arange(rope.width // 2, dtype=torch.float32, device=device)
    index_range = last_index - first_index if last_index != first_index else 0.001
    return ((rate_index - first_index) / index_range).clamp(0, 1)


def yarn_magnitude(scaling: RopeScalingConfig | None) -> float:
    """Factor of rotated queries and keys (YaRN: arXiv:2309.00071, section 3.4)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0


Ranges = tuple[range, ...]


def select_rows(x: Tensor, own: Ranges) -> Tensor:
    """Rows of x [s, ...] with these numbers."""
    row_parts = [x[rows.start : rows.stop] for rows in own]
    return row_parts[0] if len(row_parts) == 1 else torch.cat(row_parts)


@lru_cache(maxsize=8)
def own_rope_table(length: int, own: Ranges, rope: Rope, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows of `rope_table` of these tokens."""
    cos, sin = rope_table(length, rope, device)
    return select_rows(cos, own), select_rows(sin, own)


@lru_cache(maxsize=8)
def rope_table(length: int, rope: Rope, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each fp32 [length, width / 2], times YaRN's factor.

    Kept outside the modules: a buffer would be cast to bf16 with them, which cannot tell positions above 256 apart.
    """
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * rope_frequencies(rope, device)
    factor = yarn_magnitude(rope.scaling)
    return (angle.cos(), angle.sin()) if factor == 1.0 else (angle.cos() * factor, angle.sin() * factor)


def document_positions(segments: Tensor) -> Tensor:
    """Position of every token inside its document. segments: document ordinals [b, s] -> int64 [b, s]."""
    token_index = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    document_begins = torch.ones_like(segments, dtype=torch.bool)
    document_begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return token_index - torch.where(document_begins, token_index, 0).cummax(dim=1).values


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of x [s, b, heads, d]; cos, sin broadcastable to [s, b, 1, d/2], fp32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


T = TypeVar("T")


class Latest(Generic[T]):
    """`f` with a memo of its results for the last tensor: a repeated call with the same other arguments is free.

    One tensor is enough: layers run one after the other on one micro-batch. It must not be written to. The other
    arguments must be hashable.
    """

    def __init__(self, f: Callable[..., T]) -> None:
        self._f = f
        self._kept: tuple[Tensor, dict[tuple[Any, ...], T]] | None = None

    def __call__(self, tensor: Tensor, *rest: Any) -> T:
        kept_results = self._kept
        if kept_results is None or kept_results[0] is not tensor:
            kept_results = self._kept = tensor, {}
        if rest not in kept_results[1]:
            kept_results[1][rest] = self._f(tensor, *rest)
        return kept_results[1][rest]


@Latest
def _rotation(segments: Tensor, rope: Rope, own: Ranges) -> tuple[Tensor, Tensor]:
    """cos and sin of the tokens `own`, each fp32 [own, b, 1, width / 2]; positions restart at every document of
    segments [b, s]."""
    cos, sin = rope_table(segments.shape[1], rope, segments.device)
    document_position = select_rows(document_positions(segments).t(), own)
    return cos[document_position][:, :, None], sin[document_position][:, :, None]


SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}  # at a time: fits a CPU's cache, fills a GPU
FEWEST = 16  # queries at a time, even if their scores are more


def raise_highest(
    highest: Tensor, q: Tensor, k: Tensor, segments: Tensor | None, scores: AttentionScores = FULL
) -> None:
    """highest <- max(highest, largest causal q k * scale) of every head, in place, without gradients.

    highest: fp32 [q]. q [b, q, s, d], k [b, k, s, d], after the rotation; segments [b, s]: attention stays inside
    documents. The logits are those before a cap, inside the window. The products have the dtype of the inputs: in bf16
    a logit is wrong by at most 0.4 %.
    """
    q, k = q.detach(), k.detach()
    if torch.compiler.is_compiling():
        _op(highest, q, k, segments, scores.score_factor(q.shape[-1]), scores.window)
    else:
        _raise(highest, q, k, segments, scores.score_factor(q.shape[-1]), scores.window)


@torch.no_grad()
def _raise(
    highest: Tensor, q: Tensor, k: Tensor, segments: Tensor | None, factor: float, window: int | None
) -> None:
    if is_cast(q):
        q, k = q.float(), k.float()
    b, heads, s, _ = q.shape
    kv = k.shape[1]
    q, k = q.unflatten(1, (kv, heads // kv)), k.transpose(-2, -1)
    scores = SCORES.get(q.device.type, SCORES["cuda"])
    at_a_time = min(s, max(FEWEST, scores // (b * heads * s)))
    future = torch.ones(at_a_time, at_a_time, dtype=torch.bool, device=q.device).triu_(1)
    for begin in range(0, s, at_a_time):
        end = min(begin + at_a_time, s)
        c, oldest = end - begin, 0 if window is None else max(begin - window + 1, 0)
        # [b, k, q / k, c, end - oldest]
        logits = (q[..., begin:end, :].flatten(2, 3) @ k[..., oldest:end]).unflatten(2, (-1, c))
        logits[..., begin - oldest :].masked_fill_(future[:c, :c], -math.inf)
        if window is not None and end - oldest > window:
            past = torch.ones(c, end - oldest, dtype=torch.bool, device=q.device)
            logits.masked_fill_(past.tril_(begin - oldest - window), -math.inf)
        if segments is not None:
            other = segments[:, begin:end, None] != segments[:, None, oldest:end]
            logits.masked_fill_(other[:, None, None], -math.inf)
        found = logits.amax((0, 3, 4)).flatten().float() * factor
        torch.maximum(highest, found, out=highest)


# Opaque to torch.compile, which would unroll the loop.
_op = torch.library.custom_op(
    "megastable::raise_highest",
    _raise,
    mutates_args=("highest",),
    schema="(Tensor(a!) highest, Tensor q, Tensor k, Tensor? segments, float factor, int? window) -> ()",
)


@_op.register_fake
def _(
    highest: Tensor, q: Tensor, k: Tensor, segments: Tensor | None, factor: float, window: int | None
) -> None:
    return None


class Places(NamedTuple):
    """Positions and documents of the tokens of a micro-batch; the same for all layers.

    cos, sin: fp32, broadcastable to [s, b, 1, d / 2], s the tokens that this rank rotates. segments [b, s] where
    attention is restricted to documents; documents: what the core prepared. keys: of dropout in both halves of the
    block, int64 [2, b], in training with it. measured: where the block's router writes what it has chosen.
    """

    cos: Tensor
    sin: Tensor
    segments: Tensor | None = None
    documents: Any = None
    keys: Tensor | None = None
    measured: Tensor | None = None


@Latest
def _prepared(segments: Tensor, core: Core, scores: AttentionScores) -> Any:
    return core.prepare(segments, scores, segments.shape[1], segments.device)


def _head_norm(
    config: ModelConfig, heads: int, tp: TensorParallel, name: str
) -> RMSNorm | SplitRMSNorm | None:
    width = config.head_width
    if config.qk_norm == "full":
        return SplitRMSNorm(heads * width, config.norm_eps, tp, name, config.zero_centered_norms)
    if not config.qk_norm:
        return None
    return RMSNorm(width, config.norm_eps, tp, name, partial=True, centered=config.zero_centered_norms)


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    """x [s, b, heads, d], normed per head or over the full width."""
    if isinstance(norm, SplitRMSNorm):
        return norm(x.flatten(2)).view_as(x)
    return x if norm is None else norm(x)


class Attention(nn.Module):
    """x [s, b, hidden] (or its sequence shard) -> the same shape.

    With context parallelism x has this rank's tokens. At the core q, k and v have all tokens of this rank's heads; in a
    ring they stay as they are. scores: how the logits are made.
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
        width = self.width = config.head_width
        self.q_heads, self.k_heads = config.heads // tp.size, config.key_value_heads // tp.size
        self.rope = Rope.from_config(config)
        self.recompute_core = recompute_core
        self.core, self.own = CORES[kernels.attention], Elementwise(kernels.elementwise)
        kv_width = config.key_value_heads * width
        fused_sections = config.heads * width, kv_width, kv_width
        self.qkv = ColumnParallelLinear(config.hidden, fused_sections, tp, f"{name}.qkv")
        self.qkv_bias = ColumnParallelBias(fused_sections, tp, f"{name}.qkv") if config.qkv_bias else None
        self.q_norm = _head_norm(config, config.heads, tp, f"{name}.q_norm")
        self.k_norm = _head_norm(config, config.key_value_heads, tp, f"{name}.k_norm")
        self.out = RowParallelLinear(config.heads * width, config.hidden, tp, f"{name}.out")
        # fp32 [q / c], in a ring [q]: raised by the logits of training steps, if set.
        self.highest: Tensor | None = None

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, b, q, d], keys and values [s, b, k, d], normed, not yet rotated, from what `self.qkv` gives."""
        s, b, _ = qkv.shape
        if self.qkv_bias is not None:
            qkv = self.qkv_bias(qkv)
        q, k, v = qkv.view(s, b, -1, self.width).split((self.q_heads, self.k_heads, self.k_heads), dim=2)
        return _normed(q, self.q_norm), _normed(k, self.k_norm), v

    def find_places(self, length: int, segments: Tensor | None, device: torch.device) -> Places:
        """Positions for a micro-batch of samples of `length` tokens."""
        scores, is_ring = self.scores.within_length(length), self.cp.ring
        own_tokens = self.cp.find_own_tokens(length) if is_ring else (range(length),)
        if segments is not None:
            documents = segments if is_ring else _prepared(segments, self.core, scores)
            return Places(*_rotation(segments, self.rope, own_tokens), segments, documents)
        cos, sin = own_rope_table(length, own_tokens, self.rope, device)
        documents = None if is_ring else self.core.prepare(None, scores, length, device)
        return Places(cos[:, None, None], sin[:, None, None], None, documents)

    def forward(
        self, x: Tensor, at: Places, between: Callable[[Tensor, Places], Tensor] | None = None
    ) -> Tensor:
        """between: a compiled replacement of `self.attend_between`; see `Block.compile_in_pieces`."""
        return self.out((between or self.attend_between)(self.qkv(x), at))

    def rotate_heads(self, qkv: Tensor, at: Places) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of the core: q [b, q, s, d], k and v [b, k, s, d], from qkv [s, b, (q + 2 k) d] without biases."""
        if self.own.has("heads"):
            rotated_heads = self._rotate_by_kernel(qkv, at)
        else:
            q, k, v = self.split_heads(qkv)
            if not self.cp.ring:
                q, k, v = to_heads(q, k, v, self.cp)
            rotated_heads = rotate_pairs(q, at.cos, at.sin), rotate_pairs(k, at.cos, at.sin), v
        q, k, v = (rotated_head.permute(1, 2, 0, 3) for rotated_head in rotated_heads)
        return q, k, v

    def _rotate_by_kernel(self, qkv: Tensor, at: Places) -> tuple[Tensor, Tensor, Tensor]:
        if self.q_norm is None:
            return rotate_heads(qkv, None, at.cos, at.sin, Heads(self.q_heads, self.k_heads))
        assert isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)
        weight, eps, centered = self.q_norm.tell_kernel()
        both_weights = weight, self.k_norm.weigh()
        return rotate_heads(
            qkv, both_weights, at.cos, at.sin, Heads(self.q_heads, self.k_heads, eps, centered)
        )

    def attend_between(self, qkv: Tensor, at: Places) -> Tensor:
        """From fused queries, keys and values [s, b, (q + 2 k) d] to the attention output [s, b, q d]."""
        q, k, v = self.rotate_heads(qkv, at)
        if self.cp.ring:
            # Its backward pass keeps its inputs and its output alone: there is nothing to recompute.
            watched = self.highest if torch.is_grad_enabled() else None
            y = ring_attention(
                q, k, v, at.segments, self.scores, cp=self.cp, fused=self.core.fused, highest=watched
            )
            return y.permute(2, 0, 1, 3).flatten(2)
        # In this order, evaluation is not compiled again.
        if torch.is_grad_enabled() and self.highest is not None:
            raise_highest(self.highest, q, k, at.segments, self.scores)
        inputs = q, k, v, at.documents, self.scores
        if self.recompute_core and torch.is_grad_enabled():
            # No random numbers in here: there is no state to save and restore.
            y = checkpoint(self.core.run, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            y = self.core.run(*inputs)
        return to_tokens(y.permute(2, 0, 1, 3), self.cp).flatten(2)
