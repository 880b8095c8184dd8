"""Communication volume of a training step, by formulas. Pure; `benchmarks/scaling.py` counts it in real steps.

Tensor parallelism: Megatron-LM, arXiv:1909.08053 section 3; with sequence parallelism: Korthikanti et al.,
arXiv:2205.05198 section 4.2.2; sharded data parallelism: ZeRO, arXiv:1910.02054 section 7, as DeepSpeed 0.19.8 does it;
rings: Patarasuk & Yuan, J. Parallel Distrib. Comput. 69 (2009); context parallelism: DeepSpeed Ulysses,
arXiv:2309.14509 section 3.1, or a ring, arXiv:2310.01889.

Letters: s tokens of a sample, b samples of a micro-batch, h hidden, e bytes of an activation, A micro-batches of a
step, T, P, D tensor, pipeline and data ranks, C ranks that share a sample, R replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import lcm
from typing import Any

from megastable.config.model import ModelConfig
from megastable.config.rules import LINEARS
from megastable.config.tree import RunConfig
from megastable.model.sizes import GPU_ELEMENTS, chunk_size, fp8_linears, layer_costs
from megastable.parallel.layout import (
    cut_evenly,
    cut_into_buckets,
    cut_into_stages,
    find_owned,
    limit_bucket,
    list_chunks,
)
from megastable_tools.plan.updates import stage_matrices, stage_rounds, update_cost_of

FP32, FP64, INT32 = 4, 8, 4
COLUMNS = frozenset({"attention.qkv", "mlp.gate_up"})  # column-parallel layers of LINEARS
ROWS = frozenset(LINEARS) - COLUMNS
GRADIENT_COLUMNS = 9  # of engine/local_gradients.py
DEFAULT_BUCKET = 5e8  # elements of DeepSpeed's reduce_bucket_size
# What a rank with replicas sends of its sums: names of terms.
ACROSS, MOVED = "gradients over replicas", "gradients to their owners"
SUB_GROUP = 10**9  # elements on a rank that end a sub-group of ZeRO 3: DeepSpeed's default


@dataclass(frozen=True)
class Term:
    """`calls` of one collective in a step, each with `bytes` given by this rank (for a receive: received).

    group: "tensor", "context", "data", "shard" (the data ranks of a replica), "replica" (those with the same shard),
    "stage" (tensor x data), "pipeline" (all stages of one pipe), "model" (tensor x pipeline), "tied" (the data ranks of
    a replica on the first and the last stage), "world".
    """

    what: str
    group: str
    collective: str
    bytes: int
    calls: int

    @property
    def total(self) -> int:
        return self.bytes * self.calls


def count_shards(config: RunConfig, data: int) -> int:
    """Number of data ranks over which ZeRO shares out the state."""
    return data // config.parallel.replicas


def count_members(config: RunConfig, data: int) -> dict[str, int]:
    """Number of ranks in a group of each kind."""
    t, p = config.parallel.tensor, config.parallel.pipeline
    context_ranks = config.parallel.context
    group_sizes = {"tensor": t, "context": context_ranks, "data": data, "pipeline": p}
    shards = count_shards(config, data)
    group_sizes |= {"shard": shards, "replica": config.parallel.replicas, "tied": 2 * shards}
    return group_sizes | {"stage": t * data, "model": t * p, "world": t * p * data}


def count_sent_bytes(term: Term, ranks: int) -> float:
    """Bytes that this rank sends in a step for `term`, in a ring of `ranks` ranks.

    An all-reduce is a reduce-scatter and an all-gather. A full-duplex link carries as much in the other direction.
    """
    if term.group == "tied":
        return term.total  # all of it goes to the other stage
    ring_rounds = {
        "all-reduce": 2 * (ranks - 1) / ranks,
        "reduce-scatter": (ranks - 1) / ranks,
        "all-gather": ranks - 1,
        "broadcast": (ranks - 1) / ranks,  # all but the last rank pass it on
        "reduce": (ranks - 1) / ranks,  # all but the receiver
        "all-to-all": (ranks - 1) / ranks,  # all but its own part
        "send": 1.0,
        "receive": 0.0,
    }
    return term.total * ring_rounds[term.collective]


def stage_bounds(config: RunConfig) -> list[int]:
    """Bounds of the stages, or of their chunks, in the list of layers (embedding, blocks, final norm, head)."""
    return list(_bounds(config.model, config.parallel.pipeline * config.parallel.model_chunks))


@lru_cache(maxsize=256)  # the layout search asks repeatedly
def _bounds(model: ModelConfig, stages: int) -> tuple[int, ...]:
    layers = layer_costs(model)
    return tuple(cut_into_stages([cost for cost, _ in layers], stages, [is_block for _, is_block in layers]))


@dataclass(frozen=True)
class Stage:
    """Layers of a pipeline stage."""

    blocks: int
    first: bool
    last: bool


def stage_of(cut: Sequence[int], stage: int, chunks: int = 1) -> Stage:
    """Stage `stage` of layers partitioned by `cut`, from `stage_bounds`, into stages of so many chunks."""
    stages = (len(cut) - 1) // chunks
    return Stage(sum(map(len, list_chunk_blocks(cut, stage, chunks))), stage == 0, stage == stages - 1)


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


def cut_linears(config: RunConfig, eight: Set[str]) -> frozenset[str]:
    """The linear layers of a block that send in chunks (parallel/overlapped.py): those that are not in FP8. eight: of
    `sizes.fp8_linears`."""
    return frozenset() if config.parallel.tensor_overlap == 1 else frozenset(LINEARS) - eight


def parameter_sizes(model: ModelConfig, stage: Stage, tensor: int) -> tuple[list[int], list[int]]:
    """Elements of every matrix, and of every norm and bias, on one rank."""
    h, d, f = model.hidden, model.head_width, model.ffn_width
    q, key_width = model.heads * d, model.key_value_heads * d
    matrix_sizes = [h * (q + 2 * key_width) // tensor, q * h // tensor, 2 * f * h // tensor, f * h // tensor]
    norm_sizes = [h] * (4 if model.norms == "both" else 2)
    if model.qkv_bias:
        norm_sizes.append((q + 2 * key_width) // tensor)
    if model.qk_norm:
        norm_sizes += [q // tensor, key_width // tensor] if model.qk_norm == "full" else [d, d]
    # A stage holds a tied embedding once; the last stage has a copy if it is another one.
    vocabulary_tables = stage.first + (stage.last and not (model.tied and stage.first))
    return (
        matrix_sizes * stage.blocks + [model.padded_vocab * h // tensor] * vocabulary_tables,
        norm_sizes * stage.blocks + [h] * stage.last,
    )


@dataclass(frozen=True)
class ParameterGroup:
    """A parameter group of the optimizer on one rank, before ZeRO partitions it: elements of every parameter.

    moments: state tensors, each of as many elements.
    """

    sizes: list[int]
    moments: int


def parameter_groups(config: RunConfig, held: Stage) -> list[ParameterGroup]:
    """The optimizer's groups, without empty ones; Muon's matrices are the first."""
    matrices, norm_sizes = parameter_sizes(config.model, held, config.parallel.tensor)
    of = update_cost_of(config.optimizer)
    group_sizes = [ParameterGroup(matrices, of.matrices), ParameterGroup(norm_sizes, of.vectors)]
    if config.optimizer.name == "muon":
        inner = len(matrices) - (held.first + held.last - (config.model.tied and held.first and held.last))
        group_sizes[:1] = [ParameterGroup(matrices[:inner], 1), ParameterGroup(matrices[inner:], 2)]
    return [parameter_group for parameter_group in group_sizes if parameter_group.sizes]


def _watched(config: RunConfig, data: int) -> int:
    """Data ranks whose gradients are watched (engine/local_gradients.py), or ranks, if they share no data
    (engine/local_gradients.py)."""
    stability_config, parallel_config = config.stability, config.parallel
    if not (stability_config.enabled and stability_config.hardware.gradients):
        return 0
    if data > 1:
        return data
    ranks = parallel_config.tensor * parallel_config.pipeline
    return ranks if ranks > 1 and parallel_config.zero == 1 and config.precision.kind == "bf16" else 0


def list_step_terms(
    config: RunConfig,
    data: int,
    stage: int,
    cut: Sequence[int],
    loss: str,
    *,
    elements: int = GPU_ELEMENTS,
    ballot: int = 0,
    zero: Mapping[str, Any] | None = None,
    data_rank: int = 0,
    tensor_rank: int | None = None,
) -> list[Term]:
    """All communication of a rank of pipeline stage `stage` in one training step that updates the weights.

    config: model.vocab_size must be known. data: data-parallel ranks. cut: of `stage_bounds`. loss: "reference" or
    "chunked", in chunks of about `elements` logits. ballot: numbers in that of `Engine.train_step`. zero: the section
    zero_optimization of DeepSpeed's configuration. data_rank: of the rank; only the traffic of a tied embedding, of
    weights and of what replicas exchange depends on it, and the first rank sends most. tensor_rank: of the rank, for
    the exact exchange of Muon's matrices; None: its mean.

    Calls are counted as if gradients (ZeRO 1 in fp32 and fp16, ZeRO 2 and 3) and Muon's matrices fitted into one
    bucket, and as if ZeRO 3 prefetched everything that it keeps, and nothing else: other bucket sizes send the same
    bytes.
    """
    chunks = config.parallel.model_chunks
    held = stage_of(cut, stage, chunks)
    terms = _activations(config, data, held, list_chunk_blocks(cut, stage, chunks), loss, elements)
    terms += _context(config, data, held)
    terms += _stages(config, data, held)
    terms += _tied(config, data, held, data_rank)
    terms += _zero(config, data, held, zero or {}, data_rank)
    terms += _orthogonalized(config, data, held, None if tensor_rank is None else (data_rank, tensor_rank))
    if config.optimizer.qk_clip is not None:
        terms.append(
            Term("QK-clip", "world", "all-reduce", FP32 * config.model.layers * config.model.heads, 1)
        )
    # The gate's one sum: gradients of all data ranks, losses and squares of all samples, the norm and its validity,
    # the ballot; how often each token is in the batch.
    numbers = GRADIENT_COLUMNS * _watched(config, data) + 2 * config.train.global_batch + 2 + ballot
    numbers += config.model.vocab_size or 0
    terms.append(Term("the gate", "world", "all-reduce", FP64 * numbers, 1))
    terms += _clipping(config, data, held)
    terms += _update_sums(config, data, held, zero or {})
    return [volume_term for volume_term in terms if volume_term.calls]


def count_micro_batches(config: RunConfig, data: int) -> int:
    """Micro-batches of a step: A. Ranks that share samples count together."""
    return config.train.global_batch // (config.train.micro_batch * (data // config.parallel.context))


def count_tokens(config: RunConfig) -> int:
    """Tokens of a micro-batch on one rank: s b / C."""
    return config.model.sequence_length * config.train.micro_batch // config.parallel.context


def count_element_bytes(config: RunConfig) -> int:
    """Bytes of an activation, and of a weight in compute precision: e."""
    return 4 if config.precision.kind == "fp32" else 2


def _activations(
    config: RunConfig, data: int, held: Stage, chunk_blocks: Sequence[range], loss: str, elements: int
) -> list[Term]:
    """Tensor parallelism, in every micro-batch. chunk_blocks: of `list_chunk_blocks`."""
    m, parallel_config = config.model, config.parallel
    tensor_ranks, blocks = parallel_config.tensor, held.blocks
    if tensor_ranks == 1:
        return []
    micro_batches = count_micro_batches(config, data)
    own_tokens = count_tokens(config)
    whole_bytes = own_tokens * m.hidden * count_element_bytes(config)
    part_bytes = whole_bytes // tensor_ranks
    is_full = parallel_config.recompute == "full"
    # Recomputation ends at the last tensor that the backward pass needs: without a norm behind it, the
    # block's last product is not reduced again.
    numbers = list(chain(*chunk_blocks))
    recomputed_products = sum(1 + needs_product(m, block) for block in numbers)
    # Two regions of a block (attention, MLP), each entered and left; the embedding is left only, the head entered only.
    entered, left = 2 * blocks + held.last, 2 * blocks + held.first
    entered_again, left_again = (2 * blocks, recomputed_products) if is_full else (0, 0)

    def tensor(what: str, collective: str, size: int, calls: int) -> Term:
        return Term(what, "tensor", collective, size, calls * micro_batches)

    if parallel_config.sequence:
        # Calls of the layers that send in chunks: column-parallel ones, row-parallel ones, and of those the recomputed.
        cut = {n: cut_linears(config, fp8_linears(config, n)) for n in numbers}
        columns, rows = (sum(len(linears & side) for linears in cut.values()) for side in (COLUMNS, ROWS))
        rows_again = sum(
            len(linears & ROWS) - ("mlp.down" in linears and not needs_product(m, n))
            for n, linears in cut.items()
        )
        chunks = parallel_config.tensor_overlap
        # Without a weight's gradient beside it, the sum of an input's gradient is cut, too.
        cut_sums = columns * (parallel_config.schedule == "zero_bubble")

        def slices(what: str, collective: str, size: int, calls: int, cut_calls: int) -> list[Term]:
            return [
                tensor(what, collective, size, calls - cut_calls),
                tensor(what, collective, size // chunks, cut_calls * chunks),
            ]

        terms = [
            *slices("activations, forward", "all-gather", part_bytes, entered, columns),
            *slices("activations, forward", "reduce-scatter", whole_bytes, left, rows),
            *slices("activations, recomputed", "all-gather", part_bytes, entered_again, columns * is_full),
            *slices(
                "activations, recomputed", "reduce-scatter", whole_bytes, left_again, rows_again * is_full
            ),
            tensor(
                "activations, gathered again",
                "all-gather",
                part_bytes,
                2 * blocks * parallel_config.gathers_again,
            ),
            *slices("their gradients", "reduce-scatter", whole_bytes, entered, cut_sums),
            *slices("their gradients", "all-gather", part_bytes, left, rows),
        ]
    else:
        terms = [
            tensor("activations, forward", "all-reduce", whole_bytes, left),
            tensor("activations, recomputed", "all-reduce", whole_bytes, left_again),
            tensor("their gradients", "all-reduce", whole_bytes, entered),
        ]
    if m.qk_norm == "full":
        # The mean squares of queries and keys, and their gradients.
        terms.append(tensor("QK-norm", "all-reduce", own_tokens * FP32, (6 if is_full else 4) * blocks))
    # With sequence parallelism every rank norms only its part of the tokens; queries and keys are its own anyway.
    for chunk_number, chunk in enumerate(chunk_blocks):
        has_final_norm = held.last and chunk_number == len(chunk_blocks) - 1
        norm_counts = (4 if m.norms == "both" else 2) * len(chunk) + has_final_norm
        norm_widths = [m.hidden] * parallel_config.sequence * norm_counts
        norm_widths += [m.head_width] * (2 * len(chunk)) * (m.qk_norm is True)
        if parallel_config.zero == 3:
            width_counts = Counter(norm_widths).items()
            terms += [
                tensor("gradients of norms", "all-reduce", width * FP32, n) for width, n in width_counts
            ]
        elif norm_widths:
            terms.append(tensor("gradients of norms", "all-reduce", sum(norm_widths) * FP32, 1))
    if held.last:
        terms += [tensor("loss", *term_parts) for term_parts in _loss(config, own_tokens, loss, elements)]
    return terms


def _context(config: RunConfig, data: int, held: Stage) -> list[Term]:
    """All-to-alls around every attention, there and back: queries, keys and values to head shards, and the output to
    token shards. A key head goes to all ranks that have queries for it. In a ring keys and values pass every rank, and
    in the backward pass their gradients, too, in fp32."""
    model_config, p = config.model, config.parallel
    if p.context == 1:
        return []
    if p.is_ring:
        numbers = (
            2 * count_tokens(config) * model_config.key_value_heads // p.tensor * model_config.head_width
        )
        rounds = (p.context - 1) * held.blocks * count_micro_batches(config, data)
        key_bytes, key_calls = (
            numbers * count_element_bytes(config),
            (3 if p.recompute == "full" else 2) * rounds,
        )
        return [
            term
            for collective in ("send", "receive")
            for term in (
                Term("keys, values", "context", collective, key_bytes, key_calls),
                Term("their gradients", "context", collective, numbers * FP32, rounds),
            )
        ]
    q, key_width = model_config.heads // p.tensor, lcm(model_config.key_value_heads // p.tensor, p.context)
    head_bytes = count_tokens(config) * model_config.head_width * count_element_bytes(config)
    passes = (3 if p.recompute == "full" else 2) * held.blocks * count_micro_batches(config, data)
    return [
        Term("queries, keys, values", "context", "all-to-all", head_bytes * (q + 2 * key_width), passes),
        Term("attention's output", "context", "all-to-all", head_bytes * q, passes),
    ]


def _loss(config: RunConfig, tokens: int, loss: str, elements: int) -> list[tuple[str, int, int]]:
    """(collective, bytes, calls) of one micro-batch's loss."""
    if loss == "reference":
        return [("all-reduce", tokens * FP32, 1), ("all-reduce", 2 * tokens * FP32, 1)]  # maxima, then sums
    # For every chunk: logsumexp and target logit of each token.
    size = chunk_size(tokens, config.model.padded_vocab // config.parallel.tensor, elements)
    whole_chunks, rest = divmod(tokens, size)
    return [("all-gather", 2 * size * FP32, whole_chunks), ("all-gather", 2 * rest * FP32, int(rest > 0))]


def _stages(config: RunConfig, data: int, held: Stage) -> list[Term]:
    """Pipeline parallelism, 1F1B or any other order: traffic across the ends of a stage's chunks."""
    model_config, p = config.model, config.parallel
    if p.pipeline == 1:
        return []
    steps = count_micro_batches(config, data)
    whole_tokens = model_config.sequence_length * config.train.micro_batch
    whole_bytes = count_tokens(config) * model_config.hidden * count_element_bytes(config)
    stream_bytes = whole_bytes // (p.tensor if p.sequence else 1)
    # To what is behind this stage's chunks, and before them.
    forth, back = (steps * (p.model_chunks - is_end) for is_end in (held.last, held.first))
    documents_apart = config.data.keep_documents_apart
    return [
        Term("activations", "pipeline", "send", stream_bytes, forth),
        Term("their gradients", "pipeline", "receive", stream_bytes, forth),
        Term("activations", "pipeline", "receive", stream_bytes, back),
        Term("their gradients", "pipeline", "send", stream_bytes, back),
        Term("segments", "pipeline", "send", whole_tokens * INT32, forth * documents_apart),
        Term("segments", "pipeline", "receive", whole_tokens * INT32, back * documents_apart),
        # DeepSpeed broadcasts the loss to all stages, of this data rank and of all, although it is not used.
        Term("DeepSpeed's loss", "data", "all-reduce", FP32, int(held.last and data > 1)),
        Term("DeepSpeed's loss", "pipeline", "broadcast", 2 * FP32, 1),
    ]


def tied_piece(config: RunConfig, data: int, held: Stage, data_rank: int = 0) -> int:
    """Elements of a tied embedding on one data rank, if two stages have it: it is their first matrix."""
    if not (config.model.tied and config.parallel.pipeline > 1 and (held.first or held.last)):
        return 0
    # Muon has a group of its own for what it leaves to AdamW.
    embedding_group = parameter_groups(config, held)[int(config.optimizer.name == "muon")]
    shards = count_shards(config, data)
    partition_size = round_up(sum(embedding_group.sizes), 2 * shards) // shards
    embedding = config.model.padded_vocab * config.model.hidden // config.parallel.tensor
    return min(max(embedding - data_rank % shards * partition_size, 0), partition_size)


def _tied(config: RunConfig, data: int, held: Stage, data_rank: int) -> list[Term]:
    """To the other stage: this stage's gradient, summed over the data ranks, of the elements that this rank updates."""
    has_copies = tied_piece(config, data, held) > 0  # the first data rank always has some
    piece_elements = tied_piece(config, data, held, data_rank)
    return [Term("tied embedding", "tied", "all-to-all", piece_elements * FP32, int(has_copies))]


def _zero(
    config: RunConfig, data: int, held: Stage, settings: Mapping[str, Any], data_rank: int
) -> list[Term]:  # fmt: skip
    """Data parallelism: gradients, weights, and DeepSpeed's checks before the update."""
    p, micro_batches = config.parallel, count_micro_batches(config, data)
    group_sizes = [group.sizes for group in parameter_groups(config, held)]
    if p.zero == 3:
        gradients = sum(round_up(n, data) for group_size in group_sizes for n in group_size) * FP32
        return [
            *_gathered(config, data, held, settings),
            Term("gradients", "data", "reduce-scatter", gradients, micro_batches),
            *_checks(config, _updates(config, data, held, settings), FP64),
        ]
    shards, group_kind = count_shards(config, data), "data" if p.replicas == 1 else "shard"
    # DeepSpeed also reduces over a group of one, but does not gather over it.
    weights = _shared(config, data, held, settings, data_rank) if shards > 1 else []
    if p.zero == 1 and config.precision.kind == "bf16":
        # To every rank the part that it updates; the norm piggybacks on the gate's sum.
        bucket_calls = Counter(
            n for group_buckets in cut_gradients(config, data, held, settings) for n in group_buckets
        )
        summed = [
            Term("gradients", group_kind, "reduce-scatter", n * FP32, bucket_calls[n] * (data > 1))
            for n in bucket_calls
        ]
        # A slice of every bucket goes over the replicas, and on to its owners.
        slice_calls = Counter[int]()
        for n, calls in bucket_calls.items() if p.replicas > 1 else ():
            slice_calls[(n // shards + (data_rank % shards < n % shards)) * FP32] += calls
        for slice_bytes, calls in slice_calls.items():
            summed += [
                Term(ACROSS, "replica", "all-reduce", slice_bytes, calls),
                Term(MOVED, "shard", "all-to-all", slice_bytes, calls),
            ]
        return [*summed, *weights]
    group_totals, sum_count = [sum(group) for group in group_sizes], micro_batches if p.zero == 2 else 1
    # To every rank its part, without the padding.
    summed = [Term("gradients", "data", "reduce-scatter", sum(group_totals) * FP32, sum_count)]
    return [*summed, *_checks(config, 0, FP32), *weights]  # the norm piggybacks here, too


def cut_gradients(
    config: RunConfig, data: int, held: Stage, settings: Mapping[str, Any]
) -> list[list[int]]:  # fmt: skip
    """Elements of the buckets of gradients that ZeRO 1 in bf16 sums (engine/gradient_sums.py), by group of parameters.

    In the order of the backward pass: the last bucket of each group is complete when that is over.
    """
    bucket_limit, cut_groups = _limit(settings, data), []
    for ordered_sizes in _order_sizes(config, held):
        group_buckets = [
            sum(ordered_sizes[i] for i in numbers)
            for numbers in cut_into_buckets(ordered_sizes, bucket_limit)
        ]
        # DeepSpeed's padding is behind the last parameter.
        group_buckets[0] += pad_flat(ordered_sizes, count_shards(config, data)) - sum(ordered_sizes)
        cut_groups.append(group_buckets)
    return cut_groups


def cut_weights(
    config: RunConfig, data: int, held: Stage, settings: Mapping[str, Any]
) -> list[list[range]]:  # fmt: skip
    """Elements of the buckets in which ZeRO 1 and 2 gather weights (engine/weight_gathers.py), by group of parameters.

    In the order of the forward pass: the first bucket of each group is read when that begins, or nearly.
    """
    shards, bucket_limit = count_shards(config, data), _limit(settings, data)
    return [
        cut_evenly(sizes, pad_flat(sizes, shards), shards, bucket_limit)
        for sizes in _order_sizes(config, held)
    ]


def _limit(settings: Mapping[str, Any], data: int) -> int:
    return limit_bucket(int(settings.get("reduce_bucket_size", DEFAULT_BUCKET)), data)


def pad_flat(sizes: Sequence[int], ranks: int) -> int:
    """Elements of a flat buffer that ranks share out: DeepSpeed pads it to 4 bytes of bf16 on every rank."""
    return round_up(sum(sizes), 2 * ranks)


def _order_sizes(config: RunConfig, held: Stage) -> list[list[int]]:
    """Elements of every parameter in the order of the model, by group."""
    # Of the tables for the vocabulary, which end their group's list, the embedding comes before all blocks.
    early_tables = int(held.first or (held.last and config.model.tied))
    table_group, ordered_groups = int(config.optimizer.name == "muon"), []
    for group_number, group in enumerate(parameter_groups(config, held)):
        later_ones = len(group.sizes) - (early_tables if group_number == table_group else 0)
        ordered_groups.append(group.sizes[later_ones:] + group.sizes[:later_ones])
    return ordered_groups


def _shared(
    config: RunConfig, data: int, held: Stage, settings: Mapping[str, Any], data_rank: int
) -> list[Term]:  # fmt: skip
    """Updated weights: even slices of every bucket are gathered. Before that they come from the ranks that have updated
    them, in one message for all buckets but those of which each rank has updated an equal part."""
    e, slice_counts, given_elements = count_element_bytes(config), Counter[int](), 0
    ranks, group_kind = count_shards(config, data), "data" if config.parallel.replicas == 1 else "shard"
    for group_buckets in cut_weights(config, data, held, settings):
        flat_length = group_buckets[-1].stop
        for bucket in group_buckets:
            slice_counts[len(bucket) // ranks] += 1
            if len(group_buckets) > 1:
                given_elements += len(find_owned(bucket, flat_length, ranks, data_rank % ranks))
    exchanged = [Term("weights", group_kind, "all-to-all", given_elements * e, 1)] if given_elements else []
    return exchanged + [
        Term("weights", group_kind, "all-gather", n * e, calls) for n, calls in slice_counts.items()
    ]


def _clipping(config: RunConfig, data: int, held: Stage) -> list[Term]:
    """What clipping sums over the ranks before an update: optim/clipping.py, engine/zero.py.

    `worker` counts as if no worker were above the threshold; otherwise gradients are averaged twice.
    """
    m, parallel_config, kind = config.model, config.parallel, config.optimizer.clipping.kind
    every_stage = Stage(m.layers, first=True, last=True)
    matrix_sizes, vector_sizes = parameter_sizes(m, every_stage, 1)
    qkv_width = m.head_width * (m.heads + 2 * m.key_value_heads)
    rows = m.layers * (qkv_width + 2 * m.ffn_width + 2 * m.hidden) + (1 if m.tied else 2) * m.padded_vocab
    sample_ranks = data // parallel_config.context
    numbers = {
        "value": 1, "adagc": len(matrix_sizes) + len(vector_sizes), "agc": 2 * (rows + len(vector_sizes)),
        "worker": sample_ranks,
    }  # fmt: skip
    terms = [Term("clipping", "world", "all-reduce", FP64 * numbers.get(kind, 0), int(kind in numbers))]
    if kind == "worker" and parallel_config.context > 1:
        for parameter_group in parameter_groups(config, held):
            padded_size = round_up(sum(parameter_group.sizes), 2 * count_shards(config, data)) * FP32
            terms.append(Term("gradients of a worker", "context", "all-reduce", padded_size, 1))
    return terms


def _update_sums(config: RunConfig, data: int, held: Stage, settings: Mapping[str, Any]) -> list[Term]:
    """What an optimizer sums over the ranks within an update: optim/adam_pieces.py,
    adafactor.py. Tables of the whole model, also where a call updates a part of it."""
    m, name = config.model, config.optimizer.name
    matrices, vector_sizes = parameter_sizes(m, Stage(m.layers, first=True, last=True), 1)
    number_bytes = FP64 * (len(matrices) + len(vector_sizes))  # one for every parameter
    q, key_width, f = m.heads * m.head_width, m.key_value_heads * m.head_width, m.ffn_width
    side_count = m.layers * (2 * q + 2 * key_width + 3 * f + 4 * m.hidden)  # rows and columns of all matrices
    side_count += (1 if m.tied else 2) * (m.padded_vocab + m.hidden)
    sizes = {
        "stable_adamw": [number_bytes],
        "lamb": [2 * number_bytes],
        "stable_spam": [number_bytes, 2 * number_bytes],  # maxima, then sums
        "adafactor": [FP32 * (side_count + len(matrices)), number_bytes],
    }
    calls = _updates(config, data, held, settings)
    return [Term(f"{name}'s update", "world", "all-reduce", size, calls) for size in sizes.get(name, [])]


def _updates(config: RunConfig, data: int, held: Stage, settings: Mapping[str, Any]) -> int:
    """How often ZeRO calls the optimizer in a step: for all parameters, or for each sub-group."""
    if config.parallel.zero == 3:
        sub_group_size, calls = settings.get("sub_group_size", SUB_GROUP), 0
        for group in parameter_groups(config, held):
            size = sub_group_size  # the first parameter opens a sub-group
            for parameter_elements in group.sizes:
                calls += size >= sub_group_size
                size = (0 if size >= sub_group_size else size) + round_up(parameter_elements, data) // data
        return calls
    return 1


def _orthogonalized(config: RunConfig, data: int, held: Stage, rank: tuple[int, int] | None) -> list[Term]:
    """Muon's two exchanges: momentum to the owners of the matrices, and results back. Bytes that a rank gives itself
    count, so a matrix that stays where it lies costs less. rank: (data, tensor) rank; None: the mean of all."""
    m, p = config.model, config.parallel
    rank_count = p.tensor * data
    if config.optimizer.name != "muon" or rank_count == 1:
        return []
    if rank is None:
        given = [sum(matrix.numel for matrix in stage_matrices(m, held.blocks)) // rank_count] * 2
    else:
        each, own_rank = stage_rounds(m, held.blocks, p.tensor, data, p.zero), rank[0] * p.tensor + rank[1]
        given = [sum(of.count_given(own_rank, back=back) for of in each) for back in (False, True)]
    e = 2 if config.precision.kind == "bf16" else FP32
    term_names = "momentum of matrices", "orthogonalized matrices"
    return [Term(what, "stage", "all-to-all", n * e, 1) for what, n in zip(term_names, given, strict=True)]


def _gathered(config: RunConfig, data: int, held: Stage, settings: Mapping[str, Any]) -> list[Term]:
    """ZeRO 3: weights, each padded to a multiple of the ranks, gathered where they are used."""
    p, m, e = config.parallel, config.model, count_element_bytes(config)
    steps = count_micro_batches(config, data)
    matrix_sizes, norm_sizes = parameter_sizes(m, held, p.tensor)
    total = sum(matrix_sizes) + sum(norm_sizes)
    enough = {"stage3_max_live_parameters": total, "stage3_max_reuse_distance": 2 * total}  # there and back
    whole = [Counter(round_up(n, data) // data * e for n in group) for group in (matrix_sizes, norm_sizes)]
    if all(settings.get(setting_key, 10**9) >= needed for setting_key, needed in enough.items()):
        # All in one call, kept until the end of the backward pass. A tied weight belongs to the whole model, and comes
        # first.
        first = round_up(m.padded_vocab * m.hidden // p.tensor, data) // data * e if m.tied else 0
        rest = sum(size * n for counted_sizes in whole for size, n in counted_sizes.items()) - first
        return [Term("weights", "data", "all-gather", size, steps * (size > 0)) for size in (first, rest)]
    # One by one, in both passes; once more where recomputed, except the last of a block, which the backward pass needs
    # next.
    uses: Counter[int] = Counter()
    if p.recompute == "full":
        block = Stage(held.blocks, first=False, last=False)
        for group in parameter_sizes(m, block, p.tensor):
            uses.update(round_up(n, data) // data * e for n in group)
        for block_number in range(held.blocks):  # no pipeline under ZeRO 3: all of them
            last = m.hidden if needs_product(m, block_number) else m.ffn_width * m.hidden // p.tensor
            uses[round_up(last, data) // data * e] -= 1
    for counted_sizes in whole:
        for size, n in counted_sizes.items():
            uses[size] += 2 * n
    return [Term("weights", "data", "all-gather", size, steps * n) for size, n in uses.items()]


def _checks(config: RunConfig, groups: int, norm_bytes: int) -> list[Term]:
    """ZeRO's norms, one per group of parameters; and in 16 bits a further check that all gradients are finite."""
    p = config.parallel
    model_group = "tensor" if p.pipeline == 1 else "model"  # DeepSpeed's model-parallel group
    asked_groups = [("data", True), (model_group, p.tensor * p.pipeline > 1)]
    terms = [Term("norm", group, "all-reduce", norm_bytes, groups * needed) for group, needed in asked_groups]
    if config.precision.kind == "fp16" or (config.precision.kind == "bf16" and p.zero == 2):
        terms += [Term("overflow", group, "all-reduce", 1, int(needed)) for group, needed in asked_groups]
    return terms


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
