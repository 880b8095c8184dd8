"""Causal attention on a CPU as a few large matrix products per block of queries: the backend `blocked`.

torch's fused CPU kernel makes many small products; oneDNN does large batched ones several times faster. So the scores
of a few hundred queries are written out at a time, over all keys that they attend to and as many heads as fit in the
cache: FlashAttention-2 (Dao, arXiv:2307.08691) without its inner loop and its rescaling.

Precision is that of the fused kernels: scores, softmax and sums in fp32, probabilities rounded to the dtype of the
inputs. A product of bf16 matrices would be rounded on output, so the scores are a product of fp32 matrices that hold
bf16 values, computed by bf16 instructions (`_scores`). The gradients of the scores are small only after a subtraction,
which is therefore done inside the product (`_upstream`).

Shapes: b micro-batch, q query heads and k key/value heads of this tensor rank, s sequence, d head width;
g = q / k queries share a key; n pairs of a sample and a key head; r = c * g rows, those of c queries.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megastable.base import products
from megastable.model.kernels import FULL, AttentionScores

ROWS = 256  # queries of a block
DOCUMENT_ROWS = 64  # queries of a block with documents: it also covers the document of its first query
ELEMENTS = 2**20  # scores of a block unless one head has more; 4 MiB in fp32
ALIGN = 64  # of a block's first key: oneDNN compiles a kernel for every new shape of a product (0.5 ms)
KEPT = 16  # keep probabilities for the backward if at most this many times as large as the queries
EXTRA = 8  # columns for the subtraction; two are used, the width stays a multiple of 8


@functools.cache
def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `blocked_attention` supports this: CPUs, fp32, and bf16 where oneDNN has bf16 products."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    return dtype == torch.float32 or products.NATIVE


@dataclass(frozen=True)
class AttentionBlock:
    """Queries [first, end) of samples [b0, b1) and key heads [k0, k1), over keys [key, end).

    It has all heads of its samples, or some heads of one sample.
    """

    first: int
    end: int
    key: int
    b0: int
    b1: int
    k0: int
    k1: int

    def shape(self, groups: int) -> tuple[int, int, int]:
        """[n, r, keys]."""
        pair_count = (self.b1 - self.b0) * (self.k1 - self.k0)
        return pair_count, (self.end - self.first) * groups, self.end - self.key


def split_blocks(
    b: int, heads: int, groups: int, s: int, c: int, starts: list[list[int]] | None = None,
    window: int | None = None,
) -> Iterator[AttentionBlock]:  # fmt: skip
    """All blocks of c queries (the last ones may have fewer), by their queries. heads: key heads.

    starts: by sample, the first token of the document of every c-th token; None where a sample is one document. window:
    how many keys a query sees, its own included.
    """
    for row, first in enumerate(range(0, s, c)):
        end = min(first + c, s)
        oldest = 0 if window is None else max(first - window + 1, 0)
        keys = [max(starts[i][row] if starts else 0, oldest) // ALIGN * ALIGN for i in range(b)]
        fit = max(1, ELEMENTS // ((end - first) * groups * (end - min(keys))))
        if fit >= heads:
            for b0 in range(0, b, fit // heads):
                b1 = min(b0 + fit // heads, b)
                yield AttentionBlock(first, end, min(keys[b0:b1]), b0, b1, 0, heads)
        else:
            for b0 in range(b):
                for k0 in range(0, heads, fit):
                    yield AttentionBlock(first, end, keys[b0], b0, b0 + 1, k0, min(k0 + fit, heads))


def document_starts(segments: Tensor, c: int) -> list[list[int]]:
    """The first token of the document of every c-th token of each sample. segments: [b, s]."""
    opens_document = torch.ones_like(segments, dtype=torch.bool)
    opens_document[:, 1:] = segments[:, 1:] != segments[:, :-1]
    document_start = torch.arange(segments.shape[1]).mul(opens_document)
    return document_start.cummax(1).values[:, ::c].tolist()


def kept_size(b: int, heads: int, s: int, d: int) -> int:
    """Number of probabilities that the forward keeps for the backward: those of all blocks of at most ROWS, or none."""
    whole_blocks, rest_rows = s // ROWS, s % ROWS  # divmod does not take symbolic sizes
    head_size = ROWS * ROWS * whole_blocks * (whole_blocks + 1) // 2 + rest_rows * s
    return b * heads * head_size if head_size <= KEPT * s * d else 0


Place = Callable[[Sequence[int]], Tensor]


class _Held(threading.local):
    """Per-thread scratch, kept from call to call: the system hands out new memory page by page, which takes longer than
    the computation in it."""

    def __init__(self) -> None:
        self.flat: dict[tuple[str, torch.dtype], Tensor] = {}


_held = _Held()


def _scratch(name: str, dtype: torch.dtype) -> Place:
    """Hands out the same memory for every block and every call."""

    def place(shape: Sequence[int]) -> Tensor:
        size, held_memory = math.prod(shape), _held.flat.get((name, dtype))
        if held_memory is None or size > len(held_memory):
            with torch.inference_mode(False):  # else training could no longer write to it
                held_memory = _held.flat[name, dtype] = torch.empty(size, dtype=dtype)
        return held_memory[:size].view(shape)

    return place


def _shelf(flat: Tensor) -> Place:
    """Hands out a separate part of `flat` to every block, in block order."""
    used_size = 0

    def place(shape: Sequence[int]) -> Tensor:
        nonlocal used_size
        first_element, used_size = used_size, used_size + math.prod(shape)
        return flat[first_element:used_size].view(shape)

    return place


def _scores(q: Tensor, k: Tensor, scale: float, out: Tensor) -> Tensor:
    """q k^T * scale in fp32 into `out` [n, r, keys]."""
    if q.dtype == torch.float32:
        return torch.baddbmm(out, q, k.transpose(1, 2), beta=0, alpha=scale, out=out)
    # oneDNN may use bf16 instructions, which multiply bf16 values exactly and sum in fp32. If it does not, the product
    # is as exact, but slower.
    mkldnn_matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    precision_before = mkldnn_matmul.fp32_precision
    mkldnn_matmul.fp32_precision = "bf16"
    try:
        wide_q = _scratch("queries", torch.float32)(q.shape).copy_(q)
        wide_k = _scratch("keys", torch.float32)(k.shape).copy_(k)
        return torch.baddbmm(out, wide_q, wide_k.transpose(1, 2), beta=0, alpha=scale, out=out)
    finally:
        mkldnn_matmul.fp32_precision = precision_before


@functools.lru_cache(maxsize=4)
def _future(c: int) -> Tensor:
    """Additive causal mask of c queries and the same c keys: -inf for later keys. [c, 1, c]"""
    return torch.full((c, c), -math.inf).triu_(1)[:, None]


@functools.lru_cache(maxsize=64)
def _past(c: int, keys: int, window: int) -> Tensor:
    """Additive mask of c queries, the last c of `keys` tokens: -inf for keys before their window. [c, keys]"""
    return torch.full((c, keys), -math.inf).tril_(keys - c - window)


class _Call:
    """Shapes and scratch of one forward or backward, and views of its tensors by block."""

    def __init__(self, q: Tensor, k: Tensor, segments: Tensor | None, scores: AttentionScores) -> None:
        self.b, self.q, self.s, self.d = q.shape
        self.k = k.shape[1]
        self.g = self.q // self.k
        self.scale, self.cap, self.window = scores.score_factor(self.d), scores.cap, scores.window
        self.segments = segments
        self.slopes = _scratch("slopes", torch.float32)
        query_count = min(ROWS if segments is None else DOCUMENT_ROWS, self.s)
        starts_by_sample = None if segments is None else document_starts(segments, query_count)
        self.blocks = split_blocks(self.b, self.k, self.g, self.s, query_count, starts_by_sample, self.window)
        self.room, self.future = _scratch("scores", torch.float32), _future(query_count)

    def view(self, x: Tensor, at: AttentionBlock) -> Tensor:
        """A block's queries in x [b, q, s, d]: a view [b, k, c, g, d]."""
        x = x[at.b0 : at.b1, :, at.first : at.end].unflatten(1, (self.k, self.g))
        return x[:, at.k0 : at.k1].transpose(2, 3)

    def rows(self, x: Tensor, at: AttentionBlock) -> Tensor:
        """The same as rows [n, r, d]."""
        return self.view(x, at).reshape(*at.shape(self.g)[:2], self.d)

    def pairs(self, x: Tensor) -> Tensor:
        """Keys or values [b, k, s, d] as [b * k, s, d], contiguous."""
        return x.reshape(-1, self.s, self.d).contiguous()

    def part(self, x: Tensor, at: AttentionBlock) -> Tensor:
        """A block's keys in x [b * k, s, d]: a view [n, keys, d]."""
        return x[at.b0 * self.k + at.k0 : (at.b1 - 1) * self.k + at.k1, at.key : at.end]

    def probabilities(self, at: AttentionBlock, q: Tensor, k: Tensor, out: Tensor) -> Tensor:
        """softmax(q k^T * scale) over the visible keys, into `out` [n, r, keys]. q: [n, r, d], k: [n, keys, d].

        With a cap, `slopes` then holds the derivative of the capped logits by the others, fp32 [n, r, keys].
        """
        shape = at.shape(self.g)
        scores = _scores(q, k, self.scale, self.room(shape))
        if self.cap is not None:
            scores.div_(self.cap).tanh_()
            torch.mul(scores, scores, out=self.slopes(shape)).neg_().add_(1)
            scores.mul_(self.cap)
        c = at.end - at.first
        seen = scores.view(at.b1 - at.b0, -1, c, self.g, shape[2])
        seen[..., -c:].add_(self.future[:c, :, :c])
        if self.window is not None and at.end - at.key > self.window:
            seen.add_(_past(c, at.end - at.key, self.window)[:, None])
        if self.segments is not None:
            of = self.segments[at.b0 : at.b1]
            other = of[:, at.first : at.end, None] != of[:, None, at.key : at.end]  # [b, c, keys]
            seen.add_(torch.zeros(other.shape).masked_fill_(other, -math.inf)[:, None, :, None])
        return out.copy_(torch.softmax(scores, -1, out=scores))

    def multiply_by_slopes(self, ds: Tensor) -> None:
        """ds [n, r, keys] times `slopes`, in place. In the memory of the scores, which are not needed any more: of two
        dtypes torch would cast into new memory, twice."""
        wide_ds = self.room(ds.shape).copy_(ds).mul_(self.slopes(ds.shape))
        ds.copy_(wide_ds)


