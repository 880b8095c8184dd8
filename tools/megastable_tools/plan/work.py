"""Work of a rank in a step, FLOPs and memory traffic, operation by operation. Pure; without torch.

Products of a layer: 2 m k n forward and twice that backward. Attention: Dao, FlashAttention-2, arXiv:2307.08691: two
products of s x s forward, five backward (one is recomputed), of which a causal model needs half. Memory: how often
a tensor passes between memory and multiprocessor, with everything fused that torch.compile fuses, and with nothing
fused. Time follows from both by the roofline: Williams et al., Communications of the ACM 52 (2009).

Letters: as in activations.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

from megastable.config.rules import LINEARS
from megastable.config.tree import RunConfig
from megastable.model.sizes import keeps_weight_casts, keys_seen
from megastable.optim.ownership import ITERATIONS
from megastable_tools.plan.activations import ShapeSizes
from megastable_tools.plan.partition import (
    COLUMNS,
    FP32,
    INT64,
    Stage,
    count_element_bytes,
    count_shards,
    cut_linears,
    needs_product,
    parameter_groups,
    parameter_sizes,
)
from megastable_tools.plan.updates import busiest_flops, list_block_weights, stage_matrices, update_cost_of

FORWARD, BACKWARD, AGAIN = "forward", "backward", "recomputed"
PRODUCT, EIGHT, ATTENTION = "product", "product in FP8", "attention"
EXPERT, WIDE, ROUTING = "product of experts", "product in fp32", "routing"
MEMORY, STREAM, CAST = "memory", "stream", "cast to FP8"


@dataclass(frozen=True)
class Operation:
    """`times` operations of one kind in a micro-batch (or in a step, for the update).

    kind: one of the nine above. flops and bytes: of one. shortest: the shortest side of a product. kernels: launches
    per operation, a fraction for what is done once a step. beside: the collective over the tensor group that goes on
    meanwhile (parallel/overlapped.py), in as many calls as there are operations. is_late: a weight's gradient that
    ZB-H1 computes after the others of its backward pass.
    """

    what: str
    kind: str
    flops: float
    bytes: float
    times: int = 1
    shortest: float = float("inf")
    kernels: float = 1
    when: str = FORWARD
    beside: str = ""
    is_late: bool = False


# Memory passes that FP8 adds per tensor, in bytes per element: forward for an activation, for a weight, backward for
# a gradient. A cast reads 2 and writes 1, and 1 more for the transposed copy, which products of gradients need on
# Hopper; with the tensor's own scale ("current") its largest magnitude takes another read.
PASSES = {"current": 6.0, "delayed": 4.0, "block": 4.0}


def list_block_work(
    config: RunConfig, z: ShapeSizes, eight: Set[str], fused: bool, number: int = 0, micro_batches: int = 1,
    is_grouped: bool = False,
) -> Iterator[Operation]:  # fmt: skip
    """Block `number` and one of `micro_batches`: forward, recomputation and backward. eight: of `sizes.fp8_linears`.
    is_grouped: of `groups_experts`."""
    p, fp8_config = config.parallel, config.precision.fp8
    is_routed = config.model.experts_of(number) is not None
    cut = cut_linears(config, eight, is_routed)
    is_full, is_selective = p.recompute == "full", p.recompute == "selective"
    linear_sizes = (
        (z.h, z.q + 2 * z.k),
        (z.q, z.h),
        (z.h, 2 * z.f),
        (z.f, z.h),
    )  # (inputs, outputs) on this rank
    for name, (k, n) in list(zip(LINEARS, linear_sizes, strict=True))[: 2 if is_routed else None]:
        in_eight = name in eight
        product_bytes = (1 if in_eight else z.e) * (z.N * k + k * n) + z.e * z.N * n
        product_kind, flops = EIGHT if in_eight else PRODUCT, 2 * z.N * k * n
        product = Operation(name, product_kind, flops, product_bytes, shortest=min(z.N, k, n))
        chunks, is_column = p.tensor_overlap if name in cut else 1, name in COLUMNS
        # In chunks the weight is read for every one of them.
        in_chunks = replace(
            product, flops=flops / chunks, bytes=product_bytes / chunks + (1 - 1 / chunks) * z.e * k * n,
            shortest=min(z.N / chunks, k, n), times=chunks,
        )  # fmt: skip
        # What was gathered in slices is put together: a gradient, or an input that is kept.
        joined = Operation(f"{name}: slices", MEMORY, 0, 2 * z.e * z.N * (k if is_column else n))
        forth, back = ("all-gather", "reduce-scatter") if is_column else ("reduce-scatter", "all-gather")
        # Recomputation ends before the block's last product if nothing in the backward pass needs its output.
        is_recomputed = is_full and (name != "mlp.down" or needs_product(config.model, number))
        for when in (FORWARD, AGAIN) if is_recomputed else (FORWARD,):
            yield replace(in_chunks, when=when, beside=forth if chunks > 1 else "")
            if chunks > 1 and is_column and not p.gathers_again:
                yield replace(joined, when=when)
        # The gradients of the input and of the weight.
        if is_column:
            gathered = "all-gather" if p.gathers_again else ""
            if p.schedule == "zero_bubble":  # the sum has no product beside it but its own, cut
                yield replace(in_chunks, when=BACKWARD, beside=back if chunks > 1 else "")
                yield replace(product, when=BACKWARD, beside=gathered, is_late=True)
            else:
                summed = "" if p.tensor == 1 else back if p.sequence else "all-reduce"
                yield replace(product, when=BACKWARD, beside=gathered)
                yield replace(product, when=BACKWARD, beside=summed)
        else:
            yield replace(in_chunks, when=BACKWARD, beside=back if chunks > 1 else "")
            if chunks > 1:
                yield replace(joined, when=BACKWARD)
            yield replace(product, when=BACKWARD, is_late=p.schedule == "zero_bubble")
        if in_eight and fp8_config is not None:
            each = PASSES[fp8_config.recipe]
            is_kept = keeps_weight_casts(config)
            often = 1 / micro_batches if is_kept else 1
            fp8_cast = Operation(f"{name}: x", CAST, 0, each * z.N * k)
            weight_cast = Operation(f"{name}: weight", CAST, 0, each * k * n * often, kernels=often)
            yield from (fp8_cast, weight_cast)
            if is_recomputed:
                yield replace(fp8_cast, when=AGAIN)
                if not is_kept:
                    yield replace(weight_cast, when=AGAIN)
            yield Operation(f"{name}: gradient", CAST, 0, each * z.N * n, when=BACKWARD)
    # Two products of s x s; q, k, v and the result pass through memory.
    core_flops, core_bytes = 4 * count_attended(config, z, number), z.e * z.N * (2 * z.q + 2 * z.k)
    attention_core = Operation("attention", ATTENTION, core_flops, core_bytes)
    yield attention_core
    if is_full or (is_selective and not config.parallel.is_ring):
        yield replace(attention_core, when=AGAIN)
    yield replace(attention_core, flops=2.5 * core_flops, bytes=2 * core_bytes, kernels=3, when=BACKWARD)
    yield from _elementwise(config, z, fused, is_routed)
    if is_routed:
        yield from _list_expert_work(config, z, number, is_grouped)


def groups_experts(config: RunConfig, has_kernel: bool) -> bool:
    """Whether all experts of a block are one product: engine/numerics.py. has_kernel: whether the device has a kernel
    that is faster than one product for each (model/grouped.py)."""
    wanted = config.kernels.experts == "grouped" or (config.kernels.experts == "auto" and has_kernel)
    is_single = config.precision.fp8 is not None or config.parallel.schedule == "zero_bubble"
    return wanted and config.parallel.zero != 3 and not is_single


def _list_expert_work(
    config: RunConfig, z: ShapeSizes, number: int, is_grouped: bool
) -> Iterator[Operation]:  # fmt: skip
    """Router, routed and shared experts of block `number`; every expert has as many tokens. Nothing of it is compiled.

    A grouped product is as efficient as one product of as many rows as an expert has.
    """
    experts, p = config.model.experts, config.parallel
    assert experts is not None
    own_experts = experts.count // config.parallel.expert
    rows, width = z.N * experts.top_k, config.model.expert_width // p.tensor
    shared_width = width * experts.shared
    is_full, row_elements = p.recompute == "full", rows * z.h

    def both(o: Operation, *backward: Operation, again: bool = is_full) -> Iterator[Operation]:
        yield o
        if again:
            yield replace(o, when=AGAIN)
        yield from (replace(backward_o, when=BACKWARD) for backward_o in backward)

    router_bytes = (z.e + 2 * FP32) * z.n * z.h + FP32 * z.n * experts.count
    router_flops = 2 * z.n * z.h * experts.count
    router = Operation("router", WIDE, router_flops, router_bytes, kernels=4)
    yield from both(router, replace(router, times=2))
    # Scores, the choice, its weights, both losses; then choices sorted by expert, as int64.
    score_bytes, sort_bytes = 12 * FP32 * z.n * experts.count, 16 * INT64 * rows
    routing = Operation("choices", ROUTING, 0, score_bytes + sort_bytes, kernels=40)
    yield from both(routing, replace(routing, bytes=score_bytes, kernels=25))
    # Rows of the tokens, taken by expert; results put back, weighted in fp32, summed.
    taken = Operation("tokens to experts", ROUTING, 0, 2 * z.e * row_elements, kernels=2)
    yield from both(taken, replace(taken, bytes=z.e * (4 * row_elements + z.N * z.h), kernels=3))
    put_bytes = (6 * z.e + 2 * FP32) * row_elements + (2 * FP32 + z.e) * z.N * z.h
    back_bytes = (4 * z.e + 4 * FP32) * row_elements + (2 * FP32 + z.e) * z.N * z.h
    results = Operation("results of experts", ROUTING, 0, put_bytes, kernels=5)
    yield from both(results, replace(results, bytes=back_bytes, kernels=7))
    products = 1 if is_grouped else own_experts
    for name, k, n in (("experts.gate_up", z.h, 2 * width), ("experts.down", width, z.h)):
        product = Operation(
            name, EXPERT, 2 * rows * k * n / products, z.e * (rows * (k + n) + own_experts * k * n) / products,
            times=products, shortest=min(rows / own_experts, k, n),
        )  # fmt: skip
        late = replace(product, is_late=p.schedule == "zero_bubble")
        yield from both(product, product, late)
        if is_grouped:  # gradients of experts without tokens are set to zero
            yield Operation(name, ROUTING, 0, 2 * z.e * own_experts * k * n, when=BACKWARD)
    activation = Operation("SwiGLU", MEMORY, 0, 5 * z.e * rows * width / products, products, kernels=2)
    is_again = p.recompute != "none"
    yield from both(activation, replace(activation, bytes=2 * activation.bytes, kernels=5), again=is_again)
    if shared_width:
        for name, k, n in (("shared.gate_up", z.h, 2 * shared_width), ("shared.down", shared_width, z.h)):
            product_bytes = z.e * (z.N * (k + n) + k * n)
            product = Operation(name, PRODUCT, 2 * z.N * k * n, product_bytes, shortest=min(z.N, k, n))
            late = replace(product, is_late=p.schedule == "zero_bubble")
            # Recomputation ends before the last product: see `list_block_work`.
            is_last = name == "shared.down" and not needs_product(config.model, number)
            yield from both(product, product, late, again=is_full and not is_last)
        activation = Operation("SwiGLU", MEMORY, 0, 5 * z.e * z.N * shared_width, kernels=2)
        yield from both(
            activation, replace(activation, bytes=2 * activation.bytes, kernels=5), again=is_again
        )


def count_attended(config: RunConfig, z: ShapeSizes, number: int) -> float:
    """Pairs of tokens times heads times d in a causal model, in block `number`: with a window its queries see fewer
    keys."""
    attended = z.N * z.length / 2 * z.q
    return attended * keys_seen(z.length, config.model.window_of(number)) / keys_seen(z.length, None)


def count_score_work(z: ShapeSizes) -> Operation:
    """Additional cost of attention per block if [heads, s, s] is written out: product, mask, softmax, dropout and
    product forward, the same again for the backward pass, and their gradients."""
    return Operation("scores", MEMORY, 0, 20 * z.scores * z.e, kernels=12)


def _elementwise(config: RunConfig, z: ShapeSizes, fused: bool, routed: bool) -> Iterator[Operation]:
    """Norms, residuals, QK-norm with RoPE, SwiGLU. routed: only the attention of a block with experts is compiled, and
    the experts have SwiGLUs of their own."""
    if routed:
        halves = [_elementwise(config, z, part_fused, False) for part_fused in (fused, False)]
        for is_second, half in enumerate(halves):
            for o in half:
                if o.what == "norms and residuals":
                    yield replace(o, bytes=o.bytes / 2, kernels=o.kernels / 2)
                elif o.what == "RoPE" and not is_second:
                    yield o
        return
    stream, head_elements, ffn_elements = z.n * z.h, z.N * (z.q + z.k), z.N * z.f
    e, model_config, has_norm = z.e, config.model, bool(config.model.qk_norm)
    more = 2 if model_config.norms == "both" else 0  # norms of the products' results
    forward_passes: list[tuple[str, float, int]]
    back: list[tuple[str, float, int]]
    clamp_bytes = 0 if model_config.swiglu_clamp is None else ffn_elements * e
    if fused:
        # x -> y, twice; x + y between; SwiGLU reads two and writes one. Backward: what forward read, and gradients.
        # A norm before the sum: its input is read twice; its gradient passes through memory, too. With QK-norm there
        # are kernels for mean squares and for weights: 0.39 GB in a block of 350m.yaml, by reading inductor's code.
        forward_passes = [
            ("norms and residuals", (9 + more) * stream * e, 4),
            ("RoPE", (3.75 if has_norm else 2) * head_elements * e, 4 if has_norm else 2),
            ("SwiGLU", 3 * ffn_elements * e, 1),
        ]
        back = [
            ("norms and residuals", (12 + 3 * more) * stream * e, 5 + more),
            ("RoPE", (4 if has_norm else 2) * head_elements * e, 5 if has_norm else 3),
            ("SwiGLU", 5 * ffn_elements * e, 2),
        ]
    else:
        # Operation by operation, norms and RoPE in fp32: to float, square, mean, rsqrt, times, times, back.
        norm_bytes, rotation_bytes = 34.0, (34.0 if has_norm else 0.0) + 28.0
        forward_passes = [
            ("norms and residuals", ((2 + more) * norm_bytes + 6 * e) * stream, 16 + 7 * more),
            ("RoPE", rotation_bytes * head_elements, 26),
            ("SwiGLU", 5 * ffn_elements * e + 4 * clamp_bytes, 2 + 2 * (clamp_bytes > 0)),
        ]
        back = [
            ("norms and residuals", ((2 + more) * 1.8 * norm_bytes + 2 * e) * stream, 28 + 13 * more),
            ("RoPE", 1.8 * rotation_bytes * head_elements, 40),
            ("SwiGLU", 10 * ffn_elements * e + 6 * clamp_bytes, 5 + 2 * (clamp_bytes > 0)),
        ]
    if fused and config.parallel.schedule == "zero_bubble":
        # Products that can be deferred are not compiled: norms and sums are kernels of their own.
        forward_passes[0] = ("norms and residuals", (10 + 2 * more) * stream * e, 4 + more)
        back[0] = ("norms and residuals", (16 + 5 * more) * stream * e, 7 + 2 * more)
    recompute_kind = config.parallel.recompute
    for what, memory_bytes, kernel_count in forward_passes:
        yield Operation(what, MEMORY, 0, memory_bytes, kernels=kernel_count)
        if recompute_kind == "full" or (recompute_kind == "selective" and what == "SwiGLU"):
            yield Operation(what, MEMORY, 0, memory_bytes, kernels=kernel_count, when=AGAIN)
    for what, memory_bytes, kernel_count in back:
        yield Operation(what, MEMORY, 0, memory_bytes, kernels=kernel_count, when=BACKWARD)


def list_end_work(config: RunConfig, z: ShapeSizes, held: Stage) -> Iterator[Operation]:
    """Work of the first stage (embedding) and the last one (final norm, head, loss) beside the blocks."""
    stream_elements = z.n * z.h
    table = z.vocabulary * z.h
    if held.first:
        yield Operation("embedding", MEMORY, 0, 2 * z.N * z.h * z.e, kernels=4)
        # Rows with a gradient are added up in a table that starts as zeros.
        yield Operation("embedding", MEMORY, 0, table * z.e + 3 * z.N * z.h * z.e, kernels=4, when=BACKWARD)
    if held.last:
        yield Operation("final norm", MEMORY, 0, 2 * stream_elements * z.e, kernels=2)
        yield Operation("final norm", MEMORY, 0, 4 * stream_elements * z.e, kernels=3, when=BACKWARD)
        head_bytes = z.e * (z.N * z.h + table + z.N * z.vocabulary)
        shortest = min(z.N, z.h, z.vocabulary)
        head_product = Operation("head", PRODUCT, 2 * z.N * table, head_bytes, shortest=shortest)
        yield head_product
        yield replace(head_product, when=BACKWARD, times=2)
        # Read in compute precision, in fp32 once each for the logsumexp and the gradient, which is written.
        yield Operation("loss", MEMORY, 0, (3 * z.e + 4) * z.N * z.vocabulary, kernels=12)


def count_accumulation(config: RunConfig, held: Stage, micro_batches: int) -> Operation:
    """Accumulation of a micro-batch's gradients in fp32 sums: those are read and written. The first ones are copied."""
    m, expert_ranks = config.model, config.parallel.expert
    parameter_count = sum(map(sum, parameter_sizes(m, held, config.parallel.tensor, expert_ranks)))
    element_bytes = count_element_bytes(config)
    gradient_bytes = parameter_count * (element_bytes + 8 - 4 / micro_batches)
    kernels = 9 * held.blocks
    if held.routed:
        more_matrices = len(list_block_weights(m, True, expert_ranks)) - len(list_block_weights(m, False))
        kernels += more_matrices * held.routed
    return Operation("gradients", STREAM, 0, gradient_bytes, kernels=kernels, when=BACKWARD)


