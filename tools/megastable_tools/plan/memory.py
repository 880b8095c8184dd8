"""Device and host memory of one rank, by kind and by phase of a step. Pure; without torch.

    for footprint in footprints(config, layout):            # of every pipeline stage
        print(footprint.stage, footprint.total, footprint.peak, footprint.kinds)

State between steps follows the layout of DeepSpeed 0.19.8 (ZeRO, arXiv:1910.02054 section 5); activations are counted
in activations.py, for as many micro-batches as 1F1B has in flight (Narayanan et al., arXiv:2006.09503
section 3.2). `benchmarks/footprint.py` compares both with real steps. Not included: the waste of a GPU's allocator, the
CUDA context, NCCL's buffers and scratch space of cuBLAS and cuDNN (`planning.md` says how much to reserve).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple

from megastable.config import deepspeed_json
from megastable.config.rules import caps_logits
from megastable.config.tree import RunConfig
from megastable.model.sizes import chunk_size, elements_on, fp8_linears, keeps_weight_casts
from megastable.optim.ownership import LIMIT
from megastable.parallel.interleaved import list_passes
from megastable.parallel.layout import Layout
from megastable_tools.plan import activations
from megastable_tools.plan.activations import PlannedKernels
from megastable_tools.plan.partition import (
    FP32,
    Stage,
    count_element_bytes,
    count_shards,
    count_tables,
    list_chunk_blocks,
    pad_flat,
    parameter_groups,
    parameter_sizes,
    round_up,
    stage_bounds,
    stage_of,
)
from megastable_tools.plan.updates import list_block_weights, stage_matrices, update_cost_of
from megastable_tools.plan.volume import tied_piece

# Copied from model/ and optim/, which need torch; on a CPU only.
LOSS_BLOCK, SUM_CHUNK, UPDATE_CHUNK, SCORES = 2**19, 2**18, {"cpu": 2**17, "cuda": 2**24}, 2**20
FUSED_CHUNK = 2**18
ENTROPY_BLOCK = {"cpu": LOSS_BLOCK, "cuda": 2**22}
CHUNK, FP8_CHUNK = 2**22, 2**20  # of flatstate.py and fp8/scale_factors.py
ALIGN = 64  # of model/blocked.py

Kind = Literal["weights", "gradients", "master", "moments", "activations", "logits", "buffers"]
# Phases of a step: before the last block of a micro-batch, where layer_stats.py examines its attention; the loss; in
# the backward pass loss and head, the last blocks, the first block and embedding; the update; its weights on their way
# to other ranks. Then between two steps, and before the first one: building the layers, then the optimizer's state.
Phase = Literal[
    "watch", "loss", "head", "backward", "end", "update", "exchange", "between", "layers", "optimizer"
]
Device = Literal["cuda", "cpu"]
KINDS: tuple[Kind, ...] = ("weights", "gradients", "master", "moments", "activations", "logits", "buffers")
STEP: tuple[Phase, ...] = ("watch", "loss", "head", "backward", "end", "update", "exchange", "between")
BUILDING: tuple[Phase, ...] = ("layers", "optimizer")
PHASES = (*STEP, *BUILDING)
WAITING: tuple[Phase, ...] = ("loss", "head", "backward")  # phases in which saved activations are in memory
PASSES: tuple[Phase, ...] = ("watch", *WAITING, "end")
BACK: tuple[Phase, ...] = ("head", "backward", "end")


@dataclass(frozen=True)
class Item:
    """Bytes of one kind on a rank. phases: in which they are allocated."""

    kind: Kind
    name: str
    bytes: int
    phases: tuple[Phase, ...] = STEP


@dataclass(frozen=True)
class Host:
    """Host memory of one rank. snapshot: one snapshot; points: number of snapshots that the recipe keeps; checkpoint:
    the copy that is written in the background. building: the peak before the first step, when none of these exists."""

    snapshot: int
    points: int
    checkpoint: int
    building: int


@dataclass(frozen=True)
class Footprint:
    """Memory of a rank of pipeline stage `stage`; items: all of it, by name."""

    stage: int
    items: tuple[Item, ...]
    host: Host

    def bytes_at(self, phase: Phase) -> dict[Kind, int]:
        """Bytes by kind in a phase."""
        bytes_by_kind = dict.fromkeys(KINDS, 0)
        for memory_item in self.items:
            if phase in memory_item.phases:
                bytes_by_kind[memory_item.kind] += memory_item.bytes
        return bytes_by_kind

    @cached_property
    def peak(self) -> Phase:
        """The phase with the most bytes."""
        bytes_by_phase = dict.fromkeys(PHASES, 0)
        for memory_item in self.items:
            for step_phase in memory_item.phases:
                bytes_by_phase[step_phase] += memory_item.bytes
        return max(PHASES, key=bytes_by_phase.__getitem__)

    @cached_property
    def kinds(self) -> dict[Kind, int]:
        """Bytes by kind at the peak; they add up to `total`."""
        return self.bytes_at(self.peak)

    @cached_property
    def total(self) -> int:
        """Bytes on the device at the peak."""
        return sum(self.kinds.values())

    @property
    def building(self) -> int:
        """Peak of bytes on the device before the first step."""
        return max(sum(self.bytes_at(step_phase).values()) for step_phase in BUILDING)

    @property
    def held(self) -> int:
        """Bytes on the device between two steps."""
        return sum(self.bytes_at("between").values())


def list_footprints(
    config: RunConfig,
    layout: Layout,
    *,
    device: Device = "cuda",
    kernels: PlannedKernels | None = None,
    zero: Mapping[str, Any] | None = None,
    elements: int | None = None,
    cut: Sequence[int] | None = None,
    stages: Iterable[int] | None = None,
) -> list[Footprint]:
    """Memory of a rank of each of these pipeline stages, None = all, in steps after the first one.

    config: model.vocab_size must be known; layout: config.parallel on a number of ranks. kernels: None = those that the
    config selects on such a device (`kernels_on`). zero: the section zero_optimization of DeepSpeed's configuration;
    None = that of the config's file. elements: logits of a chunk; None = the device's. cut: None = `volume.bounds`.

    Raises ConfigError if the batch cannot be divided over the layout, or the DeepSpeed file is missing.
    """
    cut = stage_bounds(config) if cut is None else cut
    kernels = kernels or kernels_on(config, device)
    zero = read_zero_section(config.deepspeed, config.parallel.zero) if zero is None else zero
    has_both = config.model.expert_blocks < config.model.layers
    kinds_of_blocks = [*([False] if has_both else []), *([True] if config.model.expert_blocks else [])]
    # The same on all stages. True: with routed experts.
    blocks_by_kind = {
        is_routed: activations.list_block_operations(config, kernels, is_routed)
        for is_routed in kinds_of_blocks
    }
    steps = deepspeed_json.count_micro_batches(config, layout.world)
    footprints = []
    for stage in range(config.parallel.pipeline) if stages is None else stages:
        chunk_blocks = list_chunk_blocks(cut, stage, config.parallel.model_chunks)
        held, blocks = stage_of(config, cut, stage), list(chain(*chunk_blocks))
        flying = _count_flying(layout.pipeline, stage, tuple(map(len, chunk_blocks)), steps)
        groups = _flat(config, layout, held)
        memory_items = [
            *_state(config, held, groups),
            *_exchanged(config, layout, held, groups, steps, zero),
            *_building(config, held, groups),
            *_activations(config, held, blocks, kernels, flying, blocks_by_kind),
            *_deferred(config, held, min(stage, steps - 1), kernels),
            *_fp8_weights(config, blocks, kernels, flying),
            *_ends(config, held),
            *_stages(config, layout, held, flying),
            *_scratch(config, layout, held, groups, kernels, device),
        ]
        if held.last:
            memory_items += _logits(config, kernels, elements or elements_on(device), device)
        found_items = tuple(memory_item for memory_item in memory_items if memory_item.bytes)
        footprints.append(Footprint(stage, found_items, _host(config, held, groups)))
    return footprints


class Flying(NamedTuple):
    """What is in flight on a stage at most: passes of micro-batches, and blocks in them, of `held`; without the newest
    pass `left` blocks."""

    passes: int
    blocks: int
    left: int
    held: int

    def scale(self, stage_bytes: int) -> int:
        """What the blocks in flight keep, if all of the stage keep `stage_bytes` of one micro-batch."""
        return stage_bytes * self.blocks // self.held

    def scale_rest(self, stage_bytes: int) -> int:
        """As `scale`, without the newest pass."""
        return stage_bytes * self.left // self.held


@lru_cache(maxsize=4096)
def _count_flying(stages: int, stage: int, chunk_blocks: tuple[int, ...], micro_batches: int) -> Flying:
    """chunk_blocks: blocks of every chunk of the stage."""
    held = sum(chunk_blocks)
    if len(chunk_blocks) == 1:
        passes = min(stages - stage, micro_batches)
        return Flying(passes, passes * held, (passes - 1) * held, held)
    passes = blocks = 0
    most = Flying(0, 0, 0, held)
    # Later micro-batches repeat what the first ones do.
    for one_pass in list_passes(stages, stage, len(chunk_blocks), min(micro_batches, 2 * stages)):
        sign, pass_blocks = 1 if one_pass.is_forward else -1, chunk_blocks[one_pass.chunk]
        passes, blocks = passes + sign, blocks + sign * pass_blocks
        most = max(
            most, Flying(passes, blocks, blocks - pass_blocks, held), key=lambda f: (f.blocks, f.passes)
        )
    return most


def kernels_on(config: RunConfig, device: Device) -> PlannedKernels:
    """The result of `numerics.choose` on such a device, if everything is installed there."""
    wanted, gpu = config.kernels, device == "cuda"
    capped, fp16 = config.model.attention_softcap is not None, config.precision.kind == "fp16"
    te = gpu and config.precision.kind != "fp32" and not config.segmented
    there = {"reference": True, "sdpa": True, "blocked": not gpu and not fp16, "te": te}
    usable = [name for name, is_there in there.items() if is_there]
    possible = {name for name in usable if not capped or caps_logits(name, device)}
    if config.parallel.is_ring:
        possible = {"sdpa", "reference"}
    attention: str = wanted.attention
    if attention not in possible:  # "auto", too
        attention = next(name for name in ("blocked", "sdpa", "reference") if name in possible)
    compiled = gpu if wanted.compile == "auto" else wanted.compile
    loss = "chunked" if wanted.loss == "auto" else wanted.loss
    return PlannedKernels(attention, loss, compiled and config.parallel.zero != 3, gpu)


@lru_cache(maxsize=8)
def read_zero_section(name: str, stage: int) -> dict[str, Any]:
    """zero_optimization of the DeepSpeed file `name` for a ZeRO stage. Raises ConfigError if it contradicts or is
    missing."""
    zero_config = RunConfig.model_validate({"deepspeed": name, "parallel": {"zero": stage}})
    return deepspeed_json.build_deepspeed_json(zero_config, 1)["zero_optimization"]


class FlatGroup(NamedTuple):
    """Elements of a group of the optimizer on a rank before ZeRO partitions it, padded for that, and of the rank's own
    part."""

    whole: int
    own: int


def _flat(config: RunConfig, layout: Layout, held: Stage) -> list[FlatGroup]:
    flat_groups = list[FlatGroup]()
    for group in parameter_groups(config, held):
        shards = count_shards(config, layout.data, group)
        if config.parallel.zero == 3:
            whole = sum(round_up(n, layout.data) * size_count for n, size_count in group.counts.items())
        else:
            whole = pad_flat(group.total, shards)
        flat_groups.append(FlatGroup(whole, whole // shards))
    return flat_groups


def _sum_own(groups: Sequence[FlatGroup]) -> int:
    return sum(group.own for group in groups)


def _sum_whole(groups: Sequence[FlatGroup]) -> int:
    return sum(group.whole for group in groups)


def _sums(config: RunConfig) -> bool:
    """Whether BF16_Optimizer keeps permanent fp32 sums of all gradients."""
    return config.parallel.zero == 1 and config.precision.kind == "bf16"


def _state(config: RunConfig, held: Stage, groups: Sequence[FlatGroup]) -> Iterable[Item]:
    """Memory held from step to step; the moments are created by the first update."""
    e, whole, own = count_element_bytes(config), _sum_whole(groups), _sum_own(groups)
    made_phases: tuple[Phase, ...] = (*STEP, "optimizer")
    yield Item("weights", "weights that compute", (own if config.parallel.zero == 3 else whole) * e, PHASES)
    yield Item("master", "fp32 master weights", own * FP32, made_phases)
    yield Item("moments", "the optimizer's state", sum(_optimizer_state(config, held, groups)))
    if _sums(config):
        yield Item("gradients", "fp32 sums of gradients", whole * FP32, made_phases)
    elif config.parallel.zero == 3:
        yield Item("gradients", "fp32 sums of gradients, this rank's part", own * FP32, made_phases)


def _building(config: RunConfig, held: Stage, groups: Sequence[FlatGroup]) -> Iterable[Item]:
    """Additional memory before the first step: under ZeRO 3 a layer that is not yet partitioned, then a parameter
    gathered for its hook. A second, flat copy of the weights is `Host.building`."""
    element_bytes = count_element_bytes(config)
    if config.parallel.zero == 3:
        matrix_sizes, _ = parameter_sizes(config.model, held, config.parallel.tensor)
        block_sizes = [
            sum(map(sum, parameter_sizes(config.model, held.cut_block(last), config.parallel.tensor)))
            for last in (False, True)
        ]
        layer = max(*block_sizes, *matrix_sizes)
        yield Item("weights", "a layer, whole", layer * element_bytes, ("layers",))
        yield Item("weights", "a parameter, whole", max(matrix_sizes) * element_bytes, ("optimizer",))
    elif not _sums(config):
        copy_bytes = _sum_own(groups) * FP32
        yield Item("gradients", "the update's copy of this rank's part", copy_bytes, ("optimizer",))


def _exchanged(
    config: RunConfig, layout: Layout, held: Stage, groups: Sequence[FlatGroup], steps: int,
    zero: Mapping[str, Any],
) -> Iterable[Item]:  # fmt: skip
    """Memory for gradients and weights in transit between the data ranks."""
    if config.parallel.zero < 3:  # what this rank gives, and what it gets: parallel/mappings.py
        passed_on = sum(group.own for group in groups if group.own < group.whole) * count_element_bytes(
            config
        )
        yield Item("weights", "updated weights on their way to other ranks", 2 * passed_on, ("exchange",))
    if _sums(config):
        other = tied_piece(config, layout.data, held)  # elsewhere the update's copy is larger
        yield Item("gradients", "the other stage's gradient of the embedding", other * FP32, ("update",))
        if config.optimizer.clipping.kind == "worker":
            own_bytes = _sum_own(groups) * FP32 * (2 if layout.replicas > 1 else 1)
            what = "this rank's own gradient, of what it sums and updates"
            yield Item("gradients", what, own_bytes, ("update",))
        return
    e, whole_elements = count_element_bytes(config), _sum_whole(groups)
    own, zero_stage = _sum_own(groups), config.parallel.zero
    bucket = int(zero.get("reduce_bucket_size", 5e8))
    full = _fill(config, held, bucket) if zero_stage > 1 else 0
    earlier: tuple[Phase, ...] = PASSES if steps > 1 else ("end",)  # from the first micro-batch on
    if zero_stage == 1:
        yield Item("gradients", "fp32 sums of gradients", whole_elements * FP32, (*earlier, "update"))
        yield Item("buffers", "bucket of gradients", bucket * FP32, BACK)
    elif zero_stage == 2:
        yield Item("gradients", "fp32 sums of gradients, this rank's part", own * FP32, (*earlier, "update"))
        buffer_count = 2 if zero.get("overlap_comm") else 1
        yield Item("buffers", "buckets of gradients", buffer_count * bucket * e, ("backward", "end"))
        yield Item("buffers", "a bucket in fp32, to be summed", full * FP32 * (e < FP32), ("end",))
    else:
        yield Item("buffers", "bucket of gradients", bucket * FP32, (*STEP, "optimizer"))
        yield Item("gradients", "gradients of a bucket", full * e, ("end",))
        yield Item("buffers", "a bucket in fp32, twice, to be summed", 2 * full * FP32, ("end",))
        live = int(zero.get("stage3_max_live_parameters", 1e9))
        live += int(zero.get("stage3_prefetch_bucket_size", 5e7))
        yield Item("weights", "gathered weights", min(whole_elements, live) * e, ("watch", *WAITING))
        # Released weights were freed already.
        first = _flat(config, layout, replace(held.cut_block(last=False), first=held.first))
        first_elements = _sum_whole(first)
        yield Item("weights", "gathered weights of the first block", min(first_elements, live) * e, ("end",))
    copy_bytes = max(group.own for group in groups) * FP32
    yield Item("gradients", "the update's copy of this rank's part", copy_bytes, ("update",))


def _fill(config: RunConfig, held: Stage, bucket: int) -> int:
    """The most gradients in a bucket before the next one no longer fits: from the head to the embedding."""
    expert_ranks = config.parallel.expert
    matrix_sizes, _ = parameter_sizes(config.model, held, config.parallel.tensor, expert_ranks)
    if sum(matrix_sizes) <= bucket:
        return sum(matrix_sizes)
    inner = len(matrix_sizes) - count_tables(config.model, held)
    block_sizes, end_sizes = matrix_sizes[:inner], matrix_sizes[inner:]
    return _fill_most((*end_sizes[held.first :], *reversed(block_sizes), *end_sizes[: held.first]), bucket)


@lru_cache(maxsize=256)
def _fill_most(gradient_sizes: tuple[int, ...], bucket: int) -> int:
    most = bucket_fill = 0
    for size in gradient_sizes:
        bucket_fill = bucket_fill + size if bucket_fill + size <= bucket else size
        most = max(most, bucket_fill)
    return most


def _activations(
    config: RunConfig,
    held: Stage,
    blocks: Sequence[int],
    kernels: PlannedKernels,
    flying: Flying,
    blocks_by_kind: Mapping[bool, Sequence[activations.SavedOperation]],
) -> Iterable[Item]:
    """Saved activations of the passes in flight, and the temporary memory of the backward pass. blocks: the numbers of
    the stage's. blocks_by_kind: the operations of one with routed experts, and of one without."""
    z, back = activations.shape_sizes_of(config), "gradients on their way back"
    first_routed, last_routed = (held.cut_block(last).routed > 0 for last in (False, True))
    for is_routed, block_operations in blocks_by_kind.items():
        if not (block_count := held.count_blocks(is_routed)):
            continue
        alike_blocks = [n for n in blocks if (config.model.experts_of(n) is not None) == is_routed]
        for saved_tensor in chain(*(saved_operation.saved for saved_operation in block_operations)):
            linear_name = activations.INPUTS.get(saved_tensor.name)
            fp8_block_count = fp8_blocks(config, alike_blocks, linear_name) if linear_name else 0
            fp8_bytes = activations.in_fp8(config, saved_tensor, kernels.gpu)
            each = saved_tensor.bytes * block_count + fp8_bytes * fp8_block_count
            most, ending, one_block = flying.scale(each), flying.scale_rest(each), each // block_count
            yield Item("activations", saved_tensor.name, most, WAITING)
            # Before the last block only that one is missing; at the end of a backward pass the first one is left.
            missing = one_block if is_routed == last_routed else 0
            yield Item("activations", saved_tensor.name, most - missing, ("watch",))
            left = one_block if is_routed == first_routed else 0
            yield Item("activations", saved_tensor.name, ending + left, ("end",))
    stream = z.stream * z.e
    yield Item("activations", "input of the last block", stream, ("watch",))
    beside_bytes = activations.count_backward_bytes(blocks_by_kind[last_routed]) + stream
    ending_bytes = activations.count_backward_bytes(blocks_by_kind[first_routed]) + stream
    if held.last:
        final = activations.final_norm(config, kernels)
        # On the last stage one micro-batch is in flight.
        final_bytes = activations.count_kept_bytes(final)
        yield Item("activations", "final norm", final_bytes, WAITING)
        beside_bytes = max(activations.count_backward_bytes(final) + stream, beside_bytes - final_bytes)
        is_scaled = config.model.width_ratio != 1.0  # the head's input is then another tensor
        yield Item("activations", "features", z.N * z.h * z.e * (1 + is_scaled), ("loss",))
    yield Item("activations", back, beside_bytes, ("backward",))
    yield Item("activations", back, ending_bytes, ("end",))
    if config.segmented:
        head_width = config.model.head_width
        place_bytes = z.samples * z.length * head_width * FP32
        # On a GPU FlexAttention has a block mask.
        mask_bytes = z.samples * z.length**2 if not kernels.gpu and kernels.attention != "blocked" else 0
        yield Item("buffers", "places of tokens in segments", place_bytes + mask_bytes, PASSES)
    if config.model.window is not None and not kernels.gpu and kernels.attention == "sdpa":
        yield Item("buffers", "mask of the window", z.length**2)


