"""The only file that imports deepspeed: a narrow face over its engines and optimizer wrappers.

    engine = Engine(config, ds_config, topology)
    result = engine.train_step(micro_batches, lr, judge)   # forward, backward, gate, update
    losses = engine.evaluate(micro_batches)                # per-sample cross-entropy

What every caller sees is the same under one pipeline stage or many, ZeRO 1 to 3, bf16, fp16 or fp32.
Source of the gate: no hook exists in DeepSpeed 0.19.8, so `_take_model_step` is replaced on the instance.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import io
import logging
import math
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megastable.hardware import has_gpu, ranks_of_host

# Set before importing deepspeed: otherwise it calls torch.cuda.is_available(), which initialises CUDA, and warns on
# every rank without a GPU.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if has_gpu() else "cpu")

import deepspeed
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime import bf16_optimizer, compiler
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils.timer import NoopTimer

from megastable.config import OptimizerConfig, RunConfig
from megastable.data.loader import MicroBatch
from megastable.deterministic import prepare
from megastable.errors import ConfigError, MegastableError, RendezvousError
from megastable.flatstate import FlatState, Fragment
from megastable.fp8.apply import apply
from megastable.fp8.switch import History
from megastable.hostcopy import Filled
from megastable.model import gpt
from megastable.model.init import initialise
from megastable.model.kernels import DTYPES, Kernels, choose
from megastable.model.loss import LossFunction
from megastable.optim.adamw import AdamW, decay_groups
from megastable.optim.fused import FusedAdamW
from megastable.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megastable.parallel.mappings import sum_and_scatter
from megastable.parallel.pipeline import partition
from megastable.parallel.sharding import placement_of, shape_of
from megastable.parallel.tied import TiedGradient
from megastable.parallel.topology import ContextParallel, TensorParallel, Topology
from megastable.probe import Probe, Statistics
from megastable.products import linear_of_parameter
from megastable.ranks import gathered, shared, strangers


@dataclass(frozen=True)
class Measured:
    """What is known of a step before the optimizer runs. The same numbers on every rank.

    losses, squares: fp64 [global batch], per-sample cross-entropy (nats) and mean logsumexp^2, in the order of
    the step's positions. grad_norm: global L2 norm before clipping, unscaled; inf when any gradient is not
    finite. votes: what the ranks said (`Engine.train_step(votes=...)`), summed. overflow: gradients beyond fp16's
    range, which a smaller loss scale mends: part of fp16, no incident. fp8: whether it was computed in FP8, None where
    the recipe does not ask for it.
    """

    losses: Tensor
    squares: Tensor
    grad_norm: float
    votes: tuple[float, ...]
    loss_scale: float
    overflow: bool = False
    fp8: bool | None = None

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples", "_step_applied")


class Judge(Protocol):
    """The gate: True lets DeepSpeed clip and update, False drops the gradients. A pure function of its input."""

    def __call__(self, measured: Measured) -> bool: ...


def start_distributed(timeout: float, deterministic: bool = False) -> None:
    """Join the process group that the launcher describes in the environment.

    timeout: seconds before a collective counts as hung. deterministic: `run.deterministic`, for this process from here
    on.
    """
    if deterministic:
        prepare()
    deepspeed_logger.setLevel(logging.WARNING)
    # It collects garbage again and again while it builds an engine: what was imported is none.
    gc.freeze()
    # Its pipeline sends activations that require gradients; the gradients come back by a send of their own.
    warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered.*")
    # It calls collectives by names that torch 2.13 replaced.
    warnings.filterwarnings("ignore", message=".*`torch.distributed.* is deprecated.*")
    if os.environ.get("DS_ACCELERATOR") == "cpu" and get_accelerator().device_name() != "cpu":
        # DeepSpeed decides once, at the import: for a forked rank that was in its parent.
        set_accelerator(CPU_Accelerator())
    if device().type == "cuda":
        _take_gpu()
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            # Evaluation and recomputation ask for other sizes than training: without it they leave holes.
            # The second name warns in newer torch, and older ones have no other.
            settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
            (settings or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
    else:
        # DeepSpeed refuses fp16 on CPUs without its instructions; torch computes it on all of them, slowly.
        get_accelerator().is_fp16_supported = lambda: True
        # Of its own operations it would use the shared-memory collectives alone, which leave 66 MiB a rank in /dev/shm
        # after every run. To look which others there are, it would run a compiler on every rank.
        deepspeed.ops.__compatible_ops__ = {}
        if "OMP_NUM_THREADS" not in os.environ:
            # Every rank would start a thread per core: ranks of one host share them.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_of_host()))
    # It imports its Muon only to see that the optimizer is another one, and that would be compiled at its import: for
    # this every rank would load torch's whole compiler.
    compiler.compile = lambda: compiler.dummy_decorator
    # It warns of optimizers that it does not know; these work element by element, as ZeRO needs it.
    known = zero_utils.ZERO_SUPPORTED_OPTIMIZERS
    known += [optimizer for optimizer in (AdamW, FusedAdamW) if optimizer not in known]
    try:
        with _silence():
            deepspeed.init_distributed(
                dist_backend="nccl" if device().type == "cuda" else "gloo",
                timeout=datetime.timedelta(seconds=timeout),
                verbose=False,
            )
    except dist.DistNetworkError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RendezvousError(
            f"the ranks cannot meet at {where}: {str(error).splitlines()[0]}. If another run is on this host, "
            "give this one a port of its own: deepspeed --master_port 29600 ..."
        ) from None


def _take_gpu() -> None:
    """Make this rank's GPU the current one: object collectives of NCCL go through that, and all would use GPU 0."""
    try:
        torch.cuda.set_device(device())
    except RuntimeError as error:  # too old a driver, more ranks than GPUs, a GPU that fell off the bus
        raise MegastableError(
            f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()} cannot use {device()} of "
            f"{torch.cuda.device_count()}: {str(error).splitlines()[0]} (nvidia-smi shows the driver and the GPUs; "
            "every rank must see all of its host; DS_ACCELERATOR=cpu trains without)"
        ) from None


