"""Rotary position embedding, half-split (Su et al., arXiv:2104.09864; the `rotate_half` layout of Llama and Qwen)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=8)
def rope_table(length: int, width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each fp32 [length, width / 2].

    Kept outside the modules: a buffer would be cast to bf16 with them, and positions above 256 would blur.
    """
    frequency = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def document_positions(segments: Tensor) -> Tensor:
    """Position of every token inside its document. segments: document ordinals [b, s] -> int64 [b, s]."""
    index = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def rotation(segments: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each fp32 [s, b, 1, width / 2]; positions begin anew at every document of segments [b, s]."""
    cos, sin = rope_table(segments.shape[1], width, theta, segments.device)
    position = document_positions(segments).t()
    return cos[position][:, :, None], sin[position][:, :, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of x [s, b, heads, d]; cos, sin broadcastable to [s, b, 1, d/2], fp32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
