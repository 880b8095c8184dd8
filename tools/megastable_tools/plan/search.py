"""Search for the layouts of a recipe on a number of GPUs: which are valid, which fit, which is fastest. Pure; no torch.

    found = search(config, 512, cluster)
    for plan in found.plans:                                # those that fit, fastest first
        print(plan.time.seconds, overrides(plan.config, config))

The search covers every split of the GPUs into tensor x pipeline x data, every divisor of data for context, every ZeRO
stage, recomputation and micro-batch that config/tree.py and the DeepSpeed files allow. It prunes what cannot be better:
a larger micro-batch or less recomputation than one that does not fit, more recomputation than needed, and tensor
parallelism without sequence parallelism where that is possible: it sends the same bytes and takes more memory (in tiny
models its fewer messages are faster).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from math import gcd, isqrt
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from megastable.base.errors import ConfigError
from megastable.config import deepspeed_json
from megastable.config.training import Fp8Config, ParallelConfig
from megastable.config.tree import RunConfig
from megastable.fp8.fitting import misfit
from megastable.parallel.layout import Layout
from megastable_tools.plan import volume
from megastable_tools.plan.cluster import ClusterConfig
from megastable_tools.plan.memory import Device, Footprint, footprints
from megastable_tools.plan.time import StepTime, step_time

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
ZERO: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
GIB = 2**30
HEADROOM = 0.05  # of usable memory: the error of the memory formulas (docs/planning.md)


class Choice(NamedTuple):
    """The settings that a search varies in a recipe."""

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
    """A recipe on a layout. footprints: of the stages that can be tightest (`critical`)."""

    config: RunConfig
    layout: Layout
    cluster: ClusterConfig
    footprints: tuple[Footprint, ...]

    @cached_property
    def tightest(self) -> Footprint:
        return max(self.footprints, key=lambda footprint: footprint.total)

    @cached_property
    def left(self) -> int:
        """Free bytes of a GPU at the peak of a step; negative if it does not fit."""
        return room(self.cluster) - self.tightest.total

    @property
    def fits(self) -> bool:
        return self.left >= 0

    @property
    def tight(self) -> bool:
        """Whether it fits with less to spare than the prediction's error."""
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
    """Result of a search on a number of GPUs.

    plans: for every split of the GPUs and every micro-batch the one that recomputes least and fits; if it is tight,
    also those that recompute more, up to the first that is not; fastest first. nearest: of those that do not fit, the
    one that lacks least; None if no layout is valid, or all fit.
    """

    gpus: int
    plans: tuple[LayoutPlan, ...]
    nearest: LayoutPlan | None

    def best(self) -> list[LayoutPlan]:
        """The fastest plan of every tensor x pipeline, fastest first: differences in the other settings alone say
        little more. Tight ones are the last choice, and the last in the list."""
        first: dict[tuple[object, ...], LayoutPlan] = {}
        for found in sorted(self.plans, key=lambda plan: plan.tight):
            choice = Choice.of(found.config)
            first.setdefault((choice.tensor, choice.pipeline, choice.fp8), found)
        return list(first.values())


def room(cluster: ClusterConfig) -> int:
    """Bytes of a GPU's memory that training can use."""
    return int((cluster.memory_gib - cluster.reserve_gib) * GIB)


def plan(config: RunConfig, gpus: int, cluster: ClusterConfig) -> LayoutPlan:
    """`config` unchanged. Raises ConfigError if its layout does not divide the GPUs or the batch."""
    data = deepspeed_json.data_parallel(config, gpus)
    deepspeed_json.build(config, gpus)  # raises if its DeepSpeed file contradicts it
    return _judge(config, data, cluster)


def search(
    config: RunConfig, gpus: int, cluster: ClusterConfig, precisions: Sequence[Fp8Config | None] | None = None
) -> SearchResult:
    """All layouts of `config` on a number of GPUs, with the same global batch. model.vocab_size must be known.

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
        # Among equals the one that changes least, then the one with most free memory.
        changed = sum(a != b for a, b in zip(Choice.of(found.config), own, strict=True))
        return found.time.seconds, changed, -found.left

    return SearchResult(gpus, tuple(sorted(fitting, key=order)), nearest)


def _judged(
    config: RunConfig, gpus: int, cluster: ClusterConfig, precisions: Sequence[Fp8Config | None]
) -> Iterator[LayoutPlan]:
    """All candidates that have to be evaluated, whether they fit or not.

    More recomputation only slows down a layout that fits, and a larger micro-batch does not help one that does not fit:
    so this follows the border between both, from small micro-batches and no recomputation on, past tight plans to the
    first that is not tight.
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
    """The least number of GPUs on which `config` fits unchanged, with data ranks that divide the batch; if there is
    none, that of one replica."""
    p, t = config.parallel, config.train
    replica = p.tensor * p.pipeline * p.context
    numbers = [replica * n for n in divisors(gcd(*config.batches.values) // t.micro_batch)]
    return next((n for n in numbers if plan(config, n, cluster).fits), replica)


def elsewhere(
    config: RunConfig, found: SearchResult, cluster: ClusterConfig, doublings: int = 8
) -> LayoutPlan | None:
    """If nothing fits on the GPUs of `found`: a plan on another number of GPUs. None if none is near.

    If no layout is valid, the next smaller number of whole hosts; if memory is short, 2, 4, ... times as many GPUs.
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
    """If the global batch divides over no layout of `gpus`: a plan with the nearest batch that does."""
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
    """Whether this many GPUs can be divided into tensor and context ranks, samples of a step and stages at all."""
    m, batch = config.model, gcd(*config.batches.values)
    shared = {heads * samples for heads in divisors(m.heads) for samples in divisors(batch)}
    return any(gpus % n == 0 and gpus // n <= m.layers for n in shared)


Axes = tuple[int, int, int, bool, int]  # tensor, pipeline, context, sequence, zero


def families(config: RunConfig, gpus: int) -> Iterator[tuple[Axes, tuple[int, ...]]]:
    """Axes that config/tree.py allows, and the micro-batches that divide every global batch over them, ascending.

    Raises ConfigError for a DeepSpeed file that no ZeRO stage can use.
    """
    m, batch = config.model, gcd(*config.batches.values)
    zeros = [zero for zero in ZERO if _zero_section(config.deepspeed, zero) is not None]
    if not zeros:  # raises with the file's problem
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
    """`config` with `choice`, checked by config/tree.py's own rules; None if they refuse it."""
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
    # What Transformer Engine does not support would be emulated.
    return None if choice.fp8 is not None and misfit(made) else made


def overrides(config: RunConfig, base: RunConfig) -> list[str]:
    """Command-line overrides that turn `base` into `config`, the result of a search."""
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
    """Changes that make a plan fit: for every setting the first other value that does, all else being equal; and the
    least number of GPUs on which it fits unchanged. Fastest first."""
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
    """Stages among which the tightest must be: the first, the last, and the first one of every size in between: later
    stages of the same size have fewer micro-batches in flight (1F1B)."""
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
    """zero_optimization of the DeepSpeed file `name` for a ZeRO stage; None if it contradicts or is missing."""
    try:
        ds = deepspeed_json.build(RunConfig(deepspeed=name, parallel=ParallelConfig(zero=zero)), 1)
    except ConfigError:
        return None
    section: dict[str, Any] = ds["zero_optimization"]
    return section


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))
