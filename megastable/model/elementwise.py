"""A block's elementwise work by own Triton kernels, as operations that torch.compile leaves whole.

By part, what they compute, and the plain code that stays the reference:

- "heads": QK-norm and RoPE (`Attention.split_heads` and `attention.rotate_pairs`)
- "norms": the norm before attention; the residual's sum and the norm before the MLP (`RMSNorm`)
- "swiglu": `block_parts.swiglu`

They compute in fp32 and round once, where the reference rounds after every operation, and keep nothing for the backward
pass but what they were given. Shapes: s sequence, b micro-batch, q and k heads, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

PARTS = ("heads", "norms", "swiglu")


@dataclass
class Elementwise:
    """Which `parts` own kernels compute in one block. aside: none of them, as hooks watch modules, or plain PyTorch
    takes their place."""

    parts: Sequence[str] = ()
    aside: bool = False

    def has(self, part: str) -> bool:
        return part in self.parts and not self.aside


class Heads(NamedTuple):
    """Of q and of k, each; eps and whether the factor is 1 + weight, of their norms."""

    q: int
    k: int
    eps: float = 0.0
    centered: bool = False


@torch.library.custom_op("megastable::rotate_heads", mutates_args=())
def _rotate_heads(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, q_heads: int, k_heads: int,
    eps: float, centered: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from megastable.model import triton_kernels

    q, k = _empty_heads(qkv, q_heads, k_heads)
    triton_kernels.rotate(qkv, q_weight, k_weight, cos, sin, q, k, eps, centered)
    return q, k


@_rotate_heads.register_fake
def _(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, q_heads: int, k_heads: int,
    eps: float, centered: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _empty_heads(qkv, q_heads, k_heads)


def _empty_heads(qkv: Tensor, q_heads: int, k_heads: int) -> tuple[Tensor, Tensor]:
    s, b, qkv_width = qkv.shape
    width = qkv_width // (q_heads + 2 * k_heads)
    return qkv.new_empty(s, b, q_heads, width), qkv.new_empty(s, b, k_heads, width)


@torch.library.custom_op("megastable::unrotate_heads", mutates_args=())
def _unrotate_heads(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor,
    sin: Tensor, eps: float, centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from megastable.model import triton_kernels

    gradient = torch.empty_like(qkv)
    weight_parts = triton_kernels.unrotate(
        (dq, dk, dv), qkv, q_weight, k_weight, cos, sin, gradient, eps, centered
    )
    q_parts, k_parts = weight_parts.split(triton_kernels.count_groups(dq, dk), 1)
    return gradient, q_parts.sum((0, 1)), k_parts.sum((0, 1))


@_unrotate_heads.register_fake
def _(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor,
    sin: Tensor, eps: float, centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q_gradient, k_gradient = (qkv.new_empty(dq.shape[-1], dtype=torch.float32) for _ in range(2))
    return torch.empty_like(qkv), q_gradient, k_gradient


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, heads: Heads
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.heads = heads
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        q, k = _rotate_heads(qkv, q_weight, k_weight, cos, sin, *heads)
        # A view: the backward kernel writes the gradient of all three, which nobody then has to join.
        return q, k, qkv[..., -k.shape[2] * k.shape[3] :].view_as(k)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        heads = ctx.heads
        gradient, *weight_gradients = _unrotate_heads(
            *upstream, qkv, q_weight, k_weight, cos, sin, heads.eps, heads.centered
        )
        if q_weight is None:
            return gradient, None, None, None, None, None
        q_gradient, k_gradient = (
            weight_gradient.to(weight.dtype)
            for weight_gradient, weight in zip(weight_gradients, (q_weight, k_weight), strict=True)
        )
        return gradient, q_gradient, k_gradient, None, None, None


def rotate_heads(
    qkv: Tensor, weights: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """q [s, b, q, d], k and v [s, b, k, d] of qkv [s, b, (q + 2 k) d]: q and k normed, then rotated. weights: of their
    norms, [d] each; None: not normed. cos, sin: fp32, [s, b or 1, 1, d / 2]. v is a view."""
    q_weight, k_weight = weights or (None, None)
    q, k, v = _Heads.apply(qkv, q_weight, k_weight, cos, sin, heads)
    return q, k, v


@torch.library.custom_op("megastable::norm", mutates_args=())
def _norm(x: Tensor, weight: Tensor, eps: float, centered: bool) -> Tensor:
    from megastable.model import triton_kernels

    normed_x = torch.empty_like(x)
    triton_kernels.norm(x, None, weight, x, normed_x, eps, centered)
    return normed_x


@_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, centered: bool) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("megastable::add_norm", mutates_args=())
def _add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    from megastable.model import triton_kernels

    total, normed_total = torch.empty_like(x), torch.empty_like(x)
    triton_kernels.norm(x, y, weight, total, normed_total, eps, centered)
    return total, normed_total


@_add_norm.register_fake
def _(x: Tensor, y: Tensor, weight: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("megastable::unnorm", mutates_args=())
def _unnorm(
    upstream: Tensor, beside: Tensor, x: Tensor, weight: Tensor, eps: float, centered: bool
) -> tuple[Tensor, Tensor]:
    from megastable.model import triton_kernels

    gradient = torch.empty_like(x)
    given = upstream.contiguous(), beside.contiguous()
    return gradient, triton_kernels.unnorm(*given, x, weight, gradient, eps, centered).sum(0)


@_unnorm.register_fake
def _(
    upstream: Tensor, beside: Tensor, x: Tensor, weight: Tensor, eps: float, centered: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[-1], dtype=torch.float32)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
        ctx.options = eps, centered
        ctx.save_for_backward(x, weight)
        # x as well: its gradients from both sides are then summed by the kernel.
        return x.view_as(x), _norm(x, weight, eps, centered)

    @staticmethod
    def backward(ctx: Any, beside: Tensor, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient, weight_gradient = _unnorm(upstream, beside, x, weight, *ctx.options)
        return gradient, weight_gradient.to(weight.dtype), None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight: Tensor, eps: float, centered: bool
    ) -> tuple[Tensor, Tensor]:
        total, normed_total = _add_norm(x, y, weight, eps, centered)
        ctx.options = eps, centered
        ctx.save_for_backward(total, weight)
        return total, normed_total

    @staticmethod
    def backward(ctx: Any, beside: Tensor, upstream: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        gradient, weight_gradient = _unnorm(upstream, beside, total, weight, *ctx.options)
        return gradient, gradient, weight_gradient.to(weight.dtype), None, None


def norm_stream(x: Tensor, weight: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """x [..., h] as it is, for those that add to it, and its RMSNorm. centered: the factor is 1 + weight [h]."""
    same_x, normed_x = _Norm.apply(x.contiguous(), weight, eps, centered)
    return same_x, normed_x


def add_and_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """x + y [..., h], and its RMSNorm; as `norm_stream`."""
    total, normed_total = _AddNorm.apply(x.contiguous(), y.contiguous(), weight, eps, centered)
    return total, normed_total


@torch.library.custom_op("megastable::swiglu", mutates_args=())
def _swiglu(gate_up: Tensor) -> Tensor:
    from megastable.model import triton_kernels

    result = _empty_half(gate_up)
    triton_kernels.swiglu(gate_up, result)
    return result


@_swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return _empty_half(gate_up)


def _empty_half(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@torch.library.custom_op("megastable::unswiglu", mutates_args=())
def _unswiglu(upstream: Tensor, gate_up: Tensor) -> Tensor:
    from megastable.model import triton_kernels

    gradient = torch.empty_like(gate_up)
    triton_kernels.unswiglu(upstream.contiguous(), gate_up, gradient)
    return gradient


@_unswiglu.register_fake
def _(upstream: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up)


def _save_gate_up(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_swiglu.register_autograd(
    lambda ctx, upstream: _unswiglu(upstream, *ctx.saved_tensors), setup_context=_save_gate_up
)


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 f] -> [..., f]."""
    result: Tensor = _swiglu(gate_up.contiguous())
    return result
