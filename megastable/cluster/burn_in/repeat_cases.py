"""Computations on fractions, whose bits are not known beforehand: the same inputs must give the same bits every time.

What kernels make of one element is compared with fp64 on the CPU, too: a fault that repeats itself shows there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megastable.cluster.burn_in import draws, exact_cases
from megastable.cluster.burn_in.exact_cases import DTYPES, Run, name

ELEMENTS = {"cuda": (1 << 20, 1 << 23), "cpu": (1 << 10, 1 << 14)}
RELATIVE, ABSOLUTE = 2.0**-17, 2.0**-20  # of fp32 kernels, which are right to some units of 2^-23
# Each of positive and negative numbers, or of positive ones.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "exp": (torch.exp, -20.0, 10.0), "log": (torch.log, 0.01, 1e4), "tanh": (torch.tanh, -5.0, 5.0),
    "erf": (torch.erf, -4.0, 4.0), "rsqrt": (torch.rsqrt, 0.01, 1e4), "sin": (torch.sin, -6.0, 6.0),
    "silu": (F.silu, -10.0, 10.0), "gelu": (F.gelu, -6.0, 6.0), "reciprocal": (torch.reciprocal, 0.01, 1e4),
}  # fmt: skip


@dataclass(frozen=True)
class RepeatCase:
    """setup: as of `KnownCase`. nearly: for each result what it should be about, in fp64, and how far it may be off."""

    what: str
    setup: Callable[[torch.device], Run]
    nearly: Callable[[], tuple[tuple[Tensor, Tensor], ...]] | None = None


def elementwise_case(kind: str, seed: int, round_: int, number: int) -> RepeatCase:
    """One function of many elements; all functions in turn."""
    key = draws.key("elementwise", seed, round_, number)
    what = list(FUNCTIONS)[(round_ + number) % len(FUNCTIONS)]
    function, low, high = FUNCTIONS[what]
    dtype = draws.pick((torch.float32, *DTYPES), key, "dtype")
    count = draws.between(*ELEMENTS[kind], key, "count")
    inputs = draws.floats(draws.key(key, "inputs"), (count,), low, high).to(dtype)

    def setup(device: torch.device) -> Run:
        x = inputs.to(device)
        return lambda: (elementwise(function, x),)

    def nearly() -> tuple[tuple[Tensor, Tensor], ...]:
        right = function(inputs.double())
        return ((right, right.abs() * RELATIVE + ABSOLUTE),)

    return RepeatCase(f"{what} of {name(dtype)} [{count}]", setup, nearly if dtype == torch.float32 else None)


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


def repeat_case(kind: str, seed: int, round_: int, number: int) -> RepeatCase:
    """A block of a transformer without its weights: product, norm, attention, softmax, sum."""
    shape = exact_cases.attention_shape(kind, seed, round_, number)
    key = draws.key("repeat", seed, round_, number)
    size = (shape.batch, shape.heads, shape.length, shape.head)
    drawn = draws.floats(draws.key(key, "inputs"), (draws.PRIME,), -2.0, 2.0).to(shape.dtype)
    inputs = draws.tiled(drawn, (3, *size))
    weight = draws.floats(draws.key(key, "weight"), (shape.head, shape.head), -1.0, 1.0).to(shape.dtype)

    def setup(device: torch.device) -> Run:
        x, w = inputs.to(device), weight.to(device)
        return lambda: block(x, w, shape.causal)

    return RepeatCase(f"block of {shape.what}", setup)


def block(x: Tensor, weight: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """x: queries, keys and values [3, batch, heads, length, head]; weight [head, head]. Of its parts each result."""
    product = exact_cases.product(x.flatten(0, 3), weight, tf32=False)
    q, k, v = F.layer_norm(product, product.shape[-1:]).view_as(x)
    output = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return product, output, F.softmax(output, -1), output.float().sum(-1)
