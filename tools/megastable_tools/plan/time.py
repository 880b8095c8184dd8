"""Predict the time of a step on a cluster: computing, communication by link, pipeline bubble. Pure; without torch.

    predicted = step_time(config, Layout(tensor=8, pipeline=8, data=8), load("launch/clusters/h100.yaml"))
    predicted.seconds, predicted.mfu, predicted.lines

Every operation of `work.py` takes the longer of the times for its FLOPs and its bytes (roofline), every message of
`volume.py` its bytes over the link that its group crosses, plus latency. 1F1B: all micro-batches of the slowest
stage, and one of every other stage while the pipe fills and drains (Narayanan et al., arXiv:2104.04473 section 2.2.1).
ZB-H1: while it does, weight gradients are computed twice (Qi et al., arXiv:2401.10241, section 2.3).
Overlap: under ZeRO 1 in bf16 gradients are summed behind the backward pass of the last micro-batch, but for the last
buckets (engine/gradient_sums.py), in other precisions after it; ZeRO 2 and 3 communicate during computing. ZeRO 1 and 2
gather weights behind the forward pass of the first micro-batch, but for the first buckets (engine/weight_gathers.py).
Messages of tensor parallelism are hidden by the product that each goes beside, and by no more than it takes
(parallel/overlapped.py).

Left out: checkpoints, evaluation, snapshots and the gate (docs/stability-method.md#cost), input, stragglers, failures.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

from megastable.base.errors import ConfigError
from megastable.config.rules import writes_scores
from megastable.config.tree import RunConfig
from megastable.model.sizes import flops_per_token, fp8_linears, layer_costs
from megastable.parallel.layout import Layout
from megastable_tools.plan import partition, volume, work
from megastable_tools.plan.activations import shape_sizes_of
from megastable_tools.plan.cluster import ClusterConfig
from megastable_tools.plan.links import estimate_latency, find_crossing
from megastable_tools.plan.work import Operation

DAY = 86_400.0
BALLOT = 9  # numbers that piggyback on the gate's all-reduce in training, but for fingerprints and messages


@dataclass(frozen=True)
class TimeShare:
    """A part of the step. kind: of `KINDS`."""

    what: str
    kind: str
    seconds: float
    because: str


PART = {
    work.PRODUCT: "products", work.EIGHT: "products", work.EXPERT: "products", work.WIDE: "products",
    work.ATTENTION: "attention", work.MEMORY: "memory", work.ROUTING: "memory", work.STREAM: "memory",
    work.CAST: "casts",
}  # fmt: skip
NAMES = {
    work.PRODUCT: "matrix products", work.EIGHT: "matrix products in FP8", work.ATTENTION: "attention",
    work.EXPERT: "products of experts", work.WIDE: "products of routers", work.ROUTING: "tokens to experts and back",
    work.MEMORY: "norms, activations, loss", work.STREAM: "sums of gradients", work.CAST: "casts to FP8",
}  # fmt: skip
COMPUTING = ("products", "attention", "memory", "casts", "recomputation")
KINDS = (*COMPUTING, "tensor", "context", "expert", "pipeline", "bubble", "data", "update")
INSIDE = ("tensor", "context", "expert", "pipeline")  # groups whose messages are part of a micro-batch
# Sent once per step, or once per micro-batch.
SUMS = ("gradients", volume.ACROSS, volume.MOVED)
LARGE = (*SUMS, "weights", "tied embedding", "momentum of matrices", "orthogonalized matrices")


@dataclass(frozen=True)
class Traffic:
    """Data that a rank sends over groups of one kind in a step. link: "host" or "network". seconds: including hidden
    ones."""

    group: str
    link: str
    ranks: int
    bytes: float
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """Time of one step of the whole job. flops: of the model, over all GPUs, by the convention of `mfu` and
    `mfu_causal`."""

    seconds: float
    lines: tuple[TimeShare, ...]
    traffic: tuple[Traffic, ...]
    tokens: int
    gpus: int
    flops: float
    flops_causal: float
    peak: float
    price: float

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by kind."""
        seconds_by_kind: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        for time_line in self.lines:
            seconds_by_kind[time_line.kind] += time_line.seconds
        return seconds_by_kind

    @property
    def mfu(self) -> float:
        """Share of the peak of the configured precision (FP8: of bf16), attention as a full square."""
        return self.flops / (self.seconds * self.gpus * self.peak)

    @property
    def mfu_causal(self) -> float:
        """The same, with only the half of attention that a causal model needs."""
        return self.flops_causal / (self.seconds * self.gpus * self.peak)

    @property
    def tflops(self) -> float:
        """Model TFLOP/s per GPU: attention as a full square."""
        return self.flops / (self.seconds * self.gpus) / 1e12

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def count_days(self, tokens: float) -> float:
        """Days to train on this many tokens."""
        return tokens / self.tokens_per_second / DAY

    def count_dollars(self, tokens: float) -> float:
        return self.count_days(tokens) * 24 * self.gpus * self.price


