"""Weight gradients that a backward pass leaves for later are those that it would have computed, also compiled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megastable.engine.adjustments import CLAMPED
from megastable.engine.build import defer_weight_gradients
from megastable.fp8.emulated import Current, Product
from megastable.fp8.scale_factors import E4M3, E5M2
from megastable.model import elementwise
from megastable.model.block_parts import swiglu
from megastable.model.gpt import Block
from megastable.model.kernels import Kernels
from megastable.parallel.deferred_gradients import DeferredGradients
from megastable.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megastable.parallel.topology import TensorParallel
from tests.parallel.compiling import without_kernels
from tests.parallel.test_layouts import LENGTH, config


def make_block(recompute: str, compiled: bool, deferring: bool, own: tuple[str, ...] = ()) -> Block:
    torch.manual_seed(1)
    kernels = Kernels("sdpa", "chunked", compiled, elementwise=own)
    block = Block(config().model, TensorParallel(), 0, recompute, kernels)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    block.to(torch.bfloat16)
    if deferring:
        defer_weight_gradients(block)
    return block


def cast_products(block: Block) -> Block:
    """The block with its products in emulated FP8."""
    for name, part in block.named_modules():
        if isinstance(part, ColumnParallelLinear | RowParallelLinear):
            part.product = Product(name, Current((E4M3, E4M3, E5M2)), lambda: True)
    return block


def run_block(block: Block, x: Tensor) -> None:
    block(x).backward(torch.ones_like(x))


def gradients(block: Block) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in block.named_parameters()}


def are_equal(one: Block, other: Block) -> bool:
    return all(torch.equal(gradients(other)[name], gradient) for name, gradient in gradients(one).items())


@pytest.mark.quick("*-plain", "*-fp8")
@pytest.mark.parametrize("kind", ["plain", "fp8", "compiled"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_come_later_and_are_the_same(recompute: str, kind: str) -> None:
    batches = [torch.randn(LENGTH, 2, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    deferred, counts = DeferredGradients(), Counter[str]()
    with without_kernels():
        plain, block = (make_block(recompute, kind == "compiled", deferring) for deferring in (False, True))
        if kind == "fp8":
            plain, block = cast_products(plain), cast_products(block)
        for x in batches:
            run_block(plain, x)
        expected_inputs = [x.grad for x in batches]
        for x in batches:
            x.grad = None
            with deferred.collect():
                run_block(block, x)
        for x, expected in zip(batches, expected_inputs, strict=True):
            assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
        linears = {name for name, parameter in block.named_parameters() if parameter.dim() == 2}
        assert len(linears) == 4
        assert {name for name, gradient in gradients(block).items() if gradient is None} == linears
        for name in linears:  # hooks run as if the backward pass had come to the weight
            weight = block.get_parameter(name)
            weight.register_post_accumulate_grad_hook(lambda _, name=name: counts.update([name]))
        deferred.compute_oldest()
        assert counts == Counter(linears)
        deferred.compute_oldest()
        assert counts == Counter(2 * list(linears)) and are_equal(block, plain)
        # Without a schedule that collects them, none is left.
        run_block(block, batches[0])
        run_block(plain, batches[0])
        assert counts == Counter(3 * list(linears)) and are_equal(block, plain)


def test_norms_between_deferring_products_are_compiled() -> None:
    x = torch.randn(LENGTH, 2, 32, dtype=torch.bfloat16, requires_grad=True)
    with without_kernels():
        torch._dynamo.reset()
        counters.clear()
        block = make_block("none", compiled=True, deferring=True)
        fast_output = block(x)
        # One for all norms; in attention and in the MLP what lies between products.
        assert counters["stats"]["unique_graphs"] == 3
        block.compute_plainly(attention=False, compiled=True, own=False)
        torch._dynamo.reset()
        counters.clear()
        assert torch.equal(block(x), fast_output) and not counters["stats"]["unique_graphs"]


def test_clamp_of_a_remedy_reaches_compiled_blocks() -> None:
    """what lies between deferring products is compiled with the activation of the time, not of the start"""
    block = make_block("none", compiled=False, deferring=False)
    mlp, x = block.mlp, 100 * torch.randn(LENGTH, 2, 32, dtype=torch.bfloat16)
    with without_kernels():
        compiled_block = make_block("none", compiled=True, deferring=True)
        assert torch.equal(compiled_block.mlp(x), mlp(x))
        compiled_block.mlp.activation = CLAMPED
        clamped_output = compiled_block.mlp(x)
    assert not torch.equal(clamped_output, mlp(x))
    mlp.activation = CLAMPED
    assert torch.equal(clamped_output, mlp(x))


def test_own_swiglu_is_used_between_deferring_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """the part that a start says its own kernels compute is not left to torch.compile"""
    monkeypatch.setattr(elementwise, "swiglu", lambda gate_up: 2 * swiglu(gate_up))  # of a GPU
    x = torch.randn(LENGTH, 2, 32, dtype=torch.bfloat16)
    with without_kernels():
        mlp = make_block("none", compiled=True, deferring=True, own=("swiglu",)).mlp
        assert torch.equal(mlp(x), mlp.down(2 * swiglu(mlp.gate_up(x))))
        mlp.own.aside = True
        assert torch.equal(mlp(x), mlp.down(swiglu(mlp.gate_up(x))))


def test_a_step_that_raises_leaves_nothing_for_the_next_one() -> None:
    deferred_gradients = DeferredGradients()
    with deferred_gradients.collect():
        pass
    with pytest.raises(ValueError, match="stopped"), deferred_gradients.collect():
        raise ValueError("stopped")
    with pytest.raises(IndexError):
        deferred_gradients.compute_oldest()
