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
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megastable.base.products import differentiate_product, multiply_rows
from megastable.parallel.overlapped import differentiate_entered, multiply_entered
from megastable.parallel.topology import TensorParallel

Later = tuple[Tensor, Callable[[], Tensor | None]]  # a weight, and what computes its gradient


class DeferredGradients:
    """Weight gradients of several backward passes, the oldest first. They keep the inputs of the products, and the
    gradients of their outputs, in memory."""

    def __init__(self) -> None:
        self._passes: deque[deque[Later]] = deque()

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

    def compute_oldest(self) -> None:
        """Compute what the oldest pass has left, in the order of that pass. Collective over the tensor group where
        layers gather their input again."""
        left_gradients = self._passes.popleft()
        while left_gradients:
            given_weight = _Deferred.apply(*left_gradients.popleft())
            # Its own gradient is not looked at: given, so that autograd does not have to make one.
            torch.autograd.backward([given_weight], [given_weight.detach()])


_collected: deque[Later] | None = None  # of the backward pass that is going on, if it leaves any


def is_deferring() -> bool:
    """Whether a backward pass is going on that leaves weight gradients for later."""
    return _collected is not None


def defer_gradient(weight: Tensor, compute: Callable[[], Tensor | None]) -> bool:
    """In the backward pass of a product: whether the gradient of `weight`, the parameter itself, is left for later."""
    if _collected is None:
        return False
    _collected.append((weight, compute))
    return True


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
    def forward(ctx: Any, x: Tensor, w: Tensor, tp: TensorParallel | None) -> Tensor:
        # Not the saved one: under recomputation that is detached.
        ctx.tp, ctx.weight = tp, w
        y, kept = (multiply_rows(x, w), x) if tp is None else multiply_entered(x, w, tp)
        ctx.save_for_backward(kept, w)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (kept, w), tp, (needs_input, needs_weight, _) = ctx.saved_tensors, ctx.tp, ctx.needs_input_grad

        def differentiate(*needed: bool) -> tuple[Tensor | None, Tensor | None]:
            if tp is None:
                return differentiate_product(gradient, kept, w, needed)
            return differentiate_entered(gradient, kept, w, tp, needed)

        if needs_weight and defer_gradient(ctx.weight, lambda: differentiate(False, True)[1]):
            return differentiate(needs_input, False)[0], None, None
        return *differentiate(needs_input, needs_weight), None


def multiply_deferring(x: Tensor, w: Tensor, tp: TensorParallel | None = None) -> Tensor:
    """`products.linear`, or with `tp` `overlapped.enter_and_multiply`, bit for bit, whose weight gradient can be
    deferred. x [..., in], w [out, in], a parameter -> [..., out]. Not for compiled code, which would compute both
    gradients."""
    y: Tensor = _DeferringProduct.apply(x, w, tp)
    return y
