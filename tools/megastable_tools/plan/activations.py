"""Activation memory that a rank keeps for the backward pass of one micro-batch, tensor by tensor. Pure; without torch.

    made = block(config, kernels)
    kept(made), extra(made)        # bytes kept; bytes that the backward pass allocates beside them

Derived from model/*.py by what autograd saves for every operation (torch's derivatives.yaml): a product saves the
factor that the other's gradient needs, a linear layer its input, a power its base, silu its input, a root and a softmax
their result; sums, casts, permutations and rotations by a table save nothing. Views keep their whole base alive. For
compiled blocks: what torch 2.13's partitioner was observed to save; it recomputes whatever is cheap. Korthikanti et
al., arXiv:2205.05198 section 4, count other layers.

Letters: N tokens of a micro-batch on this rank, n those of its part of the residual stream (N, or N / tensor with
sequence parallelism), h hidden, q and k widths of all queries and keys of this tensor rank, f of its SwiGLU, e bytes of
an activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from megastable.config.rules import writes_scores
from megastable.config.tree import RunConfig
from megastable_tools.plan.partition import FP32, INT64, count_element_bytes

ROWS, KEPT = 256, 16  # copied from model/blocked.py, which needs torch
RING_ELEMENTS = 1 << 24  # copied from model/ring.py
SCORES = 1 << 24  # copied from layer_stats.py, which needs torch


@dataclass(frozen=True)
class PlannedKernels:
    """As in model/kernels.py, which needs torch; made by `memory.kernels_on`. gpu: the kernels are for a GPU."""

    attention: str = "sdpa"
    loss: str = "chunked"
    compile: bool = True
    gpu: bool = True


@dataclass(frozen=True)
class Saved:
    """A tensor saved for the backward pass. width: bytes of an element."""

    name: str
    elements: int
    width: int

    @property
    def bytes(self) -> int:
        return self.elements * self.width


@dataclass(frozen=True)
class SavedOperation:
    """saved: freed after its backward. backward: bytes of its gradients, in and out, and of its temporary results.
    left: bytes that it leaves in memory for a weight gradient that comes later."""

    saved: tuple[Saved, ...]
    backward: int
    left: int = 0


@dataclass(frozen=True)
class ShapeSizes:
    """The letters of the module docstring, for a config on one rank."""

    N: int
    n: int
    h: int
    q: int
    k: int
    f: int
    e: int
    vocabulary: int  # rows of this tensor rank, padding included
    heads: int  # of queries at the attention's core
    queries: int  # of a sample there: all tokens; in a ring this rank's
    samples: int
    length: int

    @property
    def scores(self) -> int:
        """Scores at the attention's core, with those that a mask excludes."""
        return self.samples * self.heads * self.queries * self.length

    @property
    def stream(self) -> int:
        """Elements of this rank's part of the residual stream."""
        return self.n * self.h


# Saved inputs of linear layers, by the name of the saved tensor; see config.LINEARS.
INPUTS = {
    "attention input": "attention.qkv", "attention output": "attention.out", "MLP input": "mlp.gate_up",
    "SwiGLU output": "mlp.down",
}  # fmt: skip