def count_update(config: RunConfig, held: Stage, data: int, fused: bool) -> Operation:
    """Norm, clipping, the optimizer and the weights in compute precision, for this rank's partition. fused: whether
    AdamW can clip and write the weights in its own pass: compiled, or in chunks that a CPU's cache holds."""
    of, o = update_cost_of(config.optimizer), config.optimizer
    # Under BF16_Optimizer norms are measured while gradients are written (engine/micro_batch_sums.py).
    is_measured = config.precision.kind == "bf16" and config.parallel.zero == 1
    is_one_pass = is_measured and fused and o.name == "adamw"
    # Gradient: averaged (8), squared (4), clipped (8). Master: copied (4 and a weight).
    each = (8 if data > 1 else 0) + (0 if is_measured else 4) + of.bytes + count_element_bytes(config)
    each += 0 if is_one_pass and o.clipping.kind == "norm" else 8
    each += 0 if is_one_pass and o.qk_clip is None else 4
    # Muon's matrices have one moment less, which is read and written.
    size = sum(
        group.total
        * (each - 8 * (config.optimizer.name == "muon" and group.moments == 1))
        / count_shards(config, data, group)
        for group in parameter_groups(config, held)
    )
    return Operation("update", STREAM, 0, size, kernels=20)


def count_orthogonalization(config: RunConfig, held: Stage, data: int) -> Operation | None:
    """Newton-Schulz on the matrices that the busiest rank of a stage owns."""
    if config.optimizer.name != "muon":
        return None
    all_of = stage_matrices(config.model, held.blocks, held.routed)
    flops = busiest_flops(config.model, held.blocks, held.routed, config.parallel.tensor * data)
    element_bytes = 2 if config.precision.kind == "bf16" else 4
    mean_elements = sum(m.numel for m in all_of) / len(all_of)
    each = sum(m.flops for m in all_of) / len(all_of)
    # Of a matrix of mean size: it is read twice and written, as is its square.
    matrix_traffic = ITERATIONS * 6 * mean_elements * element_bytes
    return Operation(
        "orthogonalization", PRODUCT, flops, flops / each * matrix_traffic,
        shortest=min(min(m.rows, m.columns) for m in all_of), kernels=math.ceil(flops / each * 3 * ITERATIONS),
    )  # fmt: skip
