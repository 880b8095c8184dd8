"""Patches of DeepSpeed 0.19.8, each with its reason and with the change that would make it needless."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime import compiler
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups, nvtx
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils.timer import NoopTimer
from torch import Tensor, nn
from torch.distributed import Work, distributed_c10d

from megastable.base import activity
from megastable.base.collectives import find_least
from megastable.engine.gradient_sums import GradientSums
from megastable.engine.local_gradients import LocalGradients
from megastable.optim.build import OPTIMIZERS
from megastable.parallel.mappings import begin_sum, sum_and_scatter
from megastable.parallel.sharding import SPLIT
from megastable.parallel.topology import Topology


def patch_at_start() -> None:
    """Patches before the process group exists."""
    # DeepSpeed logs every setting. Needless when it logs on rank 0 and at debug only.
    deepspeed_logger.setLevel(logging.WARNING)
    # Its pipeline sends activations that require gradients; the gradients come back by a separate send. Needless
    # when it detaches what it sends.
    warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered.*")
    # It calls collectives by names that torch 2.13 replaced. Needless with a version for torch 2.13.
    warnings.filterwarnings("ignore", message=".*`torch.distributed.* is deprecated.*")
    if os.environ.get("DS_ACCELERATOR") == "cpu" and get_accelerator().device_name() != "cpu":
        # It probes CUDA once, at import: for a forked rank that was in its parent. Needless when it probes at the first
        # use.
        set_accelerator(CPU_Accelerator())
    # It imports its Muon only to check that the optimizer is another one, and Muon is compiled on import: every rank
    # would load torch's whole compiler. Needless when it checks without the import.
    compiler.compile = lambda: compiler.dummy_decorator
    # It warns of optimizers that it does not know; ours work on flat pieces, as ZeRO needs. Needless when it asks an
    # optimizer.
    known = zero_utils.ZERO_SUPPORTED_OPTIMIZERS
    known += [optimizer for optimizer in OPTIMIZERS if optimizer not in known]


def patch_for_cpu() -> None:
    """Patches for a rank that computes on a CPU."""
    # It refuses fp16 on CPUs without fp16 instructions; torch computes it on all of them, slowly. Needless when it asks
    # torch.
    get_accelerator().is_fp16_supported = lambda: True
    # Of its own operators it would use only the shared-memory collectives, which leave 66 MiB per rank in /dev/shm
    # after every run. To check which others exist, it would run a compiler on every rank. Needless when they clean
    # up, and can be disabled.
    deepspeed.ops.__compatible_ops__ = {}
    # Profiler ranges for a GPU around every hook of ZeRO 3: thousands a step. Needless when it checks for a GPU.
    nvtx.enable_nvtx = False
    # A collective on a CPU blocks until the slowest rank is there, also in the middle of a forward pass: that is no
    # work of this rank. (On a GPU it only enqueues.) Needless when torch counts the seconds.
    if not hasattr(Work.wait, "timed"):
        Work.wait = _timed(Work.wait)  # type: ignore[method-assign]


def _timed(wait: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        wait_begin = time.monotonic()
        try:
            return wait(*args, **kwargs)
        finally:
            activity.count_wait(time.monotonic() - wait_begin)

    timed.timed = True  # type: ignore[attr-defined]
    return timed


class Partitioned(deepspeed.zero.Init):
    """Partitions the parameters of a module that are not yet filled.

    DeepSpeed broadcasts them first: uninitialised bytes, which gloo holds in full for longer than needed.
    Needless when the broadcast can be disabled.
    """

    def _zero_init_param(self, param: nn.Parameter) -> None:
        self._convert_to_deepspeed_param(param)
        param.partition()  # type: ignore[attr-defined]


def disable_step_timers(engine: Any) -> None:
    """Disable step timers: its pipeline times every step, and frees the times (two CUDA events each) only when it
    prints them. Needless when it does not time what it will not print."""
    if engine.steps_per_print() is None:
        engine.timers = NoopTimer()


def report_activities(engine: Any) -> None:
    """Say what is done in every instruction of a pipeline's schedule: a whole step is one call. Collective. Needless
    when it calls hooks."""
    doing = {
        schedule.LoadMicroBatch: activity.DATA, schedule.ForwardPass: activity.FORWARD,
        schedule.BackwardPass: activity.BACKWARD, schedule.ReduceTiedGrads: activity.REDUCE,
        schedule.ReduceGrads: activity.REDUCE,
    }  # fmt: skip
    exchanges = (schedule.SendActivation, schedule.RecvActivation, schedule.SendGrad, schedule.RecvGrad)

    def within(kind: type, instruct: Callable[..., None]) -> Callable[..., None]:
        def enter(self: Any, *args: Any, **kwargs: Any) -> None:
            activity.enter_activity(doing[kind])
            instruct(self, *args, **kwargs)

        def exchange(self: Any, *args: Any, **kwargs: Any) -> None:
            activity.begin_exchange(world._get_sequence_number_for_group())
            instruct(self, *args, **kwargs)
            activity.end_exchange(world._get_sequence_number_for_group())

        if kind in exchanges:
            return exchange
        return enter if kind in doing else instruct

    world: Any = distributed_c10d._get_default_group()
    count = world._get_sequence_number_for_group()
    activity.set_exchanged(count - find_least([count])[0])  # it tries its links when it is built
    engine._INSTRUCTION_MAP = {kind: within(kind, f) for kind, f in engine._INSTRUCTION_MAP.items()}


# Of a message, at either end: this stage and the other, or the chunks of the model there, by their numbers.
Hop = tuple[int, int]


def watch_messages(
    own_stage: int, sent: Callable[[Tensor, Hop], None], received: Callable[[Tensor, Hop], None]
) -> None:
    """Show every message between stages, with its hop: before it is sent, and when it has arrived. Needless with
    hooks."""
    # Another engine's may be there.
    real_send, real_receive = (getattr(function, "real", function) for function in (p2p.send, p2p.recv))

    def shown_send(tensor: Tensor, stage: int, *args: Any) -> Any:
        sent(tensor, (own_stage, stage))
        return real_send(tensor, stage, *args)

    def shown_receive(tensor: Tensor, stage: int, *args: Any) -> Any:
        receive_result = real_receive(tensor, stage, *args)
        received(tensor, (own_stage, stage))
        return receive_result

    shown_send.real, shown_receive.real = real_send, real_receive  # type: ignore[attr-defined]
    shown_send.watch, shown_receive.watch = sent, received  # type: ignore[attr-defined]
    p2p.send, p2p.recv = shown_send, shown_receive


def show_message(end: Callable[..., Any], message: Tensor, hop: Hop) -> None:
    """Show a message that went another way to what watches them, if anything does. end: DeepSpeed's function of this
    end, p2p.send or p2p.recv."""
    if (watch := getattr(end, "watch", None)) is not None:
        watch(message, hop)


@contextlib.contextmanager
def share_among(group: Any) -> Iterator[None]:
    """Inside, BF16_Optimizer shares the state out over `group` instead of all data ranks. Its replicas (MiCS, hpZeRO)
    are for ZeRO 3 alone. Needless when ZeRO 1 has them."""
    initialise = BF16_Optimizer.__init__

    def initialise_in_group(o: BF16_Optimizer, *given: Any, **named: Any) -> None:
        initialise(o, *given, **named | {"dp_process_group": group})

    with replace_attribute(BF16_Optimizer, "__init__", initialise_in_group):
        yield


class _ShardGroups:
    """What a wrapper sets as the data ranks of its parameter groups, but for those of experts `group`."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __set__(self, o: Any, given: Sequence[Any]) -> None:
        pairs = zip(o.optimizer.param_groups, given, strict=True)
        vars(o)[SHARD_GROUPS] = [self._group if of.get("split") else data_group for of, data_group in pairs]

    def __get__(self, o: Any, _: Any = None) -> Any:
        return vars(o)[SHARD_GROUPS]


