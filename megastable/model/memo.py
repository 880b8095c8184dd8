"""What is worked out once for a micro-batch and used by every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class Latest(Generic[T]):
    """`f`, whose last result is kept: asked again for the same tensor and the same rest, it is not worked out anew.

    One is enough: layers run one after the other on one micro-batch. Nobody may write to the tensor.
    """

    def __init__(self, f: Callable[..., T]) -> None:
        self._f = f
        self._kept: tuple[Tensor, tuple[Any, ...], T] | None = None

    def __call__(self, tensor: Tensor, *rest: Any) -> T:
        kept = self._kept
        if kept is None or kept[0] is not tensor or kept[1] != rest:
            kept = self._kept = tensor, rest, self._f(tensor, *rest)
        return kept[2]
