"""Products of the parallel layers, with their messages beside them.

A column-parallel layer gathers the sequence, multiplies, and in the backward pass gathers again (`gathers_again`) and
sums the gradient of its input; a row-parallel layer multiplies, sums and scatters, and gathers in the backward pass.

- Backward, always: the second gather goes on beside the product of the input's gradient, and the sum of that gradient
  beside the product of the weight's: as in Korthikanti et al., arXiv:2205.05198, section 4.2.2.
- With `tp.chunks`, the other messages are sent in so many slices of every rank's part of the sequence: one is under way
  while the product of another one is computed (the idea: Wang et al., Overlap Communication with Dependent Computation,
  ASPLOS 2023).

Slices of the same collectives, not a ring of point-to-point messages: the bytes and the order of the sums stay those of
the library, and the number of products does not grow with the group.

Under torch.compile each of these is one operation, which it neither looks into nor moves. Otherwise it would also
gather once and keep the result: to it both gathers are the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from megastable.base.products import (
    differentiate_input,
    differentiate_weight,
    flatten_rows,
    multiply_parts,
    multiply_rows,
)
from megastable.parallel.deferred_gradients import defer_gradient, is_deferring
from megastable.parallel.mappings import (
    begin_entering_sum,
    begin_gather,
    begin_scatter,
    gather_sequence,
    gather_slices,
)
from megastable.parallel.topology import TensorParallel


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        if not torch.compiler.is_compiling():
            # Not the saved one: under recomputation that is detached, and knows the parameter as long as its graph.
            ctx.weight = w
        if torch.compiler.is_compiling() and tp.chunks > 1:
            y, whole_input = _entered_op(x, w, *_describe(tp))
            kept = x if tp.gathers_again else whole_input
        else:
            y, kept = multiply_entered(x, w, tp)
        ctx.save_for_backward(kept, w)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        kept, w = ctx.saved_tensors
        if torch.compiler.is_compiling():
            return *_entered_gradients_op(gradient, kept, w, *_describe(ctx.tp)), None
        (needs_input, needs_weight, _), tp = ctx.needs_input_grad, ctx.tp
        if not (needs_weight and is_deferring()):
            return *differentiate_entered(gradient, kept, w, tp, (needs_input, needs_weight)), None
        gathered_over = tp if tp.gathers_again else None
        defer_gradient(
            ctx.weight, kept, lambda x: differentiate_weight(flatten_rows(gradient), x, w), gathered_over
        )
        return *differentiate_entered(gradient, kept, w, tp, (needs_input, False)), None


class _Kept(torch.autograd.Function):
    """Saves x and w before `_Leaving` computes anything: a recomputation, which ends at the last tensor that it needs,
    then ends before a block's last product. What it gives has the shape of the result, and no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        if not torch.compiler.is_compiling():
            ctx.weight = w
        ctx.save_for_backward(x, w)
        return x.new_empty(1).expand(x.shape[0] // tp.size, *x.shape[1:-1], w.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        if torch.compiler.is_compiling():
            return *_left_gradients_op(gradient, x, w, *_describe(ctx.tp)), None
        needs_input, needs_weight, _ = ctx.needs_input_grad
        dx, whole_gradient = differentiate_left_input(gradient, w, ctx.tp, needs_input)

        def differentiate(x: Tensor) -> Tensor:
            return differentiate_weight(flatten_rows(whole_gradient), x, w)

        if not (needs_weight and is_deferring()):
            return dx, differentiate(x) if needs_weight else None, None
        defer_gradient(ctx.weight, x, differentiate)
        return dx, None, None


class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: Tensor, x: Tensor, w: Tensor, tp: TensorParallel) -> Tensor:
        return _left_op(x, w, *_describe(tp)) if torch.compiler.is_compiling() else multiply_left(x, w, tp)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient, None, None, None


