"""What a rank of a pipeline stage holds: its blocks, and its parameters by the optimizer's groups. Pure; without torch.

E: neighbouring data ranks that share out the experts of a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache

from megastable.config.model import ModelConfig
from megastable.config.rules import LINEARS
from megastable.config.tree import RunConfig
from megastable.model.sizes import layer_costs
from megastable.parallel.layout import cut_into_stages, list_chunks
from megastable_tools.plan.updates import UpdateCost, list_block_weights, update_cost_of

FP32, INT64 = 4, 8
COLUMNS = frozenset({"attention.qkv", "mlp.gate_up"})  # column-parallel layers of LINEARS
ROWS = frozenset(LINEARS) - COLUMNS


def count_shards(config: RunConfig, data: int, group: ParameterGroup | None = None) -> int:
    """Number of data ranks over which ZeRO shares out the state of a group of parameters; None: of all but experts that
    data ranks share out."""
    return data // config.parallel.replicas // (1 if group is None else group.expert_ranks)


def stage_bounds(config: RunConfig) -> list[int]:
    """Bounds of the stages, or of their chunks, in the list of layers (embedding, blocks, final norm, head)."""
    return list(_bounds(config.model, config.parallel.pipeline * config.parallel.model_chunks))


@lru_cache(maxsize=256)  # the layout search asks repeatedly
def _bounds(model: ModelConfig, stages: int) -> tuple[int, ...]:
    layers = layer_costs(model)
    return tuple(cut_into_stages([cost for cost, _ in layers], stages, [is_block for _, is_block in layers]))


@dataclass(frozen=True)
class Stage:
    """Layers of a pipeline stage. routed: the blocks with routed experts; they come after the others."""

    blocks: int
    first: bool
    last: bool
    routed: int = 0

    def count_blocks(self, routed: bool) -> int:
        """Blocks with routed experts, or those with a dense MLP."""
        return self.routed if routed else self.blocks - self.routed

    def cut_block(self, last: bool) -> Stage:
        """Its first block, or its last one, alone."""
        is_routed = self.routed > 0 if last else self.routed == self.blocks
        return Stage(1, first=False, last=False, routed=int(is_routed))


def stage_of(config: RunConfig, cut: Sequence[int], stage: int) -> Stage:
    """Stage `stage` of layers partitioned by `cut`, from `stage_bounds`."""
    m, chunks = config.model, config.parallel.model_chunks
    chunk_blocks, stages = list_chunk_blocks(cut, stage, chunks), (len(cut) - 1) // chunks
    first_routed = m.layers - m.expert_blocks
    routed = sum(len(range(max(blocks.start, first_routed), blocks.stop)) for blocks in chunk_blocks)
    return Stage(sum(map(len, chunk_blocks)), stage == 0, stage == stages - 1, routed)


def whole_stage(model: ModelConfig) -> Stage:
    """The whole model as one stage."""
    return Stage(model.layers, first=True, last=True, routed=model.expert_blocks)


def list_chunk_blocks(cut: Sequence[int], stage: int, chunks: int = 1) -> list[range]:
    """The numbers of the blocks of every chunk of a stage. The embedding precedes block 0; final norm and head come
    last."""
    return [
        range(max(layers.start - 1, 0), min(layers.stop, cut[-1] - 2) - 1)
        for layers in list_chunks(cut, (len(cut) - 1) // chunks, stage)
    ]


def needs_product(model: ModelConfig, block: int) -> bool:
    """Whether the backward pass of a block needs the result of its last product: a norm that follows it does, the
    residual sum does not."""
    return model.placement_of(block) != "before"


def cut_linears(config: RunConfig, eight: Set[str], routed: bool) -> frozenset[str]:
    """The linear layers of a block that send in chunks (parallel/overlapped.py): those that are neither in FP8 nor of
    experts. eight: of `sizes.fp8_linears`. routed: whether it has routed experts."""
    linears = frozenset(LINEARS[:2] if routed else LINEARS)
    return frozenset() if config.parallel.tensor_overlap == 1 else linears - eight


@lru_cache(maxsize=256)
def parameter_sizes(
    model: ModelConfig, stage: Stage, tensor: int, expert_ranks: int = 1
) -> tuple[tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """Elements of every matrix, and of every norm and bias, on one rank."""
    h, d = model.hidden, model.head_width
    q, key_width = model.heads * d, model.key_value_heads * d
    matrix_sizes = list[int]()
    for is_routed in (False, True):
        if block_count := stage.count_blocks(is_routed):
            block_weights = list_block_weights(model, is_routed, expert_ranks)
            matrix_sizes += [weight.count_elements(tensor) for weight in block_weights] * block_count
    norm_sizes = [h] * (4 if model.norms == "both" else 2)
    if model.qkv_bias:
        norm_sizes.append((q + 2 * key_width) // tensor)
    if model.qk_norm:
        norm_sizes += [q // tensor, key_width // tensor] if model.qk_norm == "full" else [d, d]
    # A stage holds a tied embedding once; the last stage has a copy if it is another one.
    table_sizes = [model.padded_vocab * h // tensor] * count_tables(model, stage)
    return (*matrix_sizes, *table_sizes), (*(norm_sizes * stage.blocks), *([h] * stage.last))


def count_tables(model: ModelConfig, stage: Stage) -> int:
    """Matrices of a stage with a row for every token of the vocabulary: they are the last ones of all."""
    return stage.first + (stage.last and not (model.tied and stage.first))


@dataclass(frozen=True)
class ParameterGroup:
    """A parameter group of the optimizer on one rank, before ZeRO partitions it: elements of every parameter.

    moments: state tensors, each of as many elements. tables: of the sizes, those of tables for the vocabulary, the last
    ones. expert_ranks: data ranks that have other parameters in its place, so that as many fewer share out each.
    """

    sizes: tuple[int, ...]
    moments: int
    tables: int = 0
    expert_ranks: int = 1

    @cached_property
    def counts(self) -> Counter[int]:
        """How many parameters have a size."""
        return Counter(self.sizes)

    @cached_property
    def total(self) -> int:
        return sum(self.sizes)


def parameter_groups(config: RunConfig, held: Stage) -> tuple[ParameterGroup, ...]:
    """The optimizer's groups, without empty ones: routers, experts that data ranks share out, other matrices (Muon has
    the tables apart), norms."""
    update_cost, is_muon = update_cost_of(config.optimizer), config.optimizer.name == "muon"
    expert_ranks = config.parallel.expert
    return _make_groups(config.model, config.parallel.tensor, expert_ranks, update_cost, is_muon, held)


@lru_cache(maxsize=256)
def _make_groups(
    m: ModelConfig, tensor: int, expert_ranks: int, of: UpdateCost, is_muon: bool, held: Stage
) -> tuple[ParameterGroup, ...]:  # fmt: skip
    matrices, norm_sizes = parameter_sizes(m, held, tensor, expert_ranks)
    tables, moments = count_tables(m, held), 1 if is_muon else of.matrices
    inner_sizes, table_sizes = matrices[: len(matrices) - tables], matrices[len(matrices) - tables :]
    group_sizes = list[ParameterGroup]()
    if held.routed:
        sizes_apart = dict[str, tuple[int, ...]](router=(), expert=(), rest=())
        for weight in list_block_weights(m, True, expert_ranks):
            is_apart = weight.is_expert and expert_ranks > 1
            part = "router" if weight.is_router else "expert" if is_apart else "rest"
            sizes_apart[part] += (weight.count_elements(tensor),)
        routed_matrices = held.routed * sum(map(len, sizes_apart.values()))
        inner_sizes = inner_sizes[: len(inner_sizes) - routed_matrices] + sizes_apart["rest"] * held.routed
        group_sizes += [
            ParameterGroup(sizes_apart["router"] * held.routed, moments),
            ParameterGroup(sizes_apart["expert"] * held.routed, moments, expert_ranks=expert_ranks),
        ]
    if is_muon:
        group_sizes += [ParameterGroup(inner_sizes, moments), ParameterGroup(table_sizes, 2, tables)]
    else:
        group_sizes.append(ParameterGroup(inner_sizes + table_sizes, moments, tables))
    group_sizes.append(ParameterGroup(norm_sizes, of.vectors))
    return tuple(parameter_group for parameter_group in group_sizes if parameter_group.sizes)


def count_micro_batches(config: RunConfig, data: int) -> int:
    """Micro-batches of a step: A. Ranks that share samples count together."""
    return config.train.global_batch // (config.train.micro_batch * (data // config.parallel.context))


def count_tokens(config: RunConfig) -> int:
    """Tokens of a micro-batch on one rank: s b / C."""
    return config.model.sequence_length * config.train.micro_batch // config.parallel.context


def count_element_bytes(config: RunConfig) -> int:
    """Bytes of an activation, and of a weight in compute precision: e."""
    return 4 if config.precision.kind == "fp32" else 2


def pad_flat(elements: int, ranks: int) -> int:
    """Elements of a flat buffer that ranks share out: DeepSpeed pads it to 4 bytes of bf16 on every rank."""
    return round_up(elements, 2 * ranks)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
