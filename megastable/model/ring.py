"""Ring attention: every rank keeps its queries, and keys and values go round the ranks that share a sample.

Liu et al., arXiv:2310.01889. A rank has two chunks of a sample (`layout.find_own_tokens`). In each round it multiplies
its queries with the keys of one rank, while those of the next round are on their way. Partial results are merged by
their log-sum-exps, as FlashAttention-2 merges blocks (Dao, arXiv:2307.08691). In the backward pass keys and values go
round again, and their gradients with them, in fp32.

Shapes: b micro-batch, q query heads and k key/value heads of this tensor rank, g = q / k queries share a key; m and n
queries and keys of a chunk, 2 m tokens of a rank; d head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from megastable.model.kernels import FULL, AttentionScores
from megastable.parallel.layout import find_own_tokens
from megastable.parallel.mappings import begin_shift
from megastable.parallel.topology import ContextParallel

ELEMENTS = 2**24  # scores that are written out at a time: 64 MiB in fp32
FUSED_WIDTH = 256  # widest head of FlashAttention-2's kernels, which want multiples of 8


class ChunkProduct(NamedTuple):
    """Queries of own chunk `query` against keys of chunk `key` of the rank whose turn it is, each 0 or 1.

    first_query, first_key: positions of their first tokens. causal: they are the same chunk. cut: the window ends
    inside.
    """

    query: int
    key: int
    first_query: int
    first_key: int
    causal: bool
    cut: bool


def list_products(
    length: int, ranks: int, rank: int, source: int, window: int | None = None
) -> list[ChunkProduct]:
    """What `rank` multiplies when it has the keys of rank `source`: what a causal mask and the window leave.

    Of every query's products that with its own chunk is the first, in which it sees at least itself.
    """
    own_chunks, other_chunks = (
        find_own_tokens(length, ranks, one_rank, ring=True) for one_rank in (rank, source)
    )
    kept_products = []
    for query_chunk, own_chunk in enumerate(own_chunks):
        for key_chunk, other_chunk in reversed(list(enumerate(other_chunks))):
            farthest_distance, nearest_distance = (
                own_chunk[-1] - other_chunk[0],
                own_chunk[0] - other_chunk[-1],
            )
            if farthest_distance < 0 or (window is not None and nearest_distance >= window):
                continue
            is_cut = window is not None and farthest_distance >= window
            kept_products.append(
                ChunkProduct(
                    query_chunk, key_chunk, own_chunk[0], other_chunk[0], own_chunk == other_chunk, is_cut
                )
            )
    return kept_products


def _rows(x: Tensor, keys: int) -> Tensor:
    """[b, q, m, d] -> [b, k, g m, d]"""
    return x.unflatten(1, (keys, -1)).flatten(2, 3)


def _logits(q: Tensor, k: Tensor, allowed: Tensor, scores: AttentionScores) -> tuple[Tensor, Tensor | None]:
    """Logits [b, k, g, m, n], -inf where they are not allowed, and the derivatives of capped ones. allowed:
    broadcastable to that shape."""
    capped_logits = (
        (_rows(q, k.shape[1]) @ k.mT).unflatten(2, (-1, q.shape[2])).mul_(scores.score_factor(q.shape[-1]))
    )
    cap_slopes = None
    if scores.cap is not None:
        capped_logits.div_(scores.cap).tanh_()
        cap_slopes = 1 - capped_logits * capped_logits
        capped_logits.mul_(scores.cap)
    return capped_logits.masked_fill_(~allowed, -math.inf), cap_slopes


def _attend(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scores: AttentionScores
) -> tuple[Tensor, Tensor]:
    """Attention to these keys alone: [b, q, m, d], and the log-sum-exp of the logits, [b, q, m]; 0 and -inf where none
    is allowed. Written out."""
    masked_logits, _ = _logits(q, k, allowed, scores)
    log_sums = masked_logits.logsumexp(-1)
    key_weights = masked_logits.sub_(log_sums.clamp_min(torch.finfo(log_sums.dtype).min)[..., None]).exp_()
    return (key_weights.flatten(2, 3) @ v).view_as(q), log_sums.flatten(1, 2)


def _attend_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, shift: Tensor, allowed: Tensor, scores: AttentionScores
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v. lse: of all keys; shift: sum(dy y), [b, q, m]."""
    masked_logits, cap_slopes = _logits(q, k, allowed, scores)
    group_shape = masked_logits.shape[:-1]
    key_weights = masked_logits.sub_(lse.view(group_shape)[..., None]).exp_()
    q_rows, dy_rows = _rows(q, k.shape[1]), _rows(dy, k.shape[1])
    value_gradient = key_weights.flatten(2, 3).mT @ dy_rows
    logit_gradient = key_weights.mul_(
        (dy_rows @ v.mT).view_as(key_weights).sub_(shift.view(group_shape)[..., None])
    )
    if cap_slopes is not None:
        logit_gradient.mul_(cap_slopes)
    dz_rows = logit_gradient.mul_(scores.score_factor(q.shape[-1])).flatten(2, 3)
    return (dz_rows @ k).view_as(q), dz_rows.mT @ q_rows, value_gradient


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`_attend` by FlashAttention-2's kernel, to all keys or to those up to the query's own."""
    aten_ops: Any = torch.ops.aten
    if q.device.type == "cpu":
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        attended_values, log_sums = aten_ops._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    else:
        attended_values, log_sums, *_ = aten_ops._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, scale=scale
        )
    return attended_values, log_sums


def _flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`_attend_backward` by FlashAttention-2's kernel. y: attention to all keys."""
    aten_ops, (key_heads, group_size) = torch.ops.aten, (k.shape[1], q.shape[1] // k.shape[1])
    if q.device.type == "cpu":
        k, v = (x.repeat_interleave(group_size, 1) for x in (k, v))
        of_cpu: Any = aten_ops._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = of_cpu(dy, q, k, v, y, lse, 0.0, causal, scale=scale)
        return (
            dq,
            dk.unflatten(1, (key_heads, group_size)).sum(2),
            dv.unflatten(1, (key_heads, group_size)).sum(2),
        )
    of_gpu: Any = aten_ops._scaled_dot_product_flash_attention_backward
    unused_state = torch.empty(2, dtype=torch.uint64, device=q.device)  # random state, of dropout
    sequence_lengths = None, None, q.shape[2], k.shape[2]
    dq, dk, dv = of_gpu(
        dy, q, k, v, y, lse.contiguous(), *sequence_lengths, 0.0, causal, unused_state, unused_state, scale=scale
    )  # fmt: skip
    return dq, dk, dv


class _Pass:
    """One forward or backward pass on one rank. highest: whether it looks for the largest logits."""

    def __init__(
        self, q: Tensor, segments: Tensor | None, group: str, fused: bool, scores: AttentionScores
    ) -> None:
        self.group = _resolve_process_group(group)  # type: ignore[arg-type]
        self.rank, self.size = (
            torch.distributed.get_rank(self.group),
            torch.distributed.get_world_size(self.group),
        )
        self.chunk, self.segments, self.scores = q.shape[2] // 2, segments, scores
        self.wide = torch.promote_types(q.dtype, torch.float32)
        has_kernel = q.device.type == "cpu" or (
            q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] <= FUSED_WIDTH and q.shape[3] % 8 == 0
        )
        self.fused = fused and has_kernel and segments is None and scores.cap is None
        # What is written out is computed in fp32 at least; so is all on a CPU, where bf16 may be emulated.
        self.dtype = q.dtype if self.fused and q.device.type != "cpu" else self.wide
        self.scale = scores.score_factor(q.shape[3])

    def list_products(self, source: int) -> list[ChunkProduct]:
        length = 2 * self.chunk * self.size
        return list_products(length, self.size, self.rank, source, self.scores.window)

    def half(self, x: Tensor, which: int) -> Tensor:
        """A chunk of x [b, heads, 2 m, ...]."""
        return x[:, :, which * self.chunk : (which + 1) * self.chunk]

    def split_queries(self, product: ChunkProduct, q: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Parts of a chunk's queries, and which keys they see: bool [b or 1, 1, 1, part, n]."""
        at_a_time = max(1, ELEMENTS // (q.shape[0] * q.shape[1] * self.chunk))
        key_positions = torch.arange(product.first_key, product.first_key + self.chunk, device=q.device)
        for first_row in range(0, self.chunk, at_a_time):
            part_rows = slice(first_row, min(first_row + at_a_time, self.chunk))
            query_positions = (
                torch.arange(part_rows.start, part_rows.stop, device=q.device) + product.first_query
            )
            allowed_keys = self.scores.make_mask(query_positions, key_positions)[None]
            if self.segments is not None:
                allowed_keys = allowed_keys & (
                    self.segments[:, query_positions, None] == self.segments[:, None, key_positions]
                )
            yield part_rows, allowed_keys[:, None, None]

    def is_fused(self, product: ChunkProduct) -> bool:
        return self.fused and not product.cut

    def attend(self, product: ChunkProduct, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_fused(product):
            return _flash(q, k, v, product.causal, self.scale)
        q, k, v = (x.to(self.wide) for x in (q, k, v))
        query_parts = self.split_queries(product, q)
        part_results = [
            _attend(q[:, :, part_rows], k, v, allowed_keys, self.scores)
            for part_rows, allowed_keys in query_parts
        ]
        attended_values, log_sums = (torch.cat(of_parts, 2) for of_parts in zip(*part_results, strict=True))
        return attended_values, log_sums

    def find_highest(self, product: ChunkProduct, q: Tensor, k: Tensor) -> Tensor:
        """The largest logit of every head before a cap, [q]."""
        query_parts, uncapped_scores = self.split_queries(product, q), self.scores._replace(cap=None)
        part_highest = [
            _logits(q[:, :, part_rows], k, allowed_keys, uncapped_scores)[0].amax((0, 3, 4)).flatten()
            for part_rows, allowed_keys in query_parts
        ]
        return torch.stack(part_highest).amax(0)

    def attend_backward(
        self, product: ChunkProduct, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.is_fused(product):
            return _flash_backward(dy, q, k, v, y, lse, product.causal, self.scale)
        dy, q, k, v, y = (x.to(self.wide) for x in (dy, q, k, v, y))
        row_shifts, dk, dv, dq_parts = (dy * y).sum(-1), torch.zeros_like(k), torch.zeros_like(v), []
        for part_rows, allowed_keys in self.split_queries(product, q):
            part_gradient, part_queries, part_lse, part_shift = (
                x[:, :, part_rows] for x in (dy, q, lse, row_shifts)
            )
            dq, dk_part, dv_part = _attend_backward(
                part_gradient, part_queries, k, v, part_lse, part_shift, allowed_keys, self.scores
            )
            dq_parts.append(dq)
            dk.add_(dk_part)
            dv.add_(dv_part)
        return torch.cat(dq_parts, 2), dk, dv


def _like_stream(x: Tensor) -> Tensor:
    """New memory for [b, heads, s, d], laid out as the surrounding layers use it: [s, b, heads, d]."""
    b, heads, s, d = x.shape
    return x.new_empty(s, b, heads, d).permute(1, 2, 0, 3)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, group: str, fused: bool, watched: bool,
    scale: float | None, cap: float | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output [b, q, 2 m, d], log-sum-exps [b, q, 2 m] in fp32, and the largest logits [q] in fp32, or none."""
    ring_pass = _Pass(q, segments, group, fused, AttentionScores(scale, cap, window))
    q_given, q = q, q.to(ring_pass.dtype)
    kv = torch.stack((k, v))
    y, lse = (
        q.new_zeros(q.shape, dtype=ring_pass.wide),
        q.new_full(q.shape[:3], -math.inf, dtype=ring_pass.wide),
    )
    highest_logits = q.new_full((q.shape[1] if watched else 0,), -math.inf, dtype=torch.float32)
    for turn_number in range(ring_pass.size):
        # On their way while this turn's products are computed.
        next_kv = begin_shift(kv, ring_pass.group) if turn_number + 1 < ring_pass.size else None
        k, v = kv.to(ring_pass.dtype)
        for chunk_product in ring_pass.list_products((ring_pass.rank - turn_number) % ring_pass.size):
            own_queries, own_keys = (
                ring_pass.half(q, chunk_product.query),
                ring_pass.half(k, chunk_product.key),
            )
            part_result, part_lse = ring_pass.attend(
                chunk_product, own_queries, own_keys, ring_pass.half(v, chunk_product.key)
            )
            # Finite from the first product on, as a query sees itself there.
            held_part, held_lse = (
                ring_pass.half(y, chunk_product.query),
                ring_pass.half(lse, chunk_product.query),
            )
            total_lse = torch.logaddexp(held_lse, part_lse)
            held_part.mul_((held_lse - total_lse).exp_()[..., None]).add_(
                part_result * (part_lse - total_lse).exp_()[..., None]
            )
            held_lse.copy_(total_lse)
            if watched:
                torch.maximum(
                    highest_logits,
                    ring_pass.find_highest(chunk_product, own_queries, own_keys).float(),
                    out=highest_logits,
                )
        if next_kv is not None:
            kv = next_kv()
    return _like_stream(q_given).copy_(y), lse, highest_logits


def _backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, y: Tensor, lse: Tensor, group: str,
    fused: bool, scale: float | None, cap: float | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, given that of y."""
    ring_pass = _Pass(q, segments, group, fused, AttentionScores(scale, cap, window))
    given_inputs, kv = (q, k, v), torch.stack((k, v))
    dy, q, y = (x.to(ring_pass.dtype) for x in (dy, q, y))
    dq = q.new_zeros(q.shape, dtype=ring_pass.wide)
    own_sums = travelling_sums = None
    for turn_number in range(ring_pass.size):
        next_kv = begin_shift(kv, ring_pass.group) if turn_number + 1 < ring_pass.size else None
        turn_sums = torch.zeros(kv.shape, dtype=ring_pass.wide, device=kv.device)
        k, v = kv.to(ring_pass.dtype)
        for chunk_product in ring_pass.list_products((ring_pass.rank - turn_number) % ring_pass.size):
            of_queries = [ring_pass.half(x, chunk_product.query) for x in (y, lse)]
            own_gradient, own_queries = (ring_pass.half(x, chunk_product.query) for x in (dy, q))
            of_keys = [ring_pass.half(x, chunk_product.key) for x in (k, v)]
            query_gradient, dk, dv = ring_pass.attend_backward(
                chunk_product, own_gradient, own_queries, *of_keys, *of_queries
            )
            ring_pass.half(dq, chunk_product.query).add_(query_gradient)
            ring_pass.half(turn_sums[0], chunk_product.key).add_(dk)
            ring_pass.half(turn_sums[1], chunk_product.key).add_(dv)
        # Those of this rank's own keys stay here. The others follow the keys, one turn behind, and arrive at home at
        # the end.
        if turn_number == 0:
            own_sums = turn_sums
        else:
            if travelling_sums is not None:
                turn_sums.add_(travelling_sums())
            travelling_sums = begin_shift(turn_sums, ring_pass.group)
        if next_kv is not None:
            kv = next_kv()
    assert own_sums is not None
    if travelling_sums is not None:
        own_sums.add_(travelling_sums())
    all_gradients = (_like_stream(x).copy_(of) for x, of in zip(given_inputs, (dq, *own_sums), strict=True))
    dq, dk, dv = all_gradients
    return dq, dk, dv


# torch.compile treats both operators as opaque.
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? segments"
_SCORES = "float? scale, float? cap, int? window"
_op = torch.library.custom_op(
    "megastable::ring_attention",
    _forward,
    mutates_args=(),
    schema=f"({_INPUTS}, str group, bool fused, bool watched, {_SCORES}) -> (Tensor, Tensor, Tensor)",
)
_backward_op = torch.library.custom_op(
    "megastable::ring_attention_backward",
    _backward,
    mutates_args=(),
    schema=(
        f"(Tensor dy, {_INPUTS}, Tensor y, Tensor lse, str group, bool fused, {_SCORES}) -> (Tensor, Tensor, Tensor)"
    ),
)


@_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, group: str, fused: bool, watched: bool, *scores: Any
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(q.dtype, torch.float32)
    highest = q.new_empty(q.shape[1] if watched else 0, dtype=torch.float32)
    return _like_stream(q), q.new_empty(q.shape[:3], dtype=wide), highest


@_backward_op.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like_stream(q), _like_stream(k), _like_stream(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, segments, group, fused, _, *scores = inputs
    y, lse, highest = output
    ctx.save_for_backward(q, k, v, segments, y, lse)
    ctx.how = group, fused, *scores
    ctx.mark_non_differentiable(lse, highest)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    return *_backward_op(dy, *ctx.saved_tensors, *ctx.how), *[None] * 7


_op.register_autograd(_gradients, setup_context=_save)


class _EagerRing(torch.autograd.Function):
    """The same without the custom operators, in which no mode sees the messages (benchmarks/scaling.py)."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_save)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        return *_backward(dy, *ctx.saved_tensors, *ctx.how), *[None] * 7


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, scores: AttentionScores = FULL, *, cp: ContextParallel,
    fused: bool = True, highest: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal softmax(q k^T * scale) v over all tokens of a sample, of which each rank of `cp` has a part.

    Every sum has its own fixed order: the same inputs give the same bits in every run, but not those of another number
    of ranks. Collective over the group, forward and backward.

    Args:
        q: This rank's queries, rotated, [b, q, s / ranks, d], of its `find_own_tokens`.
        k: Its keys, [b, k, s / ranks, d]. `k` divides `q`; neither need be divisible by the number of ranks.
        v: Its values, like `k`.
        segments: The document of every token of the whole samples, int [b, s]; None: samples are one document.
        scores: How logits are made.
        cp: The ranks, with `ring`.
        fused: Use a fused kernel where there is one for the dtype, and nothing but a causal mask: no documents, no cap,
            no end of a window. Else scores are written out in parts, in fp32.
        highest: fp32 [q]; raised in place by the largest logits before a cap.

    Returns:
        [b, q, s / ranks, d], contiguous as [s / ranks, b, q, d].
    """
    scores = scores.within_length(q.shape[2] * cp.size)
    run = _op if torch.compiler.is_compiling() else _EagerRing.apply
    y, _, found = run(q, k, v, segments, cp.group.group_name, fused, highest is not None, *scores)
    if highest is not None:
        torch.maximum(highest, found, out=highest)
    return y
