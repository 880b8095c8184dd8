"""The largest attention logit of every head, without the scores in memory; beside any attention core.

Fused kernels do not return it, so queries and keys are multiplied once more, some hundred queries at a time, over the
keys up to theirs: about a seventh of the products of attention, forward and backward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megastable.base.products import is_cast

SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}  # at a time: fits a CPU's cache, fills a GPU
FEWEST = 16  # queries at a time, even if their scores are more


def raise_highest(highest: Tensor, q: Tensor, k: Tensor, segments: Tensor | None) -> None:
    """highest <- max(highest, largest causal q k / sqrt(d)) of every head, in place, without gradients.

    highest: fp32 [q]. q [b, q, s, d], k [b, k, s, d], after the rotation; segments [b, s]: attention stays inside
    documents. The products have the dtype of the inputs: in bf16 a logit is wrong by at most 0.4 %.
    """
    q, k = q.detach(), k.detach()
    if torch.compiler.is_compiling():
        _op(highest, q, k, segments)
    else:
        _raise(highest, q, k, segments)


@torch.no_grad()
def _raise(highest: Tensor, q: Tensor, k: Tensor, segments: Tensor | None) -> None:
    if is_cast(q):
        q, k = q.float(), k.float()
    b, heads, s, d = q.shape
    kv = k.shape[1]
    q, k = q.unflatten(1, (kv, heads // kv)), k.transpose(-2, -1)
    scores = SCORES.get(q.device.type, SCORES["cuda"])
    at_a_time = min(s, max(FEWEST, scores // (b * heads * s)))
    future = torch.ones(at_a_time, at_a_time, dtype=torch.bool, device=q.device).triu_(1)
    for begin in range(0, s, at_a_time):
        end = min(begin + at_a_time, s)
        c = end - begin
        logits = (q[..., begin:end, :].flatten(2, 3) @ k[..., :end]).unflatten(
            2, (-1, c)
        )  # [b, k, q / k, c, end]
        logits[..., begin:].masked_fill_(future[:c, :c], -math.inf)
        if segments is not None:
            other = segments[:, begin:end, None] != segments[:, None, :end]
            logits.masked_fill_(other[:, None, None], -math.inf)
        found = logits.amax((0, 3, 4)).flatten().float() / math.sqrt(d)
        torch.maximum(highest, found, out=highest)


# Opaque to torch.compile, which would unroll the loop.
_op = torch.library.custom_op(
    "megastable::raise_highest",
    _raise,
    mutates_args=("highest",),
    schema="(Tensor(a!) highest, Tensor q, Tensor k, Tensor? segments) -> ()",
)


@_op.register_fake
def _(highest: Tensor, q: Tensor, k: Tensor, segments: Tensor | None) -> None:
    return None
