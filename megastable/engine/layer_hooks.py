"""Shows every tensor that crosses a module's boundary in forward and backward to an observer. Changes no value."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from megastable.engine.engine import Engine
from megastable.engine.layer_names import (
    GIVEN_BY,
    TAKEN_BY,
    is_layer_of_list,
    named_modules,
    renamed,
    split_stream,
)
from megastable.model.gpt import Block, Head
from megastable.model.loss import Features, LossFunction, projected
from megastable.parallel.sharding import placement_of


class LayerHooks:
    """Hooks that call `see`; `watching` sets them."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._forward: int | None = None  # the micro-batch; None while backward recomputes a block
        self._backward = 0

    def see(self, x: Tensor, micro_batch: int, backward: bool, layer: str, tensor: str) -> None:
        """x: an activation, or its or a weight's gradient, of the layer of this name in the whole model. tensor: which
        of its tensors: "input", "output", "input gradient", "weight gradient", ..."""
        raise NotImplementedError

    def _gradient(self, micro_batch: int, layer: str, tensor: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            # An activation's hook opens every backward pass: it sets the pass for the weights' hooks.
            self._backward = micro_batch
            self.see(gradient, micro_batch, True, layer, tensor)

        return hook

    def _enter(self, name: str, x: Tensor, micro_batch: int) -> Tensor:
        giver = renamed(name, GIVEN_BY)
        self.see(x, micro_batch, False, giver or name, "output" if giver else "input")
        if x.requires_grad:
            # The gradient of `x` is summed over all its readers; that of a view belongs to this module alone.
            x = x.view_as(x)
            x.register_hook(self._gradient(micro_batch, name, "input gradient"))
        return x

    def _leave(self, name: str, y: Tensor, micro_batch: int) -> None:
        self.see(y, micro_batch, False, name, "output")
        if y.requires_grad:
            taker = renamed(name, TAKEN_BY)
            whose = "input gradient" if taker else "output gradient"
            y.register_hook(self._gradient(micro_batch, taker or name, whose))

    def module(self, module: nn.Module, name: str) -> list[Any]:
        """Hooks on a module. Layers of the list (blocks, embedding, ...) count the micro-batches for their
        submodules."""
        is_layer = is_layer_of_list(name)

        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if is_layer:
                self._forward = self._calls[name]
                self._calls[name] += 1
            x, segments = split_stream(args[0])
            if self._forward is None or not x.is_floating_point():
                return None
            x = self._enter(name, x, self._forward)
            return ((x, *segments) if segments else x, *args[1:])

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._forward is not None:
                self._leave(name, split_stream(output)[0], self._forward)
            if is_layer:
                self._forward = None

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def parameter(self, parameter: nn.Parameter) -> Any:
        layer, _, which = placement_of(parameter).name.rpartition(".")  # its weight, or its bias

        def hook(gradient: Tensor) -> None:
            self.see(gradient, self._backward, True, layer, f"{which} gradient")

        return parameter.register_hook(hook)

    def loss(self, function: LossFunction) -> Callable[[Tensor | Features, Tensor], Tensor]:
        """The loss function with checks: it is not a module. If it contains the head's projection, the logits are
        computed once more to be checked, chunk by chunk."""

        def watched(given: Tensor | Features, labels: Tensor) -> Tensor:
            micro_batch = self._calls["loss"]
            self._calls["loss"] += 1
            if isinstance(given, tuple):
                given = self._enter("head", given[0], micro_batch), given[1]
                for logits in projected(given):
                    self.see(logits, micro_batch, False, "head", "output")
            else:
                given = self._enter("loss", given, micro_batch)
            loss = function(given, labels)
            self.see(loss, micro_batch, False, "loss", "output")
            return loss

        return watched


Hooks = TypeVar("Hooks", bound=LayerHooks)


@contextlib.contextmanager
def watching(engine: Engine, watch: Hooks) -> Iterator[Hooks]:
    """Sets hooks on all of this rank's modules, parameters and its loss. Blocks are not compiled, and take no more
    memory than in any other step."""
    module, handles = engine.ds.module, list[Any]()
    blocks = [part for part in module.modules() if isinstance(part, Block)]
    loss = "loss" if engine.topology.layout.pipeline == 1 else "loss_fn"
    function = getattr(module, loss)
    try:
        setattr(module, loss, watch.loss(function))
        for block in blocks:
            block.in_halves = True
        for name, part in named_modules(module):
            if isinstance(part, Head) and engine.kernels.loss == "chunked":
                continue  # its output is the loss, which does its work
            handles += watch.module(part, name)
        handles += [watch.parameter(parameter) for parameter in module.parameters()]
        yield watch
    finally:
        setattr(module, loss, function)
        for block in blocks:
            block.in_halves = False
        for handle in handles:
            handle.remove()