@dataclass(frozen=True)
class Others:
    """How other frameworks differ from megastable, whose are the defaults.

    virtual: stages per rank (interleaved 1F1B, arXiv:2104.04473 section 2.2.2). hidden: groups whose messages go on
    during any computing; ours are hidden by rules of their own. fused: fused elementwise work under ZeRO 3, too.
    summing: products that accumulate weight gradients. scores: attention that writes them out, as before
    FlashAttention. routing: each pass reads and writes the rows of experts once, where ours take some four times as
    long, and a token goes once to a rank with several of its experts (DeepEP).
    """

    virtual: int = 1
    hidden: tuple[str, ...] = ()
    fused: bool = False
    summing: bool = False
    scores: bool = False
    routing: bool = False


DEEPSPEED = Others()


def step_time(
    config: RunConfig,
    layout: Layout,
    cluster: ClusterConfig,
    zero: Mapping[str, Any] | None = None,
    *,
    others: Others = DEEPSPEED,
) -> StepTime:
    """The predicted time of a step of `config`, whose model.vocab_size must be known, on `layout.world` GPUs.

    layout: agrees with config.parallel. zero: the section zero_optimization of DeepSpeed's configuration. others:
    features of another framework, to compare its runs with the prediction.

    Raises ConfigError for a layout that does not fit, and for FP8 that would not be faster.
    """
    _possible(config, layout, cluster)
    return _Prediction(config, layout, cluster, dict(zero or {}), others).predict_step()


def _possible(config: RunConfig, layout: Layout, cluster: ClusterConfig) -> None:
    parallel_config, t = config.parallel, config.train
    p = parallel_config
    named_sizes = (p.tensor, p.pipeline, p.context, p.replicas, p.expert)
    own_sizes = (layout.tensor, layout.pipeline, layout.context, layout.replicas, layout.expert)
    if named_sizes != own_sizes or any(layout.data % size for size in own_sizes[2:]):
        raise ConfigError(
            f"the layout {layout} is not that of parallel.*: tensor, pipeline, context, replicas, expert = "
            f"{named_sizes}"
        )
    if odd_batches := [size for size in config.batches.values if size % (t.micro_batch * layout.samples)]:
        size = f"train.global_batch={t.global_batch}"
        if odd_batches[-1] != t.global_batch:
            size = f"train.batch_warmup: a batch of {odd_batches[-1]}"
        raise ConfigError(
            f"{size} is not a multiple of train.micro_batch={t.micro_batch} x "
            f"{layout.samples} groups of data-parallel ranks: change one of them"
        )
    if config.model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size comes from a corpus, and none is opened here: set model.vocab_size=..."
        )
    if (fp8_config := config.precision.fp8) is not None:
        if fp8_config.backend == "emulated":
            raise ConfigError(
                "precision.fp8.backend=emulated is slower than no FP8, by an unmeasured factor: leave "
                "precision.fp8 out, or use backend te"
            )
        if config.precision.kind != "bf16":
            raise ConfigError(
                f"precision.fp8 with precision.kind={config.precision.kind} is emulated, and slower than no FP8: use "
                "precision.kind=bf16, or leave precision.fp8 out"
            )
        if cluster.tflops.fp8 is None:
            raise ConfigError(f"precision.fp8: a GPU of {cluster.name} does not compute in it: leave it out")


class BlockKind(NamedTuple):
    """Blocks that take the same time. eight: their layers in FP8; like: the first block with their window, norms and
    kind of MLP."""

    eight: frozenset[str]
    like: int


