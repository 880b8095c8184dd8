"""Shows every tensor that crosses a module's boundary in forward and backward to an observer. Changes no value.

Modules are named as people know them, in the whole model and alike in every layout. The list of layers is that of
gpt.py: embedding, blocks, final_norm, head; the loss comes after the last.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, TypeVar

from torch import Tensor, nn

from megastable.engine.engine import Engine
from megastable.model.gpt import Block, Head
from megastable.model.loss import Features, LossFunction, project_in_chunks
from megastable.parallel.sharding import placement_of

# Operations between two modules belong to neither: the input of the left module is the output of the right one, ...
GIVEN_BY = {".attention.out": ".attention.core", ".mlp.down": ".mlp.swiglu", "loss": "head"}
# ... and a gradient that reaches the left's output has passed through the right one.
TAKEN_BY = {
    ".attention.qkv": ".attention.core",
    ".attention.q_norm": ".attention.core",
    ".attention.k_norm": ".attention.core",
    ".mlp.gate_up": ".mlp.swiglu",
}


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Blocks, and modules with a weight: "blocks.7", "blocks.7.mlp.down", "final_norm"."""
    for named_part in module.modules():
        if isinstance(named_part, Block):
            yield named_part.name, named_part
        elif isinstance(own_weight := getattr(named_part, "weight", None), nn.Parameter):
            yield placement_of(own_weight).name.removesuffix(".weight"), named_part


def is_layer_of_list(name: str) -> bool:
    """Whether the model calls it, not a block."""
    return name.count(".") == (1 if name.startswith("blocks.") else 0)


def depth_of(name: str, blocks: int) -> int:
    """Index in the list of layers of the one that `name` is, or is in; blocks: of the model."""
    layer_kind, *name_rest = name.split(".")
    if layer_kind == "blocks":
        return 1 + int(name_rest[0])
    return {"embedding": 0, "final_norm": blocks + 1, "head": blocks + 2, "loss": blocks + 3}[layer_kind]


def replace_ending(name: str, table: Mapping[str, str]) -> str | None:
    """`name` with the ending that `table` gives for its own; None if it has none of these."""
    for name_ending, other_ending in table.items():
        if name.endswith(name_ending):
            return name.removesuffix(name_ending) + other_ending
    return None


def split_stream(stream: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """x, and what travels with it."""
    return (stream[0], stream[1:]) if isinstance(stream, tuple) else (stream, ())


class LayerHooks:
    """Hooks that call `see_tensor`; `watch_layers` sets them."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._forward: int | None = None  # the micro-batch; None while backward recomputes a block

    def see_tensor(self, x: Tensor, micro_batch: int, backward: bool, layer: str, tensor: str) -> None:
        """x: an activation, or its or a weight's gradient, of the layer of this name in the whole model. tensor: which
        of its tensors: "input", "output", "input gradient", "weight gradient", ..."""
        raise NotImplementedError

    def _gradient(self, micro_batch: int, layer: str, tensor: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self.see_tensor(gradient, micro_batch, True, layer, tensor)

        return hook

    def _enter(self, name: str, x: Tensor, micro_batch: int) -> Tensor:
        giving_layer = replace_ending(name, GIVEN_BY)
        self.see_tensor(x, micro_batch, False, giving_layer or name, "output" if giving_layer else "input")
        if x.requires_grad:
            # The gradient of `x` is summed over all its readers; that of a view belongs to this module alone.
            x = x.view_as(x)
            x.register_hook(self._gradient(micro_batch, name, "input gradient"))
        return x

    def _leave(self, name: str, y: Tensor, micro_batch: int) -> None:
        self.see_tensor(y, micro_batch, False, name, "output")
        if y.requires_grad:
            taking_layer = replace_ending(name, TAKEN_BY)
            gradient_kind = "input gradient" if taking_layer else "output gradient"
            y.register_hook(self._gradient(micro_batch, taking_layer or name, gradient_kind))

    def hook_module(self, module: nn.Module, name: str) -> list[Any]:
        """Hooks on a module. Layers of the list (blocks, embedding, ...) count the micro-batches for their
        submodules."""
        is_layer = is_layer_of_list(name)

        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if is_layer:
                self._forward = self._calls[name]
                self._calls[name] += 1
            x, stream_rest = split_stream(args[0])
            if self._forward is None or not x.is_floating_point():
                return None
            x = self._enter(name, x, self._forward)
            return ((x, *stream_rest) if stream_rest else x, *args[1:])

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._forward is not None:
                self._leave(name, split_stream(output)[0], self._forward)
            if is_layer:
                self._forward = None

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def hook_parameter(self, parameter: nn.Parameter) -> Any:
        layer, _, which = placement_of(parameter).name.rpartition(".")  # its weight, or its bias
        micro_batches = count()  # each gives one gradient, in their order

        def hook(gradient: Tensor | None) -> None:
            if gradient is not None:  # else it is left for later (engine/zero_bubble.py)
                self.see_tensor(gradient, next(micro_batches), True, layer, f"{which} gradient")

        return parameter.register_hook(hook)

    def wrap_loss(self, function: LossFunction) -> Callable[[Tensor | Features, Tensor], Tensor]:
        """The loss function with checks: it is not a module. If it contains the head's projection, the logits are
        computed once more to be checked, chunk by chunk."""

        def watched(given: Tensor | Features, labels: Tensor) -> Tensor:
            micro_batch = self._calls["loss"]
            self._calls["loss"] += 1
            if isinstance(given, tuple):
                given = self._enter("head", given[0], micro_batch), given[1]
                for logits in project_in_chunks(given):
                    self.see_tensor(logits, micro_batch, False, "head", "output")
            else:
                given = self._enter("loss", given, micro_batch)
            loss_value = function(given, labels)
            self.see_tensor(loss_value, micro_batch, False, "loss", "output")
            return loss_value

        return watched


Hooks = TypeVar("Hooks", bound=LayerHooks)


@contextlib.contextmanager
def watch_layers(engine: Engine, watch: Hooks) -> Iterator[Hooks]:
    """Sets hooks on all of this rank's modules, parameters and its loss. Blocks are not compiled, and take no more
    memory than in any other step."""
    module, hook_handles = engine.ds.module, list[Any]()
    model_blocks = [named_part for named_part in module.modules() if isinstance(named_part, Block)]
    loss_attribute = "loss" if engine.topology.layout.pipeline == 1 else "loss_fn"
    loss_function = getattr(module, loss_attribute)
    try:
        setattr(module, loss_attribute, watch.wrap_loss(loss_function))
        for model_block in model_blocks:
            model_block.in_halves = True
        for module_name, named_part in named_modules(module):
            if isinstance(named_part, Head) and engine.kernels.loss == "chunked":
                continue  # its output is the loss, which does its work
            hook_handles += watch.hook_module(named_part, module_name)
        hook_handles += [watch.hook_parameter(p) for p in module.parameters()]
        yield watch
    finally:
        setattr(module, loss_attribute, loss_function)
        for model_block in model_blocks:
            model_block.in_halves = False
        for hook_handle in hook_handles:
            hook_handle.remove()