SHARD_GROUPS = "real_dp_process_group"


@contextlib.contextmanager
def share_experts(topology: Topology) -> Iterator[None]:
    """Inside, ZeRO 1 and 2 share the state of experts out over the data ranks that have the same ones.

    DeepSpeed does so for layers of its own (`has_moe_layers`), of which it then sums and divides gradients, and takes
    the norm, in another way than those of other layers. Only its marks of parameters serve, by which it leaves experts
    on different ranks different when it starts, and ZeRO 2 knows their ranks. Needless when every group of parameters
    may name its ranks.
    """
    if topology.layout.expert == 1:
        yield
        return
    group = topology.find_sharing(True).group
    groups._EXPERT_DATA_PARALLEL_GROUP[SPLIT] = group
    with contextlib.ExitStack() as stack:
        for wrapper in (BF16_Optimizer, DeepSpeedZeroOptimizer):
            stack.enter_context(replace_attribute(wrapper, SHARD_GROUPS, _ShardGroups(group)))
        yield


def sum_in_parts(o: BF16_Optimizer, engine: Any, sums: GradientSums) -> None:
    """Reduce-scatter gradients as in ZeRO 1 (arXiv:1910.02054 section 5.1), while they are computed.

    By default every rank gets all, after the backward pass: twice the bytes, with copies, and norm and clipping of
    everything. Needless when BF16_Optimizer reduce-scatters. It also makes an fp32 copy of every gradient in new memory
    to add it, and zeroes all sums twice; needless when it adds in place and overwrites.
    """
    o._update_hp_grad = sums.add_gradient
    o.clear_hp_grads = sums.own.clear_counts
    engine.buffered_allreduce_fallback = sums.finish_sums
    parts = o.fp32_groups_gradient_flat_partition
    o.get_grads_for_norm = lambda for_clipping=False: parts if for_clipping else (sums.own.counted, {})


