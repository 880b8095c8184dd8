"""Rotary position embedding, half-split (Su et al., arXiv:2104.09864; the `rotate_half` layout of Llama and Qwen)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megastable.config.model import ModelConfig, RopeScalingConfig


class Rope(NamedTuple):
    """Parameters of a model's rotations. width: of a head."""

    width: int
    theta: float
    scaling: RopeScalingConfig | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> Rope:
        return cls(config.head_width, config.rope_theta, config.rope_scaling)


def frequencies(rope: Rope, device: torch.device) -> Tensor:
    """Radians per position, fp32 [width / 2], computed as in transformers (modeling_rope_utils.py)."""
    turns = torch.arange(0, rope.width, 2, dtype=torch.float32, device=device) / rope.width
    plain, scaling = 1.0 / rope.theta**turns, rope.scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    assert scaling.original_length is not None
    if scaling.kind == "yarn":
        kept = 1 - _yarn_ramp(rope, scaling, device)
        return plain / scaling.factor * (1 - kept) + plain * kept
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    # 0: divided by the factor; 1: unchanged.
    kept = (scaling.original_length / wavelength - low) / (high - low)
    blended = (1 - kept) * plain / scaling.factor + kept * plain
    divided = torch.where(wavelength > scaling.original_length / low, plain / scaling.factor, blended)
    return torch.where(wavelength < scaling.original_length / high, plain, divided)


def _yarn_ramp(rope: Rope, scaling: RopeScalingConfig, device: torch.device) -> Tensor:
    """0 for the frequencies that YaRN keeps, 1 for those that it divides, fp32 [width / 2] (arXiv:2309.00071, section
    3.2; between whole numbers, as in its authors' code)."""
    length = scaling.original_length
    assert length is not None

    def index(turns: float) -> float:
        """Of the frequency, as a real number, that turns so often in the original length."""
        return rope.width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(index(scaling.beta_fast)), 0)
    high = min(math.ceil(index(scaling.beta_slow)), rope.width - 1)
    at = torch.arange(rope.width // 2, dtype=torch.float32, device=device)
    return ((at - low) / (high - low if high != low else 0.001)).clamp(0, 1)


def magnitude(scaling: RopeScalingConfig | None) -> float:
    """Factor of rotated queries and keys (YaRN: arXiv:2309.00071, section 3.4)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0


@lru_cache(maxsize=8)
def rope_table(length: int, rope: Rope, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each fp32 [length, width / 2], times YaRN's factor.

    Kept outside the modules: a buffer would be cast to bf16 with them, which cannot tell positions above 256 apart.
    """
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies(rope, device)
    factor = magnitude(rope.scaling)
    return (angle.cos(), angle.sin()) if factor == 1.0 else (angle.cos() * factor, angle.sin() * factor)


def document_positions(segments: Tensor) -> Tensor:
    """Position of every token inside its document. segments: document ordinals [b, s] -> int64 [b, s]."""
    index = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def rotation(segments: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """cos and sin, each fp32 [s, b, 1, width / 2]; positions restart at every document of segments [b, s]."""
    cos, sin = rope_table(segments.shape[1], rope, segments.device)
    position = document_positions(segments).t()
    return cos[position][:, :, None], sin[position][:, :, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of x [s, b, heads, d]; cos, sin broadcastable to [s, b, 1, d/2], fp32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
