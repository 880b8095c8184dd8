"""QK-clip: where a head's largest attention logit exceeds a threshold, scale its query and key weights down after the
update, so that it would have been the threshold (MuonClip: Kimi K2, arXiv:2507.20534 section 2.1).

A head's logits are bilinear in its queries and keys: factors f of its query rows and g of its key rows scale them by
f g. The rotation commutes with both. With grouped queries, heads share a key head: it gets the root of the smallest
factor among them, and every query head the rest of its own, so that no head's logits are scaled by anything but its
factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megastable.parallel.fragments import Fragment, rectangles


def over(highest: Tensor, threshold: float) -> Tensor:
    """Which heads to clip. A largest logit that is not finite is no measurement: its head is left alone."""
    return torch.isfinite(highest) & (highest > threshold)


def clip_factors(highest: Tensor, kv_heads: int, threshold: float) -> tuple[Tensor, Tensor]:
    """Factors of query heads [..., heads] and key heads [..., kv_heads], from largest logits [..., heads]. fp32."""
    wanted = torch.where(over(highest, threshold), threshold / highest, 1.0)
    groups = wanted.unflatten(-1, (kv_heads, -1))
    keys = groups.amin(-1).sqrt()
    return (groups / keys.unsqueeze(-1)).flatten(-2), keys


def row_factors(queries: Tensor, keys: Tensor, width: int, tensor: int, tensor_rank: int) -> Tensor:
    """The factor of every row of a tensor rank's fused weight (or element of its bias): queries, keys, values.

    queries, keys: factors of all heads of a block; width: of a head; tensor: ranks of the tensor group.
    """
    q, k = (of.chunk(tensor)[tensor_rank].repeat_interleave(width) for of in (queries, keys))
    return torch.cat((q, k, torch.ones_like(k)))


@torch.no_grad()
def scale_rows(piece: Tensor, fragment: Fragment, factors: Tensor) -> None:
    """Multiply the rows of a parameter's shard by `factors` [rows], in place, in the `piece` that `fragment` describes:
    a flat range, which may begin and end inside a row."""
    factors = factors.to(piece.device)
    for part in rectangles(fragment):
        part.of(piece).mul_(factors[part.rows, None])