def stop_distributed() -> None:
    """Leave the process group in step; without the barrier ranks sometimes abort at exit."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def device() -> torch.device:
    """The device of this rank: DS_ACCELERATOR=cpu keeps a run off the GPUs."""
    if get_accelerator().device_name() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    # DeepSpeed prints its partitioning and settings on stdout; ours are in the run directory.
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def _refusals(file: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, ValueError, KeyError, DeepSpeedConfigError) as error:
        raise ConfigError(
            f"deepspeed={file}: DeepSpeed refuses this configuration: {error}. Compare the file with those in "
            "ds_configs/, and look at `python -m megastable.config RECIPE`"
        ) from error


@contextlib.contextmanager
def _instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner)
    missing = object()
    before = own.get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


class _Mpu:
    """What DeepSpeed asks of a model-parallel unit where there is one pipeline stage."""

    def __init__(self, topology: Topology) -> None:
        self.t = topology

    def get_model_parallel_group(self) -> Any:
        return self.t.tensor_group

    def get_model_parallel_rank(self) -> int:
        return self.t.tensor_rank

    def get_model_parallel_world_size(self) -> int:
        return self.t.layout.tensor

    get_tensor_model_parallel_group = get_slice_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_slice_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> Any:
        return self.t.data_group

    def get_data_parallel_world_size(self) -> int:
        return self.t.layout.data


class _Parts(deepspeed.zero.Init):
    """Partitions the parameters of a module that are not yet filled."""

    def _zero_init_param(self, param: nn.Parameter) -> None:
        # Its own broadcasts them before: bytes of no meaning, which gloo holds whole for longer than they are needed.
        self._convert_to_deepspeed_param(param)
        param.partition()  # type: ignore[attr-defined]


class _Spec(LayerSpec):
    def __init__(self, layer: gpt.Layer, make: gpt.Make) -> None:
        super().__init__(nn.Module)
        self.layer, self.make = layer, make

    def build(self, log: bool = False) -> nn.Module:
        return self.make(self.layer.build)


class _TiedSpec(TiedLayerSpec):
    build = _Spec.build

    def __init__(self, layer: gpt.Layer, make: gpt.Make, forward: Callable[..., Any] | None) -> None:
        super().__init__("embedding", nn.Module, forward_fn=forward)
        self.layer, self.make = layer, make


class _Pipeline(PipelineModule):
    """A PipelineModule that is cut where `parallel.pipeline.partition` says."""

    def __init__(
        self,
        config: RunConfig,
        kernels: Kernels,
        topology: Topology,
        loss: LossFunction,
        cp: ContextParallel,
        make: gpt.Make,
    ) -> None:
        chunked, recompute = kernels.loss == "chunked", config.parallel.recompute
        head = gpt.LateHead if chunked else gpt.Head
        self._layers = layers = gpt.layers(config.model, loss.tp, recompute, kernels, head, cp)
        specs: list[LayerSpec] = []
        for index, layer in enumerate(layers):
            if layer.tied:
                forward = (gpt.features if chunked else gpt.tied_head) if index else None
                specs.append(_TiedSpec(layer, make, forward))
            else:
                specs.append(_Spec(layer, make))
        layout = topology.layout
        grid = PipeModelDataParallelTopology(num_pp=layout.pipeline, num_mp=layout.tensor, num_dp=layout.data)
        super().__init__(specs, topology=grid, loss_fn=loss)

    def _partition_layers(self, method: str = "") -> None:
        self.parts = partition(
            [layer.cost for layer in self._layers],
            self.num_stages,
            [layer.is_block for layer in self._layers],
        )
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(self.parts[stage], self.parts[stage + 1])


class Engine:
    """A GPT with its optimizer on this rank of a `Topology`. All methods are collective."""

    def __init__(self, config: RunConfig, ds_config: dict[str, Any], topology: Topology) -> None:
        self.config, self.topology = config, topology
        self.device = device()
        layout, p = topology.layout, config.parallel
        self.tp = TensorParallel(topology.tensor_group, topology.tensor_rank, layout.tensor, p.sequence)
        self.cp = ContextParallel(topology.context_group, layout.context)
        assert config.model.vocab_size is not None
        self.kernels = choose(config, self.device)
        if others := strangers(self.kernels):
            raise shared(
                ConfigError(
                    f"kernels: ranks {others} would compute by others than rank 0, and copies of weights drift apart: "
                    "install the same on all hosts, or name kernels that all of them have"
                )
            )
        self.loss = LossFunction(config.model.vocab_size, config.model.z_loss, self.tp, self.kernels.compile)
        with _silence():
            module = self._module(ds_config)
            staged = config.precision.fp8 is not None and layout.pipeline > 1
            sharing = topology.stage_group() if staged else None
            self.fp8 = apply(module, config, self.kernels.fp8, sharing, self.device)
            with _refusals(config.deepspeed):
                self.ds, self.optimizer, *_ = deepspeed.initialize(
                    model=module,
                    optimizer=_adamw(module, config.optimizer, self.kernels.compile),
                    config=ds_config,
                    mpu=_Mpu(topology) if layout.pipeline == 1 else None,
                    dist_init_required=False,
                )
        if isinstance(self.optimizer, BF16_Optimizer):
            self._mend_bf16_optimizer(self.optimizer)
        elif isinstance(self.optimizer, DeepSpeedZeroOptimizer):
            # ZeRO 2 divides 16-bit gradients before it sums them in fp32: by 3, each is rounded once more.
            self.optimizer.gradient_average = False
        self.tied = self._tie() if config.model.tied and layout.pipeline > 1 else None
        if layout.pipeline > 1 and self.ds.steps_per_print() is None:
            # Its pipeline times every step, and drops the times (two CUDA events each) only when it prints them.
            self.ds.timers = NoopTimer()
        self._update = self.ds._take_model_step
        self.ds._take_model_step = self._gate
        self._judge: Judge | None = None
        self._votes: Callable[[], Sequence[float]] = tuple
        self._probing = False
        self._copies: list[Filled | torch.cuda.Event] = []
        self.probe = Probe(self.ds.module, topology, self.tp, self.device, self.fp8)
        self.measured: Measured | None = None
        self.applied = False
        self.counters_before = self.counters()

    def _mend_bf16_optimizer(self, o: BF16_Optimizer) -> None:
        """Sums of gradients as ZeRO 1 has them (arXiv:1910.02054 section 5.1): a rank gets the part that it updates.

        Of DeepSpeed's own every rank gets all: twice the bytes, by way of copies, and norm and clipping of it all.
        """
        o._update_hp_grad = _Accumulate(o)
        data, parts = self.topology.layout.data, o.fp32_groups_gradient_flat_partition

        def reduce(*_: Any, **__: Any) -> None:
            for whole, part in zip(o.fp32_groups_gradients_flat, parts, strict=True) if data > 1 else ():
                sum_and_scatter(whole, part, self.topology.data_group)
                part.div_(data)

        self.ds.buffered_allreduce_fallback = reduce
        counted = [f for f in self.flat_state().fragments if f.counted]
        self._summed = [parts[f.group][f.offset : f.offset + f.numel] for f in counted]
        o.get_grads_for_norm = lambda for_clipping=False: parts if for_clipping else (self._summed, {})

    def _tie(self) -> TiedGradient | None:
        """Tied gradients are summed after the data-parallel sum, instead of by DeepSpeed before it. None on a stage
        without a copy."""
        group = self.topology.tied_group()
        self.ds.module.tied_comms = {}  # what DeepSpeed would sum over
        tied = {placement_of(p).name for p in self.ds.module.tied_modules.parameters()}
        if not tied:
            return None
        self._tied = f = next((f for f in self.flat_state().fragments if f.name in tied), None)
        held = range(f.start, f.start + f.numel) if f else range(0)
        return TiedGradient(held, self.topology.stage, group)

    def _sum_tied(self, tied: TiedGradient) -> None:
        if (f := self._tied) is None:
            tied.add(torch.empty(0, device=self.device))
        else:
            tied.add(self._gradients([f])[f.group, f.offset].view(-1)[: f.numel])

    def _module(self, ds_config: dict[str, Any]) -> nn.Module:
        """The model, or this rank's stage, with initial weights; under ZeRO 3 this rank's part of them."""
        c = self.config
        make = partial(self._make, ds_config)
        module: nn.Module
        if self.topology.layout.pipeline == 1:
            recompute = c.parallel.recompute
            module = gpt.GPT(c.model, self.tp, recompute, None, self.loss, self.kernels, self.cp, make)
        else:
            module = _Pipeline(c, self.kernels, self.topology, self.loss, self.cp, make)
        initialise(module, c.model, self.tp, c.run.seed, self.topology.data_rank)
        return module

    def _make(self, ds_config: dict[str, Any], build: Callable[[], nn.Module]) -> nn.Module:
        """A layer, not yet filled, where and in what dtype it computes: `deepspeed.initialize` would hold it twice to
        convert it, and whole to partition it."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES[self.config.precision.kind])
        try:
            with self.device:
                module = build()
        finally:
            torch.set_default_dtype(before)
        if self.config.parallel.zero == 3:
            for part in module.modules():
                if isinstance(part, ColumnParallelLinear | RowParallelLinear):
                    part.product = linear_of_parameter
            # Otherwise DeepSpeed monkeypatches F.linear globally.
            zero = ds_config["zero_optimization"] | {"memory_efficient_linear": False}
            given = ds_config | {"zero_optimization": zero}
            group, mpu = self.topology.data_group, _Mpu(self.topology)
            with _refusals(self.config.deepspeed):
                _Parts(module, group, config_dict_or_path=given, mpu=mpu)
        return module

    # Training

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        lr: float,
        judge: Judge,
        votes: Callable[[], Sequence[float]] = tuple,
    ) -> tuple[Measured, bool]:
        """One step on this rank's micro-batches: what was measured, and whether the update was applied.

        What `votes` says after the backward pass, as many numbers on every rank, is added up over the ranks and comes
        back in `Measured`: votes that cost no collective.
        """
        if not self._probing:
            self.counters_before = self.counters()
        self._judge, self._votes, self.measured = judge, votes, None
        self.loss.samples.clear()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self._computing():
            if self.topology.layout.pipeline > 1:
                self.ds.train_batch(iter([self._inputs(m) for m in micro_batches]))
            else:
                self.ds.train()
                for micro_batch in micro_batches:
                    inputs, labels = self._inputs(micro_batch)
                    self.ds.backward(self.ds(inputs, labels))
                    self.ds.step()
        if self.fp8 is not None:
            self.fp8.settle(self.applied)
        assert self.measured is not None, "the step ended without reaching the gate"
        return self.measured, self.applied

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Per-sample cross-entropy, fp64 [ranks x micro-batches], in the loader's order; no update."""
        self.loss.samples.clear()
        with self._computing():
            if self.topology.layout.pipeline > 1:
                batches = iter([self._inputs(m) for m in micro_batches])
                self.ds.eval_batch(batches, num_micro_batches=len(micro_batches))
            else:
                self.ds.eval()
                for micro_batch in micro_batches:
                    self.ds(*self._inputs(micro_batch))
        return self._collect(len(micro_batches), self._scalar([]))[0]

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.fp8 is None else self.fp8.computing()

    def _inputs(self, batch: MicroBatch) -> tuple[gpt.Stream, Tensor]:
        def move(x: Tensor) -> Tensor:
            return x.to(self.device, non_blocking=True)

        tokens, labels = move(batch.tokens), move(batch.labels)
        return (tokens if batch.segments is None else (tokens, move(batch.segments))), labels

    def _collect(self, micro_batches: int, extra: Tensor) -> tuple[Tensor, Tensor, list[float]]:
        """One sum over the world: per-sample numbers of the last stage, and `extra` (fp64 [n]) of every rank. Of a
        sample that ranks share each of them knows the mean over its tokens."""
        t, b = self.topology, self.config.train.micro_batch
        table = torch.zeros(2, micro_batches, t.layout.samples, b, dtype=torch.float64, device=self.device)
        if t.is_last_stage and t.tensor_rank == 0:
            table[:, :, t.sample_rank] = torch.stack(self.loss.samples, 1).double() / t.layout.context
        flat = torch.cat((table.flatten(), extra))
        dist.all_reduce(flat)
        flat = flat.cpu()
        n = table.numel() // 2
        return flat[:n], flat[n : 2 * n], flat[2 * n :].tolist()

    def _gate(self, lr_kwargs: Any = None) -> None:
        """In place of DeepSpeed's update: measure, judge, then update or drop. Every rank decides alike."""
        if isinstance(self.optimizer, DeepSpeedZeroOptimizer):
            torch._foreach_div_(list(self._gradients([]).values()), self.topology.layout.data)
        if self.tied is not None:
            self._sum_tied(self.tied)
        part, valid, known = self._squared_norm()
        part = torch.where(valid, part, 0.0)
        extra = torch.cat((torch.stack((part, (~valid).double())), self._scalar(self._votes())))
        losses, squares, (squared_norm, broken, *votes) = self._collect(
            self.ds.gradient_accumulation_steps(), extra
        )
        grad_norm = math.sqrt(squared_norm)
        scale = float(getattr(self.optimizer, "loss_scale", 1.0))
        # A loss that is not finite is no overflow of the scaled gradients: a smaller scale would not mend it.
        overflow = bool(broken) and self.config.precision.kind == "fp16" and scale > self._lowest_scale
        overflow &= bool(torch.isfinite(losses).all())
        norm_or_inf = math.inf if broken else grad_norm
        in_fp8 = None if self.fp8 is None else self.fp8.on
        self.measured = Measured(losses, squares, norm_or_inf, tuple(votes), scale, overflow, in_fp8)
        if self.probe.watching:
            flat = self.flat_state()
            self.probe.gradients(flat, self._gradients(flat.fragments), scale)
        assert self._judge is not None
        self._wait_for_copies()
        if self._judge(self.measured):
            # One that is not finite goes on to DeepSpeed, which drops the update, whatever the judge says.
            self._step(lr_kwargs, norm_or_inf if known is None else known)
        elif self.measured.overflow and not self._probing:
            # An overflow of fp16 is DeepSpeed's to skip: it lowers the loss scale on the way.
            self._step(lr_kwargs, known)
        else:
            self._discard()
            self.applied = False

    def _squared_norm(self) -> tuple[Tensor, Tensor, Any]:
        """This rank's part of the squared gradient norm, unscaled and unclipped, fp64: the parts of all ranks are
        summed. Whether it is a number. And what DeepSpeed itself computes for the norm, None where that is ours."""
        o = self.optimizer
        if isinstance(o, BF16_Optimizer):
            part = self._squares()
            return part, torch.isfinite(part), None
        if isinstance(o, DeepSpeedZeroOptimizer_Stage3):
            known = o._get_norm_groups()
            norms = torch.stack([self._scalar(n) for n in known])
            norm = torch.where(norms.min() < 0, -1.0, torch.linalg.vector_norm(norms))  # -1: an invalid group
        elif isinstance(o, DeepSpeedZeroOptimizer):
            norm = known = o.scaled_global_norm()
        else:
            raise TypeError(f"DeepSpeed chose {type(o).__name__}, which the gate does not know")
        norm = self._scalar(norm) / float(getattr(o, "loss_scale", 1.0))
        # All ranks have the norm of all: one says it, so that a last bit that differs cannot split them.
        said = norm.square() if self.topology.rank == 0 else torch.zeros_like(norm)
        return said, torch.isfinite(norm) & (norm >= 0), known

    def _squares(self) -> Tensor:
        """Of the sums that BF16_Optimizer updates this rank's part of the weights by, what this rank counts."""
        norms = torch._foreach_norm(self._summed) if self._summed else [self._scalar(0.0)]
        return torch.stack(norms).double().square().sum()

    def _step(self, lr_kwargs: Any, known: Any) -> None:
        """DeepSpeed's update, which would go over all gradients once more for the norm that it clips by."""
        o = self.optimizer
        owner, name = o, "scaled_global_norm"
        if isinstance(o, BF16_Optimizer):
            owner, name = bf16_optimizer, "get_global_norm_of_tensors"
        elif isinstance(o, DeepSpeedZeroOptimizer_Stage3):
            name = "_get_norm_groups"
        with _instead(owner, name, lambda *_, **__: known):
            self._update(lr_kwargs)
        self.applied = bool(self.ds.was_step_applied())

    def _gradients(self, fragments: Sequence[Fragment]) -> dict[tuple[int, int], Tensor]:
        """What the optimizer is about to use, times the loss scale, by the (group, offset) of its fragments."""
        o = self.optimizer
        if isinstance(o, BF16_Optimizer):
            buffers = o.fp32_groups_gradient_flat_partition
            return {(f.group, f.offset): buffers[f.group][f.offset :] for f in fragments}
        found = {}
        for group, pieces in o.averaged_gradients.items():
            offset = 0
            for piece in pieces:
                found[group, offset] = piece
                offset += piece.numel()
        return found

    def _scalar(self, value: Any) -> Tensor:
        # Without waiting: the votes are on their way to a GPU while it still computes the gradients.
        return torch.as_tensor(value, dtype=torch.float64).to(self.device, non_blocking=True)

    @property
    def _lowest_scale(self) -> float:
        return float(getattr(self.optimizer.loss_scaler, "min_scale", 0.0))

    def _discard(self) -> None:
        """Forget the gradients. Weights, moments and loss scale stay as they are, bit for bit."""
        o = self.optimizer
        o.zero_grad()
        if isinstance(o, DeepSpeedZeroOptimizer_Stage3):
            o.averaged_gradients = {}  # and its micro_step_id begins at 0: zero_grad has seen to it
        elif isinstance(o, DeepSpeedZeroOptimizer):
            o.micro_step_id = -1
            o._release_preflattened_grad_buffers()
            for key in o.averaged_gradients:
                o.averaged_gradients[key] = None
                o.all_grad_tensors[key] = None
        self.ds._step_applied = False
        self.ds.skipped_steps += 1
        self.ds.global_steps += 1
        self.ds.global_samples += self.ds.train_batch_size()

    def measure(self, micro_batches: Sequence[MicroBatch]) -> Measured:
        """What a step on these micro-batches would measure, by the same forward and backward; it leaves no trace."""
        counters, last = self.counters(), (self.measured, self.applied)
        self._probing = True
        try:
            lr = self.optimizer.param_groups[0]["lr"]
            measured, _ = self.train_step(micro_batches, lr, lambda _: False)
        finally:
            self._probing = False
            self.measured, self.applied = last
            self.restore_counters(counters)
        return measured

    def statistics(self) -> Statistics:
        """How weights, moments and the last update are, and what `probe.watch()` has seen of the last step."""
        return self.probe.collect(self.flat_state(), self.applied)

    # State

    def optimizer_state(self) -> dict[str, Tensor]:
        """The tensors that a snapshot copies: fp32 masters and Adam's state by name. Not copies: the very ones."""
        found: dict[str, Tensor] = {}
        for index, master in enumerate(self.masters):
            found[f"{index}/weight"] = master.data
            for key, value in self.optimizer.optimizer.state.get(master, {}).items():
                found[f"{index}/{key}"] = value
        return found

    @torch.no_grad()
    def restore_optimizer_state(self, saved: dict[str, Tensor]) -> None:
        """Bring masters and Adam's state to `saved`, in place; afterwards `refresh_weights`. Gradients are dropped."""
        self._wait_for_copies()
        inner = self.optimizer.optimizer
        for index, master in enumerate(self.masters):
            wanted = {name.split("/", 1)[1]: t for name, t in saved.items() if name.startswith(f"{index}/")}
            master.data.copy_(wanted.pop("weight"))
            state = inner.state[master]
            for key in [key for key in state if key not in wanted]:
                del state[key]
            for key, value in wanted.items():
                if key in state:
                    state[key].copy_(value)
                else:
                    on = master.device if value.dim() or inner.defaults.get("fused") else "cpu"
                    state[key] = value.to(on, copy=True)

    def counters(self) -> dict[str, Any]:
        """DeepSpeed's counts of steps, fp16's loss scaler, and what delayed scales of FP8 remember."""
        return {
            "engine": {name: getattr(self.ds, name) for name in COUNTERS},
            "scaler": self.scaler,
            "fp8": self.fp8.state() if self.fp8 is not None else None,
        }

    def restore_counters(self, saved: dict[str, Any]) -> None:
        for name, value in saved["engine"].items():
            setattr(self.ds, name, value)
        self.restore_scaler(saved["scaler"])
        if self.fp8 is not None:
            self.fp8.restore(saved["fp8"])

    def fp8_history(self) -> dict[str, list[list[float]]]:
        """What delayed scales of FP8 remember, of all layers of the model; collective."""
        here = self.fp8.history() if self.fp8 is not None else {}
        if self.topology.layout.pipeline == 1 or self.fp8 is None:
            return here
        return {name: told for held in gathered(here) for name, told in held.items()}

    def restore_fp8_history(self, history: History) -> None:
        if self.fp8 is not None:
            self.fp8.read(history)

    @property
    def scaler(self) -> dict[str, Any]:
        """fp16's loss scaler: its scale, and what it counts; empty in other precisions."""
        if self.config.precision.kind != "fp16":
            return {}
        values = vars(self.optimizer.loss_scaler).items()
        return {name: value for name, value in values if isinstance(value, int | float | bool)}

    def set_loss_scale(self, scale: float) -> None:
        """fp16: go on with this loss scale. Elsewhere there is none."""
        if self.config.precision.kind == "fp16":
            self.restore_scaler({"cur_scale": scale})

    def restore_scaler(self, saved: dict[str, Any]) -> None:
        for name in saved.keys() & self.scaler.keys():
            setattr(self.optimizer.loss_scaler, name, saved[name])

    def hold_updates(self, until: Filled | torch.cuda.Event) -> None:
        """The next update waits, on the GPU or for a thread, for `until`: what it overwrites is still being copied."""
        self._copies.append(until)

    def _wait_for_copies(self) -> None:
        for until in self._copies:
            if isinstance(until, Filled):
                until.synchronize()
            else:
                torch.cuda.current_stream().wait_event(until)
        self._copies.clear()

    def flat_state(self) -> FlatState:
        """Masters and moments of this rank by parameter; see flatstate.py. Views: what is written there counts."""
        o, fragments = self.optimizer, []
        for parameter in self.ds.module.parameters():
            placement = placement_of(parameter)
            counted = not getattr(parameter, "ds_pipe_replicated", False)
            counted &= parameter.tensor_model_parallel or self.topology.tensor_rank == 0
            shape = shape_of(parameter)
            if isinstance(o, DeepSpeedZeroOptimizer_Stage3):
                group, offset, size = o.grad_position[o.get_param_id(parameter)]
                start = self.topology.data_rank * size
                numel = min(size, parameter.ds_numel - start)
            else:
                held = getattr(parameter, "_hp_mapping", None)
                if held is None:
                    continue
                group, offset = held.param_group_index, held.hp_fragment_address.start
                start, numel = held.lp_fragment_address.start, held.lp_fragment_address.numel
            if numel > 0:
                fragments.append(
                    Fragment(
                        name=placement.name, dim=placement.dim, sections=placement.sections, shape=shape, group=group,
                        offset=offset, start=start, numel=numel, counted=counted,
                    )
                )  # fmt: skip
        masters, groups = self.masters, o.optimizer.param_groups
        # ZeRO 3 cuts the optimizer's groups into buffers of at most `sub_group_size` elements.
        owner = getattr(o, "sub_group_to_group_id", range(len(groups)))
        settings = [groups[owner[i]] for i in range(len(masters))]
        return FlatState(masters, o.optimizer, fragments, self.topology.data_group, settings)

    @property
    def masters(self) -> list[Tensor]:
        """The flat fp32 master weights of this rank."""
        o = self.optimizer
        if isinstance(o, BF16_Optimizer):
            return list(o.fp32_groups_flat_partition)
        if isinstance(o, DeepSpeedZeroOptimizer_Stage3):
            return list(o.fp32_partitioned_groups_flat)
        return list(o.single_partition_of_fp32_groups)

    def refresh_weights(self) -> None:
        """Bring the parameters that compute up to date with the master weights."""
        o = self.optimizer
        if isinstance(o, DeepSpeedZeroOptimizer_Stage3):
            # An evaluation leaves whole parameters behind, and they would be used as they are.
            o._partition_all_parameters()
            for master, low in zip(
                o.fp32_partitioned_groups_flat, o.fp16_partitioned_groups_flat, strict=True
            ):
                low.data.copy_(master.data)
            for group in range(len(o.fp16_partitioned_groups_flat)):
                o._unflatten_partitioned_parameters(group)
            if o.persistent_parameters:
                o.persistent_parameters[0].all_gather(o.persistent_parameters)
        else:
            o.update_lp_params()
            if isinstance(o, DeepSpeedZeroOptimizer):
                for group in range(len(o.bit16_groups)):
                    o._update_model_bit16_weights(group)


