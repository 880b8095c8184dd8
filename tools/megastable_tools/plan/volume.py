"""Communication volume of a training step, by formulas. Pure; `benchmarks/scaling.py` counts it in real steps.

Tensor parallelism: Megatron-LM, arXiv:1909.08053 section 3; with sequence parallelism: Korthikanti et al.,
arXiv:2205.05198 section 4.2.2; sharded data parallelism: ZeRO, arXiv:1910.02054 section 7, as DeepSpeed 0.19.8 does it;
rings: Patarasuk & Yuan, J. Parallel Distrib. Comput. 69 (2009); context parallelism: DeepSpeed Ulysses,
arXiv:2309.14509 section 3.1, or a ring, arXiv:2310.01889.

Letters: s tokens of a sample, b samples of a micro-batch, h hidden, e bytes of an activation, A micro-batches of a
step, T, P, D tensor, pipeline and data ranks, C ranks that share a sample, R replicas, E neighbouring data ranks that
share out the experts of a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import lcm
from typing import Any

from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.model.sizes import GPU_ELEMENTS, chunk_size, fp8_linears
from megastable.parallel.layout import (
    cut_evenly,
    cut_into_buckets,
    find_owned,
    limit_bucket,
)
from megastable_tools.plan.partition import (
    COLUMNS,
    FP32,
    INT64,
    ROWS,
    ParameterGroup,
    Stage,
    count_element_bytes,
    count_micro_batches,
    count_shards,
    count_tokens,
    cut_linears,
    list_chunk_blocks,
    needs_product,
    pad_flat,
    parameter_groups,
    parameter_sizes,
    round_up,
    stage_of,
    whole_stage,
)
from megastable_tools.plan.updates import list_block_weights, stage_matrices, stage_rounds

FP64, INT32 = 8, 4
GRADIENT_COLUMNS = 9  # of engine/local_gradients.py
ROUTER_TOTALS = 4  # of model/experts.py, which needs torch
DEFAULT_BUCKET = 5e8  # elements of DeepSpeed's reduce_bucket_size
# What a rank with replicas sends of its sums: names of terms.
ACROSS, MOVED = "gradients over replicas", "gradients to their owners"
SUB_GROUP = 10**9  # elements on a rank that end a sub-group of ZeRO 3: DeepSpeed's default


@dataclass(frozen=True)
class Term:
    """`calls` of one collective in a step, each with `bytes` given by this rank (for a receive: received).

    group: "tensor", "context", "data", "shard" (the data ranks of a replica), "replica" (those with the same shard),
    "expert" (the data ranks that share out experts), "expert data" (those with the same experts), "stage"
    (tensor x data), "pipeline" (all stages of one pipe), "model" (tensor x pipeline), "tied" (the data ranks of
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


def count_members(config: RunConfig, data: int) -> dict[str, int]:
    """Number of ranks in a group of each kind."""
    t, p = config.parallel.tensor, config.parallel.pipeline
    context_ranks, expert_ranks = config.parallel.context, config.parallel.expert
    group_sizes = {"tensor": t, "context": context_ranks, "data": data, "pipeline": p}
    shards = count_shards(config, data)
    group_sizes |= {"expert": expert_ranks, "expert data": shards // expert_ranks}
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
    held = stage_of(config, cut, stage)
    chunk_blocks = list_chunk_blocks(cut, stage, config.parallel.model_chunks)
    terms = _activations(config, data, held, chunk_blocks, loss, elements)
    terms += _context(config, data, held)
    terms += _routers(config, data, held)
    terms += list_expert_terms(config, data, held)
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
    if config.model.experts is not None:  # what every router has chosen: engine/expert_routing.py
        numbers += config.model.layers * (2 * config.model.experts.count + ROUTER_TOTALS)
    terms.append(Term("the gate", "world", "all-reduce", FP64 * numbers, 1))
    terms += _clipping(config, data, held)
    terms += _update_sums(config, data, held, zero or {})
    return [volume_term for volume_term in terms if volume_term.calls]


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
        cut = {n: cut_linears(config, fp8_linears(config, n), m.experts_of(n) is not None) for n in numbers}
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
                # Experts keep what they have gathered.
                (2 * blocks - held.routed) * parallel_config.gathers_again,
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


def _routers(config: RunConfig, data: int, held: Stage) -> list[Term]:
    """Routed experts in tensor and context parallelism, beside the tokens: choices and their weights enter the experts'
    region with them, and the balance loss counts the choices of all ranks that share a micro-batch's tokens."""
    p, experts = config.parallel, config.model.experts
    if experts is None:
        return []
    calls = held.routed * count_micro_batches(config, data)
    calls_again = calls * (2 if p.recompute == "full" else 1)
    choices, load_bytes = count_tokens(config) * experts.top_k, experts.count * FP32
    balance_calls = calls_again * (experts.balance_loss > 0 and experts.balance_over == "micro_batch")
    terms = list[Term]()
    if p.tensor > 1 and p.sequence:
        own_choices, router_bytes = choices // p.tensor, experts.count * config.model.hidden * FP32
        terms += [
            Term("choices of experts", "tensor", "all-gather", own_choices * INT64, calls_again),
            Term("their weights", "tensor", "all-gather", own_choices * FP32, calls_again),
            Term("gradients of their weights", "tensor", "reduce-scatter", choices * FP32, calls),
            Term("gradients of routers", "tensor", "all-reduce", router_bytes, calls),
            Term("loads of experts", "tensor", "all-reduce", load_bytes, balance_calls),
        ]
    elif p.tensor > 1:
        terms.append(Term("gradients of their weights", "tensor", "all-reduce", choices * FP32, calls))
    if p.context > 1:
        terms.append(Term("loads of experts", "context", "all-reduce", load_bytes, balance_calls))
    return terms


def list_expert_terms(config: RunConfig, data: int, held: Stage) -> list[Term]:
    """Experts on E data ranks, in every micro-batch and block: how many tokens go to each expert, the tokens there, and
    their results back; in the backward pass the gradients of both. As if all experts had as many tokens."""
    experts = config.model.experts
    if experts is None or config.parallel.expert == 1:
        return []
    calls = held.routed * count_micro_batches(config, data)
    calls_again = calls * (2 if config.parallel.recompute == "full" else 1)
    row_bytes = count_tokens(config) * experts.top_k * config.model.hidden * count_element_bytes(config)
    return [
        Term("counts of tokens", "expert", "all-to-all", experts.count * INT64, calls_again),
        Term("tokens to experts and back", "expert", "all-to-all", row_bytes, 2 * calls_again),
        Term("their gradients", "expert", "all-to-all", row_bytes, 2 * calls),
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
    embedding_group = next(group for group in parameter_groups(config, held) if group.tables)
    shards = count_shards(config, data)
    partition_size = pad_flat(embedding_group.total, shards) // shards
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
    groups = parameter_groups(config, held)
    if p.zero == 3:
        padded_sizes = (round_up(n, data) * calls for group in groups for n, calls in group.counts.items())
        gradients = sum(padded_sizes) * FP32
        return [
            *_gathered(config, data, held, settings),
            Term("gradients", "data", "reduce-scatter", gradients, micro_batches),
            *_checks(config, _updates(config, data, held, settings), FP64),
        ]
    shards = count_shards(config, data)
    # DeepSpeed also reduces over a group of one, but does not gather over it.
    weights = _shared(config, data, held, settings, data_rank) if shards > 1 else []
    if p.zero == 1 and config.precision.kind == "bf16":
        # To every rank the part that it updates; the norm piggybacks on the gate's sum.
        bucket_calls = Counter(
            (_name_group(config, group), n)
            for group, group_buckets in zip(groups, cut_gradients(config, data, held, settings), strict=True)
            for n in group_buckets
        )
        summed = [
            Term("gradients", group_kind, "reduce-scatter", n * FP32, calls * (data > 1))
            for (group_kind, n), calls in bucket_calls.items()
        ]
        # A slice of every bucket goes over the replicas, and on to its owners.
        slice_calls = Counter[int]()
        for (_, n), calls in bucket_calls.items() if p.replicas > 1 else ():
            slice_calls[(n // shards + (data_rank % shards < n % shards)) * FP32] += calls
        for slice_bytes, calls in slice_calls.items():
            summed += [
                Term(ACROSS, "replica", "all-reduce", slice_bytes, calls),
                Term(MOVED, "shard", "all-to-all", slice_bytes, calls),
            ]
        return [*summed, *weights]
    group_totals, sum_count = Counter[str](), micro_batches if p.zero == 2 else 1
    for group in groups:
        group_totals[_name_group(config, group)] += group.total
    # To every rank its part, without the padding.
    summed = [
        Term("gradients", group_kind, "reduce-scatter", total * FP32, sum_count)
        for group_kind, total in group_totals.items()
    ]
    return [*summed, *_checks(config, 0, FP32), *weights]  # the norm piggybacks here, too


def _name_group(config: RunConfig, group: ParameterGroup) -> str:
    """Of the data ranks over which ZeRO shares out a group of parameters."""
    if group.expert_ranks > 1:
        return "expert data"
    return "data" if config.parallel.replicas == 1 else "shard"


def cut_gradients(
    config: RunConfig, data: int, held: Stage, settings: Mapping[str, Any]
) -> list[list[int]]:  # fmt: skip
    """Elements of the buckets of gradients that ZeRO 1 in bf16 sums (engine/gradient_sums.py), by group of parameters.

    In the order of the backward pass: the last bucket of each group is complete when that is over.
    """
    bucket_limit, cut_groups = _limit(settings, data), []
    for group in parameter_groups(config, held):
        group_buckets = _cut_sizes(_order_sizes(config, held, group), bucket_limit)
        # DeepSpeed's padding is behind the last parameter.
        padding = pad_flat(group.total, count_shards(config, data, group)) - group.total
        cut_groups.append([group_buckets[0] + padding, *group_buckets[1:]])
    return cut_groups


@lru_cache(maxsize=256)  # the layout search asks repeatedly
def _cut_sizes(sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Elements of every bucket."""
    return tuple(sum(sizes[i] for i in numbers) for numbers in cut_into_buckets(sizes, limit))


_cut_evenly = lru_cache(maxsize=256)(cut_evenly)


def cut_weights(
    config: RunConfig, data: int, held: Stage, settings: Mapping[str, Any]
) -> list[list[range]]:  # fmt: skip
    """Elements of the buckets in which ZeRO 1 and 2 gather weights (engine/weight_gathers.py), by group of parameters.

    In the order of the forward pass: the first bucket of each group is read when that begins, or nearly.
    """
    bucket_limit, cut_groups = _limit(settings, data), []
    for group in parameter_groups(config, held):
        ordered_sizes, group_shards = _order_sizes(config, held, group), count_shards(config, data, group)
        flat_length = pad_flat(group.total, group_shards)
        cut_groups.append(_cut_evenly(ordered_sizes, flat_length, group_shards, bucket_limit))
    return cut_groups


def _limit(settings: Mapping[str, Any], data: int) -> int:
    return limit_bucket(int(settings.get("reduce_bucket_size", DEFAULT_BUCKET)), data)


def _order_sizes(config: RunConfig, held: Stage, group: ParameterGroup) -> tuple[int, ...]:
    """Elements of every parameter of a group in the order of the model."""
    # Of the tables for the vocabulary, which end their group's list, the embedding comes before all blocks.
    has_early = held.first or (held.last and config.model.tied)
    later_ones = len(group.sizes) - int(group.tables > 0 and has_early)
    return group.sizes[later_ones:] + group.sizes[:later_ones]


Slice = tuple[str, int]  # a kind of group, and elements


def _shared(
    config: RunConfig, data: int, held: Stage, settings: Mapping[str, Any], data_rank: int
) -> list[Term]:  # fmt: skip
    """Updated weights: even slices of every bucket are gathered. Before that they come from the ranks that have updated
    them, in one message for all buckets but those of which each rank has updated an equal part."""
    e, slice_counts, given_elements = count_element_bytes(config), Counter[Slice](), Counter[str]()
    cut_groups = cut_weights(config, data, held, settings)
    for group, group_buckets in zip(parameter_groups(config, held), cut_groups, strict=True):
        ranks, group_kind = count_shards(config, data, group), _name_group(config, group)
        own_rank, flat_length = data_rank // group.expert_ranks % ranks, group_buckets[-1].stop
        for bucket in group_buckets if ranks > 1 else ():
            slice_counts[group_kind, len(bucket) // ranks] += 1
            if len(group_buckets) > 1:
                given_elements[group_kind] += len(find_owned(bucket, flat_length, ranks, own_rank))
    exchanged = [
        Term("weights", group_kind, "all-to-all", n * e, 1) for group_kind, n in given_elements.items() if n
    ]
    return exchanged + [
        Term("weights", group_kind, "all-gather", n * e, calls)
        for (group_kind, n), calls in slice_counts.items()
    ]


def _clipping(config: RunConfig, data: int, held: Stage) -> list[Term]:
    """What clipping sums over the ranks before an update: optim/clipping.py, engine/zero.py.

    `worker` counts as if no worker were above the threshold; otherwise gradients are averaged twice.
    """
    m, parallel_config, kind = config.model, config.parallel, config.optimizer.clipping.kind
    matrices, vectors = map(len, parameter_sizes(m, whole_stage(m), 1))
    rows = sum(matrix_rows * n for (matrix_rows, _), n in _count_shapes(m).items())
    rows += (1 if m.tied else 2) * m.padded_vocab
    sample_ranks = data // parallel_config.context
    numbers = {
        "value": 1, "adagc": matrices + vectors, "agc": 2 * (rows + vectors), "worker": sample_ranks,
    }  # fmt: skip
    terms = [Term("clipping", "world", "all-reduce", FP64 * numbers.get(kind, 0), int(kind in numbers))]
    if kind == "worker" and parallel_config.context > 1:
        for parameter_group in parameter_groups(config, held):
            padded_size = pad_flat(parameter_group.total, count_shards(config, data, parameter_group)) * FP32
            terms.append(Term("gradients of a worker", "context", "all-reduce", padded_size, 1))
    return terms


def _update_sums(config: RunConfig, data: int, held: Stage, settings: Mapping[str, Any]) -> list[Term]:
    """What an optimizer sums over the ranks within an update: optim/adam_pieces.py,
    adafactor.py. Tables of the whole model, also where a call updates a part of it."""
    m, name = config.model, config.optimizer.name
    matrices, vector_sizes = parameter_sizes(m, whole_stage(m), 1)
    number_bytes = FP64 * (len(matrices) + len(vector_sizes))  # one for every parameter
    side_count = sum(sum(shape) * n for shape, n in _count_shapes(m).items())  # rows and columns
    side_count += (1 if m.tied else 2) * (m.padded_vocab + m.hidden)
    sizes = {
        "stable_adamw": [number_bytes],
        "lamb": [2 * number_bytes],
        "stable_spam": [number_bytes, 2 * number_bytes],  # maxima, then sums
        "adafactor": [FP32 * (side_count + len(matrices)), number_bytes],
    }
    if name not in sizes:
        return []
    calls = _updates(config, data, held, settings)
    return [Term(f"{name}'s update", "world", "all-reduce", size, calls) for size in sizes[name]]


def _count_shapes(model: ModelConfig) -> Counter[tuple[int, int]]:
    """How many matrices of all blocks have so many rows and columns."""
    whole, shape_counts = whole_stage(model), Counter[tuple[int, int]]()
    for is_routed in (False, True):
        if block_count := whole.count_blocks(is_routed):
            for weight in list_block_weights(model, is_routed):
                shape_counts[weight.shape] += block_count
    return shape_counts


def _updates(config: RunConfig, data: int, held: Stage, settings: Mapping[str, Any]) -> int:
    """How often ZeRO calls the optimizer in a step: for all parameters, or for each sub-group."""
    if config.parallel.zero == 3:
        limit = int(settings.get("sub_group_size", SUB_GROUP))
        return sum(_count_sub_groups(group.sizes, data, limit) for group in parameter_groups(config, held))
    return 1


@lru_cache(maxsize=256)
def _count_sub_groups(sizes: tuple[int, ...], data: int, limit: int) -> int:
    size, calls = limit, 0  # the first parameter opens a sub-group
    for parameter_elements in sizes:
        calls += size >= limit
        size = (0 if size >= limit else size) + round_up(parameter_elements, data) // data
    return calls


def _orthogonalized(config: RunConfig, data: int, held: Stage, rank: tuple[int, int] | None) -> list[Term]:
    """Muon's two exchanges: momentum to the owners of the matrices, and results back. Bytes that a rank gives itself
    count, so a matrix that stays where it lies costs less. rank: (data, tensor) rank; None: the mean of all."""
    m, p = config.model, config.parallel
    rank_count = p.tensor * data
    if config.optimizer.name != "muon" or rank_count == 1:
        return []
    if rank is None:
        all_elements = sum(matrix.numel for matrix in stage_matrices(m, held.blocks, held.routed))
        given = [(all_elements // rank_count, all_elements // rank_count)]
    else:
        each = stage_rounds(m, held.blocks, held.routed, p.tensor, data, p.zero)
        own_rank = rank[0] * p.tensor + rank[1]
        given = [(of.count_given(own_rank, back=False), of.count_given(own_rank, back=True)) for of in each]
    e = 2 if config.precision.kind == "bf16" else FP32
    return [
        Term(what, "stage", "all-to-all", elements * e, 1)
        for round_elements in given
        for what, elements in zip(
            ("momentum of matrices", "orthogonalized matrices"), round_elements, strict=True
        )
    ]


def _gathered(config: RunConfig, data: int, held: Stage, settings: Mapping[str, Any]) -> list[Term]:
    """ZeRO 3: weights, each padded to a multiple of the ranks, gathered where they are used."""
    p, m, e = config.parallel, config.model, count_element_bytes(config)
    steps = count_micro_batches(config, data)
    matrix_sizes, norm_sizes = parameter_sizes(m, held, p.tensor)
    total = sum(matrix_sizes) + sum(norm_sizes)
    enough = {"stage3_max_live_parameters": total, "stage3_max_reuse_distance": 2 * total}  # there and back
    whole = [_count_parts(group, data, e) for group in (matrix_sizes, norm_sizes)]
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
        block = replace(held, first=False, last=False)
        for group in parameter_sizes(m, block, p.tensor):
            uses.update(_count_parts(group, data, e))
        for block_number in range(held.blocks):  # no pipeline under ZeRO 3: all of them
            experts = m.experts_of(block_number)
            last_weight = list_block_weights(m, experts is not None)[-1]
            last = m.hidden if needs_product(m, block_number) else last_weight.count_elements(p.tensor)
            # The results of routed experts are needed once more, and all of their weights are released.
            is_next = experts is None or experts.shared > 0 or needs_product(m, block_number)
            uses[round_up(last, data) // data * e] -= is_next
    for counted_sizes in whole:
        for size, n in counted_sizes.items():
            uses[size] += 2 * n
    return [Term("weights", "data", "all-gather", size, steps * n) for size, n in uses.items()]


def _count_parts(sizes: Sequence[int], data: int, width: int) -> Counter[int]:
    """How many parameters have a part of so many bytes on each data rank. width: bytes of an element."""
    part_counts = Counter[int]()
    for size, n in Counter(sizes).items():
        part_counts[round_up(size, data) // data * width] += n
    return part_counts


def _checks(config: RunConfig, groups: int, norm_bytes: int) -> list[Term]:
    """ZeRO's norms, one per group of parameters; and in 16 bits a further check that all gradients are finite."""
    p = config.parallel
    model_group = "tensor" if p.pipeline == 1 else "model"  # DeepSpeed's model-parallel group
    asked_groups = [("data", True), (model_group, p.tensor * p.pipeline > 1)]
    terms = [Term("norm", group, "all-reduce", norm_bytes, groups * needed) for group, needed in asked_groups]
    if config.precision.kind == "fp16" or (config.precision.kind == "bf16" and p.zero == 2):
        terms += [Term("overflow", group, "all-reduce", 1, int(needed)) for group, needed in asked_groups]
    return terms