class _Prediction:
    """Intermediate results of `step_time`."""

    def __init__(
        self, config: RunConfig, layout: Layout, cluster: ClusterConfig, zero: Mapping[str, Any], others: Others
    ) -> None:  # fmt: skip
        self.config, self.layout, self.cluster, self.zero, self.others = config, layout, cluster, zero, others
        self.micro_batches = partition.count_micro_batches(config, layout.data)
        self.cut = partition.stage_bounds(config)
        self.sizes = shape_sizes_of(config)
        self.members = volume.count_members(config, layout.data)
        self.links = {group_name: find_crossing(group_name, layout, cluster) for group_name in self.members}
        # Under ZeRO 3 weights are gathered between the operations: nothing is compiled (model/kernels.py).
        wanted = config.kernels.compile
        is_compiled = (cluster.device == "gpu" if wanted == "auto" else wanted) and config.parallel.zero < 3
        self.fused = is_compiled or others.fused
        # torch's kernel is for bf16 on Hopper GPUs and newer ones, which are those with FP8.
        has_kernel = cluster.tflops.fp8 is not None and config.precision.kind == "bf16"
        self.is_grouped = work.groups_experts(config, has_kernel)
        self.loss = "chunked" if config.kernels.loss == "auto" else config.kernels.loss
        base_peak = cluster.tflops.fp32 if config.precision.kind == "fp32" else cluster.tflops.bf16
        if base_peak is None:
            raise ConfigError(f"precision.kind=fp32: {cluster.name} does not say how fast it is: tflops.fp32")
        self.peak = base_peak * 1e12
        # The first block with a window, a place of norms, and routed experts or none.
        self._alike: dict[tuple[int | None, str, bool], int] = {}
        self.held = [self._held(stage_number) for stage_number in range(config.parallel.pipeline)]
        self._said: dict[int, list[volume.Term]] = {}
        self._blocks: dict[BlockKind, list[tuple[Operation, float]]] = {}

    def predict_step(self) -> StepTime:
        c, stage_count = self.config, self.config.parallel.pipeline
        # Stages that hold the same layers take the same time.
        slot_lines: dict[Any, list[TimeShare]] = {}
        for stage_number, key in enumerate(self.held):
            if key not in slot_lines:
                slot_lines[key] = self._slot(stage_number)
        stage_seconds = [sum(line.seconds for line in slot_lines[key]) for key in self.held]
        dearest = max(range(stage_count), key=stage_seconds.__getitem__)
        n = self.micro_batches
        time_lines = [
            TimeShare(line.what, line.kind, line.seconds * n, f"{n} micro-batches: {line.because}")
            for line in slot_lines[self.held[dearest]]
        ]
        if stage_count > 1:
            because = f"a micro-batch on each of the other stages; the slowest, number {dearest}, waits"
            chunks = max(self.others.virtual, c.parallel.model_chunks)
            if chunks > 1:
                because += f"; in {chunks} chunks"
            bubble_seconds = (sum(stage_seconds) - stage_seconds[dearest]) / chunks
            bubble_seconds += stage_seconds[dearest] * self._count_waits()
            if c.parallel.schedule == "zero_bubble":
                bubble_seconds = max(0.0, bubble_seconds - self._count_filled(dearest))
                because += ", and computes weight gradients"
            time_lines.append(TimeShare("the pipeline fills and drains", "bubble", bubble_seconds, because))
        time_lines += self._data(dearest, sum(line.seconds for line in time_lines if line.kind in COMPUTING))
        held_stage = self.held[dearest][0]
        update = work.count_update(
            c, held_stage, self.layout.data, self.fused or self.cluster.device == "cpu"
        )
        what, because = f"norm, clipping, {c.optimizer.name}", f"{update.bytes / 1e9:.2f} GB of memory"
        time_lines.append(TimeShare(what, "update", self._seconds(update), because))
        newton_schulz = work.count_orthogonalization(c, held_stage, self.layout.data)
        if newton_schulz is not None:
            because = f"{newton_schulz.flops / 1e12:.3g} TFLOP on the busiest rank"
            time_lines.append(TimeShare("Newton-Schulz", "update", self._seconds(newton_schulz), because))
        step_tokens = c.train.global_batch * c.model.sequence_length
        return StepTime(
            seconds=math.fsum(line.seconds for line in time_lines),
            lines=tuple(line for line in time_lines if line.seconds > 0),
            traffic=tuple(self._traffic(dearest)),
            tokens=step_tokens,
            gpus=self.layout.world,
            flops=step_tokens * flops_per_token(c.model, False),
            flops_causal=step_tokens * flops_per_token(c.model, True),
            peak=self.peak,
            price=self.cluster.dollars_per_gpu_hour,
        )

    def _count_waits(self) -> float:
        """Micro-batches for which the slowest stage waits in the middle of a step, in chunks of the model: for those
        that are missing from the last round of all stages, and in every round for the stage with the slowest chunk."""
        stages, chunks = self.config.parallel.pipeline, self.config.parallel.model_chunks
        if chunks == 1:
            return 0.0
        layer_prices = [cost for cost, _ in layer_costs(self.config.model)]
        chunk_prices = [sum(layer_prices[begin:end]) for begin, end in pairwise(self.cut)]
        rounds_price = sum(
            max(chunk_prices[first : first + stages]) for first in range(0, len(chunk_prices), stages)
        )
        uneven_share = rounds_price / max(sum(chunk_prices[stage::stages]) for stage in range(stages)) - 1
        missing_batches = -self.micro_batches % stages
        return missing_batches * (1 - 1 / chunks) + self.micro_batches * uneven_share

    def _count_filled(self, dearest: int) -> float:
        """Seconds of the bubble of 1F1B that ZB-H1 fills with weight gradients. With fewer micro-batches than stages
        not all stages can leave one for later."""
        stages = self.config.parallel.pipeline
        weight_seconds = sum(self._count_weight_pass(stage) for stage in range(stages) if stage != dearest)
        left_share = (min(self.micro_batches, stages) - 1) / (stages - 1)
        return (1 + left_share) * weight_seconds

    def _count_weight_pass(self, stage: int) -> float:
        """Seconds of the weight gradients of one micro-batch that are deferred."""
        return sum(
            block_count * o.times * seconds
            for block_kind, block_count in self.held[stage][1]
            for o, seconds in self._block(block_kind)
            if o.is_late
        )

    # Computing

    def _held(self, stage: int) -> tuple[partition.Stage, tuple[tuple[BlockKind, int], ...]]:
        """The layers of a stage, and the number of its blocks by kind."""
        chunks = self.config.parallel.model_chunks
        held = partition.stage_of(self.config, self.cut, stage)
        numbers = chain(*partition.list_chunk_blocks(self.cut, stage, chunks))
        counted = Counter(self._kind(number) for number in numbers)
        return held, tuple(sorted(counted.items(), key=lambda item: (sorted(item[0].eight), item[0].like)))

    def _kind(self, number: int) -> BlockKind:
        m = self.config.model
        shape_key = m.window_of(number), m.placement_of(number), m.experts_of(number) is not None
        first_alike = self._alike.setdefault(shape_key, number)
        return BlockKind(fp8_linears(self.config, number), first_alike)

    def _operations(self, stage: int) -> Iterator[tuple[Operation, int, float]]:
        """The operations of one micro-batch: (operation, count, seconds of one)."""
        work_sizes, (held_stage, kind_counts) = self.sizes, self.held[stage]
        for block_kind, block_count in kind_counts:
            for o, line_seconds in self._block(block_kind):
                yield o, o.times * block_count, line_seconds
        end_operations = list(work.list_end_work(self.config, work_sizes, held_stage))
        if not self.others.summing:
            end_operations.append(work.count_accumulation(self.config, held_stage, self.micro_batches))
        yield from ((o, o.times, self._seconds(o)) for o in end_operations)

    def _block(self, kind: BlockKind) -> list[tuple[Operation, float]]:
        """The operations of one block of this kind, and the seconds of each; cached for all stages."""
        if kind not in self._blocks:
            blocks = work.list_block_work(
                self.config,
                self.sizes,
                kind.eight,
                self.fused,
                kind.like,
                self.micro_batches,
                self.is_grouped,
            )
            block_operations = list(blocks)
            if self.others.scores or (
                self.config.parallel.is_ring and writes_scores(self.config.model, self.config.segmented)
            ):
                block_operations.append(work.count_score_work(self.sizes))
            self._blocks[kind] = [
                (block_operation, self._seconds(block_operation)) for block_operation in block_operations
            ]
        return self._blocks[kind]

    def _seconds(self, o: Operation) -> float:
        """Seconds of one operation."""
        e, computing_seconds = self.cluster.efficiency, 0.0
        if o.kind == work.ATTENTION:
            computing_seconds = o.flops / (self.peak * e.rate_attention(self.config.model.head_width))
        elif o.flops:
            best_rate = self.peak * e.products
            if o.kind == work.EIGHT:
                assert self.cluster.tflops.fp8 is not None
                best_rate = self.cluster.tflops.fp8 * 1e12 * e.products_fp8
            elif o.kind == work.WIDE and self.cluster.tflops.fp32 is not None:
                best_rate = self.cluster.tflops.fp32 * 1e12 * e.products
            computing_seconds = o.flops * (1 + e.half_size / o.shortest) / (best_rate * e.sustained)
        memory_share = e.streams if o.kind == work.STREAM else e.memory
        moved_bytes = o.bytes / 4 if o.kind == work.ROUTING and self.others.routing else o.bytes
        moving_seconds = moved_bytes / (self.cluster.memory_tb_per_second * 1e12 * memory_share)
        return max(computing_seconds, moving_seconds, o.kernels * self.cluster.kernel_us * 1e-6)

    def _slot(self, stage: int) -> list[TimeShare]:
        """One micro-batch, forward and backward, on one stage, with its communication."""
        grouped_sums: dict[tuple[str, str], list[float]] = {}
        for work_operation, operation_count, seconds in self._operations(stage):
            time_part = "recomputation" if work_operation.when == work.AGAIN else PART[work_operation.kind]
            kind_sums = grouped_sums.setdefault((work_operation.kind, time_part), [0.0, 0.0, 0.0])
            kind_sums[0] += seconds * operation_count
            kind_sums[1] += work_operation.flops * operation_count
            kind_sums[2] += work_operation.bytes * operation_count
        time_lines = []
        for (line_text, part_kind), (seconds, kind_flops, moved_bytes) in grouped_sums.items():
            reason_text = f"{moved_bytes / 1e9:.3g} GB at {moved_bytes / 1e12 / seconds:.3g} TB/s"
            if kind_flops:
                reason_text = f"{kind_flops / 1e12:.3g} TFLOP at {kind_flops / 1e12 / seconds:.3g} TFLOP/s"
            time_lines.append(TimeShare(NAMES[line_text], part_kind, seconds, reason_text))
        computing_seconds = sum(time_line.seconds for time_line in time_lines)
        return time_lines + self._messages(stage, computing_seconds)

    # Communication

    def _sent(self, terms: Iterable[volume.Term]) -> float:
        """Bytes that leave this rank."""
        shared_terms = [(term, n) for term in terms if (n := self.members[term.group]) > 1]
        return sum(volume.count_sent_bytes(term, n) for term, n in shared_terms)

    def _moving(self, terms: Sequence[volume.Term]) -> float:
        """Seconds of all calls."""
        bucket_count = sum(term.calls for term in terms if term.what == volume.MOVED)
        total_seconds = 0.0
        for term in terms:
            n, group_link = self.members[term.group], self.links[term.group]
            if n > 1 and term.collective != "receive":  # the other end's send
                sent_bytes = volume.count_sent_bytes(term, n)
                if term.what == volume.MOVED:
                    # One rank or a few own a bucket: each host is busy in its turn, over all cards (NCCL's PXN), while
                    # the others wait.
                    total_seconds += sent_bytes * min(n, bucket_count) / group_link.rate
                else:
                    total_seconds += group_link.count_seconds(term.collective, sent_bytes, n)
                total_seconds += term.calls * estimate_latency(term.collective, n, group_link)
        return total_seconds

    def _terms(self, stage: int) -> list[volume.Term]:
        if stage not in self._said:
            step_terms = volume.list_step_terms(
                self.config, self.layout.data, stage, self.cut, self.loss, ballot=BALLOT, zero=self.zero
            )
            # The parts of others' ranks are even already.
            self._said[stage] = [t for t in step_terms if self.others == DEEPSPEED or not _makes_even(t)]
            if self.others.routing:
                self._said[stage] = [self._send_once(t) for t in self._said[stage]]
        return self._said[stage]

    def _send_once(self, term: volume.Term) -> volume.Term:
        """Of k experts, drawn from all of them, a token has some on E (1 - (1 - 1 / E)^k) of E ranks."""
        experts, ranks = self.config.model.experts, self.config.parallel.expert
        if term.group != "expert" or experts is None:
            return term
        rank_count = ranks * (1 - (1 - 1 / ranks) ** experts.top_k)
        return replace(term, bytes=int(term.bytes * rank_count / experts.top_k))

    def _messages(self, stage: int, computing: float) -> list[TimeShare]:
        """Communication of a micro-batch: tensor, context and pipeline. computing: seconds that can hide some of it."""
        terms_by_group: dict[str, list[volume.Term]] = defaultdict(list)
        for term in self._terms(stage):
            is_inside = term.group in INSIDE and self.members[term.group] > 1
            if (
                is_inside
                and term.collective != "receive"
                and (term.group, term.collective) != ("pipeline", "broadcast")
            ):
                terms_by_group[term.group].append(term)
        time_lines, n = [], self.micro_batches
        for group_name, terms in terms_by_group.items():
            is_hidden, beside_seconds = group_name in self.others.hidden, computing
            if group_name == "context" and self.config.parallel.is_ring:
                # Beside the products of all rounds but the last.
                is_hidden, context_ranks = True, self.members["context"]
                attention_work = (o for o in self._operations(stage) if o[0].kind == work.ATTENTION)
                attention_seconds = sum(times * seconds for _, times, seconds in attention_work)
                beside_seconds = min(computing, attention_seconds * (context_ranks - 1) / context_ranks)
            moving_seconds = self._moving(terms) / n
            seconds, hidden = self._hide(moving_seconds, beside_seconds, is_hidden)
            if group_name == "pipeline" and self.config.parallel.model_chunks > 1:
                # Messages of chunks are waited for while the pipeline fills and drains, otherwise they have a pass.
                awaited_count = 2 * (self.layout.pipeline * self.config.parallel.model_chunks - 1)
                awaited_share = min(
                    1.0, awaited_count / sum(term.calls for term in terms if term.what != "segments")
                )
                _, hidden = self._hide(moving_seconds * (1 - awaited_share), computing, True)
                seconds = moving_seconds - hidden
            if group_name == "tensor" and self.others == DEEPSPEED:
                hidden = self._hide_tensor(stage)
                seconds = moving_seconds - hidden
            computing -= hidden
            because = f"{self._sent(terms) / n / 1e9:.3g} GB in {sum(t.calls for t in terms) // n} messages "
            because += self.links[group_name].told + _beside(hidden)
            time_lines.append(TimeShare(f"{group_name} parallelism", group_name, seconds, because))
        return time_lines

    def _hide_tensor(self, stage: int) -> float:
        """Seconds of a micro-batch's messages over the tensor group that go on beside products. Of those in chunks one
        has no product beside it: the first that is gathered, the last that is summed."""
        z, tensor_ranks, hidden_seconds = self.sizes, self.members["tensor"], 0.0
        for block_kind, block_count in self.held[stage][1]:
            for o, seconds in self._block(block_kind):
                if o.beside:
                    given_bytes = (
                        z.N * z.h * z.e // o.times // (tensor_ranks if o.beside == "all-gather" else 1)
                    )
                    message = volume.Term("", "tensor", o.beside, given_bytes, o.times)
                    _, hidden = self._hide(self._moving([message]), seconds * o.times, True)
                    hidden_seconds += block_count * hidden * (1 if o.times == 1 else 1 - 1 / o.times)
        return hidden_seconds

    def _data(self, stage: int, computing: float) -> list[TimeShare]:
        """Communication once per step, or beside the micro-batches. computing: seconds of the whole step."""
        terms_by_group: dict[str, list[volume.Term]] = defaultdict(list)
        for term in self._terms(stage):
            if term.group in ("data", "shard", "replica", "expert data", "stage", "tied", "world", "model"):
                terms_by_group[term.what if term.what in LARGE else "norms, gate and the like"].append(term)
        zero, alone = self.config.parallel.zero, self.layout.pipeline == 1  # no overlap under a pipeline
        time_lines = []
        for what, terms in terms_by_group.items():
            beside = "data" in self.others.hidden and what in ("gradients", "weights")
            beside |= alone and zero == 3 and what == "weights"
            beside |= alone and zero > 1 and what == "gradients" and bool(self.zero.get("overlap_comm", True))
            moving_seconds = self._moving(terms)
            pass_seconds = share = 0.0
            if what in SUMS and self._sums_early:
                pass_seconds, share = self._count_backward(stage), self._count_early_share(stage)
            elif what == "weights" and zero < 3 and self.others == DEEPSPEED:
                pass_seconds, share = self._count_forward(stage), self._count_late_share(stage)
            if share and not beside:
                _, hidden = self._hide(moving_seconds * share, min(computing, pass_seconds), True)
                seconds = moving_seconds - hidden
            else:
                seconds, hidden = self._hide(moving_seconds, computing, beside)
            computing -= hidden
            because = f"{self._sent(terms) / 1e9:.3g} GB {self.links[terms[0].group].told}{_beside(hidden)}"
            time_lines.append(TimeShare(what, "data", seconds, because))
        return time_lines

    @property
    def _sums_early(self) -> bool:
        """Whether gradients are summed while the last backward pass goes on, by engine/gradient_sums.py."""
        is_bf16, clipping = self.config.precision.kind == "bf16", self.config.optimizer.clipping.kind
        is_ours = self.others == DEEPSPEED and self.config.parallel.zero == 1
        return is_ours and is_bf16 and clipping != "worker"

    def _count_early_share(self, stage: int) -> float:
        """Share of the gradients in buckets that are complete before the backward pass is over."""
        cut_groups = volume.cut_gradients(self.config, self.layout.data, self.held[stage][0], self.zero)
        return 1 - sum(buckets[-1] for buckets in cut_groups) / sum(map(sum, cut_groups))

    def _count_late_share(self, stage: int) -> float:
        """Share of the weights in buckets that are not read before the forward pass has begun."""
        cut_groups = volume.cut_weights(self.config, self.layout.data, self.held[stage][0], self.zero)
        first_elements = sum(len(buckets[0]) for buckets in cut_groups)
        return 1 - first_elements / sum(buckets[-1].stop for buckets in cut_groups)

    def _count_forward(self, stage: int) -> float:
        """Seconds of computing in the forward pass of one micro-batch, which reads the weights one after the other."""
        return sum(times * seconds for o, times, seconds in self._operations(stage) if o.when == work.FORWARD)

    def _count_backward(self, stage: int) -> float:
        """Seconds of computing in the backward pass of one micro-batch, in which its gradients become complete."""
        if self.config.parallel.schedule == "zero_bubble":
            return self._count_weight_pass(stage)
        return sum(times * seconds for o, times, seconds in self._operations(stage) if o.when != work.FORWARD)

    def _hide(self, seconds: float, computing: float, beside: bool) -> tuple[float, float]:
        """(exposed, hidden) seconds of communication that overlaps with `computing`."""
        hidden = min(self.cluster.efficiency.overlap * seconds, max(computing, 0.0)) if beside else 0.0
        return seconds - hidden, hidden

    def _traffic(self, stage: int) -> Iterator[Traffic]:
        all_terms = self._terms(stage)
        for group in dict.fromkeys(
            all_term.group for all_term in all_terms if self.members[all_term.group] > 1
        ):
            terms = [term for term in all_terms if term.group == group]
            link, ranks = self.links[group].name, self.members[group]
            yield Traffic(group, link, ranks, self._sent(terms), self._moving(terms))


def _makes_even(term: volume.Term) -> bool:
    """Whether even slices of a bucket come from the ranks that update it, or go to them."""
    return term.collective == "all-to-all" and term.what in ("weights", volume.MOVED)


def _beside(hidden: float) -> str:
    return f"; {hidden:.3g} s more behind the computing" if hidden else ""
