"""Weight gradients that a backward pass leaves for later, to be computed while a pipeline stage would wait.

    gradients = DeferredGradients()
    with gradients.collect():
        loss.backward()              # gradients of inputs, and of weights that are not in a deferring product
    gradients.compute_oldest()       # those of the weights that are

Source: Qi et al., Zero bubble pipeline parallelism, arXiv:2401.10241, section 2: B and W. A weight's gradient is the
result of the same product as otherwise, and is given to autograd like any other: hooks of a parameter run then.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megastable.base.products import differentiate_product, differentiate_weight, flatten_rows, multiply_rows
from megastable.parallel.mappings import begin_gather
from megastable.parallel.topology import TensorParallel


class _Later(NamedTuple):
    """A weight, and what computes its gradient from the input of its product; `tp`: over whose group that is gathered
    before."""

    weight: Tensor
    given_input: Any
    compute: Callable[[Any], Tensor]
    tp: TensorParallel | None


class DeferredGradients:
    """Weight gradients of several backward passes, the oldest first. They keep the inputs of the products, and the
    gradients of their outputs, in memory."""

    def __init__(self) -> None:
        self._passes: deque[deque[_Later]] = deque()

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """In this context a backward pass leaves weight gradients here."""
        global _collected
        assert _collected is None, "a backward pass inside of another one"
        _collected = deque()
        try:
            yield
            self._passes.append(_collected)
        except BaseException:
            self._passes.clear()  # the step ends here, and nobody computes what its earlier passes have left
            raise
        finally:
            _collected = None

    @torch.no_grad()
    def compute_oldest(self) -> None:
        """Compute what the oldest pass has left, in the order of that pass. Collective over the tensor group where
        layers gather their input again: one is under way while products are computed that do not need it."""
        left_gradients = self._passes.popleft()
        messages = deque((later.given_input, later.tp) for later in left_gradients if later.tp is not None)
        gathering = begin_gather(*messages.popleft()) if messages else None
        while left_gradients:
            weight, product_input, compute, tp = left_gradients.popleft()
            if tp is not None:
                assert gathering is not None
                product_input = gathering.wait()
                gathering = begin_gather(*messages.popleft()) if messages else None
            with torch.enable_grad():
                given_weight = _Deferred.apply(weight, partial(compute, product_input))
            # Its own gradient is not looked at: given, so that autograd does not have to make one.
            torch.autograd.backward([given_weight], [given_weight.detach()])


_collected: deque[_Later] | None = None  # of the backward pass that is going on, if it leaves any


def is_deferring() -> bool:
    """Whether a backward pass is going on that leaves weight gradients for later."""
    return _collected is not None


def defer_gradient(
    weight: Tensor, given_input: Any, compute: Callable[[Any], Tensor], tp: TensorParallel | None = None
) -> None:
    """In the backward pass of a product, while `is_deferring`: leave the gradient of `weight`, the parameter itself,
    for later. compute: called with `given_input`, or, if `tp` is given, with what its group gathers of that tensor."""
    assert _collected is not None
    _collected.append(_Later(weight, given_input, compute, tp))


class _Deferred(torch.autograd.Function):
    """A graph of one node, with the gradient of `compute`: autograd takes its memory, and copies one that is given."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        ctx.compute = compute
        return weight.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.compute(), None


class _DeferringProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.weight = w  # not the saved one: under recomputation that is detached
        ctx.save_for_backward(x, w)
        return multiply_rows(x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, w), (needs_input, needs_weight) = ctx.saved_tensors, ctx.needs_input_grad
        if not (needs_weight and is_deferring()):
            return differentiate_product(gradient, x, w, ctx.needs_input_grad)
        defer_gradient(ctx.weight, x, lambda x: differentiate_weight(flatten_rows(gradient), x, w))
        return differentiate_product(gradient, x, w, (needs_input, False))[0], None


def multiply_deferring(x: Tensor, w: Tensor) -> Tensor:
    """`products.linear`, bit for bit, whose weight gradient can be deferred. x [..., in], w [out, in], a parameter ->
    [..., out]. Not for compiled code, which would compute both gradients."""
    y: Tensor = _DeferringProduct.apply(x, w)
    return y