def update_at_once(o: DeepSpeedZeroOptimizer) -> None:
    """Call the optimizer once for all parameter groups, as BF16_Optimizer does.

    By default it is called for one group after the other. Stages of a pipeline have different groups, and one without
    the embedding's would call less often: an optimizer that sums over all stages would wait forever. Needless when
    DeepSpeed calls it once.
    """
    group_masters, group_gradients = o.single_partition_of_fp32_groups, []

    def step(group: int) -> None:
        group_gradients.append(group_masters[group].grad)
        if len(group_gradients) < len(group_masters):
            return
        for group_master, group_gradient in zip(group_masters, group_gradients, strict=True):
            group_master.grad = group_gradient
        group_gradients.clear()
        o.optimizer.step()
        o._lazy_init_hp_params_optimizer_state()
        for index, group_master in enumerate(group_masters):
            group_master.grad = None
            rank = dist.get_rank(o.real_dp_process_group[index])
            o.parallel_partitioned_bit16_groups[index][rank].copy_(group_master.data)

    o._optimizer_step = step


def scatter_buckets(
    o: DeepSpeedZeroOptimizer, topology: Topology, watching: Callable[[], LocalGradients | None]
) -> None:  # fmt: skip
    """Reduce-scatter the buckets of ZeRO 2, and of ZeRO 1 in fp16 and fp32, to the ranks that update them.

    By default every rank gets all of a bucket and keeps its part: twice the bytes, with ZeRO 2 in every micro-batch.
    Its other way is a reduction to each owner, before which it waits for the whole device. Needless when it
    reduce-scatters. watching: what measures the gradients before and after a sum, if anything does.
    """
    expert_sharing = topology.find_sharing(True)
    o.expert_dp_process_group = {SPLIT: expert_sharing.group}

    def scatter(
        bucket: Sequence[Tensor], dtype: torch.dtype, bucket_ranks: Any, output_bucket: Any, process_group: Any,
        **_: Any,
    ) -> None:  # fmt: skip
        is_split = topology.layout.expert > 1 and process_group is expert_sharing.group
        data_group, rank_count, own_rank = topology.find_sharing(is_split)
        owned_numbers: list[list[int]] = [[] for _ in range(rank_count)]
        for number, (owner,) in enumerate(bucket_ranks):
            owned_numbers[owner].append(number)
        whole_bucket: Tensor = o.flatten(
            [bucket[number] for numbers in owned_numbers for number in numbers]
        ).to(dtype)
        owner_pieces = whole_bucket.split(
            [sum(bucket[number].numel() for number in numbers) for numbers in owned_numbers]
        )
        # Sums in another type round too much to be checked.
        gradient_watch = watching() if dtype is torch.float32 else None
        if gradient_watch is not None:
            for receiver, owner_piece in enumerate(owner_pieces):
                if owner_piece.numel():
                    gradient_watch.measure_bucket_before_sum(owner_piece, receiver, is_split)
        begin_sum(whole_bucket, owner_pieces, own_rank, data_group).wait()
        if gradient_watch is not None and owned_numbers[own_rank]:
            gradient_watch.measure_after_sum([owner_pieces[own_rank]])
        own_sums = owner_pieces[own_rank].split(
            [bucket[number].numel() for number in owned_numbers[own_rank]]
        )
        for number, own_sum in zip(owned_numbers[own_rank], own_sums, strict=True):
            o._add_to_grad_partition_buffer(output_bucket[number], own_sum)  # ZeRO 2 keeps the fp32 result
            bucket[number].copy_(own_sum)
            if o.overlap_comm and not get_accelerator().resolves_data_dependency():
                bucket[number].record_stream(o.reduction_stream)

    o.use_multi_rank_bucket_allreduce = True
    o.allreduce_and_copy_with_multiple_ranks = scatter


