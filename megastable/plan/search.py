"""Which layouts of a recipe there are on so many GPUs, which of them fit, and which is the fastest. Pure; no torch.

    found = search(config, 512, cluster)
    for plan in found.plans:                                # those that fit, fastest first
        print(plan.time.seconds, overrides(plan.config, config))

Looked at is every split of the GPUs into tensor x pipeline x data, with every part of data for context, every ZeRO
stage, recomputation and micro-batch: all that config/tree.py and the DeepSpeed files let through. Left out is what
cannot be better: a larger micro-batch or less recomputation than does not fit already, and more recomputation than is
needed; and tensor parallelism without sequence parallelism, where that is possible: it sends the same bytes and takes
more memory (in tiny models its fewer messages are faster).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from math import isqrt
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from megastable.base.errors import ConfigError
from megastable.config import deepspeed_json
from megastable.config.tree import Fp8Config, ParallelConfig, RunConfig
from megastable.fp8.fitting import misfit
from megastable.parallel.layout import Layout
from megastable.plan import volume
from megastable.plan.cluster import ClusterConfig
from megastable.plan.items import Device, Footprint
from megastable.plan.memory import footprints
from megastable.plan.time import StepTime, step_time

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
ZERO: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
GIB = 2**30
HEADROOM = 0.05  # of what training can have: by so much formulas of memory were wrong (docs/planning.md)


class Choice(NamedTuple):
    """What a search sets in a recipe."""

    tensor: int
    pipeline: int
    context: int
    sequence: bool
    zero: int
    recompute: Recompute
    micro_batch: int
    fp8: Fp8Config | None

    @classmethod
    def of(cls, config: RunConfig) -> Choice:
        p = config.parallel
        axes = p.tensor, p.pipeline, p.context, p.sequence, p.zero, p.recompute
        return cls(*axes, config.train.micro_batch, config.precision.fp8)


@dataclass(frozen=True)
class LayoutPlan:
    """A recipe on a layout. footprints: of the stages that can be the tightest ones (`critical`)."""

    config: RunConfig
    layout: Layout
    cluster: ClusterConfig
    footprints: tuple[Footprint, ...]

    @cached_property
    def tightest(self) -> Footprint:
        return max(self.footprints, key=lambda footprint: footprint.total)

    @cached_property
    def left(self) -> int:
        """Bytes of a GPU that are free at the peak of a step; below 0 it does not fit."""
        return room(self.cluster) - self.tightest.total

    @property
    def fits(self) -> bool:
        return self.left >= 0

    @property
    def tight(self) -> bool:
        """It fits, but with less to spare than the prediction may be wrong by."""
        return 0 <= self.left < HEADROOM * room(self.cluster)

    @cached_property
    def time(self) -> StepTime:
        zero = _zero_section(self.config.deepspeed, self.config.parallel.zero)
        return step_time(self.config, self.layout, self.cluster, zero)

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches of a step on every rank."""
        return deepspeed_json.accumulation(self.config, self.layout.world)


@dataclass(frozen=True)
class SearchResult:
    """What a search has found on so many GPUs.

    plans: of every split of the GPUs and every micro-batch the one that recomputes least and fits, and where it is
    tight, those that recompute more, until one is not; fastest first.
    nearest: of those that do not fit the one that lacks least; None where no layout is possible, or none was refused.
    """

    gpus: int
    plans: tuple[LayoutPlan, ...]
    nearest: LayoutPlan | None

    def best(self) -> list[LayoutPlan]:
        """The fastest of every tensor x pipeline, fastest first: what differs in the rest alone says little more. Tight
        ones are the last choice, and the last in the list."""
        first: dict[tuple[object, ...], LayoutPlan] = {}
        for found in sorted(self.plans, key=lambda plan: plan.tight):
            choice = Choice.of(found.config)
            first.setdefault((choice.tensor, choice.pipeline, choice.fp8), found)
        return list(first.values())


def room(cluster: ClusterConfig) -> int:
    """Bytes of a GPU's memory that training can have."""
    return int((cluster.memory_gib - cluster.reserve_gib) * GIB)


def plan(config: RunConfig, gpus: int, cluster: ClusterConfig) -> LayoutPlan:
    """`config` as it stands. Raises ConfigError when its layout does not divide the GPUs or the batch."""
    data = deepspeed_json.data_parallel(config, gpus)
    deepspeed_json.build(config, gpus)  # what its DeepSpeed file contradicts
    return _judge(config, data, cluster)


