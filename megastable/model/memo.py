"""One-entry memo for values computed once per micro-batch and used by every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class Latest(Generic[T]):
    """`f` with a memo of its last result: a repeated call with the same tensor and the same other arguments is free.

    One entry is enough: layers run one after the other on one micro-batch. The tensor must not be written to.
    """

    def __init__(self, f: Callable[..., T]) -> None:
        self._f = f
        self._kept: tuple[Tensor, tuple[Any, ...], T] | None = None

    def __call__(self, tensor: Tensor, *rest: Any) -> T:
        kept = self._kept
        if kept is None or kept[0] is not tensor or kept[1] != rest:
            kept = self._kept = tensor, rest, self._f(tensor, *rest)
        return kept[2]
