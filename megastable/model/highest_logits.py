"""The largest attention logit of every head, without the scores in memory; beside any attention core.

Fused kernels do not return it, so queries and keys are multiplied once more, some hundred queries at a time, over the
keys up to theirs: about a seventh of the products of attention, forward and backward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megastable.base.products import is_cast
from megastable.model.attention_scores import FULL, AttentionScores

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
        _op(highest, q, k, segments, scores.factor(q.shape[-1]), scores.window)
    else:
        _raise(highest, q, k, segments, scores.factor(q.shape[-1]), scores.window)


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
