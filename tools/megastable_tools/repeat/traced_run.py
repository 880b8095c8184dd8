"""Trains a few steps from the beginning of a recipe, with a trace of all that is computed. Started by
`megastable repeat` on every rank:

    deepspeed --module megastable_tools.repeat.traced_run RECIPE [KEY=VALUE ...] run.dir=FOLDER

The steps are those of a run of the recipe from its first one on: data, initial weights, learning rate, update. Without
the guard, evaluations and checkpoints. FOLDER has the request (trace_file.py), and gets the traces.

What is watched: fingerprints of every tensor that crosses a module's boundary, of the gradients, and of the state after
the update. Nothing that is computed changes, except by the bit that `request.plant` asks to flip. The numbers stay on
the device until `OperationWatch.take_trace`.
"""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megastable.base.errors import OK, ConfigError
from megastable.base.fingerprint import fingerprint_tensors
from megastable.base.reproducible import is_exact
from megastable.config import deepspeed_json
from megastable.config.tree import RunConfig
from megastable.data.loader import Loader, MicroBatch, RankPart
from megastable.data.skips import Skips
from megastable.engine.engine import Engine
from megastable.engine.flatstate import KINDS
from megastable.engine.layer_hooks import (
    GIVEN_BY,
    depth_of,
    is_layer_of_list,
    named_modules,
    replace_ending,
    split_stream,
)
from megastable.engine.locators import STATE, computing_copies
from megastable.engine.measured import Measured
from megastable.engine.zero import counted_once
from megastable.model.gpt import Head
from megastable.model.loss import Features, LossFunction, project_in_chunks
from megastable.optim.schedule import scheduled_rate
from megastable.parallel.layers import ColumnParallelBias, RowParallelLinear
from megastable.parallel.layout import Layout
from megastable.parallel.sharding import is_split, placement_of
from megastable.parallel.topology import Topology
from megastable.training import rank_process
from megastable.training.startup import open_data
from megastable_tools.repeat.differences import flip_bit
from megastable_tools.repeat.trace_file import (
    CPU,
    MOMENTS,
    START,
    StepTrace,
    TracedOperation,
    TraceHeader,
    TracePoint,
    TraceRequest,
    TraceWriter,
)

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
        # Of the copies that ranks hold of a parameter one counts: the first data rank's that has it; of ZeRO 3 the
        # partitions.
        t, zero_stage = engine.topology, engine.config.parallel.zero
        self._copies_counted = {
            placement_of(p).name: t.data_rank < (t.layout.expert if is_split(p) else 1)
            and zero_stage < 3
            and counted_once(p, t)
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

    def record_start(self) -> None:
        """The state before the first step."""
        self._state("start", "start")

    def begin_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """The step begins on these."""
        self.step = step
        is_counted = self.engine.topology.stage == 0 and self.engine.topology.tensor_rank == 0
        for batch_number, micro_batch in enumerate(micro_batches):
            for tensor_name in ("tokens", "labels", "segments"):
                if (given_tensor := getattr(micro_batch, tensor_name)) is not None:
                    self._see("data", batch_number, tensor_name, "embedding", given_tensor, is_counted)

    def record_gradients(self, measured: Measured) -> bool:
        """For `Engine.train_step`: the gradients are summed, and the update is next. Whether to update."""
        flat_state = self.engine.flat_state()
        gradient_pieces = self.engine.zero.view_gradients(flat_state.fragments)
        for f in flat_state.fragments:
            piece = gradient_pieces[f.group, f.offset].reshape(-1)[: f.numel]
            self._see("reduction", -1, f"gradient of {f.name}", f.name, piece, f.counted, measured.loss_scale)
        gradient_norm = torch.tensor([measured.grad_norm], dtype=torch.float64)
        self._see("norm", -1, "gradient norm", "loss", gradient_norm, self._rank == 0)
        if self.request.moments:
            self._losses = tuple(measured.losses.tolist())
        return measured.finite

    def record_update(self) -> None:
        """The update is applied, or refused."""
        applied_tensor = torch.tensor([float(self.engine.applied)])
        self._see("update", -1, "update applied", "embedding", applied_tensor, self._rank == 0)
        self._state("update", "weights")

    def take_trace(self) -> StepTrace:
        """All that was seen since the last call. Waits for the device."""
        step_fingerprints = _fetched(self._fingerprints, self.engine.device).astype(np.int64)
        moments = None
        if self.request.moments:
            moments = np.zeros((len(self._operations), MOMENTS))
            moments[:, 0] = self._counts
            counted_rows = np.flatnonzero(moments[:, 0])
            if counted_rows.size:
                moments[counted_rows, 1:] = _fetched(self._moments, self.engine.device)
        step_trace = StepTrace(self.step, tuple(self._operations), step_fingerprints, moments, self._losses)
        self._clear()
        return step_trace

    def _state(self, phase: str, copies: str) -> None:
        flat_state = self.engine.flat_state()
        for f in flat_state.fragments:
            for state_kind in KINDS:
                if (state_piece := flat_state.view_piece(f, state_kind)) is not None:
                    self._see(phase, -1, f"{STATE[state_kind]} {f.name}", f.name, state_piece, f.counted)
        for name, given_tensor in self.engine.shared_state.items():
            self._see(phase, -1, f"shared state {name}", "embedding", given_tensor, False)
        counted_names = {f.name: f.counted for f in flat_state.fragments}
        for name, given_tensor, is_part in computing_copies(self.engine):
            is_counted = counted_names.get(name, False) if is_part else self._copies_counted[name]
            self._see(copies, -1, f"{STATE['computing']} {name}", name, given_tensor, is_counted)

    # Tensors

    def _see(
        self, phase: str, micro_batch: int, name: str, layer: str, x: Tensor, counted: bool, scale: float = 1.0
    ) -> bool:  # fmt: skip
        """Record a tensor of any shape and dtype; whether a bit of it was flipped before that, in place. layer: that
        it belongs to. counted: whether its elements are this rank's to count. scale: what it was multiplied by."""
        layer_depth = depth_of(layer, self._blocks) * (-1 if phase in ("backward", "recomputed") else 1)
        traced_operation = TracedOperation(phase, micro_batch, layer_depth, name)
        flipped = self._is(self.request.plant, traced_operation) and not self.planted
        if flipped:
            flip_bit(x)
            self.planted = True
        if self._is(self.request.dump, traced_operation):
            torch.save(x.detach().cpu(), self._folder / f"dump-{self._rank}.pt")
        self._put(traced_operation, fingerprint_tensors([x]), [x] if counted else [], scale)
        return flipped

    def _put(self, operation: TracedOperation, of: Tensor, counted: Iterable[Tensor], scale: float) -> None:
        self._operations.append(operation)
        self._fingerprints.append(of)
        if self.request.moments:
            counted_parts = [tensor_part for tensor_part in counted if tensor_part.numel()]
            self._counts.append(sum(tensor_part.numel() for tensor_part in counted_parts))
            if counted_parts:
                self._moments.append(_moments(counted_parts, scale))

    def _is(self, point: TracePoint | None, operation: TracedOperation) -> bool:
        return point is not None and (point.rank, point.step, point.phase, point.micro_batch, point.name) == (
            self._rank, self.step, operation.phase, operation.micro_batch, operation.name,
        )  # fmt: skip

    # Hooks

    @contextmanager
    def install_hooks(self) -> Iterator[OperationWatch]:
        """Watch all of this rank's modules and parameters, and its loss, for the duration of the block."""
        module, hook_handles, plain_products = self.engine.ds.module, list[Any](), list[tuple[Any, Any]]()
        loss = "loss" if self.engine.topology.layout.pipeline == 1 else "loss_fn"
        loss_function = getattr(module, loss)
        try:
            setattr(module, loss, self._loss(loss_function))
            for module_name, watched_module in self._modules(module):
                hook_handles += self._module(watched_module, module_name)
                if isinstance(watched_module, RowParallelLinear) and watched_module.tp.size > 1:
                    plain_products.append((watched_module, watched_module.product))
                    watched_module.product = self._product(watched_module.product, module_name)
            hook_handles += [self._parameter(module_parameter) for module_parameter in module.parameters()]
            yield self
        finally:
            setattr(module, loss, loss_function)
            for watched_module, plain_product in plain_products:
                watched_module.product = plain_product
            for hook_handle in hook_handles:
                hook_handle.remove()

    def _modules(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for module_name, part in named_modules(module):
            # What the head gives is seen by the loss: logits, or their features.
            if not isinstance(part, Head) and (is_layer_of_list(module_name) or not self.request.blocks_only):
                yield module_name, part
        for part in module.modules() if not self.request.blocks_only else ():
            if isinstance(part, ColumnParallelBias):
                yield placement_of(part.bias).name, part

    def _module(self, module: nn.Module, name: str) -> list[Any]:
        is_layer, giver_name = is_layer_of_list(name), replace_ending(name, GIVEN_BY)

        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            if is_layer:
                self._forward = self._calls[name]
                self._calls[name] += 1
            if giver_name is not None:
                self._output(giver_name, split_stream(args[0])[0])

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._output(name, split_stream(output)[0])
            if is_layer:
                self._forward = None

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _output(self, name: str, x: Tensor) -> None:
        """The output of a module, or of what lies between two, in a forward pass or in one that is recomputed."""
        is_counted = self._whole or name.endswith(SPLIT)
        if self._forward is None:
            self._see("recomputed", self._backward, f"{name} output", name, x, False)
            return
        self._see("forward", self._forward, f"{name} output", name, x, is_counted)
        self._watch_gradient(name, f"{name} output gradient", x, self._forward, is_counted)

    def _watch_gradient(self, layer: str, name: str, x: Tensor, micro_batch: int, counted: bool) -> None:
        def hook(gradient: Tensor) -> Tensor | None:
            # The first of a backward pass, before any is recomputed: it sets the pass for these.
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
        plant_point = self.request.plant
        if plant_point is not None and (plant_point.name, plant_point.step) == (name, self.step):
            gradient = gradient.clone()  # autograd may hand the same one to another branch
        was_flipped = self._see("backward", micro_batch, name, layer, gradient, counted, scale)
        return gradient if was_flipped else None

    def _parameter(self, parameter: nn.Parameter) -> Any:
        layer_name, _, weight_name = placement_of(parameter).name.rpartition(".")  # its weight, or its bias

        tensor_name = f"{layer_name} {weight_name} gradient"

        def hook(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:  # left for later (engine/zero_bubble.py)
                return None
            # Micro-batches give one each, in their order, though not always in their backward pass.
            micro_batch = self._calls[tensor_name]
            self._calls[tensor_name] += 1
            return self._gradient(tensor_name, layer_name, gradient, micro_batch, False, 1.0)

        return parameter.register_hook(hook)

    def _product(self, product: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        """A row-parallel product with its result watched, before the tensor group sums it: the sum hides whose part
        was another one."""

        def watched(*args: Any, **kwargs: Any) -> Tensor:
            product_result = product(*args, **kwargs)
            phase, micro_batch = ("forward", self._forward)
            if micro_batch is None:
                phase, micro_batch = "recomputed", self._backward
            self._see(phase, micro_batch, f"{name} product", name, product_result, False)
            return product_result

        return watched

    def _loss(self, function: LossFunction) -> Callable[[Tensor | Features, Tensor], Tensor]:
        """The loss function, watched: it is not a module. Logits that it makes itself, chunk by chunk, are computed
        once more to be seen."""

        def watched(given: Tensor | Features, labels: Tensor) -> Tensor:
            micro_batch = self._calls["loss"]
            self._calls["loss"] += 1
            if isinstance(given, tuple):
                head_depth = depth_of("head", self._blocks)
                logits_operation = TracedOperation("forward", micro_batch, head_depth, "head output")
                logits_fingerprint = fingerprint_tensors(project_in_chunks(given))
                self._put(logits_operation, logits_fingerprint, project_in_chunks(given), 1.0)
                # A view: the gradient that its reader hands back, before any other hook sees it.
                given = given[0].view_as(given[0]), given[1]
                self._watch_gradient("head", "head input gradient", given[0], micro_batch, False)
            else:
                self._see("forward", micro_batch, "head output", "head", given, True)
                self._watch_gradient("head", "head output gradient", given, micro_batch, True)
            loss = function(given, labels)
            sample_losses = self.engine.loss.samples[-1]
            self._see("forward", micro_batch, "loss of the samples", "loss", sample_losses, False)
            self._see("forward", micro_batch, "loss output", "loss", loss, False)
            self._watch_gradient("loss", "loss output gradient", loss, micro_batch, False)
            return loss

        return watched


def _moments(parts: Sequence[Tensor], scale: float) -> Tensor:
    """float64 [3]: sum, sum of squares and largest magnitude of all elements, divided by `scale`."""
    sums, squares, highest = [], [], []
    for given_tensor in (tensor_part.detach() for tensor_part in parts):
        wide_part = given_tensor if given_tensor.is_floating_point() else given_tensor.double()
        sums.append(wide_part.sum(dtype=torch.float64))
        squares.append(torch.linalg.vector_norm(wide_part, dtype=torch.float64).square())
        highest.append(torch.stack(wide_part.aminmax()).abs().amax().double())
    moment_sums = [torch.stack(sums).sum(), torch.stack(squares).sum() / scale, torch.stack(highest).amax()]
    return torch.stack(moment_sums) / scale


def _fetched(numbers: Sequence[Tensor], device: torch.device) -> Any:
    return torch.stack([given_tensor.to(device, non_blocking=True) for given_tensor in numbers]).cpu().numpy()


def trace_steps(config: RunConfig, recipe_path: Path, attempt: int | None = None) -> int:
    """On every rank; the process group exists already. The exit code."""
    folder = config.run.dir
    assert folder is not None, "started by hand"
    request = TraceRequest.load_request(folder)
    config, corpora = open_data(config)
    world, p = dist.get_world_size(), config.parallel
    data = deepspeed_json.size_of_data_parallel(config, world)
    layout = Layout(p.tensor, p.pipeline, data, p.context, p.replicas, p.expert)
    topology = Topology(layout, dist.get_rank(), config.run.timeout)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(config.run.seed + topology.rank)  # as a run does
    engine = Engine(config, deepspeed_json.build_deepspeed_json(config, world), topology)
    device = f"{CPU}, {torch.get_num_threads()} threads"  # which decides how a CPU sums
    if engine.device.type == "cuda":
        device = torch.cuda.get_device_name(engine.device)
    header = TraceHeader(
        topology.rank, world, socket.gethostname(), device, str(engine.kernels),
        is_exact(config.run.deterministic, engine.device), vars(layout) | {"zero": p.zero},
    )  # fmt: skip
    watch = OperationWatch(engine, request, folder)
    own_tokens = engine.cp.find_own_tokens(config.model.sequence_length)
    part = RankPart(config.train.micro_batch, topology.sample_rank, layout.samples, own_tokens)
    with ExitStack() as during:
        loader = during.enter_context(
            Loader(
                corpora.train, Skips.from_ranges(config.data.skip), 0, config.batches, part, config.data,
                pin_memory=engine.device.type == "cuda", pieces=config.pieces,
            )
        )  # fmt: skip
        writer = during.enter_context(TraceWriter(folder, header))
        during.enter_context(watch.install_hooks())
        watch.record_start()
        writer.write_step(watch.take_trace())
        _train(config, engine, loader, watch, writer)
    return OK


def _train(
    config: RunConfig, engine: Engine, loader: Loader, watch: OperationWatch, writer: TraceWriter
) -> None:
    trained_tokens, plant = 0, watch.request.plant
    for step in range(1, watch.request.steps + 1):
        next_batch = next(loader)
        batch_tokens = next_batch.positions.size * config.model.sequence_length
        learning_rate = scheduled_rate(config, engine.updates, trained_tokens, batch_tokens)
        watch.begin_step(step, next_batch.micro_batches)
        _, was_applied = engine.train_step(next_batch.micro_batches, learning_rate, watch.record_gradients)
        trained_tokens += batch_tokens if was_applied else 0
        watch.record_update()
        writer.write_step(watch.take_trace())
        if plant is not None and (plant.step, plant.rank) == (step, dist.get_rank()) and not watch.planted:
            raise ConfigError(
                f"--plant: nothing can be planted at {plant.name!r}: this layout has no such operation, or it is "
                "computed for the trace only, as kernels.loss=chunked makes logits piece by piece; choose another, or "
                "kernels.loss=reference"
            )


def main() -> None:
    """The entry point of every rank."""
    rank_process.run_rank(trace_steps)


if __name__ == "__main__":
    main()
