"""Collectives of Python objects: gather a value, share a result, raise an error on all ranks together so that none
hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megastable.base.errors import MegastableError

T = TypeVar("T")


def gathered(value: Any, group: Any = None) -> list[Any]:
    """The `value` of every rank of `group` (default: the world), in rank order, on every rank."""
    if dist.get_world_size(group) == 1:
        return [value]  # even a collective of one rank takes a millisecond
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def agree(action: Callable[[], T]) -> T:
    """Run `action` on every rank. If it raises a MegastableError on any rank, all ranks raise the lowest rank's
    error."""
    result: Any = None
    error: MegastableError | None = None
    try:
        result = action()
    except MegastableError as raised:
        error = raised
    _raise_first(gathered(error))
    return result


def first(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only; every rank returns its result or raises its MegastableError."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = action()
        except MegastableError as raised:
            answer[1] = raised
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(answer, src=0)
    _raise_first(answer[1:])
    return answer[0]


def shared(error: MegastableError) -> MegastableError:
    """Mark `error` as one that every rank raises at the same place."""
    error.collective = True
    return error


def strangers(value: Any) -> list[int]:
    """The ranks whose `value` differs from rank 0's; empty when all agree."""
    values = gathered(value)
    return [rank for rank, other in enumerate(values) if other != values[0]]


def _raise_first(errors: list[Any]) -> None:
    for error in errors:
        if error is not None:
            raise shared(error)
