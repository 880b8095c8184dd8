"""Collectives of Python objects: gather a value, share a result, raise an error on all ranks together so that none
hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megastable.base.errors import MegastableError

T = TypeVar("T")


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """The `value` of every rank of `group` (default: the world), in rank order, on every rank."""
    if dist.get_world_size(group) == 1:
        return [value]  # even a collective of one rank takes a millisecond
    values_by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values_by_rank, value, group=group)
    return values_by_rank


def run_on_all(action: Callable[[], T]) -> T:
    """Run `action` on every rank. If it raises a MegastableError on any rank, all ranks raise the lowest rank's
    error."""
    own_result: Any = None
    error: MegastableError | None = None
    try:
        own_result = action()
    except MegastableError as own_error:
        error = own_error
    _raise_first(gather_objects(error))
    return own_result


def run_on_first(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only; every rank returns its result or raises its MegastableError."""
    result_or_error: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result_or_error[0] = action()
        except MegastableError as raised:
            result_or_error[1] = raised
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(result_or_error, src=0)
    _raise_first(result_or_error[1:])
    return result_or_error[0]


def mark_collective(error: MegastableError) -> MegastableError:
    """Mark `error` as one that every rank raises at the same place."""
    error.collective = True
    return error


def find_differing_ranks(value: Any) -> list[int]:
    """The ranks whose `value` differs from rank 0's; empty when all agree."""
    values_by_rank = gather_objects(value)
    return [rank for rank, rank_value in enumerate(values_by_rank) if rank_value != values_by_rank[0]]


def _raise_first(errors: list[Any]) -> None:
    for error in errors:
        if error is not None:
            raise mark_collective(error)
