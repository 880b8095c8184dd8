"""Emulate the three FP8 products of a linear layer: quantize the operands, then multiply them in bf16.

    y = q(x) q(w)^T        dx = q(g) q(w)        dw = q(g)^T q(x)

The products of FP8 numbers are summed in fp32, as tensor cores do: every FP8 number is a bf16 number, so the product is
one of bf16, and FP8 values are saved for the backward pass. Scales of whole tensors are applied after the sum, before
any rounding; those of blocks are powers of two, which bf16 represents exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megastable.base import products
from megastable.config.training import Fp8Config
from megastable.fp8.scale_factors import (
    E4M3,
    E5M2,
    SLOTS,
    FP8Format,
    Meters,
    Quantized,
    by_columns,
    by_rows,
    by_tensor,
    by_tiles,
    largest_magnitude,
    scale_of,
)
from megastable.parallel.deferred_gradients import defer_gradient, is_deferring
from megastable.parallel.mappings import begin_entering_sum, begin_gather, gather_sequence
from megastable.parallel.topology import TensorParallel

INPUT, WEIGHT, GRADIENT = range(len(SLOTS))


def choose_formats(config: Fp8Config) -> tuple[FP8Format, FP8Format, FP8Format]:
    """The formats of inputs, weights and gradients."""
    is_hybrid = config.formats == "hybrid" or (config.formats == "auto" and config.recipe != "block")
    return E4M3, E4M3, E5M2 if is_hybrid else E4M3


class Quantizer(Protocol):
    """Quantizes a layer's matrix of slot INPUT, WEIGHT or GRADIENT: for the product that sums over its columns, and
    for the one that sums over its rows; the same result if one serves both. note: it is a training step's. largest: the
    magnitude of the matrix that x is a slice of rows of, in whole blocks; None: x is the matrix."""

    def __call__(
        self, x: Tensor, slot: int, note: bool, largest: Tensor | None = None
    ) -> tuple[Quantized, Quantized]: ...


@dataclass(frozen=True)
class Current:
    """Scales by the tensor's own largest magnitude."""

    formats: tuple[FP8Format, FP8Format, FP8Format]

    def __call__(
        self, x: Tensor, slot: int, note: bool, largest: Tensor | None = None
    ) -> tuple[Quantized, Quantized]:
        to = self.formats[slot]
        quantized_x = by_tensor(x, scale_of(largest_magnitude(x) if largest is None else largest, to), to)
        return quantized_x, quantized_x


@dataclass(frozen=True)
class Delayed:
    """Scales by the largest magnitudes of the last steps."""

    formats: tuple[FP8Format, FP8Format, FP8Format]
    meters: Meters
    layer: int

    def __call__(
        self, x: Tensor, slot: int, note: bool, largest: Tensor | None = None
    ) -> tuple[Quantized, Quantized]:
        to, known_scale = self.formats[slot], self.meters.scales[self.layer, slot]
        largest = largest_magnitude(x) if largest is None else largest
        if note:
            self.meters.note_magnitude(self.layer, slot, largest)
        quantized_x = by_tensor(x, torch.where(known_scale > 0, known_scale, scale_of(largest, to)), to)
        return quantized_x, quantized_x


@dataclass(frozen=True)
class Blocks:
    """Scales by the largest magnitude of every block."""

    formats: tuple[FP8Format, FP8Format, FP8Format]

    def __call__(
        self, x: Tensor, slot: int, note: bool, largest: Tensor | None = None
    ) -> tuple[Quantized, Quantized]:
        to = self.formats[slot]
        if slot == WEIGHT:
            weight_tiles = by_tiles(x, to)
            return weight_tiles, weight_tiles
        return by_rows(x, to), by_columns(x, to)


def make_meters(config: Fp8Config, layers: Sequence[str], device: torch.device) -> Meters | None:
    """The history of delayed scales of these layers; None for other recipes."""
    if config.recipe != "delayed":
        return None
    return Meters(layers, choose_formats(config), config.history, config.margin, device)


def make_quantizers(config: Fp8Config, layers: Sequence[str], meters: Meters | None) -> list[Quantizer]:
    """The quantizers of these layers, which are among those of `meters` if scales are delayed."""
    slot_formats = choose_formats(config)
    if meters is not None:
        layer_numbers = {layer: layer_number for layer_number, layer in enumerate(meters.names)}
        return [Delayed(slot_formats, meters, layer_numbers[layer]) for layer in layers]
    return [Blocks(slot_formats) if config.recipe == "block" else Current(slot_formats)] * len(layers)


