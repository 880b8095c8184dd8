"""Split parameters over the tensor group and join them again: pure functions between whole tensors and shards.

Every parameter carries a `Placement` (attribute `placement`) with its name in the whole model, so that
initialisation, tests and checkpoint tools see the same tensor under every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Placement:
    """A parameter's name in the whole model and how it is split.

    name: in the whole model, e.g. "blocks.3.attention.qkv.weight", the same in every layout. dim: the dimension that
    tensor parallelism splits, None = replicated. sections: sizes along `dim`, in the whole tensor, of parts that are
    split separately (fused q, k, v).
    """

    name: str
    dim: int | None = None
    sections: tuple[int, ...] = ()


def shard(whole: Tensor, placement: Placement, rank: int, size: int) -> Tensor:
    """The shard of `whole` that tensor rank `rank` of `size` holds."""
    if placement.dim is None or size == 1:
        return whole
    parts = whole.split(placement.sections, placement.dim)
    return torch.cat([part.chunk(size, placement.dim)[rank] for part in parts], placement.dim)


def unshard(shards: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole tensor from all its shards, in rank order; the inverse of `shard`."""
    if placement.dim is None or len(shards) == 1:
        return shards[0]
    size = len(shards)
    split = [s.split([n // size for n in placement.sections], placement.dim) for s in shards]
    return torch.cat(
        [torch.cat([s[i] for s in split], placement.dim) for i in range(len(placement.sections))],
        placement.dim,
    )


def place(parameter: nn.Parameter, placement: Placement, size: int) -> None:
    """Mark `parameter` with its placement, and for DeepSpeed's norms (unmarked parameters count once per group)."""
    parameter.placement = placement  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = placement.dim is not None and size > 1  # type: ignore[attr-defined]


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """The shape of this tensor rank's parameter, also where ZeRO 3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def placement_of(parameter: Tensor) -> Placement:
    """The placement set by `place`."""
    placement = getattr(parameter, "placement", None)
    assert isinstance(placement, Placement), (
        "a parameter without a placement: build it through parallel/layers.py"
    )
    return placement