def _deferred(config: RunConfig, held: Stage, left: int, kernels: PlannedKernels) -> Iterable[Item]:
    """Under ZB-H1, what weight gradients need of `left` micro-batches, and, when a backward pass comes to the first
    block, of one more."""
    if config.parallel.schedule == "zero_bubble":
        name, of_stage, of_first = "deferred weight gradients", 0, 0
        for is_routed in (False, True):
            if block_count := held.count_blocks(is_routed):
                each = activations.count_deferred_bytes(config, kernels, is_routed)
                of_stage += each * block_count
                of_first = of_first or each
        yield Item("activations", name, of_stage * left, ("watch", *WAITING))
        yield Item("activations", name, of_stage * (left + 1) - of_first, ("end",))


def _fp8_weights(
    config: RunConfig, blocks: Sequence[int], kernels: PlannedKernels, flying: Flying
) -> Iterable[Item]:
    """FP8 copies of weights, by the first micro-batch for all. Transformer Engine's, a byte per element for each of two
    layouts (on Blackwell one is enough), stay from step to step; the emulation's, of one layout, until the step's
    passes are over. Where none are kept, Transformer Engine saves copies for the backward pass in every micro-batch
    (2.20, module/linear.py: wt_save)."""
    fp8, name = config.precision.fp8, "FP8 copies of weights"
    if fp8 is None:
        return
    is_emulated = fp8.backend == "emulated" or not kernels.gpu

    def copies(block_numbers: Sequence[int]) -> int:
        layouts, copied = 1 if is_emulated else 2, 0
        for block_number in block_numbers:
            in_eight = fp8_linears(config, block_number)
            is_routed = config.model.experts_of(block_number) is not None
            block_weights = list_block_weights(config.model, is_routed, config.parallel.expert)
            copied += sum(
                weight.count_elements(config.parallel.tensor)
                for weight in block_weights
                if weight.name in in_eight
            )
        return layouts * copied

    if keeps_weight_casts(config):
        yield Item("weights", name, copies(blocks), PASSES if is_emulated else STEP)
        return
    if is_emulated:
        return
    if config.parallel.recompute == "full":  # those of the recomputed block
        # All blocks alike, except those with layers kept out of FP8.
        in_fp8 = [block_number for block_number in blocks if block_number >= fp8.keep_first]
        checked_blocks = blocks if fp8.keep else (in_fp8 or blocks)[:1]
        most_bytes = max((copies([block_number]) for block_number in checked_blocks), default=0)
        yield Item("activations", name, most_bytes, ("backward",))
        yield Item("activations", name, copies(blocks[:1]), ("end",))
        return
    each = copies(blocks)
    yield Item("activations", name, flying.scale(each), ("watch", *WAITING))
    yield Item("activations", name, flying.scale_rest(each) + copies(blocks[:1]), ("end",))


