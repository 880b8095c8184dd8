"""A piece of a parameter in the optimizer's flat buffers: the geometry that every ZeRO wrapper shares. Pure.

A rule that needs rows or columns of a whole matrix (AGC, Adafactor) sums over the pieces of all ranks:

    rows = whole_index(f, 0, rank, size)                      # of each row of the shard: its row in the whole matrix
    for r in rectangles(f):
        table.index_add_(0, rows[r.rows], r.of(gradient).square().sum(1))
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from megastable.parallel.sharding import Placement, shard


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

    def of(self, piece: Tensor) -> Tensor:
        """A view [rows, columns] of a fragment's elements [n]."""
        return piece[self.part].view(self.rows.stop - self.rows.start, -1)


def rectangles(fragment: Fragment) -> list[Rectangle]:
    """The fragment as at most three matrices, in order: the end of a row, whole rows, the beginning of a row.

    A shard of more than two dimensions counts as [first, others]; a vector as rows of one element.
    """
    width = prod(fragment.shape[1:])
    found, at, end = [], fragment.start, fragment.start + fragment.numel
    while at < end:
        row, column = divmod(at, width)
        if column or end - at < width:
            stop = min(end, (row + 1) * width)
            rows, columns = slice(row, row + 1), slice(column, column + stop - at)
        else:
            rows, columns = slice(row, end // width), slice(0, width)
            stop = rows.stop * width
        found.append(Rectangle(slice(at - fragment.start, stop - fragment.start), rows, columns))
        at = stop
    return found


def whole_index(fragment: Fragment, dim: int, rank: int, size: int) -> Tensor:
    """int64 [n]: where each index of the shard along `dim` lies in the whole tensor; rank, size: in the tensor group.

    Parts that are split separately (fused q, k, v) are not contiguous in the whole.
    """
    n = fragment.shape[dim]
    if fragment.dim != dim:
        return torch.arange(n)
    whole = torch.arange(n * size)
    return shard(whole, Placement(fragment.name, 0, fragment.sections), rank, size)