def measure_scattering(o: DeepSpeedZeroOptimizer_Stage3, watch: LocalGradients, ranks: int) -> None:
    """Reduce-scatter the buckets of ZeRO 3 as DeepSpeed does, measured before and after; it pads with what lies in
    memory, of which there is no checksum.

    Needless with hooks before and after its sum, and with zeros.
    """

    def scatter(parameters: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
        flat_gradients = [p.grad.to(dtype).view(-1) for p in parameters]
        column_sizes = [-(-one_gradient.numel() // ranks) for one_gradient in flat_gradients]
        padded_table = flat_gradients[0].new_zeros(ranks, sum(column_sizes))
        columns = padded_table.split(column_sizes, 1)
        for one_gradient, rank_column in zip(flat_gradients, columns, strict=True):
            column_size, full_rows = rank_column.shape[1], one_gradient.numel() // rank_column.shape[1]
            whole_rows, rest = one_gradient.tensor_split([full_rows * column_size])
            rank_column[:full_rows] = whole_rows.view(full_rows, column_size)
            if full_rows < ranks:
                rank_column[full_rows, : rest.numel()] = rest
        flat_table = padded_table.div_(ranks).flatten()
        partition_group = o._get_param_partition_group(parameters[0])
        rank = dist.get_rank(partition_group)
        own_part, is_checked = flat_table.view(ranks, -1)[rank], flat_table.dtype is torch.float32
        if is_checked:
            watch.measure_before_sum([flat_table])
        sum_and_scatter(flat_table, own_part, partition_group)
        if is_checked:
            watch.measure_after_sum([own_part])
        own_gradients = []
        for one_gradient, own_piece in zip(flat_gradients, own_part.split(column_sizes), strict=True):
            left_elements = min(max(one_gradient.numel() - rank * len(own_piece), 0), len(own_piece))
            own_gradients.append(own_piece[:left_elements].to(o.gradient_accumulation_dtype))
        return own_gradients

    o._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads = scatter


@contextlib.contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set another value of an attribute for the duration of the block."""
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


def hold_update_back(engine: Any) -> Callable[..., None]:
    """Let the engine's `step` and `train_batch` end before the update; returns what updates. Needless with a hook
    between backward and update."""
    model_update: Callable[..., None] = engine._take_model_step
    engine._take_model_step = lambda lr_kwargs=None: None
    return model_update