def search(
    config: RunConfig, gpus: int, cluster: ClusterConfig, precisions: Sequence[Fp8Config | None] | None = None
) -> SearchResult:
    """All layouts of `config` on so many GPUs; its global batch stays. model.vocab_size must be known.

    precisions: values of precision.fp8 to try; None = the recipe's own.
    """
    fitting: list[LayoutPlan] = []
    nearest: LayoutPlan | None = None
    for found in _judged(config, gpus, cluster, [config.precision.fp8] if precisions is None else precisions):
        if found.fits:
            fitting.append(found)
        elif nearest is None or found.left > nearest.left:
            nearest = found
    own = Choice.of(config)

    def order(found: LayoutPlan) -> tuple[float, int, int]:
        # Among equals the one that changes least, then the one that leaves most room.
        changed = sum(a != b for a, b in zip(Choice.of(found.config), own, strict=True))
        return found.time.seconds, changed, -found.left

    return SearchResult(gpus, tuple(sorted(fitting, key=order)), nearest)


def _judged(
    config: RunConfig, gpus: int, cluster: ClusterConfig, precisions: Sequence[Fp8Config | None]
) -> Iterator[LayoutPlan]:
    """Everything that has to be looked at, whether it fits or not.

    What fits with little recomputation is slower with more, and what does not fit does not with a larger micro-batch
    either: so the border between both is followed, from small micro-batches and no recomputation on; past what is tight
    to what is not.
    """
    for fp8 in precisions:
        for axes, micro_batches in families(config, gpus):
            ways = list(RECOMPUTE)
            for micro_batch in micro_batches:
                for way in tuple(ways):
                    candidate = configured(config, Choice(*axes, way, micro_batch, fp8))
                    found = candidate and _judge(candidate, gpus // (axes[0] * axes[1]), cluster)
                    if found:
                        yield found
                        if found.fits and not found.tight:
                            break
                    if not found or not found.fits:
                        ways.remove(way)


def smallest(config: RunConfig, cluster: ClusterConfig) -> int:
    """The least number of GPUs on which `config` fits as it stands, the data ranks dividing the batch; where there
    is none, that of one replica."""
    p, t = config.parallel, config.train
    replica = p.tensor * p.pipeline * p.context
    numbers = [replica * n for n in divisors(t.global_batch // t.micro_batch)]
    return next((n for n in numbers if plan(config, n, cluster).fits), replica)


def elsewhere(
    config: RunConfig, found: SearchResult, cluster: ClusterConfig, doublings: int = 8
) -> LayoutPlan | None:
    """Where nothing fits on the GPUs of `found`: a plan on other GPUs that does. None where there is none near.

    Where no layout is possible, it is that of the next smaller number of whole hosts; where memory is what lacks, that
    of 2, 4, ... times as many GPUs.
    """
    gpus, hosts = found.gpus, cluster.gpus_per_host
    numbers: Iterable[int]
    if found.nearest is None:
        step = hosts if gpus > hosts else 1
        whole = range((gpus - 1) // step * step, 0, -step)
        numbers = (number for number in whole if _factors(config, number))
    else:
        numbers = (gpus * 2**n for n in range(1, doublings + 1))
    for number in numbers:
        if any(plan.fits for plan in _judged(config, number, cluster, [config.precision.fp8])):
            return search(config, number, cluster).best()[0]
    return None


def other_batch(config: RunConfig, gpus: int, cluster: ClusterConfig) -> LayoutPlan | None:
    """Where the global batch divides over no layout of so many GPUs: a plan with the batch nearest to it that does."""
    m, batch = config.model, config.train.global_batch
    shared = {heads * stages for heads in divisors(m.heads) for stages in range(1, m.layers + 1)}
    ranks = {gpus // n for n in shared if gpus % n == 0}
    batches = {n * max(1, round(batch / n)) for n in ranks}
    for near in sorted(batches, key=lambda n: abs(n - batch))[:3]:
        train = config.train.model_copy(update={"global_batch": near})
        if best := search(config.model_copy(update={"train": train}), gpus, cluster).best():
            return best[0]
    return None


def _factors(config: RunConfig, gpus: int) -> bool:
    """Whether so many can be tensor and context ranks that share the heads, samples of a step and stages at all."""
    m, batch = config.model, config.train.global_batch
    shared = {heads * samples for heads in divisors(m.heads) for samples in divisors(batch)}
    return any(gpus % n == 0 and gpus // n <= m.layers for n in shared)


Axes = tuple[int, int, int, bool, int]  # tensor, pipeline, context, sequence, zero


def families(config: RunConfig, gpus: int) -> Iterator[tuple[Axes, tuple[int, ...]]]:
    """Axes that config/tree.py lets through, and the micro-batches that divide the global batch over them, ascending.

    Raises ConfigError for a DeepSpeed file that no ZeRO stage can use.
    """
    m, batch = config.model, config.train.global_batch
    zeros = [zero for zero in ZERO if _zero_section(config.deepspeed, zero) is not None]
    if not zeros:  # what is wrong with the file
        deepspeed_json.build(RunConfig(deepspeed=config.deepspeed, parallel=ParallelConfig()), 1)
    for tensor in divisors(gpus):
        for pipeline in divisors(gpus // tensor):
            data = gpus // tensor // pipeline
            for context in divisors(data):
                if batch % (data // context):
                    continue
                sequence = tensor > 1 and m.sequence_length % (context * tensor) == 0
                micro_batches = divisors(batch // (data // context))
                for zero in zeros:
                    axes = tensor, pipeline, context, sequence, zero
                    if configured(config, Choice(*axes, "full", 1, None)) is not None:
                        yield axes, micro_batches


def configured(config: RunConfig, choice: Choice) -> RunConfig | None:
    """`config` with `choice`, checked by config/tree.py's own rules; None when they refuse it."""
    p, t, precision = config.parallel, config.train, config.precision
    parallel = p.model_copy(update=dict(zip(Choice._fields[:6], choice[:6])))
    changed = {
        "parallel": parallel,
        "train": t.model_copy(update={"micro_batch": choice.micro_batch}),
        "precision": precision.model_copy(update={"fp8": choice.fp8}),
    }
    try:
        made = RunConfig(**{name: getattr(config, name) for name in RunConfig.model_fields} | changed)
    except ValidationError:
        return None
    # What Transformer Engine cannot compute would be emulated.
    return None if choice.fp8 is not None and misfit(made) else made


def overrides(config: RunConfig, base: RunConfig) -> list[str]:
    """What to say after the recipe of `base` to get `config`, which a search made of it."""
    ours, theirs = Choice.of(config), Choice.of(base)
    said = []
    for name, value, before in zip(Choice._fields, ours, theirs):
        if value == before:
            continue
        key = {"micro_batch": "train.micro_batch", "fp8": "precision.fp8"}.get(name, f"parallel.{name}")
        said.append(f"{key}={_word(value)}")
    return said


def _word(value: object) -> str:
    if isinstance(value, Fp8Config):
        return value.recipe
    return "off" if value is None else str(value).lower()


def remedies(found: LayoutPlan) -> list[LayoutPlan]:
    """What makes a plan fit: of every setting the first other value with which it does, all else being equal; and the
    least number of GPUs on which it fits as it is. Fastest first."""
    config, gpus, own = found.config, found.layout.world, Choice.of(found.config)
    batch = config.train.global_batch
    more = RECOMPUTE[RECOMPUTE.index(own.recompute) + 1 :]
    tries: list[list[Choice]] = [
        [own._replace(recompute=recompute) for recompute in more],
        [own._replace(micro_batch=n) for n in reversed(divisors(batch)) if n < own.micro_batch],
        [own._replace(sequence=True)],
        [own._replace(zero=zero) for zero in ZERO if zero > own.zero],
        [own._replace(tensor=n, sequence=n > 1) for n in divisors(gpus) if n > own.tensor],
        [own._replace(pipeline=n) for n in divisors(gpus) if n > own.pipeline],
        [own._replace(context=n) for n in divisors(gpus) if n > own.context],
    ]
    fitting: list[LayoutPlan] = []
    for choices in tries:
        others = (other for choice in choices if (other := configured(config, choice)) is not None)
        plans = (tried for other in others if (tried := _possible(other, gpus, found.cluster)) is not None)
        fitting += list(islice((tried for tried in plans if tried.fits), 1))
    number = smallest(config, found.cluster)
    if number > gpus and (larger := plan(config, number, found.cluster)).fits:
        fitting.append(larger)
    return sorted(fitting, key=lambda plan: (plan.layout.world, plan.time.seconds))


def _possible(config: RunConfig, gpus: int, cluster: ClusterConfig) -> LayoutPlan | None:
    try:
        return plan(config, gpus, cluster)
    except ConfigError:
        return None


@lru_cache(maxsize=1024)
def critical(cut: Sequence[int]) -> tuple[int, ...]:
    """Stages of which one is the tightest: the first, the last, and of those between the first of every size: a later
    one of the same size has fewer micro-batches on their way (1F1B)."""
    end = len(cut) - 2
    sizes: dict[int, int] = {}
    for stage in range(1, end):
        sizes.setdefault(cut[stage + 1] - cut[stage], stage)
    return tuple(sorted({0, end, *sizes.values()}))


def _judge(config: RunConfig, data: int, cluster: ClusterConfig) -> LayoutPlan:
    p = config.parallel
    layout = Layout(p.tensor, p.pipeline, data, p.context)
    cut = tuple(volume.bounds(config))
    device: Device = "cpu" if cluster.device == "cpu" else "cuda"
    stages = footprints(config, layout, device=device, cut=cut, stages=critical(cut))
    return LayoutPlan(config, layout, cluster, tuple(stages))


@lru_cache(maxsize=16)
def _zero_section(name: str, zero: Literal[0, 1, 2, 3]) -> dict[str, Any] | None:
    """zero_optimization of the DeepSpeed file `name` for a ZeRO stage; None where it contradicts, or is not there."""
    try:
        ds = deepspeed_json.build(RunConfig(deepspeed=name, parallel=ParallelConfig(zero=zero)), 1)
    except ConfigError:
        return None
    section: dict[str, Any] = ds["zero_optimization"]
    return section


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))
