"""What becomes of the numbers that somebody else's modules quantize, worked out beside them, for a step looked at.

Their own FP8 tensors are not asked for. What goes in, the weights and the gradients that come back are quantized once
more, as the emulation does it, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megastable.fp8.emulated import GRADIENT, INPUT, WEIGHT, Quantizer
from megastable.fp8.scaling import Quantized


@dataclass(frozen=True)
class Watched:
    """A module x -> y of one linear layer after the other. layers, weights: of these.

    inputs: x -> what the first layer multiplies with. between: what the second one multiplies with, of what the first
    one puts out. The gradient is that of y, of the last layer.
    """

    module: nn.Module
    layers: Sequence[str]
    weights: Sequence[Tensor]
    inputs: Callable[[Tensor], Tensor]
    between: Callable[[Tensor], Tensor]


def watch(
    watched: Watched, quantizers: Sequence[Quantizer], show: Callable[[int, int, Tensor, Quantized], None]
) -> RemovableHandle:
    """`show(number of the layer, slot, matrix, what became of it)` in every training pass until the handle is removed.

    Of the first of two layers the gradient is not seen. quantizers: of the layers.
    """

    @torch.no_grad()
    def quantize(number: int, slot: int, x: Tensor) -> None:
        matrix = x.detach().reshape(-1, x.shape[-1])
        show(number, slot, matrix, quantizers[number](matrix, slot, False)[0])

    def after(_: nn.Module, given: tuple[Any, ...], y: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        with torch.no_grad():
            x = watched.inputs(given[0].detach())
            for number, weight in enumerate(watched.weights):
                if number:
                    x = watched.between(x @ watched.weights[number - 1].t())
                quantize(number, INPUT, x)
                quantize(number, WEIGHT, weight)
        if y.requires_grad:
            y.register_hook(lambda gradient: quantize(len(watched.layers) - 1, GRADIENT, gradient))

    # Before those of others: ZeRO 3 takes the weights away in one.
    return watched.module.register_forward_hook(after, prepend=True)