def in_fp8(config: RunConfig, saved: Saved, gpu: bool) -> int:
    """Additional (or saved, if negative) bytes of a linear layer's input kept in FP8: a byte per element, and with
    blocks an fp32 scale per 128. Attention keeps a copy of its output of its own; the emulation keeps shards as they
    are. gpu: on one, Transformer Engine keeps them in FP8."""
    fp8_config = config.precision.fp8
    if fp8_config is None or config.parallel.recompute == "full":
        return 0
    is_shard = config.parallel.gathers_again and saved.name in ("attention input", "MLP input")
    if is_shard and (fp8_config.backend == "emulated" or not gpu):
        return 0
    fp8_bytes = saved.elements + (saved.elements // 128 * FP32 if fp8_config.recipe == "block" else 0)
    return fp8_bytes if saved.name == "attention output" else fp8_bytes - saved.bytes


def shape_sizes_of(config: RunConfig) -> ShapeSizes:
    m, p, micro_batch = config.model, config.parallel, config.train.micro_batch
    t, d = p.tensor, m.head_width
    token_count = micro_batch * m.sequence_length // p.context
    return ShapeSizes(
        N=token_count, n=token_count // t if p.sequence else token_count, h=m.hidden, q=m.heads * d // t,
        k=m.key_value_heads * d // t, f=m.ffn_width // t, e=count_element_bytes(config), vocabulary=m.padded_vocab // t,
        heads=m.heads // t // (1 if p.is_ring else p.context),
        queries=m.sequence_length // (p.context if p.is_ring else 1),
        samples=micro_batch, length=m.sequence_length,
    )  # fmt: skip


def count_kept_bytes(operations: Sequence[SavedOperation]) -> int:
    """Bytes saved for the backward pass."""
    return sum(saved_tensor.bytes for saved_operation in operations for saved_tensor in saved_operation.saved)


def count_backward_bytes(operations: Sequence[SavedOperation]) -> int:
    """Peak of bytes beside the saved ones, while the backward pass runs from the end."""
    held_bytes = peak_bytes = 0
    for saved_operation in reversed(operations):
        peak_bytes = max(peak_bytes, held_bytes + saved_operation.backward)
        held_bytes += saved_operation.left - sum(saved_tensor.bytes for saved_tensor in saved_operation.saved)
    return peak_bytes


def list_block_operations(
    config: RunConfig, kernels: PlannedKernels, routed: bool = False
) -> list[SavedOperation]:  # fmt: skip
    """The operations of one block, under the recomputation of `config`. routed: of one with routed experts."""
    z = shape_sizes_of(config)
    if config.parallel.recompute == "full":
        # Recomputed in the backward pass, when all of it is in memory.
        whole = list_whole_operations(config, kernels, "none", routed)
        whole_bytes = count_kept_bytes(whole) + count_backward_bytes(whole)
        return [SavedOperation((Saved("stream", z.stream, z.e),), whole_bytes)]
    return list_whole_operations(config, kernels, config.parallel.recompute, routed)


def list_whole_operations(
    config: RunConfig, kernels: PlannedKernels, recompute: str, routed: bool
) -> list[SavedOperation]:  # fmt: skip
    """The operations of one block that is not recomputed as a whole."""
    z, model_config = shape_sizes_of(config), config.model
    is_fused, is_selective = kernels.compile, recompute == "selective"
    # Products that can be deferred are not compiled; norms, and what lies between them, are compiled by themselves.
    is_whole = is_fused and config.parallel.schedule != "zero_bubble"
    qkv_width = z.q + 2 * z.k
    attention = [
        _entered("attention input", config, z, kernels, qkv_width),
        *_heads(config, z, kernels, is_selective),
        *_core(config, z, kernels, is_selective),
    ]
    if is_selective and is_whole:
        attention.append(SavedOperation((), z.e * (z.N * z.q + z.n * z.h)))
    else:
        attention.append(_left("attention output", config, z, z.q))
    if routed:  # nothing of the experts is compiled, nor of what surrounds them
        mlp = list_expert_operations(config, z, is_selective)
    else:
        mlp = [
            _entered("MLP input", config, z, kernels, 2 * z.f),
            *_list_swiglu(config, z.N * z.f, z.e, is_fused, is_selective),
        ]
        if is_whole and is_selective:
            mlp.append(SavedOperation((), z.e * (2 * z.N * z.f + z.n * z.h)))  # the product, recomputed
        else:
            mlp.append(_left("SwiGLU output", config, z, z.f))
    first_norm = _norm("attention norm", z, z.stream, z.n, is_fused)
    second_norm = _norm("MLP norm", z, z.stream, z.n, is_fused and not routed)
    # Of `mixed` the last block: the others save the same, in another order.
    norm_placement = model_config.placement_of(model_config.layers - 1)
    if norm_placement == "both":
        post_norms = [_norm(f"{name} post-norm", z, z.stream, z.n, is_fused) for name in ("attention", "MLP")]
        if is_whole:  # the stream at the second norm is added up again, of two that are kept
            second_norm = [replace(saved_operation, saved=()) for saved_operation in second_norm]
        return [*first_norm, *attention, *post_norms[0], *second_norm, *mlp, *post_norms[1]]
    if norm_placement == "before":
        return [*first_norm, *attention, *second_norm, *mlp]
    return [*attention, *first_norm, *mlp, *second_norm]


def _list_swiglu(
    config: RunConfig, elements: int, width: int, fused: bool, selective: bool
) -> list[SavedOperation]:  # fmt: skip
    """From gate and up to the inputs of the last product, which has so many elements of so many bytes."""
    has_clamp = not fused and config.model.swiglu_clamp is not None
    one = width * elements
    swiglu = [SavedOperation((Saved("gate and up", 2 * elements, width),), (3 if fused else 4) * one)]
    if not fused and not selective:
        clamped_saved = (Saved("clamped gate and up", 2 * elements, width),) if has_clamp else ()
        swiglu.append(SavedOperation((*clamped_saved, Saved("silu", elements, width)), 3 * one))
    elif selective:
        swiglu.append(SavedOperation((), (4 + 2 * has_clamp if not fused else 3) * one))
    return swiglu


def list_expert_operations(config: RunConfig, z: ShapeSizes, selective: bool) -> list[SavedOperation]:
    """Router, routed and shared experts: model/experts.py. Every token has `top_k` rows."""
    experts, tensor = config.model.experts, config.parallel.tensor
    assert experts is not None
    width = config.model.expert_width // tensor
    rows, choices, scores = z.N * experts.top_k, z.n * experts.top_k, z.n * experts.count
    row_bytes = z.e * rows * z.h
    made = [
        SavedOperation(
            (Saved("router's input", z.stream, FP32), Saved("router's weight", experts.count * z.h, FP32)),
            FP32 * (z.stream + experts.count * z.h) + z.e * z.stream,
        ),
        SavedOperation(
            (
                Saved("router's logits", scores * (experts.router_z_loss > 0), FP32),
                Saved("router's scores", scores, FP32),
                Saved("choices of experts", choices, INT64),
                Saved("weights of choices", choices * (1 + experts.normalize), FP32),
            ),
            3 * FP32 * scores,
        ),
        SavedOperation((Saved("places of choices", rows, INT64),), 2 * row_bytes + z.e * z.N * z.h),
        _linear("inputs of experts", config, z, rows * z.h, rows * 2 * width, 2 * width * z.h),
        *_list_swiglu(config, rows * width, z.e, False, selective),
        _linear("SwiGLU outputs of experts", config, z, rows * width, rows * z.h, width * z.h),
        SavedOperation(
            # By expert, as torch's index_copy keeps what it is given, and by token.
            (Saved("results of experts", 2 * rows * z.h, z.e), Saved("weights of results", rows, FP32)),
            (2 * FP32 + z.e) * rows * z.h + FP32 * z.N * z.h,
        ),
    ]
    if experts.shared:
        shared_width = width * experts.shared
        made += [
            _linear("MLP input", config, z, z.N * z.h, z.N * 2 * shared_width, 2 * shared_width * z.h),
            *_list_swiglu(config, z.N * shared_width, z.e, False, selective),
            _linear("SwiGLU output", config, z, z.N * shared_width, z.N * z.h, shared_width * z.h),
        ]
    return made


def count_deferred_bytes(config: RunConfig, kernels: PlannedKernels, routed: bool = False) -> int:
    """What the deferred weight gradients of a block keep of a micro-batch: inputs of its linear layers, and gradients
    of their outputs. In FP8 as much as without it: Transformer Engine may keep two layouts."""
    return sum(operation.left for operation in list_whole_operations(config, kernels, "none", routed))


def _norm(
    name: str, z: ShapeSizes, elements: int, rows: int, fused: bool, own: bool = True
) -> list[SavedOperation]:
    """own: no other operation saves its input; in fp32 it is kept uncast."""
    if fused:
        return [SavedOperation((Saved(f"{name}, input", elements, z.e),), 3 * z.e * elements)]
    wide_bytes = elements * FP32
    given_saved = (Saved(f"{name}, in fp32", elements, FP32),) if z.e < FP32 or own else ()
    return [
        # The gradients along the mean: of the product, of the mean, of the square; and their sum.
        SavedOperation((*given_saved, Saved(f"{name}, reciprocals", rows, FP32)), 5 * wide_bytes),
        SavedOperation((Saved(f"{name}, normed", elements, FP32),), 3 * wide_bytes),
    ]


def _linear(
    name: str, config: RunConfig, z: ShapeSizes, inputs: int, outputs: int, weight: int
) -> SavedOperation:
    """backward: the gradients of output, input and, unless it comes later, weight."""
    saved, both_bytes = (Saved(name, inputs, z.e),), z.e * (outputs + inputs)
    if config.parallel.schedule == "zero_bubble":
        return SavedOperation(saved, both_bytes, both_bytes)
    return SavedOperation(saved, both_bytes + z.e * weight)


def _left(name: str, config: RunConfig, z: ShapeSizes, inputs: int) -> SavedOperation:
    """A row-parallel layer. In chunks its backward pass also has the gradient of the whole sequence, and two slices. A
    weight gradient that comes later keeps that gradient, in any case."""
    of_shard = _linear(name, config, z, z.N * inputs, z.n * z.h, inputs * z.h)
    chunks = config.parallel.tensor_overlap
    sliced_bytes = z.e * z.N * z.h * (1 + 2 / chunks) if chunks > 1 else 0
    left_bytes = of_shard.left and of_shard.left + z.e * (z.N - z.n) * z.h
    return replace(of_shard, backward=of_shard.backward + int(sliced_bytes), left=left_bytes)


def _entered(
    name: str, config: RunConfig, z: ShapeSizes, kernels: PlannedKernels, width: int
) -> SavedOperation:
    """A column-parallel layer: see `overlapped.enter_and_multiply`. width: of its output."""
    whole_input = _linear(name, config, z, z.N * z.h, z.N * width, z.h * width)
    if not config.parallel.gathers_again:
        return whole_input
    gathered_bytes, fp8_config = z.e * z.N * z.h, config.precision.fp8
    backward_bytes, left_bytes = whole_input.backward + gathered_bytes, whole_input.left
    # Transformer Engine gathers it in the backward pass, and keeps it for later.
    if left_bytes and (fp8_config is None or fp8_config.backend == "emulated" or not kernels.gpu):
        backward_bytes, left_bytes = whole_input.backward, left_bytes - gathered_bytes + z.e * z.stream
    return SavedOperation((Saved(name, z.stream, z.e),), backward_bytes, left_bytes)


def _heads(
    config: RunConfig, z: ShapeSizes, kernels: PlannedKernels, selective: bool
) -> list[SavedOperation]:
    """From projected queries, keys and values to those at the core, without what the core itself saves."""
    model_config, made = config.model, []
    norm_rows = z.N * z.q // model_config.head_width, z.N * z.k // model_config.head_width
    are_repeated = _repeats(config, kernels) and not selective
    has_norm = bool(model_config.qk_norm)
    # Kept whole if a view of it is saved: the core's values; in fp32 the norms' inputs; compiled by the norms.
    is_exchanged = config.parallel.context > 1 and not config.parallel.is_ring
    if (has_norm and (z.e == FP32 or kernels.compile)) or not (are_repeated or is_exchanged):
        made.append(SavedOperation((Saved("queries, keys, values", z.N * (z.q + 2 * z.k), z.e),), 0))
    if has_norm and not kernels.compile:
        made += _norm("query norm", z, z.N * z.q, norm_rows[0], False, own=False)
        made += _norm("key norm", z, z.N * z.k, norm_rows[1], False, own=False)
    if is_exchanged and not are_repeated:
        made.append(SavedOperation((Saved("exchanged", z.N * (z.q + 2 * _keys(config, z)), z.e),), 0))
    return made


def _keys(config: RunConfig, z: ShapeSizes) -> int:
    """k at the core: context parallelism may repeat heads, but for a ring."""
    if config.parallel.is_ring:
        return z.k
    key_heads = config.model.key_value_heads // config.parallel.tensor
    return z.k * lcm(key_heads, config.parallel.context) // key_heads


def _repeats(config: RunConfig, kernels: PlannedKernels) -> bool:
    """Whether keys and values are repeated for every query: cores.py."""
    m, parallel_config = config.model, config.parallel
    if parallel_config.is_ring:
        return False
    key_heads = lcm(m.key_value_heads // parallel_config.tensor, parallel_config.context)
    are_grouped = key_heads < m.heads // parallel_config.tensor
    needs_flex = config.data.keep_documents_apart or m.attention_softcap is not None or m.window is not None
    on_gpu = kernels.gpu and (config.precision.kind != "fp32" or needs_flex)
    return kernels.attention == "reference" or (kernels.attention == "sdpa" and are_grouped and not on_gpu)


def _core(config: RunConfig, z: ShapeSizes, kernels: PlannedKernels, selective: bool) -> list[SavedOperation]:
    keys = _keys(config, z)
    queries = Saved("rotated queries", z.N * z.q, z.e)
    if config.parallel.is_ring:
        return [_ring(config, z, kernels, queries)]
    score_count = z.scores
    is_plain, has_cap = kernels.attention == "reference", config.model.attention_softcap is not None
    if selective:
        # Inputs only: the rest is recomputed.
        recomputed_bytes = 6 * z.e * z.N * z.q
        if is_plain:
            recomputed_bytes += (4 + has_cap) * score_count * FP32
        elif kernels.attention == "blocked":
            recomputed_bytes += count_probabilities(config, z) * z.e
        return [SavedOperation((queries, Saved("rotated keys", z.N * keys, z.e)), recomputed_bytes)]
    if is_plain:
        wide_saved = [Saved(f"{what} in fp32", z.N * z.q, FP32) for what in ("queries", "keys", "values")]
        mask_saved = Saved("mask", z.length**2, 1)
        tanh_saved = [Saved("capped scores", score_count, FP32)] if has_cap else []
        all_saved = *wide_saved, mask_saved, *tanh_saved, Saved("attention weights", score_count, FP32)
        return [SavedOperation(all_saved, 3 * score_count * FP32)]
    if _repeats(config, kernels):
        given = [queries, Saved("keys, repeated", z.N * z.q, z.e), Saved("values, repeated", z.N * z.q, z.e)]
    else:
        given = [queries, Saved("rotated keys", z.N * keys, z.e)]
    if kernels.attention == "blocked":
        given.append(Saved("attention weights", count_probabilities(config, z), z.e))
    else:
        given.append(Saved("logsumexp", z.samples * z.heads * z.queries, FP32))
    if config.parallel.context > 1:
        given.append(Saved("attention output, by heads", z.N * z.q, z.e))
    return [SavedOperation(tuple(given), z.e * z.N * (2 * z.q + 2 * keys))]


def _ring(config: RunConfig, z: ShapeSizes, kernels: PlannedKernels, queries: Saved) -> SavedOperation:
    """model/ring.py, recomputed or not: its output is the next layer's input. On a CPU, and where scores are written
    out, everything is cast to fp32."""
    is_written = kernels.attention == "reference" or writes_scores(config.model, config.segmented)
    is_wide = (is_written or not kernels.gpu) and z.e < FP32
    saved = (
        queries,
        Saved("rotated keys", z.N * z.k, z.e),
        Saved("logsumexp", z.samples * z.heads * z.queries, FP32),
    )
    pair, head_count = 2 * z.N * z.k, z.N * z.q  # keys and values; queries
    # Keys and values, and those that come; gradients of these: this rank's, those that leave, come, and are computed.
    held_bytes = 2 * pair * z.e + 4 * pair * FP32 + FP32 * head_count + z.e * (head_count + pair)
    held_bytes += is_wide * FP32 * (3 * head_count + pair)
    chunk_bytes = (head_count + (pair if kernels.gpu or is_written else 2 * head_count)) // 2 * FP32
    if is_written:
        row_scores = z.samples * z.heads * z.queries // 2  # of one query of each head against a chunk's keys
        chunk_bytes += 4 * min(row_scores * z.queries // 2, max(RING_ELEMENTS, row_scores)) * FP32
    return SavedOperation(saved, held_bytes + chunk_bytes)


def count_probabilities(config: RunConfig, z: ShapeSizes) -> int:
    """Number of probabilities kept by model/blocked.py's forward: `kept_size` there; none with a cap."""
    if config.model.attention_softcap is not None:
        return 0
    whole_blocks, rest_rows = z.length // ROWS, z.length % ROWS
    kept_elements = ROWS * ROWS * whole_blocks * (whole_blocks + 1) // 2 + rest_rows * z.length
    query_width = z.q * z.N // (z.samples * z.length * z.heads)
    return z.samples * z.heads * kept_elements if kept_elements <= KEPT * z.length * query_width else 0


def count_watched_bytes(config: RunConfig) -> int:
    """Peak of bytes that the probe allocates to examine a block's attention: `Block.queries_and_keys`,
    `attention_chunks`. Nothing is saved for a backward pass, and nothing is compiled."""
    z, m, c = shape_sizes_of(config), config.model, config.parallel.context
    key_width, q = _keys(config, z), z.e * z.N * z.q
    exchanged_width = (c > 1) * (z.q + 2 * key_width)
    if config.parallel.is_ring:  # keys are gathered, and put in order
        exchanged_width = key_width = c * z.k
    wide_width = FP32 * (3 if z.e < FP32 else 2)  # per element of a norm or a rotation
    held_bytes = z.e * z.N * (z.q + 2 * z.k)  # as projected; normed and exchanged copies come on top
    held_bytes += bool(m.qk_norm) * (q + z.e * z.N * z.k) + 2 * z.e * z.N * exchanged_width
    at_a_time = max(1, min(SCORES // (z.samples * z.heads * z.length), -(-z.queries // 8)))
    score_elements = z.samples * z.heads * at_a_time * z.length
    score_copies = 2 if m.attention_softcap is None else 3
    return max(
        (wide_width + z.e) * z.stream,
        z.e * (z.stream + z.N * z.h + z.N * (z.q + 2 * z.k)),
        held_bytes + max(wide_width * z.N * z.q, q + wide_width * z.N * key_width),
        q + z.e * z.N * key_width + FP32 * (z.N * key_width * (z.e < FP32) + score_copies * score_elements),
    )


def final_norm(config: RunConfig, kernels: PlannedKernels) -> list[SavedOperation]:
    """The operations of the last norm."""
    z = shape_sizes_of(config)
    return _norm("final norm", z, z.stream, z.n, kernels.compile)