def _like_stream(x: Tensor) -> Tensor:
    """New memory for [b, heads, s, d], laid out as the surrounding layers use it: [s, b, heads, d]."""
    b, heads, s, d = x.shape
    return x.new_empty(s, b, heads, d).permute(1, 2, 0, 3)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, room: int, scale: float | None, cap: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output [b, q, s, d], and `room` probabilities kept for the backward, flat (or none)."""
    call = _Call(q, k, segments, AttentionScores(scale, cap, window))
    keys, values = call.pairs(k), call.pairs(v)
    y = _like_stream(q)
    kept = q.new_empty(room)
    place = _shelf(kept) if len(kept) else _scratch("probabilities", q.dtype)
    for at in call.blocks:
        p = call.probabilities(at, call.rows(q, at), call.part(keys, at), place(at.shape(call.g)))
        to = call.view(y, at)
        to.copy_(torch.bmm(p, call.part(values, at)).view(to.shape))
    return y, kept


def _upstream(dy: Tensor, y: Tensor) -> Tensor:
    """[n, r, d + EXTRA]: dy, and in two columns -(dy . y), as exact as their dtype allows; dy and y: [n, r, d].

    Multiplied by values extended with two columns of ones it gives dP - sum(dP * P), the term that the softmax's
    backward needs, rounded after the subtraction instead of before.
    """
    n, r, d = dy.shape
    extended_gradient = _scratch("upstream", dy.dtype)((n, r, d + EXTRA))
    extended_gradient[..., :d] = dy
    extended_gradient[..., d:] = 0
    wide_gradient = _scratch("queries", torch.float32)((n, r, d)).copy_(dy)
    output_product = wide_gradient.mul_(_scratch("outputs", torch.float32)((n, r, d)).copy_(y)).sum(-1).neg_()
    extended_gradient[..., d] = output_product
    extended_gradient[..., d + 1] = output_product - extended_gradient[..., d]
    return extended_gradient


def _backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, y: Tensor, kept: Tensor,
    scale: float | None, cap: float | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, given that of y."""
    call = _Call(q, k, segments, AttentionScores(scale, cap, window))
    d = call.d
    keys, values = call.pairs(k), call.pairs(v)
    values = torch.cat([values, values.new_zeros(*values.shape[:2], EXTRA)], -1)
    values[..., d : d + 2] = 1
    dq, dk, dv = _like_stream(q), _like_stream(k), _like_stream(v)
    dkeys, dvalues = torch.zeros(keys.shape), torch.zeros(keys.shape)  # summed over the blocks in fp32
    place = _shelf(kept) if len(kept) else _scratch("probabilities", q.dtype)
    other = _scratch("gradients", q.dtype)
    for at in call.blocks:
        p = place(at.shape(call.g))
        rows, k_part = call.rows(q, at), call.part(keys, at)
        if not len(kept):
            call.probabilities(at, rows, k_part, p)
        up = _upstream(call.rows(dy, at), call.rows(y, at))
        call.part(dvalues, at).add_(torch.bmm(p.transpose(1, 2), up[..., :d]))
        ds = torch.bmm(up, call.part(values, at).transpose(1, 2), out=other(at.shape(call.g))).mul_(p)
        if cap is not None:
            call.multiply_by_slopes(ds)
        call.part(dkeys, at).add_(torch.bmm(ds.transpose(1, 2), rows))
        to = call.view(dq, at)
        to.copy_(torch.baddbmm(rows, ds, k_part, beta=0, alpha=call.scale).view(to.shape))
    dk.copy_(dkeys.mul_(call.scale).view(dk.shape))
    dv.copy_(dvalues.view(dv.shape))
    return dq, dk, dv