CHUNK = 1 << 18  # numbers, of which a CPU's cache has room for a copy


class _Accumulate:
    """In place of BF16_Optimizer's: adds a bf16 gradient to its fp32 sum in as few passes over memory as can be.

    Its own makes an fp32 copy of every gradient, in new memory, and adds that.
    """

    def __init__(self, optimizer: BF16_Optimizer) -> None:
        self._optimizer, self._wide = optimizer, torch.empty(CHUNK)

    @torch.no_grad()
    def __call__(self, lp: Tensor, group: int, index: int, clear_lp_grads: bool) -> None:
        if lp.grad is None:
            return
        o = self._optimizer
        total = o.fp32_groups_gradients[group][index]
        grad = lp.grad.detach().view(total.shape)
        if not o.fp32_groups_has_gradients[group][index]:
            total.copy_(grad)
        elif total.is_cuda:
            total.add_(grad)  # one kernel, which converts as it reads
        else:
            for to, given in zip(total.view(-1).split(CHUNK), grad.view(-1).split(CHUNK), strict=True):
                to.add_(self._wide[: len(given)].copy_(given))
        lp._hp_grad = total  # type: ignore[attr-defined]
        o.fp32_groups_has_gradients[group][index] = True


def _adamw(module: nn.Module, config: OptimizerConfig, compiled: bool) -> torch.optim.Optimizer:
    """AdamW over two groups: matrices decay, norms do not. compiled: the one with bf16 moments."""
    groups = decay_groups(module.parameters(), config.weight_decay)
    if config.moments == "bf16":
        return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, compiled=compiled)
    return FusedAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
