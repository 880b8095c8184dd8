"""Statistics of quantization inside third-party FP8 modules, recomputed for a watched step.

The modules' own FP8 tensors are not accessible. Inputs, weights and output gradients are quantized once more by the
emulation, and counted a few rows at a time, so that such a step takes no more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megastable.base import products
from megastable.fp8.emulated import GRADIENT, INPUT, WEIGHT, Quantizer
from megastable.fp8.scale_factors import AT_ONCE, BLOCK, Quantized, magnitude


@dataclass(frozen=True)
class Watched:
    """A module x -> y of one or more linear layers in sequence. layers, weights: of these.

    inputs: x -> the first layer's operand. between: the first layer's output -> the second one's operand. The gradient
    is that of y, of the last layer.
    """

    module: nn.Module
    layers: Sequence[str]
    weights: Sequence[Tensor]
    inputs: Callable[[Tensor], Tensor]
    between: Callable[[Tensor], Tensor]


def _itself(x: Tensor) -> Tensor:
    return x


def watch(
    watched: Watched, quantizers: Sequence[Quantizer], show: Callable[[int, int, Tensor, Quantized], None]
) -> RemovableHandle:
    """Call `show(number of the layer, slot, rows of a matrix, their quantization)` in every training pass until the
    handle is removed.

    The gradient of the first of two layers is not visible. quantizers: of the layers.
    """

    def quantize(number: int, slot: int, matrix: Tensor, of: Callable[[Tensor], Tensor] = _itself) -> None:
        widest = max(matrix.shape[-1], *(n for weight in watched.weights for n in weight.shape))
        rows = max(AT_ONCE // widest // BLOCK, 1) * BLOCK
        parts = matrix.detach().reshape(-1, matrix.shape[-1]).split(rows)
        with torch.no_grad():
            largest = reduce(torch.maximum, (magnitude(of(part)) for part in parts))
            for part in parts:
                x = of(part)
                show(number, slot, x, quantizers[number](x, slot, False, largest)[0])

    def into(number: int) -> Callable[[Tensor], Tensor]:
        """From the module's input to the operand of layer `number`."""
        if not number:
            return watched.inputs
        before, weight = into(number - 1), watched.weights[number - 1]
        return lambda x: watched.between(products.linear(before(x), weight))

    def after(_: nn.Module, given: tuple[Any, ...], y: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        for number, weight in enumerate(watched.weights):
            quantize(number, INPUT, given[0], into(number))
            quantize(number, WEIGHT, weight)
        if y.requires_grad:
            y.register_hook(lambda gradient: quantize(len(watched.layers) - 1, GRADIENT, gradient))

    # Registered before other hooks: one of ZeRO 3's releases the weights.
    return watched.module.register_forward_hook(after, prepend=True)
