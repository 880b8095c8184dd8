"""Sums over all ranks by parameter: what a rule must know of whole tensors that no rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.parallel.fragments import Fragment

if TYPE_CHECKING:
    from megastable.optim.pieces import WholeParameter


def totals(
    parts: Iterable[tuple[Fragment, Tensor]],
    width: int,
    parameters: Mapping[str, WholeParameter],
    device: torch.device,
) -> Tensor:
    """Sums over all fragments of all ranks by parameter: fp64 [parameters, width]. Collective over the world.

    parts: of each fragment its numbers, [width]; copies count once. All ranks get the same bits.
    """
    table = torch.zeros(len(parameters), width, dtype=torch.float64, device=device)
    for fragment, numbers in parts:
        if fragment.counted:
            table[parameters[fragment.name].row] += numbers.double()
    return summed(table)


def maxima(
    parts: Iterable[tuple[Fragment, Tensor]],
    width: int,
    parameters: Mapping[str, WholeParameter],
    device: torch.device,
) -> Tensor:
    """The same with maxima of numbers that are not negative."""
    table = torch.zeros(len(parameters), width, dtype=torch.float64, device=device)
    for fragment, numbers in parts:
        row = parameters[fragment.name].row
        table[row] = torch.maximum(table[row], numbers.double())
    if dist.is_initialized():
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return table


def summed(table: Tensor) -> Tensor:
    """`table`, summed in place over the world."""
    if dist.is_initialized():
        dist.all_reduce(table)
    return table
