"""Compute a function a part of its input at a time, in as little memory forward and backward as one part needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def in_parts(
    compute: Callable[..., Tensor], x: Tensor, whole: tuple[Tensor, ...], size: int, dims: tuple[int, int]
) -> Tensor:
    """What `compute` makes of x, computed for `size` rows of it at a time, and again in the backward pass.

    The gradients of `whole` are summed over the parts in fp32 and rounded once.

    Args:
        compute: (rows of x, index of the first one, *whole) -> result. It draws no random numbers.
        x: Split along its dimension `dims[0]`.
        whole: Tensors that every part needs.
        size: Rows of a part; the last one may have fewer. The same on all ranks that `compute` communicates with.
        dims: The dimension of the rows in x, and in the result.
    """
    result: Tensor = _InParts.apply(compute, size, dims, x, *whole)
    return result


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[..., Tensor],
        size: int,
        dims: tuple[int, int],
        x: Tensor,
        *whole: Tensor,
    ) -> Tensor:
        ctx.compute, ctx.size, ctx.dims = compute, size, dims
        ctx.save_for_backward(x, *whole)
        parts = enumerate(x.split(size, dims[0]))
        return torch.cat([compute(rows, index * size, *whole) for index, rows in parts], dims[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, *whole = ctx.saved_tensors
        gradients: list[Tensor] = []
        totals = [torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device) for tensor in whole]
        rows, rows_upstream = x.split(ctx.size, ctx.dims[0]), upstream.split(ctx.size, ctx.dims[1])
        for index, (part, given) in enumerate(zip(rows, rows_upstream, strict=True)):
            with torch.enable_grad():
                inputs = [tensor.detach().requires_grad_() for tensor in (part, *whole)]
                result = ctx.compute(inputs[0], index * ctx.size, *inputs[1:])
            of_part, *of_whole = torch.autograd.grad(result, inputs, given)
            gradients.append(of_part)
            for total, gradient in zip(totals, of_whole, strict=True):
                total += gradient
        rounded = [total.to(tensor.dtype) for total, tensor in zip(totals, whole, strict=True)]
        return None, None, None, torch.cat(gradients, ctx.dims[0]), *rounded
