"""RMSNorm (Zhang & Sennrich, arXiv:1910.07467), computed in fp32 for any parameter dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megastable.parallel.mappings import share, total
from megastable.parallel.sharding import Placement, place
from megastable.parallel.topology import TensorParallel


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight over the last dimension; output in the dtype of `x`.

    `partial`: each tensor rank sees only a part of the data (sequence shards, or its own heads), so the
    weight's gradient is summed over the tensor group. centered: the factor is 1 + weight. scale: another one.
    """

    def __init__(
        self, width: int, eps: float, tp: TensorParallel, name: str, partial: bool, centered: bool = False,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps, self.centered = eps, centered
        # A tensor: by a number of its own, every block would be compiled again.
        self.scale = None if scale == 1.0 else torch.tensor(scale, dtype=torch.float32, device="cpu")
        self.tp = tp if partial else TensorParallel()
        self.weight = nn.Parameter(torch.empty(width))
        place(self.weight, Placement(f"{name}.weight"), tp.size)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        weight = _factor(share(self.weight, self.tp).float(), self.centered)
        return (normed * (weight if self.scale is None else weight * self.scale)).to(x.dtype)


def _factor(weight: Tensor, centered: bool) -> Tensor:
    return weight + 1.0 if centered else weight


class SplitRMSNorm(nn.Module):
    """`RMSNorm` over a `width` that is split over the tensor group: x [..., width / tensor] -> the same.

    The mean square is over all ranks' shards; weight and its gradient are split like x.
    """

    def __init__(self, width: int, eps: float, tp: TensorParallel, name: str, centered: bool = False) -> None:
        super().__init__()
        self.width, self.eps, self.tp, self.centered = width, eps, tp, centered
        self.weight = nn.Parameter(torch.empty(width // tp.size))
        place(self.weight, Placement(f"{name}.weight", 0, (width,)), tp.size)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = total(wide.pow(2).sum(-1, keepdim=True), self.tp) / self.width
        weight = _factor(self.weight.float(), self.centered)
        return (wide * torch.rsqrt(mean + self.eps) * weight).to(x.dtype)
