"""FP8 controller: switches FP8 on and off, wraps a step, and holds the state of delayed scaling."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megastable.fp8.emulated import Product
from megastable.fp8.scale_factors import AT_ONCE, BLOCK, SLOTS, Meters, Quantized

# By layer and slot: the largest magnitudes, the newest first.
History = Mapping[str, Sequence[Sequence[float]]]
# layer, slot, total numbers, numbers that were saturated, numbers that became zero
Record = Callable[[str, str, Tensor, Tensor, int], None]


class Fp8:
    """FP8 of the layers that a rank holds; subclasses are the backends.

    layers: their names. meters: of delayed scales, None for others, which have no memory. group: the ranks that share
    them; None: all. Collective: all ranks call all methods alike. While it is off no magnitudes are recorded: outdated
    ones are worse than none.
    """

    def __init__(self, layers: Sequence[str], meters: Meters | None, group: Any) -> None:
        self.layers = list(layers)
        self._meters, self._group = meters, group
        self._on = True

    @property
    def on(self) -> bool:
        """Whether the layers compute in FP8 from now on, or in the model's own precision."""
        return self._on

    @on.setter
    def on(self, value: bool) -> None:
        if value != self._on:
            self.forget_history()
        self._on = value

    @property
    def reads_weights(self) -> bool:
        """Whether `computing` reads weights before the forward pass does."""
        return False

    def computing(self) -> AbstractContextManager[Any]:
        """Context for forward and backward of a step, or for an evaluation.

        No weight changes within. So the first pass of a step casts each, and the other micro-batches use that cast,
        which no later step does: an update, a rewind or a loaded checkpoint need not tell anybody.
        """
        return contextlib.nullcontext()

    def watch_quantization(self, record: Record | None) -> None:
        """Call `record` for every tensor that is quantized; None: stop."""
        raise NotImplementedError

    def settle_step(self, applied: bool) -> None:
        """Call after a step, whose update was applied or not."""
        if self._meters is not None:
            self._meters.settle_step(applied and self._on, self._group)

    def forget_history(self) -> None:
        """Clear the state of delayed scales."""
        if self._meters is not None:
            self._meters.forget_history()

    def copy_state(self) -> Tensor | None:
        """A copy of the state of delayed scales, for `restore_state` after a rewind."""
        return self._meters.copy_state() if self._meters is not None else None

    def restore_state(self, saved: Tensor | None) -> None:
        if self._meters is None or saved is None:
            return
        if self._on:
            self._meters.restore_state(saved)
        else:
            self.forget_history()  # otherwise snapshots taken while it is off would keep the old history

    def write_history(self) -> dict[str, list[list[float]]]:
        """The state of delayed scales, for a checkpoint."""
        return self._meters.write_history() if self._meters is not None else {}

    def read_history(self, history: History) -> None:
        """Load a `write_history` of any backend and layout; layers of other ranks are ignored."""
        if self._meters is not None:
            self._meters.read_history(history)


class Emulated(Fp8):
    """Products that emulate FP8. keeps_casts: of weights, within a step: a byte for each."""

    def __init__(
        self, layers: Sequence[str], meters: Meters | None, group: Any, keeps_casts: bool = True
    ) -> None:
        super().__init__(layers, meters, group)
        self.products: list[Product] = []
        self._keeps_casts = keeps_casts

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        for product in self.products:
            product.keeps_cast = self._keeps_casts
        try:
            yield
        finally:
            for product in self.products:
                product.keeps_cast, product.cast = False, None

    def watch_quantization(self, record: Record | None) -> None:
        for product in self.products:
            product.observe = None if record is None else partial(report_quantization, record, product.name)


def report_quantization(record: Record, layer: str, slot: int, x: Tensor, became: Quantized) -> None:
    """Report the quantization of a matrix to `record`."""
    record(layer, SLOTS[slot], *count_losses(x, became), x.numel())


@torch.no_grad()
def count_losses(x: Tensor, became: Quantized) -> tuple[Tensor, Tensor]:
    """How many numbers of a matrix were cut to the format's largest, and how many became zero; fp64.

    A magnitude within half a step above the largest is rounded to it, not cut.
    """
    to = became.format
    half_step = 2.0 ** (math.floor(math.log2(to.max)) - to.mantissa - 1)
    cut_count = lost_count = torch.zeros((), dtype=torch.float64, device=x.device)
    part_rows = max(AT_ONCE // x.shape[1] // BLOCK, 1) * BLOCK
    for first in range(0, len(x), part_rows):
        matrix_part = x[first : first + part_rows]
        quantized_part = became.slice_rows(first, first + len(matrix_part))
        decoded_codes = quantized_part.decoded(torch.float32)
        is_beyond = matrix_part.abs() > (  # without a name, which would keep the part in memory
            quantized_part.dequantized(torch.float32).abs_().mul_(1 + half_step / to.max)
        )
        cut_count = cut_count + ((decoded_codes.abs() == to.max) & is_beyond).sum(dtype=torch.float64)
        lost_count = lost_count + ((decoded_codes == 0) & (matrix_part != 0)).sum(dtype=torch.float64)
    return cut_count, lost_count
