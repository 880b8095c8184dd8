"""Predict the time of a step on a cluster: computing, communication by link, pipeline bubble. Pure; without torch.

    predicted = step_time(config, Layout(tensor=8, pipeline=8, data=8), load("launch/clusters/h100.yaml"))
    predicted.seconds, predicted.mfu, predicted.lines

Every operation of `work.py` takes the longer of the times for its FLOPs and its bytes (roofline), every message of
`volume.py` its bytes over the link that its group crosses, plus latency. 1F1B: all micro-batches of the slowest
stage, and one of every other stage while the pipe fills and drains (Narayanan et al., arXiv:2104.04473 section 2.2.1).
Overlap follows DeepSpeed 0.19.8: under ZeRO 1 gradients are summed at the end of the step, and weights gathered after
the update; ZeRO 2 and 3 communicate during computing.

Left out: checkpoints, evaluation, snapshots and the gate (docs/stability-method.md#cost), input, stragglers, failures.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from megastable.base.errors import ConfigError
from megastable.config.tree import RunConfig
from megastable.model.flops import flops_per_token
from megastable.model.sizes import fp8_linears
from megastable.parallel.layout import Layout
from megastable_tools.plan import volume, work
from megastable_tools.plan.cluster import ClusterConfig
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
    work.PRODUCT: "products", work.EIGHT: "products", work.ATTENTION: "attention", work.MEMORY: "memory",
    work.STREAM: "memory", work.CAST: "casts",
}  # fmt: skip
NAMES = {
    work.PRODUCT: "matrix products", work.EIGHT: "matrix products in FP8", work.ATTENTION: "attention",
    work.MEMORY: "norms, activations, loss", work.STREAM: "sums of gradients", work.CAST: "casts to FP8",
}  # fmt: skip
COMPUTING = ("products", "attention", "memory", "casts", "recomputation")
KINDS = (*COMPUTING, "tensor", "context", "pipeline", "bubble", "data", "update")
# Sent once per step, or once per micro-batch.
LARGE = ("gradients", "weights", "tied embedding", "momentum of matrices", "orthogonalized matrices")


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
        found: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        for line in self.lines:
            found[line.kind] += line.seconds
        return found

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

    def days(self, tokens: float, goodput: float = 1.0) -> float:
        """Days to train on this many tokens, if a share `goodput` of the time is training."""
        return tokens / self.tokens_per_second / goodput / DAY

    def dollars(self, tokens: float, goodput: float = 1.0) -> float:
        return self.days(tokens, goodput) * 24 * self.gpus * self.price


@dataclass(frozen=True)
class Others:
    """Features of other frameworks that DeepSpeed 0.19.8 lacks. The defaults are DeepSpeed's.

    virtual: stages per rank (interleaved 1F1B, arXiv:2104.04473 section 2.2.2). hidden: groups that communicate during
    computing. fused: fused elementwise work under ZeRO 3, too. summing: products that accumulate weight gradients.
    scores: attention that writes them out, as before FlashAttention.
    """

    virtual: int = 1
    hidden: tuple[str, ...] = ()
    fused: bool = False
    summing: bool = False
    scores: bool = False


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
    return _Prediction(config, layout, cluster, dict(zero or {}), others).all()


def _possible(config: RunConfig, layout: Layout, cluster: ClusterConfig) -> None:
    p, t = config.parallel, config.train
    named = (p.tensor, p.pipeline, p.context)
    if named != (layout.tensor, layout.pipeline, layout.context) or layout.data % layout.context:
        raise ConfigError(
            f"the layout {layout} is not that of parallel.*: tensor, pipeline, context = {named}"
        )
    if odd := [size for size in config.batches.values if size % (t.micro_batch * layout.samples)]:
        size = f"train.global_batch={t.global_batch}"
        if odd[-1] != t.global_batch:
            size = f"train.batch_warmup: a batch of {odd[-1]}"
        raise ConfigError(
            f"{size} is not a multiple of train.micro_batch={t.micro_batch} x "
            f"{layout.samples} groups of data-parallel ranks: change one of them"
        )
    if config.model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size comes from a corpus, and none is opened here: set model.vocab_size=..."
        )
    if (fp8 := config.precision.fp8) is not None:
        if fp8.backend == "emulated":
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
    """Blocks that take the same time. eight: their layers in FP8; like: the first block with their window and norms."""

    eight: frozenset[str]
    like: int


class _Prediction:
    """Intermediate results of `step_time`."""

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        cluster: ClusterConfig,
        zero: Mapping[str, Any],
        others: Others,
    ) -> None:
        self.config, self.layout, self.cluster, self.zero, self.others = config, layout, cluster, zero, others
        self.micro_batches = volume.accumulation(config, layout.data)
        self.cut = volume.bounds(config)
        self.sizes = work.sizes(config)
        self.members = volume.members(config, layout.data)
        self.links = {group: crossing(group, layout, cluster) for group in self.members}
        # Under ZeRO 3 weights are gathered between the operations: nothing is compiled (model/kernels.py).
        wanted = config.kernels.compile
        compiled = (cluster.device == "gpu" if wanted == "auto" else wanted) and config.parallel.zero < 3
        self.fused = compiled or others.fused
        self.loss = "chunked" if config.kernels.loss == "auto" else config.kernels.loss
        base = cluster.tflops.fp32 if config.precision.kind == "fp32" else cluster.tflops.bf16
        if base is None:
            raise ConfigError(f"precision.kind=fp32: {cluster.name} does not say how fast it is: tflops.fp32")
        self.peak = base * 1e12
        self._alike: dict[
            tuple[int | None, str], int
        ] = {}  # the first block with a window and a place of norms
        self.held = [self._held(stage) for stage in range(config.parallel.pipeline)]
        self._said: dict[int, list[volume.Term]] = {}
        self._blocks: dict[BlockKind, list[tuple[Operation, float]]] = {}

    def all(self) -> StepTime:
        c, stages = self.config, self.config.parallel.pipeline
        # Stages that hold the same layers take the same time.
        held = self.held
        firsts: dict[Any, int] = {}
        for stage, key in enumerate(held):
            firsts.setdefault(key, stage)
        slots = {key: self._slot(stage) for key, stage in firsts.items()}
        totals = [sum(line.seconds for line in slots[key]) for key in held]
        dearest = max(range(stages), key=totals.__getitem__)
        n = self.micro_batches
        lines = [
            TimeShare(line.what, line.kind, line.seconds * n, f"{n} micro-batches: {line.because}")
            for line in slots[held[dearest]]
        ]
        if stages > 1:
            because = f"a micro-batch on each of the other stages; the slowest, number {dearest}, waits"
            if self.others.virtual > 1:
                because += f"; in {self.others.virtual} parts"
            waiting = (sum(totals) - totals[dearest]) / self.others.virtual
            lines.append(TimeShare("the pipeline fills and drains", "bubble", waiting, because))
        lines += self._data(dearest, sum(line.seconds for line in lines if line.kind in COMPUTING))
        update = work.update(c, volume.stage_of(self.cut, dearest), self.layout.data)
        because = f"{update.bytes / 1e9:.2f} GB of memory"
        lines.append(
            TimeShare(f"norm, clipping, {c.optimizer.name}", "update", self._seconds(update), because)
        )
        matrices = work.orthogonalization(c, volume.stage_of(self.cut, dearest), self.layout.data)
        if matrices is not None:
            because = f"{matrices.flops / 1e12:.3g} TFLOP on the busiest rank"
            lines.append(TimeShare("Newton-Schulz", "update", self._seconds(matrices), because))
        tokens = c.train.global_batch * c.model.sequence_length
        return StepTime(
            seconds=math.fsum(line.seconds for line in lines),
            lines=tuple(line for line in lines if line.seconds > 0),
            traffic=tuple(self._traffic(dearest)),
            tokens=tokens,
            gpus=self.layout.world,
            flops=tokens * flops_per_token(c.model, False),
            flops_causal=tokens * flops_per_token(c.model, True),
            peak=self.peak,
            price=self.cluster.dollars_per_gpu_hour,
        )

    # Computing

    def _held(self, stage: int) -> tuple[volume.Stage, tuple[tuple[BlockKind, int], ...]]:
        """The layers of a stage, and the number of its blocks by kind."""
        held = volume.stage_of(self.cut, stage)
        first = volume.first_block(self.cut, stage)
        counted = Counter(self._kind(number) for number in range(first, first + held.blocks))
        return held, tuple(sorted(counted.items(), key=lambda item: (sorted(item[0].eight), item[0].like)))

    def _kind(self, number: int) -> BlockKind:
        m = self.config.model
        like = self._alike.setdefault((m.window_of(number), m.placement_of(number)), number)
        return BlockKind(fp8_linears(self.config, number), like)

    def _operations(self, stage: int) -> Iterator[tuple[Operation, int, float]]:
        """The operations of one micro-batch: (operation, count, seconds of one)."""
        z, (held, counted) = self.sizes, self.held[stage]
        for kind, blocks in counted:
            for o, seconds in self._block(kind):
                yield o, o.times * blocks, seconds
        others = [*work.ends(self.config, z, held)]
        if not self.others.summing:
            others.append(work.accumulated(self.config, held, self.micro_batches))
        yield from ((o, o.times, self._seconds(o)) for o in others)

    def _block(self, kind: BlockKind) -> list[tuple[Operation, float]]:
        """The operations of one block of this kind, and the seconds of each; cached for all stages."""
        if kind not in self._blocks:
            found = [*work.block(self.config, self.sizes, kind.eight, self.fused, kind.like)]
            if self.others.scores:
                found.append(work.scores(self.config, self.sizes))
            self._blocks[kind] = [(o, self._seconds(o)) for o in found]
        return self._blocks[kind]

    def _seconds(self, o: Operation) -> float:
        """Seconds of one operation."""
        e, computing = self.cluster.efficiency, 0.0
        if o.kind == work.ATTENTION:
            computing = o.flops / (self.peak * e.attention)
        elif o.flops:
            best = self.peak * e.products
            if o.kind == work.EIGHT:
                assert self.cluster.tflops.fp8 is not None
                best = self.cluster.tflops.fp8 * 1e12 * e.products_fp8
            computing = o.flops * (1 + e.half_size / o.shortest) / (best * e.sustained)
        reached = e.streams if o.kind == work.STREAM else e.memory
        moving = o.bytes / (self.cluster.memory_tb_per_second * 1e12 * reached)
        return max(computing, moving, o.kernels * self.cluster.kernel_us * 1e-6)

    def _slot(self, stage: int) -> list[TimeShare]:
        """One micro-batch, forward and backward, on one stage, with its communication."""
        grouped: dict[tuple[str, str], list[float]] = {}
        for o, times, seconds in self._operations(stage):
            part = "recomputation" if o.when == work.AGAIN else PART[o.kind]
            sums = grouped.setdefault((o.kind, part), [0.0, 0.0, 0.0])
            sums[0] += seconds * times
            sums[1] += o.flops * times
            sums[2] += o.bytes * times
        lines = []
        for (what, kind), (seconds, flops, moved) in grouped.items():
            because = f"{moved / 1e9:.3g} GB at {moved / 1e12 / seconds:.3g} TB/s"
            if flops:
                because = f"{flops / 1e12:.3g} TFLOP at {flops / 1e12 / seconds:.3g} TFLOP/s"
            lines.append(TimeShare(NAMES[what], kind, seconds, because))
        computing = sum(line.seconds for line in lines)
        return lines + self._messages(stage, computing)

    # Communication

    def _sent(self, terms: Iterable[volume.Term]) -> float:
        """Bytes that leave this rank."""
        return sum(volume.sent(t, self.members[t.group]) for t in terms if self.members[t.group] > 1)

    def _moving(self, terms: Iterable[volume.Term]) -> float:
        """Seconds of all calls."""
        total = 0.0
        for term in terms:
            n, link = self.members[term.group], self.links[term.group]
            if n > 1 and term.collective != "receive":  # the other end's send
                total += link.seconds(term.collective, volume.sent(term, n), n)
                total += term.calls * latency(term.collective, n, link)
        return total

    def _terms(self, stage: int) -> list[volume.Term]:
        if stage not in self._said:
            self._said[stage] = volume.step(
                self.config, self.layout.data, stage, self.cut, self.loss, ballot=BALLOT, zero=self.zero
            )
        return self._said[stage]

    def _messages(self, stage: int, computing: float) -> list[TimeShare]:
        """Communication of a micro-batch: tensor, context and pipeline. computing: seconds that can hide some of it."""
        found: dict[str, list[volume.Term]] = defaultdict(list)
        for term in self._terms(stage):
            waited = (
                term.collective == "send" if term.group == "pipeline" else term.group in ("tensor", "context")
            )
            if waited and self.members[term.group] > 1:
                found[term.group].append(term)
        lines, n = [], self.micro_batches
        for group, terms in found.items():
            seconds, hidden = self._hide(self._moving(terms) / n, computing, group in self.others.hidden)
            computing -= hidden
            because = f"{self._sent(terms) / n / 1e9:.3g} GB in {sum(t.calls for t in terms) // n} messages "
            because += self.links[group].told + _beside(hidden)
            lines.append(TimeShare(f"{group} parallelism", group, seconds, because))
        return lines

    def _data(self, stage: int, computing: float) -> list[TimeShare]:
        """Communication once per step, or beside the micro-batches. computing: seconds of the whole step."""
        found: dict[str, list[volume.Term]] = defaultdict(list)
        for term in self._terms(stage):
            if term.group in ("data", "stage", "tied", "world", "model"):
                found[term.what if term.what in LARGE else "norms, gate and the like"].append(term)
        zero, alone = self.config.parallel.zero, self.layout.pipeline == 1  # no overlap under a pipeline
        lines = []
        for what, terms in found.items():
            beside = "data" in self.others.hidden and what in ("gradients", "weights")
            beside |= alone and zero == 3 and what == "weights"
            beside |= alone and zero > 1 and what == "gradients" and bool(self.zero.get("overlap_comm", True))
            seconds, hidden = self._hide(self._moving(terms), computing, beside)
            computing -= hidden
            because = f"{self._sent(terms) / 1e9:.3g} GB {self.links[terms[0].group].told}{_beside(hidden)}"
            lines.append(TimeShare(what, "data", seconds, because))
        return lines

    def _hide(self, seconds: float, computing: float, beside: bool) -> tuple[float, float]:
        """(exposed, hidden) seconds of communication that overlaps with `computing`."""
        hidden = min(self.cluster.efficiency.overlap * seconds, max(computing, 0.0)) if beside else 0.0
        return seconds - hidden, hidden

    def _traffic(self, stage: int) -> Iterator[Traffic]:
        found: dict[str, list[volume.Term]] = defaultdict(list)
        for term in self._terms(stage):
            if self.members[term.group] > 1:
                found[term.group].append(term)
        for group, terms in found.items():
            link = self.links[group]
            yield Traffic(group, link.name, self.members[group], self._sent(terms), self._moving(terms))


def _beside(hidden: float) -> str:
    return f"; {hidden:.3g} s more behind the computing" if hidden else ""


# Links that a group of ranks crosses, and the cost of a message there


@dataclass(frozen=True)
class Crossing:
    """The link between the members of a group.

    rate: bytes a second that leave a rank in a ring; own: on the slowest link crossed; inside: on the host's.
    near, far: latency in seconds inside a host and between two. hosts: number that the group spans;
    together: its members in one host.
    """

    name: str
    rate: float
    own: float
    inside: float
    near: float
    far: float
    hosts: int
    together: int

    @property
    def told(self) -> str:
        return f"over the {self.name} at {self.rate / 1e9:.3g} GB/s"

    def seconds(self, collective: str, sent: float, ranks: int) -> float:
        """Seconds for `sent` bytes that leave each of `ranks` ranks. An all-to-all is not a ring: data for other hosts
        goes over the network, each rank with its own card, and the rest inside the host at the same time."""
        if collective == "all-to-all" and self.hosts > 1:
            far = sent * (ranks - self.together) / (ranks - 1)
            return max(far / self.own, (sent - far) / self.inside)
        return sent / self.rate


@lru_cache(maxsize=1024)
def crossing(group: str, layout: Layout, cluster: ClusterConfig) -> Crossing:
    """The link that the groups of a kind cross, by the numbers of their ranks: pipeline outermost, tensor innermost,
    and hosts filled one after another. Of several groups the slowest counts: all wait for it.

    A ring passes through every host once, and what enters a host is divided over the network cards of all of the
    group's members there: a data-parallel group without tensor parallelism has eight, one with tensor 8 has one.
    """
    e, per = cluster.efficiency, cluster.gpus_per_host
    inside, near = cluster.host.gb_per_second * 1e9 * e.host, cluster.host.latency_us * 1e-6
    own, far = cluster.network.gb_per_second * 1e9 * e.network, cluster.network.latency_us * 1e-6
    step, size, first = _stride(group, layout)
    found = []
    for base in sorted({rank % per for rank in first}):
        hosts = Counter(rank // per for rank in range(base, base + size * step, step))
        together = min(hosts.values())
        if len(hosts) == 1:
            found.append(Crossing("host", inside, inside, inside, near, near, 1, together))
        else:
            rate = min(inside, own * together)
            found.append(Crossing("network", rate, own, inside, near, far, len(hosts), together))
    return min(found, key=lambda c: (c.rate, c.name == "host"))


def _stride(group: str, lay: Layout) -> tuple[int, int, Iterable[int]]:
    """(distance of neighbours, members, first ranks) of the groups of a kind. For a pipeline these are two neighbouring
    stages, which communicate, and for tied stages one rank of each."""
    t, d, c, p = lay.tensor, lay.data, lay.context, lay.pipeline
    starts = [stage * t * d + k for stage in range(p) for k in range(t)]  # of data-parallel groups
    match group:
        case "tensor":
            return 1, t, range(0, lay.world, t)
        case "context":
            return t, c, (start + g * c * t for start in starts for g in range(lay.samples))
        case "data":
            return t, d, starts
        case "stage":
            return 1, t * d, range(0, lay.world, t * d)
        case "pipeline":
            return t * d, min(p, 2), range(max(p - 1, 1) * t * d)
        case "tied":
            return (p - 1) * t * d or 1, min(p, 2), range(t * d)
    # The whole world, or a tensor group of every stage: the same number of hosts.
    return (1, lay.world, (0,)) if group == "world" else (t * d, p, (0,))


def latency(collective: str, ranks: int, link: Crossing) -> float:
    """Seconds of an empty message: a ring's rounds, or a tree's if that is faster (NCCL has no tree for all-gather and
    reduce-scatter)."""
    if collective in ("send", "all-to-all"):
        return link.far
    ring = (ranks - link.hosts) * link.near + link.hosts * link.far
    if collective == "all-reduce":
        return min(2 * ring, 2 * math.ceil(math.log2(ranks)) * link.far)
    if collective in ("broadcast", "reduce"):
        return min(ring, math.ceil(math.log2(ranks)) * link.far)
    return ring
