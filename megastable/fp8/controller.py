"""FP8 controller: switches FP8 on and off, wraps a step, and holds the state of delayed scaling."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megastable.fp8.amax_history import SLOTS, Meters
from megastable.fp8.emulated import Product
from megastable.fp8.scale_factors import AT_ONCE, BLOCK, Quantized

History = Mapping[
    str, Sequence[Sequence[float]]
]  # by layer and slot: the largest magnitudes, the newest first
# layer, slot, total numbers, numbers that were saturated, numbers that became zero
Record = Callable[[str, str, Tensor, Tensor, int], None]


class Fp8:
    """FP8 of the layers that a rank holds. Subclasses are the backends; this one's scales have no memory.

    layers: their names. Collective: all ranks call all methods alike. While it is off no magnitudes are recorded:
    outdated ones are worse than none.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = list(layers)
        self._on = True

    @property
    def on(self) -> bool:
        """Whether the layers compute in FP8 from now on, or in the model's own precision."""
        return self._on

    @on.setter
    def on(self, value: bool) -> None:
        if value != self._on:
            self.forget()
        self._on = value

    def computing(self) -> AbstractContextManager[Any]:
        """Context for forward and backward of a step, or for an evaluation."""
        return contextlib.nullcontext()

    def watch(self, record: Record | None) -> None:
        """Call `record` for every tensor that is quantized; None: stop."""

    def settle(self, applied: bool) -> None:
        """Call after a step, whose update was applied or not."""

    def forget(self) -> None:
        """Clear the state of delayed scales."""

    def state(self) -> Any:
        """A copy of the state of delayed scales, for `restore` after a rewind."""

    def restore(self, saved: Any) -> None: ...

    def history(self) -> dict[str, list[list[float]]]:
        """The state of delayed scales, for a checkpoint."""
        return {}

    def read(self, history: History) -> None:
        """Load a `history` of any backend and layout; layers of other ranks are ignored."""


class Metered(Fp8):
    """With delayed scales, or without (meters None). group: the ranks that share them; None: all."""

    def __init__(self, layers: Sequence[str], meters: Meters | None, group: Any) -> None:
        super().__init__(layers)
        self._meters, self._group = meters, group

    def settle(self, applied: bool) -> None:
        if self._meters is not None:
            self._meters.settle(applied and self._on, self._group)

    def forget(self) -> None:
        if self._meters is not None:
            self._meters.forget()

    def state(self) -> Tensor | None:
        return self._meters.state() if self._meters is not None else None

    def restore(self, saved: Tensor | None) -> None:
        if self._meters is None or saved is None:
            return
        if self._on:
            self._meters.restore(saved)
        else:
            self.forget()  # otherwise snapshots taken while it is off would keep the old history

    def history(self) -> dict[str, list[list[float]]]:
        return self._meters.told() if self._meters is not None else {}

    def read(self, history: History) -> None:
        if self._meters is not None:
            self._meters.read(history)


class Emulated(Metered):
    """Products that emulate FP8."""

    def __init__(self, layers: Sequence[str], meters: Meters | None, group: Any) -> None:
        super().__init__(layers, meters, group)
        self.products: list[Product] = []

    def watch(self, record: Record | None) -> None:
        for product in self.products:
            product.observe = partial(tell, record, product.name) if record is not None else None


def tell(record: Record, layer: str, slot: int, x: Tensor, became: Quantized) -> None:
    """Report the quantization of a matrix to `record`."""
    record(layer, SLOTS[slot], *losses(x, became), x.numel())


@torch.no_grad()
def losses(x: Tensor, became: Quantized) -> tuple[Tensor, Tensor]:
    """How many numbers of a matrix were cut to the format's largest, and how many became zero; fp64.

    A magnitude within half a step above the largest is rounded to it, not cut.
    """
    to = became.format
    half = 2.0 ** (math.floor(math.log2(to.max)) - to.mantissa - 1)
    cut = lost = torch.zeros((), dtype=torch.float64, device=x.device)
    step = max(AT_ONCE // x.shape[1] // BLOCK, 1) * BLOCK
    for begin in range(0, len(x), step):
        some, part = x[begin : begin + step], became.rows(begin, min(begin + step, len(x)))
        code = part.decoded(torch.float32)
        beyond = part.dequantized(torch.float32).abs_().mul_(1 + half / to.max) < some.abs()
        cut = cut + ((code.abs() == to.max) & beyond).sum(dtype=torch.float64)
        lost = lost + ((code == 0) & (some != 0)).sum(dtype=torch.float64)
    return cut, lost
