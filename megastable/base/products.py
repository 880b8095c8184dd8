"""Matrix products in the dtype of their inputs, also on CPUs without bf16 instructions.

There oneDNN emulates bf16, ten times slower than fp32 (measured with torch 2.13 on a CPU with AVX2 only). So the
matrices are cast, multiplied in fp32, and the result is rounded once. The precision is the same, because bf16 products
accumulate in fp32 anyway. Only bf16 is saved for the backward pass. On all other devices these are torch's functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Whether oneDNN has native bf16 products on this host's CPU.
NATIVE = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_cast(x: Tensor) -> bool:
    """Whether products of x are computed in fp32."""
    return not NATIVE and x.dtype is torch.bfloat16 and x.device.type == "cpu"


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """`torch.mm`: a [n, k], b [k, m] -> [n, m] in their dtype."""
    if not is_cast(a):
        return torch.mm(a, b, out=out)
    float_product = torch.mm(a.float(), b.float())
    return float_product.to(a.dtype) if out is None else out.copy_(float_product)


def multiply_rows(x: Tensor, w: Tensor) -> Tensor:
    """The forward pass of `linear`, inside of an autograd function."""
    return F.linear(x.float(), w.float()).to(x.dtype) if is_cast(x) else F.linear(x, w)


def multiply_parts(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """`multiply_rows` of parts that lie apart in memory: x [t, n, in], w [out, in] -> [t, n, out], in `out` if given.

    The same bits where a row's sum does not depend on how many rows there are: on a CPU from 8 rows a part on
    (torch 2.13; with 4 in fp32 alone).
    """
    if x.device.type != "cpu":
        return multiply_batch(x, w, out)
    # A batched product in bf16 takes six times as long there (torch 2.13).
    y = multiply_rows(x, w)
    return y if out is None else out.copy_(y)


def multiply_batch(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """`multiply_parts` as one batched product, which copies neither parts nor results."""
    return torch.bmm(x, w.t().expand(len(x), -1, -1), out=out)


def flatten_rows(gradient: Tensor) -> Tensor:
    """[rows, out] of a gradient [..., out], in the dtype that both of the following functions compute in."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    return rows.float() if is_cast(rows) else rows


def differentiate_input(rows: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient [rows, in] of the input of `linear`, in its dtype. rows: of `flatten_rows`."""
    return rows.mm(w.to(rows.dtype)).to(dtype)


def differentiate_weight(rows: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """The gradient of the weight of `linear`. rows: of `flatten_rows`."""
    return rows.t().mm(x.reshape(-1, x.shape[-1]).to(rows.dtype)).to(w.dtype)


def differentiate_product(
    gradient: Tensor, x: Tensor, w: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The backward pass of `linear`, bit for bit: the gradients of x and w, where `needed`, from that of the result.
    That of x alone does not look at x."""
    rows = flatten_rows(gradient)  # once for both
    x_shape = *gradient.shape[:-1], w.shape[1]  # also of an expert without a token
    return (
        differentiate_input(rows, w, gradient.dtype).view(x_shape) if needed[0] else None,
        differentiate_weight(rows, x, w) if needed[1] else None,
    )


class _SavesParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return multiply_rows(x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        return differentiate_product(gradient, x, w, ctx.needs_input_grad)


def linear_of_parameter(x: Tensor, w: Tensor) -> Tensor:
    """`linear`, bit for bit, for weights that ZeRO 3 gathers: saves w for the backward pass as the Parameter itself.
    F.linear saves a view, which keeps the gathered weight in memory until the backward pass."""
    y: Tensor = _SavesParameter.apply(x, w)
    return y


def linear(x: Tensor, w: Tensor) -> Tensor:
    """`F.linear`: x [..., in], w [out, in] -> [..., out] in their dtype."""
    return linear_of_parameter(x, w) if is_cast(x) else F.linear(x, w)
