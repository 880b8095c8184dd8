"""Watches all that a rank computes in a step: fingerprints of every tensor that crosses a module's boundary, of the
gradients, and of the state after the update.

    with OperationWatch(engine, request).hooks() as watch:
        watch.begin(step, micro_batches)
        engine.train_step(micro_batches, lr, watch.judged)
        watch.updated()
        trace = watch.take()

Nothing that is computed changes, except by the bit that `request.plant` asks to flip. The numbers stay on the device
until `take`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megastable.base.fingerprint import fingerprint
from megastable.data.loader import MicroBatch
from megastable.engine.engine import Engine
from megastable.engine.flatstate import KINDS
from megastable.engine.layer_names import (
    GIVEN_BY,
    depth_of,
    is_layer_of_list,
    named_modules,
    renamed,
    split_stream,
)
from megastable.engine.measured import Measured
from megastable.engine.nan_locator import STATE, computing_copies
from megastable.engine.zero import counted_once
from megastable.model.gpt import Head
from megastable.model.loss import Features, LossFunction, projected
from megastable.parallel.layers import ColumnParallelBias, RowParallelLinear
from megastable.parallel.sharding import placement_of
from megastable_tools.repeat.flipped_bit import flip
from megastable_tools.repeat.operations import START, TracedOperation
from megastable_tools.repeat.trace_file import MOMENTS, StepTrace
from megastable_tools.repeat.trace_request import TracePoint, TraceRequest

# Every tensor rank has its own part of these outputs; of others it has a copy, or a part of the sequence.
SPLIT = (
    ".attention.qkv", ".attention.qkv.bias", ".attention.q_norm", ".attention.k_norm", ".attention.core",
    ".mlp.gate_up", ".mlp.swiglu", "head",
)  # fmt: skip


class OperationWatch:
    """Of one rank. folder: where a dumped tensor goes, as dump-RANK.pt."""

    def __init__(self, engine: Engine, request: TraceRequest, folder: Path) -> None:
        self.engine, self.request, self._folder = engine, request, folder
        self._blocks, self._rank = engine.config.model.layers, engine.topology.rank
        self._whole = engine.topology.tensor_rank == 0 or engine.tp.sequence
        # Of the copies that ranks hold of a parameter one counts: the first data rank's; of ZeRO 3 the partitions.
        t, zero = engine.topology, engine.config.parallel.zero
        self._copies_counted = {
            placement_of(p).name: t.data_rank == 0 and zero < 3 and counted_once(p, t)
            for p in engine.ds.module.parameters()
        }
        self.step, self.planted = START, False
        self._clear()

    def _clear(self) -> None:
        self._operations: list[TracedOperation] = []
        self._fingerprints: list[Tensor] = []
        self._moments: list[Tensor] = []
        self._counts: list[int] = []
        self._losses: tuple[float, ...] = ()
        self._calls: Counter[str] = Counter()
        self._forward: int | None = None  # the micro-batch; None while backward recomputes a block
        self._backward = 0

    # A step

    def start(self) -> None:
        """The state before the first step."""
        self._state("start", "start")

    def begin(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """The step begins on these."""
        self.step = step
        counted = self.engine.topology.stage == 0 and self.engine.topology.tensor_rank == 0
        for index, given in enumerate(micro_batches):
            for name in ("tokens", "labels", "segments"):
                if (x := getattr(given, name)) is not None:
                    self._see("data", index, name, "embedding", x, counted)

    def judged(self, measured: Measured) -> bool:
        """For `Engine.train_step`: the gradients are summed, and the update is next. Whether to update."""
        flat = self.engine.flat_state()
        pieces = self.engine.zero.gradients(flat.fragments)
        for f in flat.fragments:
            piece = pieces[f.group, f.offset].reshape(-1)[: f.numel]
            self._see("reduction", -1, f"gradient of {f.name}", f.name, piece, f.counted, measured.loss_scale)
        norm = torch.tensor([measured.grad_norm], dtype=torch.float64)
        self._see("norm", -1, "gradient norm", "loss", norm, self._rank == 0)
        if self.request.moments:
            self._losses = tuple(measured.losses.tolist())
        return measured.finite

    def updated(self) -> None:
        """The update is applied, or refused."""
        applied = torch.tensor([float(self.engine.applied)])
        self._see("update", -1, "update applied", "embedding", applied, self._rank == 0)
        self._state("update", "weights")

    def take(self) -> StepTrace:
        """All that was seen since the last call. Waits for the device."""
        fingerprints = _fetched(self._fingerprints, self.engine.device).astype(np.int64)
        moments = None
        if self.request.moments:
            moments = np.zeros((len(self._operations), MOMENTS))
            moments[:, 0] = self._counts
            counted = np.flatnonzero(moments[:, 0])
            if counted.size:
                moments[counted, 1:] = _fetched(self._moments, self.engine.device)
        trace = StepTrace(self.step, tuple(self._operations), fingerprints, moments, self._losses)
        self._clear()
        return trace

    def _state(self, phase: str, copies: str) -> None:
        flat = self.engine.flat_state()
        for f in flat.fragments:
            for kind in KINDS:
                if (piece := flat.piece(f, kind)) is not None:
                    self._see(phase, -1, f"{STATE[kind]} {f.name}", f.name, piece, f.counted)
        for name, x in self.engine.shared_state.items():
            self._see(phase, -1, f"shared state {name}", "embedding", x, False)
        ours = {f.name: f.counted for f in flat.fragments}
        for name, x, is_part in computing_copies(self.engine):
            counted = ours.get(name, False) if is_part else self._copies_counted[name]
            self._see(copies, -1, f"{STATE['computing']} {name}", name, x, counted)

    # Tensors

    def _see(
        self, phase: str, micro_batch: int, name: str, layer: str, x: Tensor, counted: bool, scale: float = 1.0
    ) -> bool:  # fmt: skip
        """Record a tensor of any shape and dtype; whether a bit of it was flipped before that, in place. layer: that
        it belongs to. counted: whether its elements are this rank's to count. scale: what it was multiplied by."""
        depth = depth_of(layer, self._blocks) * (-1 if phase in ("backward", "recomputed") else 1)
        operation = TracedOperation(phase, micro_batch, depth, name)
        flipped = self._is(self.request.plant, operation) and not self.planted
        if flipped:
            flip(x)
            self.planted = True
        if self._is(self.request.dump, operation):
            torch.save(x.detach().cpu(), self._folder / f"dump-{self._rank}.pt")
        self._put(operation, fingerprint([x]), [x] if counted else [], scale)
        return flipped

    def _put(self, operation: TracedOperation, of: Tensor, counted: Iterable[Tensor], scale: float) -> None:
        self._operations.append(operation)
        self._fingerprints.append(of)
        if self.request.moments:
            parts = [part for part in counted if part.numel()]
            self._counts.append(sum(part.numel() for part in parts))
            if parts:
                self._moments.append(_moments(parts, scale))

    def _is(self, point: TracePoint | None, operation: TracedOperation) -> bool:
        return point is not None and (point.rank, point.step, point.phase, point.micro_batch, point.name) == (
            self._rank, self.step, operation.phase, operation.micro_batch, operation.name,
        )  # fmt: skip

    # Hooks

    @contextmanager
    def hooks(self) -> Iterator[OperationWatch]:
        """Watch all of this rank's modules and parameters, and its loss, for the duration of the block."""
        module, handles, products = self.engine.ds.module, list[Any](), list[tuple[Any, Any]]()
        loss = "loss" if self.engine.topology.layout.pipeline == 1 else "loss_fn"
        function = getattr(module, loss)
        try:
            setattr(module, loss, self._loss(function))
            for name, part in self._modules(module):
                handles += self._module(part, name)
                if isinstance(part, RowParallelLinear) and part.tp.size > 1:
                    products.append((part, part.product))
                    part.product = self._product(part.product, name)
            handles += [self._parameter(parameter) for parameter in module.parameters()]
            yield self
        finally:
            setattr(module, loss, function)
            for part, product in products:
                part.product = product
            for handle in handles:
                handle.remove()

    def _modules(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, part in named_modules(module):
            # What the head gives is seen by the loss: logits, or their features.
            if not isinstance(part, Head) and (is_layer_of_list(name) or not self.request.blocks_only):
                yield name, part
        for part in module.modules() if not self.request.blocks_only else ():
            if isinstance(part, ColumnParallelBias):
                yield placement_of(part.bias).name, part

    def _module(self, module: nn.Module, name: str) -> list[Any]:
        is_layer, giver = is_layer_of_list(name), renamed(name, GIVEN_BY)

        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            if is_layer:
                self._forward = self._calls[name]
                self._calls[name] += 1
            if giver is not None:
                self._output(giver, split_stream(args[0])[0])

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._output(name, split_stream(output)[0])
            if is_layer:
                self._forward = None

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _output(self, name: str, x: Tensor) -> None:
        """The output of a module, or of what lies between two, in a forward pass or in one that is recomputed."""
        counted = self._whole or name.endswith(SPLIT)
        if self._forward is None:
            self._see("recomputed", self._backward, f"{name} output", name, x, False)
            return
        self._see("forward", self._forward, f"{name} output", name, x, counted)
        self._watch_gradient(name, f"{name} output gradient", x, self._forward, counted)

    def _watch_gradient(self, layer: str, name: str, x: Tensor, micro_batch: int, counted: bool) -> None:
        def hook(gradient: Tensor) -> Tensor | None:
            # The first of a backward pass, before any weight's: it sets the pass for these.
            self._backward = micro_batch
            # A loss is a rank's mean over its samples, times fp16's scale.
            scale = self.engine.topology.layout.data * float(getattr(self.engine.optimizer, "loss_scale", 1))
            return self._gradient(name, layer, gradient, micro_batch, counted, scale)

        if x.requires_grad:
            x.register_hook(hook)

    def _gradient(
        self, name: str, layer: str, gradient: Tensor, micro_batch: int, counted: bool, scale: float
    ) -> Tensor | None:
        """The gradient in place of the one given, if a bit of it was to be flipped."""
        point = self.request.plant
        if point is not None and (point.name, point.step) == (name, self.step):
            gradient = gradient.clone()  # autograd may hand the same one to another branch
            flipped = self._see("backward", micro_batch, name, layer, gradient, counted, scale)
            return gradient if flipped else None
        self._see("backward", micro_batch, name, layer, gradient, counted, scale)
        return None

    def _parameter(self, parameter: nn.Parameter) -> Any:
        layer, _, which = placement_of(parameter).name.rpartition(".")  # its weight, or its bias

        def hook(gradient: Tensor) -> Tensor | None:
            name = f"{layer} {which} gradient"
            return self._gradient(name, layer, gradient, self._backward, False, 1.0)

        return parameter.register_hook(hook)

    def _product(self, product: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        """A row-parallel product with its result watched, before the tensor group sums it: the sum hides whose part
        was another one."""

        def watched(*args: Any, **kwargs: Any) -> Tensor:
            y = product(*args, **kwargs)
            phase, micro_batch = ("forward", self._forward)
            if micro_batch is None:
                phase, micro_batch = "recomputed", self._backward
            self._see(phase, micro_batch, f"{name} product", name, y, False)
            return y

        return watched

    def _loss(self, function: LossFunction) -> Callable[[Tensor | Features, Tensor], Tensor]:
        """The loss function, watched: it is not a module. Logits that it makes itself, chunk by chunk, are computed
        once more to be seen."""

        def watched(given: Tensor | Features, labels: Tensor) -> Tensor:
            micro_batch = self._calls["loss"]
            self._calls["loss"] += 1
            if isinstance(given, tuple):
                logits = TracedOperation(
                    "forward", micro_batch, depth_of("head", self._blocks), "head output"
                )
                self._put(logits, fingerprint(projected(given)), projected(given), 1.0)
                # A view: the gradient that its reader hands back, before any other hook sees it.
                given = given[0].view_as(given[0]), given[1]
                self._watch_gradient("head", "head input gradient", given[0], micro_batch, False)
            else:
                self._see("forward", micro_batch, "head output", "head", given, True)
                self._watch_gradient("head", "head output gradient", given, micro_batch, True)
            loss = function(given, labels)
            self._see(
                "forward", micro_batch, "loss of the samples", "loss", self.engine.loss.samples[-1], False
            )
            self._see("forward", micro_batch, "loss output", "loss", loss, False)
            self._watch_gradient("loss", "loss output gradient", loss, micro_batch, False)
            return loss

        return watched


def _moments(parts: Sequence[Tensor], scale: float) -> Tensor:
    """float64 [3]: sum, sum of squares and largest magnitude of all elements, divided by `scale`."""
    sums, squares, highest = [], [], []
    for x in (part.detach() for part in parts):
        wide = x if x.is_floating_point() else x.double()
        sums.append(wide.sum(dtype=torch.float64))
        squares.append(torch.linalg.vector_norm(wide, dtype=torch.float64).square())
        highest.append(torch.stack(wide.aminmax()).abs().amax().double())
    found = [torch.stack(sums).sum(), torch.stack(squares).sum() / scale, torch.stack(highest).amax()]
    return torch.stack(found) / scale


def _fetched(numbers: Sequence[Tensor], device: torch.device) -> Any:
    return torch.stack([x.to(device, non_blocking=True) for x in numbers]).cpu().numpy()