# torch.compile treats both operators as opaque. Their schemas are written out: derived ones depend on how
# annotations are written.
_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor? segments"
_SCORES = "float? scale, float? cap, int? window"
_op = torch.library.custom_op(
    "megastable::blocked_attention",
    _forward,
    mutates_args=(),
    schema=f"({_ARGUMENTS}, int room, {_SCORES}) -> (Tensor, Tensor)",
)
_backward_op = torch.library.custom_op(
    "megastable::blocked_attention_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor dy, {_ARGUMENTS}, Tensor y, Tensor kept, {_SCORES}) -> (Tensor, Tensor, Tensor)",
)


@_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, room: int, scale: float | None, cap: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _like_stream(q), q.new_empty(room)


@_backward_op.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, y: Tensor, kept: Tensor,
    scale: float | None, cap: float | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _like_stream(q), _like_stream(k), _like_stream(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, segments, _, *ctx.scores = inputs
    ctx.save_for_backward(q, k, v, segments, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for `kept`


def _gradients(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *_backward_op(dy, *ctx.saved_tensors, *ctx.scores), *[None] * 5


_op.register_autograd(_gradients, setup_context=_save)


class _Eager(torch.autograd.Function):
    """The same without the custom operators, whose dispatch costs more than 0.2 ms."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_save)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
        return *_backward(dy, *ctx.saved_tensors, *ctx.scores), *[None] * 5


def blocked_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, scores: AttentionScores = FULL
) -> Tensor:
    """Causal softmax(q k^T * scale) v, inside documents. q [b, q, s, d], k and v [b, k, s, d] -> [b, q, s, d].

    documents: int [b, s], the document of every token, not decreasing along s; None: a sample is one document. The
    cost depends on the lengths of the documents and the window, not of the sequence. All of one dtype, fp32 or bf16, on
    a CPU (see `is_supported`). The result is contiguous as [s, b, q, d].
    """
    needs_gradients = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    # Computed here: a compiled graph in the disk cache must depend on the value that it was compiled for.
    # With a cap the backward needs the logits as well: both are computed again.
    kept_elements = kept_size(*q.shape) if needs_gradients and scores.cap is None else 0
    scores = scores.within_length(q.shape[2])
    if torch.compiler.is_compiling():
        return _op(q, k, v, documents, kept_elements, *scores)[0]
    return _Eager.apply(q, k, v, documents, kept_elements, *scores)[0]