def fp8_blocks(config: RunConfig, blocks: Iterable[int], linear: str) -> int:
    """Number of these blocks in which this linear layer, of `LINEARS`, computes in FP8."""
    return sum(linear in fp8_linears(config, block_number) for block_number in blocks)


def _ends(config: RunConfig, held: Stage) -> Iterable[Item]:
    """The embedding's gradient. With tied weights on one stage, the head's gradient is kept until then."""
    if held.first:
        table_elements = config.model.padded_vocab * config.model.hidden // config.parallel.tensor
        table_bytes = table_elements * count_element_bytes(config)
        both_ends = config.model.tied and held.last
        yield Item("gradients", "gradient of the embedding", table_bytes * (1 + both_ends), ("end",))
        if both_ends:
            yield Item("gradients", "gradient of the head", table_bytes, ("backward",))


def _logits(config: RunConfig, kernels: PlannedKernels, elements: int, device: Device) -> Iterable[Item]:
    """The head's projection and the loss: model/loss.py, model/loss.py."""
    z, m = activations.shape_sizes_of(config), config.model
    columns = m.padded_vocab // config.parallel.tensor
    weight_bytes, feature_bytes = columns * z.h * z.e, z.N * z.h * z.e
    if kernels.loss == "reference":
        logits, has_cap = z.N * columns, m.logit_softcap is not None
        yield Item("activations", "features, for the head", feature_bytes, ("head",))
        yield Item("logits", "logits", logits * (FP32 if has_cap else z.e), ("loss",))
        yield Item("logits", "tanh of the logits, in fp32", logits * FP32 * has_cap, ("loss", "head"))
        yield Item("logits", "softmax in fp32", logits * FP32, ("loss", "head"))
        is_cast = z.e < FP32 and not has_cap  # logits with a cap, and their gradient, are fp32
        yield Item("logits", "gradient of the logits", logits * (FP32 + z.e * is_cast), ("head",))
        return
    size = chunk_size(z.N, columns, elements)
    many_chunks = size < z.N
    real = min(m.vocab_size or columns, columns) * z.h
    # In fp32 if several chunks are added up; fp16 on a CPU in any case.
    is_narrow = config.precision.kind == "fp16" and device == "cpu"
    wide_bytes = FP32 if many_chunks or is_narrow else z.e
    part_bytes = real * z.e if many_chunks and device == "cpu" and config.precision.kind == "bf16" else 0
    is_whole = device == "cuda" or config.parallel.tensor > 1
    chunk_rows = size if is_whole else min(size, max(LOSS_BLOCK // columns, 1))
    copies = 4 if m.logit_softcap is not None else 1  # in fp32; with a cap also given, divided, their tanh
    scratch_bytes = 0 if kernels.compile else chunk_rows * columns * FP32 * copies
    if config.stability.trends.enabled:  # before that, entropies of the chunk
        entropy_block = min(size, max(ENTROPY_BLOCK[device] // columns, 1)) * columns
        scratch_bytes = max(scratch_bytes, entropy_block * FP32 * (3 if m.logit_softcap is not None else 2))
    yield Item("logits", "logits of a chunk", size * columns * z.e + scratch_bytes, ("loss",))
    yield Item("logits", "gradient of the head, summed", real * wide_bytes + part_bytes, ("loss",))
    yield Item("logits", "gradient of the features", feature_bytes, ("loss",))
    product_bytes = min(real, LOSS_BLOCK) * FP32 if device == "cpu" else 0
    # Unscaled and scaled.
    yield Item("logits", "gradients of the head", real * wide_bytes + product_bytes + weight_bytes, ("head",))
    yield Item("logits", "gradients of the features", 2 * feature_bytes, ("head",))


def _stages(config: RunConfig, layout: Layout, held: Stage, flying: Flying) -> Iterable[Item]:
    """Pipeline buffers: DeepSpeed's copy of every micro-batch in flight, and its receive buffers."""
    if layout.pipeline == 1:
        return
    z = activations.shape_sizes_of(config)
    stream_bytes, buffers = z.stream * z.e, max(2, flying.passes)
    if config.parallel.model_chunks > 1:
        # The first chunk's inputs are tokens. Of gradients as many as there are stages may still be on their way back.
        chunks = config.parallel.model_chunks
        received_passes = flying.passes * (chunks - held.first) // chunks
        yield Item("buffers", "a chunk's inputs", (received_passes + 1) * stream_bytes, PASSES)
        yield Item("buffers", "a chunk's outputs", flying.passes * stream_bytes, PASSES)
        yield Item("buffers", "gradients of a chunk's inputs", (layout.pipeline + 1) * stream_bytes, ("end",))
        return
    yield Item("buffers", "received into", stream_bytes * (2 - held.first - held.last))
    if not held.first:
        yield Item("buffers", "a stage's inputs and their gradients", 2 * buffers * stream_bytes)
    if held.last:
        yield Item("buffers", "a stage's outputs", buffers * z.N * z.h * z.e)
    else:
        yield Item("buffers", "a stage's outputs", flying.passes * stream_bytes, PASSES)


def _scratch(
    config: RunConfig,
    layout: Layout,
    held: Stage,
    groups: Sequence[FlatGroup],
    kernels: PlannedKernels,
    device: Device,
) -> Iterable[Item]:
    """Tables and temporary buffers."""
    model_config, z = config.model, activations.shape_sizes_of(config)
    yield Item("buffers", "table of rotations", model_config.sequence_length * model_config.head_width * FP32)
    # Every `logging.layers_interval` steps, and when updates are refused.
    yield Item("buffers", "attention looked at", activations.count_watched_bytes(config), ("watch",))
    largest_matrix = max(map(max, parameter_sizes(model_config, held, config.parallel.tensor)))
    yield Item("buffers", "the update looked at, a chunk", 4 * FP32 * min(CHUNK, largest_matrix), ("update",))
    if config.precision.fp8 is not None:
        widest_tensor = max(z.N, model_config.hidden) * max(2 * z.f, z.q + 2 * z.k, z.h)
        looked_at = 3 * FP32 * min(FP8_CHUNK, widest_tensor)
        yield Item("buffers", "FP8 looked at, a chunk", looked_at, ("watch", "backward", "end"))
    if _sums(config) and device == "cpu":
        yield Item("buffers", "gradients in fp32, a chunk", SUM_CHUNK * FP32, (*STEP, "optimizer"))
    is_eager = config.optimizer.moments == "bf16" and not kernels.compile
    scratch_bytes = 5 if is_eager else update_cost_of(config.optimizer).scratch
    largest_group = max(group.whole for group in groups)
    size = min(UPDATE_CHUNK[device], largest_group)
    yield Item("buffers", "the update's intermediate results", scratch_bytes * size * FP32, ("update",))
    if _sums(config) and device == "cpu" and config.optimizer.name == "adamw" and not is_eager:
        scaled_bytes = min(FUSED_CHUNK, largest_group) * FP32
        yield Item("buffers", "clipped gradients, a chunk", scaled_bytes, ("update",))
    if config.optimizer.name == "muon":
        yield from _orthogonalized(config, layout, held)
    if kernels.attention == "blocked":
        chunk_rows = min(activations.ROWS, z.length)
        block_windows = [model_config.window_of(block) or z.length for block in range(model_config.layers)]
        fit = z.heads * z.samples * chunk_rows * min(z.length, max(block_windows) + chunk_rows + ALIGN)
        scores = min(SCORES, fit) if fit > SCORES else fit
        # Scores and their gradients; plus probabilities, if none are kept.
        not_kept = config.parallel.recompute != "none" or not activations.count_probabilities(config, z)
        slope_bytes = FP32 * (model_config.attention_softcap is not None)
        yield Item("buffers", "scores of a block", scores * (FP32 + slope_bytes + z.e * (1 + not_kept)))


def _optimizer_state(config: RunConfig, held: Stage, groups: Sequence[FlatGroup]) -> Iterable[int]:
    """Bytes of every tensor of the optimizer's flat state, fp32 masters left out, on this rank."""
    state_width = 2 if config.optimizer.moments == "bf16" else FP32
    for flat_group, of in zip(groups, parameter_groups(config, held), strict=True):
        yield from [flat_group.own * state_width] * of.moments


def _orthogonalized(config: RunConfig, layout: Layout, held: Stage) -> Iterable[Item]:
    """Muon: messages of a round, on both sides, the matrices that this rank owns, and intermediate results of the
    largest one."""
    e = 2 if config.precision.kind == "bf16" else FP32
    all_of = stage_matrices(config.model, held.blocks, held.routed)
    largest = max(m.numel for m in all_of)
    here = max(min(sum(m.numel for m in all_of) // (config.parallel.tensor * layout.data), LIMIT), largest)
    yield Item("buffers", "matrices exchanged", 2 * here * e, ("update",))
    square_elements = max(min(m.rows, m.columns) for m in all_of) ** 2
    yield Item("buffers", "a matrix orthogonalized", (3 * largest + 2 * square_elements) * e, ("update",))


def _host(config: RunConfig, held: Stage, groups: Sequence[FlatGroup]) -> Host:
    state = _sum_own(groups) * FP32 + sum(_optimizer_state(config, held, groups))
    kept = config.stability.snapshots
    copy_bytes = state if config.checkpoint.asynchronous else 0
    # DeepSpeed flattens the weights in host memory: under ZeRO 3 this rank's partition; under ZeRO 1 and 2 old and new
    # copy, if the new one does not fit on the GPU. BF16_Optimizer flattens on the device.
    flattened = 0 if _sums(config) else _sum_whole(groups) + max(group.whole for group in groups)
    if config.parallel.zero == 3:
        flattened = _sum_own(groups)
    building = flattened * count_element_bytes(config)
    return Host(state, kept.keep if kept.interval else 0, copy_bytes, building)