def enter_and_multiply(x: Tensor, w: Tensor, tp: TensorParallel) -> Tensor:
    """`linear` of `enter_tensor_region`, bit for bit: x [s, b, in] (with sequence parallelism [s / tensor, b, in]),
    w [out, in] -> [s, b, out]. Saves w for the backward pass as `products.linear_of_parameter` does; with
    `gathers_again`, nothing of what it has gathered."""
    y: Tensor = _Entering.apply(x, w, tp)
    return y


def multiply_and_leave(x: Tensor, w: Tensor, tp: TensorParallel) -> Tensor:
    """`leave_tensor_region` of `linear` in `tp.chunks`, bit for bit: x [s, b, in], w [out, in] -> this rank's
    [s / tensor, b, out]. Saves w as `enter_and_multiply` does."""
    y: Tensor = _Leaving.apply(_Kept.apply(x, w, tp), x.detach(), w.detach(), tp)
    return y


def multiply_entered(x: Tensor, w: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """The forward pass of `enter_and_multiply`, and what the backward pass needs: x if it gathers again, else the
    gathered one."""
    if not tp.sequence:
        return multiply_rows(x, w), x
    if tp.chunks == 1:
        whole_input = gather_sequence(x, tp)
        return multiply_rows(whole_input, w), x if tp.gathers_again else whole_input
    sliced = tp.size, tp.chunks, x.shape[0] // tp.chunks
    y = x.new_empty((*sliced, *x.shape[1:-1], w.shape[0]))
    whole_input = x.new_empty((*sliced, *x.shape[1:]) if not tp.gathers_again else 0)
    for number, slice_input in enumerate(gather_slices(x, tp)):
        multiply_parts(slice_input.flatten(1, -2), w, out=y[:, number].flatten(1, -2))
        if not tp.gathers_again:
            whole_input[:, number] = slice_input
    return y.flatten(0, 2), x if tp.gathers_again else whole_input.flatten(0, 2)


def differentiate_entered(
    gradient: Tensor, kept: Tensor, w: Tensor, tp: TensorParallel, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The backward pass of `enter_and_multiply`: the gradients of x and w, where `needed`. That of x alone has no other
    product beside its sum: with `tp.chunks` its own is cut, as in a row-parallel layer."""
    if tp.chunks > 1 and not needed[1]:
        return multiply_left(gradient, w.t(), tp) if needed[0] else None, None
    gathering = begin_gather(kept, tp) if tp.gathers_again and needed[1] else None
    gradient_rows, summing, dw = flatten_rows(gradient), None, None
    if needed[0]:
        dx = differentiate_input(gradient_rows, w, kept.dtype).view(*gradient.shape[:-1], -1)
        summing = begin_entering_sum(dx, tp)
        del dx  # of the whole sequence
    if needed[1]:
        dw = differentiate_weight(gradient_rows, kept if gathering is None else gathering.wait(), w)
    return None if summing is None else summing.wait(), dw


def multiply_left(x: Tensor, w: Tensor, tp: TensorParallel) -> Tensor:
    """The forward pass of `multiply_and_leave`."""
    x_slices = x.unflatten(0, (tp.size, tp.chunks, -1))
    own_part = x.new_empty((x.shape[0] // tp.size, *x.shape[1:-1], w.shape[0]))
    own_slices, begun = own_part.split(own_part.shape[0] // tp.chunks), None
    for number, own_slice in enumerate(own_slices):
        product = multiply_parts(x_slices[:, number].flatten(1, -2), w)
        following = begin_scatter(product.flatten(0, 1), tp, own_slice.flatten(0, -2))
        del product
        if begun is not None:
            begun.wait()
        begun = following
    assert begun is not None
    begun.wait()
    return own_part


def differentiate_left_input(
    gradient: Tensor, w: Tensor, tp: TensorParallel, needs_input: bool
) -> tuple[Tensor | None, Tensor]:
    """The backward pass of `multiply_and_leave` but for the weight's gradient: that of x, where needed, and the whole
    gradient of the result."""
    sliced = tp.size, tp.chunks, gradient.shape[0] // tp.chunks
    dx = gradient.new_empty((*sliced, *gradient.shape[1:-1], w.shape[1])) if needs_input else None
    whole_gradient = gradient.new_empty((*sliced, *gradient.shape[1:]))
    for number, slice_gradient in enumerate(gather_slices(gradient, tp)):
        if dx is not None:
            multiply_parts(slice_gradient.flatten(1, -2), w.t(), out=dx[:, number].flatten(1, -2))
        whole_gradient[:, number] = slice_gradient
    return None if dx is None else dx.flatten(0, 2), whole_gradient.flatten(0, 2)


# One operation each for torch.compile.


def _describe(tp: TensorParallel) -> tuple[list[int], str]:
    """`tp` in types that an operation can be given; `_restore` reverses it."""
    return [tp.rank, tp.size, tp.sequence, tp.gathers_again, tp.chunks], tp.group.group_name


def _restore(numbers: Sequence[int], group: str) -> TensorParallel:
    rank, size, sequence, gathers_again, chunks = numbers
    tensor_group = _resolve_process_group(group)  # type: ignore[arg-type]
    return TensorParallel(tensor_group, rank, size, bool(sequence), bool(gathers_again), chunks)


@torch.library.custom_op("megastable::multiply_entered", mutates_args=())
def _entered_op(x: Tensor, w: Tensor, tp: Sequence[int], group: str) -> tuple[Tensor, Tensor]:
    y, kept = multiply_entered(x, w, _restore(tp, group))
    return y, x.new_empty(0) if kept is x else kept


@_entered_op.register_fake
def _(x: Tensor, w: Tensor, tp: Sequence[int], group: str) -> tuple[Tensor, Tensor]:
    _, size, _, gathers_again, _ = tp
    whole_shape = x.shape[0] * size, *x.shape[1:]
    return x.new_empty((*whole_shape[:-1], w.shape[0])), x.new_empty(0 if gathers_again else whole_shape)


@torch.library.custom_op("megastable::differentiate_entered", mutates_args=())
def _entered_gradients_op(
    gradient: Tensor, kept: Tensor, w: Tensor, tp: Sequence[int], group: str
) -> tuple[Tensor, Tensor]:
    dx, dw = differentiate_entered(gradient, kept, w, _restore(tp, group), (True, True))
    assert dx is not None and dw is not None
    return dx, dw


@_entered_gradients_op.register_fake
def _(gradient: Tensor, kept: Tensor, w: Tensor, tp: Sequence[int], group: str) -> tuple[Tensor, Tensor]:
    _, size, sequence, *_ = tp
    own_length = gradient.shape[0] // (size if sequence else 1)
    return kept.new_empty((own_length, *gradient.shape[1:-1], w.shape[1])), w.new_empty(w.shape)


@torch.library.custom_op("megastable::multiply_left", mutates_args=())
def _left_op(x: Tensor, w: Tensor, tp: Sequence[int], group: str) -> Tensor:
    return multiply_left(x, w, _restore(tp, group))


@_left_op.register_fake
def _(x: Tensor, w: Tensor, tp: Sequence[int], group: str) -> Tensor:
    return x.new_empty((x.shape[0] // tp[1], *x.shape[1:-1], w.shape[0]))


@torch.library.custom_op("megastable::differentiate_left", mutates_args=())
def _left_gradients_op(
    gradient: Tensor, x: Tensor, w: Tensor, tp: Sequence[int], group: str
) -> tuple[Tensor, Tensor]:
    dx, whole_gradient = differentiate_left_input(gradient, w, _restore(tp, group), True)
    assert dx is not None
    return dx, differentiate_weight(flatten_rows(whole_gradient), x, w)


@_left_gradients_op.register_fake
def _(gradient: Tensor, x: Tensor, w: Tensor, tp: Sequence[int], group: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), w.new_empty(w.shape)
