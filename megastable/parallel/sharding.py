"""Split parameters over the tensor group and join them again: pure functions between whole tensors and shards.

Every parameter carries a `Placement` (attribute `placement`) with its name in the whole model, so that
initialisation, tests and checkpoint tools see the same tensor under every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from pydantic import BaseModel, ConfigDict
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


def cut_shard(whole: Tensor, placement: Placement, rank: int, size: int) -> Tensor:
    """The shard of `whole` that tensor rank `rank` of `size` holds."""
    if placement.dim is None or size == 1:
        return whole
    parts = whole.split(placement.sections, placement.dim)
    return torch.cat([part.chunk(size, placement.dim)[rank] for part in parts], placement.dim)


def join_shards(shards: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole tensor from all its shards, in rank order; the inverse of `cut_shard`."""
    if placement.dim is None or len(shards) == 1:
        return shards[0]
    shard_count = len(shards)
    split_shards = [s.split([n // shard_count for n in placement.sections], placement.dim) for s in shards]
    return torch.cat(
        [torch.cat([s[i] for s in split_shards], placement.dim) for i in range(len(placement.sections))],
        placement.dim,
    )


def set_placement(parameter: nn.Parameter, placement: Placement, size: int) -> None:
    """Mark `parameter` with its placement, and for DeepSpeed's norms (unmarked parameters count once per group)."""
    parameter.placement = placement  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = placement.dim is not None and size > 1  # type: ignore[attr-defined]


SPLIT = "experts"  # DeepSpeed's name of the ranks that hold the same parameters


def split_over_experts(parameter: nn.Parameter) -> None:
    """Mark `parameter` as one that only some data ranks have, by the attributes in which DeepSpeed looks for it."""
    parameter.allreduce = False  # type: ignore[attr-defined]
    parameter.group_name = SPLIT  # type: ignore[attr-defined]


def is_split(parameter: Tensor) -> bool:
    """Whether only some data ranks have the parameter: see `split_over_experts`."""
    return not getattr(parameter, "allreduce", True)


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """The shape of this tensor rank's parameter, also where ZeRO 3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def placement_of(parameter: Tensor) -> Placement:
    """The placement set by `set_placement`."""
    placement = getattr(parameter, "placement", None)
    assert isinstance(placement, Placement), (
        "a parameter without a placement: build it through parallel/layers.py"
    )
    return placement


# A piece of a parameter in the optimizer's flat buffers: the geometry that every ZeRO wrapper shares. Pure.
#
# A rule that needs rows or columns of a whole matrix (AGC, Adafactor) sums over the pieces of all ranks:
#
# rows = whole_index(f, 0, rank, size)                      # of each row of the shard: its row in the whole matrix
# for r in rectangles(f): table.index_add_(0, rows[r.rows], r.of(gradient).square().sum(1))


class Fragment(BaseModel):
    """`numel` elements of a parameter, from `start` of its flattened tensor-parallel shard, at `offset` of buffer
    `group`. name, dim, sections: its `Placement`; shape: of the shard. counted: False for a copy that another
    rank counts (a replica over the tensor group, a tied weight on a later stage).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dim: int | None
    sections: tuple[int, ...]
    shape: tuple[int, ...]
    group: int
    offset: int
    start: int
    numel: int
    counted: bool

    @property
    def placement(self) -> Placement:
        return Placement(self.name, self.dim, self.sections)


@dataclass(frozen=True)
class Rectangle:
    """Elements `part` of a fragment as a matrix: `rows` x `columns` of the tensor-parallel shard."""

    part: slice
    rows: slice
    columns: slice

    def view_of(self, piece: Tensor) -> Tensor:
        """A view [rows, columns] of a fragment's elements [n]."""
        return piece[self.part].view(self.rows.stop - self.rows.start, -1)


def split_in_rectangles(fragment: Fragment) -> list[Rectangle]:
    """The fragment as at most three matrices, in order: the end of a row, whole rows, the beginning of a row.

    A shard of more than two dimensions counts as [first, others]; a vector as rows of one element.
    """
    row_width = prod(fragment.shape[1:])
    row_rectangles, next_element, last_element = [], fragment.start, fragment.start + fragment.numel
    while next_element < last_element:
        row, column = divmod(next_element, row_width)
        if column or last_element - next_element < row_width:
            rectangle_end = min(last_element, (row + 1) * row_width)
            rows, columns = slice(row, row + 1), slice(column, column + rectangle_end - next_element)
        else:
            rows, columns = slice(row, last_element // row_width), slice(0, row_width)
            rectangle_end = rows.stop * row_width
        row_rectangles.append(
            Rectangle(slice(next_element - fragment.start, rectangle_end - fragment.start), rows, columns)
        )
        next_element = rectangle_end
    return row_rectangles


def whole_index(fragment: Fragment, dim: int, rank: int, size: int) -> Tensor:
    """int64 [n]: where each index of the shard along `dim` lies in the whole tensor; rank, size: in the tensor group.

    Parts that are split separately (fused q, k, v) are not contiguous in the whole.
    """
    index_count = fragment.shape[dim]
    if fragment.dim != dim:
        return torch.arange(index_count)
    whole_indices = torch.arange(index_count * size)
    return cut_shard(whole_indices, Placement(fragment.name, 0, fragment.sections), rank, size)
