"""Initial weights: a pure function of seed and parameter name, whatever the layout.

Normal with `init_std`; projections back into the residual stream are scaled by 1 / sqrt(2 layers) (GPT-2, section
2.3); norms start at one. Each rank draws the whole tensor and keeps its shard: the price of an initialisation
that is the same bytes under every tensor, pipeline and ZeRO layout.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from megastable.config import ModelConfig
from megastable.parallel.sharding import Placement, placement_of, shard
from megastable.parallel.topology import TensorParallel


def whole_weight(placement: Placement, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """The initial value, fp32, of the whole tensor."""
    if len(shape) == 1:
        return torch.ones(shape)
    into_residual = placement.name.endswith((".attention.out.weight", ".mlp.down.weight"))
    std = config.init_std / math.sqrt(2 * config.layers) if into_residual else config.init_std
    digest = hashlib.blake2b(f"{seed}/{placement.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


@torch.no_grad()
def initialise(module: nn.Module, config: ModelConfig, tp: TensorParallel, seed: int) -> None:
    """Fill every parameter of `module` in place."""
    for parameter in module.parameters():
        placement = placement_of(parameter)
        shape = list(parameter.shape)
        if placement.dim is not None:
            shape[placement.dim] = sum(placement.sections)
        whole = whole_weight(placement, tuple(shape), config, seed)
        parameter.copy_(shard(whole, placement, tp.rank, tp.size))