class Product:
    """x [..., in], w [out, in] -> [..., out], replacing `plain`. on: called every time: whether to compute in FP8.

    observe: called with the slot, the tensor and its quantization, while set. keeps_cast: whether the first pass that
    trains leaves its `cast` of the weight, for those after it: only while no weight changes. tp: x enters a
    tensor-parallel region, as by `overlapped.enter_and_multiply`, but never in chunks: a scale may be that of the
    whole.
    """

    def __init__(
        self,
        name: str,
        quantize: Quantizer,
        on: Callable[[], bool],
        plain: Callable[[Tensor, Tensor], Tensor] = products.linear,
        tp: TensorParallel | None = None,
    ) -> None:
        self.name, self.quantize, self._on, self.plain, self.tp = name, quantize, on, plain, tp
        self.observe: Callable[[int, Tensor, Quantized], None] | None = None
        self.keeps_cast = False
        self.cast: tuple[Quantized, Quantized] | None = None

    @property
    def gathers_again(self) -> bool:
        """Whether x is a shard, of which nothing else is kept."""
        return self.tp is not None and self.tp.gathers_again

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        if not self._on():
            return self.plain(x, w)
        # Asked here: inside the function gradients are off.
        y: Tensor = _Product.apply(x, w, self, torch.is_grad_enabled())
        return y

    def quantized(self, x: Tensor, slot: int, note: bool = True) -> tuple[Quantized, Quantized]:
        """A matrix quantized as in the layer; a training step's is passed to `observe`."""
        both_quantized = self.quantize(x, slot, note)
        if note and self.observe is not None:
            self.observe(slot, x, both_quantized[0])
        return both_quantized

    def cast_weight(self, w: Tensor, note: bool) -> tuple[Quantized, Quantized]:
        """The weight quantized, or what was kept of it. What is not noted is not kept: a later pass has to note it."""
        if self.cast is not None:
            return self.cast
        weight_cast = self.quantized(w, WEIGHT, note)
        if self.keeps_cast and note:
            self.cast = weight_cast
        return weight_cast


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, product: Product, note: bool) -> Tensor:
        own_shard = x
        if product.tp is not None and product.tp.sequence:
            x = gather_sequence(own_shard, product.tp)
        quantized_rows, quantized_columns = product.quantized(x.reshape(-1, x.shape[-1]), INPUT, note)
        quantized_weight, _ = product.cast_weight(w, note)
        ctx.product, ctx.dtype, ctx.shape, ctx.layout = product, x.dtype, x.shape, quantized_columns.layout
        # Under recomputation the saved one is detached: autograd leads its gradient to the parameter only as long as
        # this node lives, which what is deferred happens to keep.
        ctx.weight = w
        # Save the weight itself, and take what is kept of it or quantize it again: otherwise every micro-batch of a
        # pipeline would keep a copy, and ZeRO 3 a copy of what it releases.
        # A shard is quantized again, too: with the scale of the whole, which no step changes.
        saved_input = (
            (own_shard,) if product.gathers_again else (quantized_columns.values, quantized_columns.inverse)
        )
        ctx.save_for_backward(w, *saved_input)
        y = multiply_quantized(quantized_rows, quantized_weight, x.dtype, transpose_b=True)
        return y.view(*x.shape[:-1], w.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        w, *saved_input = ctx.saved_tensors
        product: Product = ctx.product
        gathering = summing = dx = dw = None
        if product.gathers_again and ctx.needs_input_grad[1] and not is_deferring():
            assert product.tp is not None
            gathering = begin_gather(saved_input[0], product.tp)
        rows, columns = product.quantized(gradient.reshape(-1, gradient.shape[-1]), GRADIENT)
        if ctx.needs_input_grad[0]:
            dx = multiply_quantized(rows, product.cast_weight(w, False)[1], ctx.dtype).view(ctx.shape)
            if product.tp is not None:
                summing = begin_entering_sum(dx, product.tp)

        def differentiate_weight(given_input: Tensor) -> Tensor:
            if not product.gathers_again:
                quantized_input = Quantized(*saved_input, *ctx.layout)
            else:
                input_rows = given_input.reshape(-1, given_input.shape[-1])
                quantized_input = product.quantize(input_rows, INPUT, False)[1]
            return multiply_quantized(columns, quantized_input, ctx.dtype, transpose_a=True)

        if ctx.needs_input_grad[1] and is_deferring():
            gathered_over = product.tp if product.gathers_again else None
            defer_gradient(ctx.weight, saved_input[0], differentiate_weight, gathered_over)
        elif ctx.needs_input_grad[1]:
            dw = differentiate_weight(saved_input[0] if gathering is None else gathering.wait())
        if summing is not None:
            dx = summing.wait()
        return dx, dw, None, None


def multiply_quantized(
    a: Quantized, b: Quantized, dtype: torch.dtype, *, transpose_a: bool = False, transpose_b: bool = False
) -> Tensor:
    """a b, or with either transposed, in `dtype`: bf16 or fp32; summed in fp32, rounded once."""
    whole = not a.inverse.dim() and not b.inverse.dim()
    left, right = (q.decoded(dtype) if whole else q.dequantized(dtype) for q in (a, b))
    left, right = left.t() if transpose_a else left, right.t() if transpose_b else right
    if not whole:
        return products.mm(left, right)
    if left.device.type == "cpu":
        factor = float(a.inverse) * float(b.inverse)
        if products.is_cast(left):
            return (left.float() @ right.float()).mul_(factor).to(dtype)
        return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=factor)
    if dtype is torch.float32:
        return (left @ right).mul_(a.inverse * b.inverse)
    return torch.mm(left, right, out_dtype=torch.float32).mul_(a.inverse * b.inverse).to(dtype)
