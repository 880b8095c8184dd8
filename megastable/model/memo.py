"""Memo for values computed once per micro-batch and used by many layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class Latest(Generic[T]):
    """`f` with a memo of its results for the last tensor: a repeated call with the same other arguments is free.

    One tensor is enough: layers run one after the other on one micro-batch. It must not be written to. The other
    arguments must be hashable.
    """

    def __init__(self, f: Callable[..., T]) -> None:
        self._f = f
        self._kept: tuple[Tensor, dict[tuple[Any, ...], T]] | None = None

    def __call__(self, tensor: Tensor, *rest: Any) -> T:
        kept = self._kept
        if kept is None or kept[0] is not tensor:
            kept = self._kept = tensor, {}
        if rest not in kept[1]:
            kept[1][rest] = self._f(tensor, *rest)
        return kept[1][rest]
