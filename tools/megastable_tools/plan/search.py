"""Search for the layouts of a recipe on a number of GPUs: which are valid, which fit, which is fastest. Pure; no torch.

    found = search(config, 512, cluster)
    for plan in found.plans:                                # those that fit, fastest first
        print(plan.time.seconds, overrides(plan.config, config))

The search covers every split of the GPUs into tensor x pipeline x data, every divisor of data for context, by exchange
and by ring, every schedule of a pipeline, every ZeRO stage, recomputation and micro-batch that config/tree.py and the
DeepSpeed files allow. It prunes what cannot be better: a ring that writes its scores out, a larger micro-batch or less
recomputation than one that does not fit, more recomputation than needed, and tensor parallelism without sequence
parallelism where that is possible: it sends the same bytes and takes more memory (in tiny models its fewer messages are
faster). Chunks of `parallel.tensor_overlap`, and then a replica a host (`parallel.replicas`), are chosen for those that
fit and may become the fastest of their tensor x pipeline by them. Of the numbers of data ranks that can share out
routed experts, the first, the last and the largest inside of a host are tried, and all others for the fastest of each
tensor x pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import gcd, inf, isqrt
from typing import Literal, NamedTuple

from pydantic import ValidationError

from megastable.base.errors import ConfigError
from megastable.config import deepspeed_json
from megastable.config.rules import writes_scores
from megastable.config.training import Fp8Config
from megastable.config.tree import RunConfig
from megastable.model.sizes import find_misfit
from megastable.parallel.layout import Layout
from megastable_tools.plan import partition
from megastable_tools.plan.cluster import ClusterConfig
from megastable_tools.plan.memory import Device, Footprint, list_footprints, read_zero_section
from megastable_tools.plan.time import StepTime, step_time

Way = Literal["ulysses", "ring"]
CONTEXT_BY: tuple[Way, ...] = ("ulysses", "ring")
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["1f1b", "zero_bubble"]
Order = tuple[Schedule, int]  # and chunks of the model on a stage
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
ZERO = (1, 2, 3)
CHUNKS = (2, 4, 8)
ORDERS: tuple[Order, ...] = (("1f1b", 1), ("zero_bubble", 1), *(("1f1b", chunks) for chunks in CHUNKS))
GIB = 2**30
HEADROOM = 0.05  # of usable memory: the error of the memory formulas (docs/planning.md)


class Choice(NamedTuple):
    """The settings that a search varies in a recipe."""

    tensor: int
    pipeline: int
    context: int
    context_by: Way
    sequence: bool
    zero: int
    recompute: Recompute
    keep_gathered: bool
    schedule: Schedule
    model_chunks: int
    tensor_overlap: int
    replicas: int
    expert: int
    micro_batch: int
    fp8: Fp8Config | None

    @classmethod
    def of(cls, config: RunConfig) -> Choice:
        parallel_keys = [getattr(config.parallel, key) for key in cls._fields[:-2]]
        return cls._make([*parallel_keys, config.train.micro_batch, config.precision.fp8])


@dataclass(frozen=True)
class LayoutPlan:
    """A recipe on a layout. footprints: of the stages that can be tightest (`critical_stages`)."""

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
        return usable_bytes(self.cluster) - self.tightest.total

    @property
    def fits(self) -> bool:
        return self.left >= 0

    @property
    def tight(self) -> bool:
        """Whether it fits with less to spare than the prediction's error."""
        return 0 <= self.left < HEADROOM * usable_bytes(self.cluster)

    @cached_property
    def time(self) -> StepTime:
        zero_section = read_zero_section(self.config.deepspeed, self.config.parallel.zero)
        return step_time(self.config, self.layout, self.cluster, zero_section)

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches of a step on every rank."""
        return deepspeed_json.count_micro_batches(self.config, self.layout.world)


@dataclass(frozen=True)
class SearchResult:
    """Result of a search on a number of GPUs.

    plans: for every split of the GPUs and every micro-batch the one that recomputes least and fits, with
    `parallel.keep_gathered` and without; if it is tight, also those that recompute more, up to the first that is not;
    fastest first. nearest: of those that do not fit, the
    one that lacks least; None if no layout is valid, or all fit.
    """

    gpus: int
    plans: tuple[LayoutPlan, ...]
    nearest: LayoutPlan | None

    def list_best(self) -> list[LayoutPlan]:
        """The fastest plan of every tensor x pipeline, fastest first: differences in the other settings alone say
        little more. Tight ones are the last choice, and the last in the list."""
        first: dict[tuple[object, ...], LayoutPlan] = {}
        for layout_plan in sorted(self.plans, key=lambda plan: plan.tight):
            layout_choice = Choice.of(layout_plan.config)
            first.setdefault((layout_choice.tensor, layout_choice.pipeline, layout_choice.fp8), layout_plan)
        return list(first.values())


def usable_bytes(cluster: ClusterConfig) -> int:
    """Bytes of a GPU's memory that training can use."""
    return int((cluster.memory_gib - cluster.reserve_gib) * GIB)


def plan_layout(config: RunConfig, gpus: int, cluster: ClusterConfig) -> LayoutPlan:
    """`config` unchanged. Raises ConfigError if its layout does not divide the GPUs or the batch."""
    data_ranks = deepspeed_json.size_of_data_parallel(config, gpus)
    deepspeed_json.build_deepspeed_json(config, gpus)  # raises if its DeepSpeed file contradicts it
    return _judge(config, data_ranks, cluster)


def search_layouts(
    config: RunConfig, gpus: int, cluster: ClusterConfig, precisions: Sequence[Fp8Config | None] | None = None
) -> SearchResult:
    """All layouts of `config` on a number of GPUs, with the same global batch. model.vocab_size must be known.

    precisions: values of precision.fp8 to try; None = the recipe's own.
    """
    fitting_plans: list[LayoutPlan] = []
    nearest_plan: LayoutPlan | None = None
    for found in _judged(config, gpus, cluster, [config.precision.fp8] if precisions is None else precisions):
        if found.fits:
            fitting_plans.append(found)
        elif nearest_plan is None or found.left > nearest_plan.left:
            nearest_plan = found
    own_choice = Choice.of(config)

    def order(found: LayoutPlan) -> tuple[float, int, int]:
        # Among equals the one that changes least, then the one with most free memory.
        changed_count = sum(a != b for a, b in zip(Choice.of(found.config), own_choice, strict=True))
        return found.time.seconds, changed_count, -found.left

    return SearchResult(gpus, tuple(sorted(_refine(fitting_plans), key=order)), nearest_plan)


def _refine(plans: Sequence[LayoutPlan]) -> list[LayoutPlan]:
    """The plans, with chunks and replicas those that may become the fastest of their tensor x pipeline, and with other
    numbers of ranks that share out experts those that are."""
    refined_plans = _refine_part(_refine_part(plans, "tensor", _choose_chunks), "data", _choose_replicas)
    return _refine_part(refined_plans, "", _choose_expert_ranks)


def _refine_part(
    plans: Sequence[LayoutPlan], part: str, choose: Callable[[LayoutPlan], LayoutPlan]
) -> list[LayoutPlan]:
    """`choose` for every plan that would be the fastest of its kind if nothing of a part of the step were left."""
    refined_plans, best_seconds = list[LayoutPlan](), dict[tuple[object, ...], float]()
    for layout_plan in sorted(plans, key=lambda plan: plan.time.seconds):
        layout, step = layout_plan.layout, layout_plan.time
        # Tensor parallelism also while the pipeline fills and drains.
        passes = 1 + (layout.pipeline - 1) / layout_plan.accumulation if part == "tensor" else 1.0
        least_seconds = step.seconds - step.parts.get(part, 0.0) * passes
        group = layout.tensor, layout.pipeline, layout_plan.config.precision.fp8, layout_plan.tight
        if least_seconds < best_seconds.get(group, inf):
            layout_plan = choose(layout_plan)
            best_seconds[group] = min(layout_plan.time.seconds, best_seconds.get(group, inf))
        refined_plans.append(layout_plan)
    return refined_plans


def _choose_expert_ranks(found: LayoutPlan) -> LayoutPlan:
    """A plan that fits, with the number of ranks that share out experts by which it is fastest."""
    own_choice = Choice.of(found.config)
    plans = [found]
    for expert in list_expert_counts(found.config, found.layout.data):
        changed_config = apply_choice(found.config, own_choice._replace(expert=expert))
        if expert != own_choice.expert and changed_config is not None:
            plans.append(_judge(changed_config, found.layout.data, found.cluster))
    usable_plans = [plan for plan in plans if plan.fits and plan.tight <= found.tight]
    return min(usable_plans, key=lambda plan: plan.time.seconds)


def _choose_replicas(found: LayoutPlan) -> LayoutPlan:
    """A plan that fits, with a replica in every host if that is faster."""
    layout, hosts = found.layout, found.layout.world // found.cluster.gpus_per_host
    replicas = max(hosts // layout.pipeline, 1)
    if replicas == 1 or layout.data % replicas:
        return found
    changed_config = apply_choice(found.config, Choice.of(found.config)._replace(replicas=replicas))
    if changed_config is None:
        return found
    changed_plan = _judge(changed_config, layout.data, found.cluster)
    is_better = changed_plan.time.seconds < found.time.seconds and changed_plan.tight <= found.tight
    return changed_plan if changed_plan.fits and is_better else found


def _choose_chunks(found: LayoutPlan) -> LayoutPlan:
    """A plan that fits, in the number of chunks of `parallel.tensor_overlap` that is fastest, of powers of two. Nearly
    the same memory is enough for all of them."""
    own_choice, chunk_counts = Choice.of(found.config), CHUNKS if found.config.parallel.sequence else ()
    best = found
    for chunk_count in chunk_counts:
        changed_config = apply_choice(found.config, own_choice._replace(tensor_overlap=chunk_count))
        if changed_config is None:
            break
        changed_plan = _judge(changed_config, found.layout.data, found.cluster)
        if (
            not changed_plan.fits
            or changed_plan.tight > found.tight
            or changed_plan.time.seconds >= best.time.seconds
        ):
            break
        best = changed_plan
    return best


def _judged(
    config: RunConfig, gpus: int, cluster: ClusterConfig, precisions: Sequence[Fp8Config | None]
) -> Iterator[LayoutPlan]:
    """All candidates that have to be evaluated, whether they fit or not.

    More recomputation only slows down a layout that fits, and a larger micro-batch does not help one that does not fit:
    so this follows the border between both, from small micro-batches and no recomputation on, past tight plans to the
    first that is not tight; with `keep_gathered` first, and without it unless nothing is recomputed.
    """
    for fp8_config in precisions:
        for axes, micro_batches, order in _schedule_families(config, gpus, cluster.gpus_per_host):
            is_sequence = axes[4]
            ways_kept: dict[bool, list[Recompute]] = {
                True: ["none", "selective"] if is_sequence else [],
                False: [*RECOMPUTE],
            }
            for micro_batch in micro_batches:
                has_room = False
                for is_kept, recompute_ways in ways_kept.items():
                    for recompute_way in () if has_room else tuple(recompute_ways):
                        choice = Choice(
                            *axes[:-1],
                            recompute_way,
                            is_kept,
                            *order,
                            1,
                            1,
                            axes[-1],
                            micro_batch,
                            fp8_config,
                        )
                        candidate = apply_choice(config, choice)
                        layout_plan = candidate and _judge(candidate, gpus // (axes[0] * axes[1]), cluster)
                        if layout_plan:
                            yield layout_plan
                            if layout_plan.fits and not layout_plan.tight:
                                has_room = recompute_way == "none"  # nothing is faster
                                break
                        if not layout_plan or not layout_plan.fits:
                            recompute_ways.remove(recompute_way)


def _schedule_families(
    config: RunConfig, gpus: int, host_gpus: int
) -> Iterator[tuple[Axes, tuple[int, ...], Order]]:
    """`list_families`, those with pipeline stages by every schedule, and in chunks of the model."""
    for axes, micro_batches in list_families(config, gpus, host_gpus):
        for order in ORDERS if axes[1] > 1 else ORDERS[:1]:
            yield axes, micro_batches, order


def find_fewest_gpus(config: RunConfig, cluster: ClusterConfig) -> int:
    """The least number of GPUs on which `config` fits unchanged, with data ranks that divide the batch; if there is
    none, the least that its layout allows."""
    p, train_config = config.parallel, config.train
    divisors = list_divisors(gcd(*config.batches.values) // train_config.micro_batch)
    all_counts = (p.tensor * p.pipeline * p.context * divisor for divisor in divisors)
    gpu_counts = [n for n in all_counts if n % p.least_ranks == 0]
    return next((n for n in gpu_counts if plan_layout(config, n, cluster).fits), p.least_ranks)


def find_other_gpus(config: RunConfig, found: SearchResult, cluster: ClusterConfig) -> LayoutPlan | None:
    """If nothing fits on the GPUs of `found`: a plan on another number of GPUs. None if none is near.

    If no layout is valid, the next smaller number of whole hosts; if memory is short, 2, 4, ... 256 times as many GPUs.
    """
    gpu_count, hosts = found.gpus, cluster.gpus_per_host
    gpu_counts: Iterable[int]
    if found.nearest is None:
        gpu_step = hosts if gpu_count > hosts else 1
        whole = range((gpu_count - 1) // gpu_step * gpu_step, 0, -gpu_step)
        gpu_counts = (number for number in whole if _factors(config, number))
    else:
        gpu_counts = (gpu_count * 2**doublings for doublings in range(1, 9))
    for number in gpu_counts:
        if any(other_plan.fits for other_plan in _judged(config, number, cluster, [config.precision.fp8])):
            return search_layouts(config, number, cluster).list_best()[0]
    return None


def other_batch(config: RunConfig, gpus: int, cluster: ClusterConfig) -> LayoutPlan | None:
    """If the global batch divides over no layout of `gpus`: a plan with the nearest batch that does."""
    m, batch = config.model, config.train.global_batch
    shared = {heads * stages for heads in list_divisors(m.heads) for stages in range(1, m.layers + 1)}
    sample_ranks = {gpus // divided_count for divided_count in shared if gpus % divided_count == 0}
    near_batches = {divided_count * max(1, round(batch / divided_count)) for divided_count in sample_ranks}
    for near_batch in sorted(near_batches, key=lambda n: abs(n - batch))[:3]:
        train = config.train.model_copy(update={"global_batch": near_batch})
        found_layouts = search_layouts(config.model_copy(update={"train": train}), gpus, cluster)
        if best_plans := found_layouts.list_best():
            return best_plans[0]
    return None


def _factors(config: RunConfig, gpus: int) -> bool:
    """Whether this many GPUs can be divided into tensor and context ranks, samples of a step and stages at all."""
    m, global_batch = config.model, gcd(*config.batches.values)
    divisors = list_divisors(global_batch)
    shared_ranks = {heads * samples for heads in list_divisors(m.heads) for samples in divisors}
    return any(gpus % shared_rank == 0 and gpus // shared_rank <= m.layers for shared_rank in shared_ranks)


Axes = tuple[
    int, int, int, Way, bool, int, int
]  # tensor, pipeline, context, context_by, sequence, zero, expert


def list_families(config: RunConfig, gpus: int, host_gpus: int) -> Iterator[tuple[Axes, tuple[int, ...]]]:
    """Axes that config/tree.py allows, and the micro-batches that divide every global batch over them, ascending.

    Raises ConfigError for a DeepSpeed file that no ZeRO stage can use.
    """
    model_config, batch = config.model, gcd(*config.batches.values)
    is_written = writes_scores(model_config, config.segmented)
    zero_stages, problems = list[int](), list[ConfigError]()
    for zero in ZERO:
        try:
            read_zero_section(config.deepspeed, zero)
            zero_stages.append(zero)
        except ConfigError as error:
            problems.append(error)
    if not zero_stages:
        raise problems[0]
    for tensor in list_divisors(gpus):
        for pipeline_stages in list_divisors(gpus // tensor):
            data_ranks = gpus // tensor // pipeline_stages
            for context_ranks in list_divisors(data_ranks):
                if batch % (data_ranks // context_ranks):
                    continue
                is_sequence = tensor > 1 and model_config.sequence_length % (context_ranks * tensor) == 0
                micro_batches = list_divisors(batch // (data_ranks // context_ranks))
                ways = [config.parallel.context_by]
                if context_ranks > 1:
                    ways = [way for way in CONTEXT_BY if way in ways or way == "ulysses" or not is_written]
                all_counts = list_expert_counts(config, data_ranks)
                in_host = [n for n in all_counts if n * tensor <= host_gpus]
                expert_counts = sorted({1, in_host[-1] if in_host else 1, all_counts[-1]})
                for zero, way, expert in product(zero_stages, ways, expert_counts):
                    layout_axes = tensor, pipeline_stages, context_ranks, way, is_sequence, zero, expert
                    least_choice = Choice(*layout_axes[:-1], "full", False, "1f1b", 1, 1, 1, expert, 1, None)
                    if apply_choice(config, least_choice) is not None:
                        yield layout_axes, micro_batches


def list_expert_counts(config: RunConfig, data: int) -> tuple[int, ...]:
    """Numbers of neighbouring data ranks that can share out experts."""
    experts = config.model.experts
    return (1,) if experts is None else list_divisors(gcd(experts.count, data))


def apply_choice(config: RunConfig, choice: Choice) -> RunConfig | None:
    """`config` with `choice`, checked by config/tree.py's own rules; None if they refuse it."""
    old_parallel, old_train, old_precision = config.parallel, config.train, config.precision
    new_parallel = old_parallel.model_copy(update=dict(zip(Choice._fields[:-2], choice[:-2])))
    changed = {
        "parallel": new_parallel,
        "train": old_train.model_copy(update={"micro_batch": choice.micro_batch}),
        "precision": old_precision.model_copy(update={"fp8": choice.fp8}),
    }
    try:
        made_config = RunConfig(
            **{field_name: getattr(config, field_name) for field_name in RunConfig.model_fields} | changed
        )
    except ValidationError:
        return None
    # What Transformer Engine does not support would be emulated.
    return None if choice.fp8 is not None and find_misfit(made_config) else made_config


def list_overrides(config: RunConfig, base: RunConfig) -> list[str]:
    """Command-line overrides that turn `base` into `config`, the result of a search."""
    our_choice, their_choice = Choice.of(config), Choice.of(base)
    override_words = []
    for name, new_value, old_value in zip(Choice._fields, our_choice, their_choice):
        if new_value == old_value:
            continue
        key = {"micro_batch": "train.micro_batch", "fp8": "precision.fp8"}.get(name, f"parallel.{name}")
        word = "off" if new_value is None else str(new_value).lower()
        override_words.append(f"{key}={new_value.recipe if isinstance(new_value, Fp8Config) else word}")
    return override_words


def list_remedies(found: LayoutPlan) -> list[LayoutPlan]:
    """Changes that make a plan fit: for every setting the first other value that does, all else being equal; and the
    least number of GPUs on which it fits unchanged. Fastest first."""
    config, gpus, own = found.config, found.layout.world, Choice.of(found.config)
    global_batch = config.train.global_batch
    more_recompute = RECOMPUTE[RECOMPUTE.index(own.recompute) + 1 :]
    choice_lists: list[list[Choice]] = [
        [own._replace(recompute=recompute_way) for recompute_way in more_recompute],
        [own._replace(micro_batch=n) for n in reversed(list_divisors(global_batch)) if n < own.micro_batch],
        [own._replace(sequence=True)],
        [own._replace(keep_gathered=False)] if own.keep_gathered else [],
        [own._replace(schedule="1f1b")] if own.schedule != "1f1b" else [],
        [own._replace(replicas=n) for n in reversed(list_divisors(own.replicas)) if n < own.replicas],
        [own._replace(model_chunks=n) for n in reversed(range(1, own.model_chunks))],
        [own._replace(zero=zero_stage, replicas=1) for zero_stage in ZERO if zero_stage > own.zero],
        [own._replace(expert=n) for n in list_expert_counts(config, found.layout.data) if n > own.expert],
        [own._replace(tensor=n, sequence=n > 1) for n in list_divisors(gpus) if n > own.tensor],
        [own._replace(pipeline=n) for n in list_divisors(gpus) if n > own.pipeline],
        [
            own._replace(context=n, context_by=way)
            for n in list_divisors(gpus)
            if n > own.context
            for way in CONTEXT_BY
        ],
    ]
    fitting_plans: list[LayoutPlan] = []
    for layout_choices in choice_lists:
        for changed_config in filter(None, (apply_choice(config, choice) for choice in layout_choices)):
            with suppress(ConfigError):  # a layout that divides neither the GPUs nor the batch
                if (changed_plan := plan_layout(changed_config, gpus, found.cluster)).fits:
                    fitting_plans.append(changed_plan)
                    break
    gpu_number = find_fewest_gpus(config, found.cluster)
    if gpu_number > gpus and (larger_plan := plan_layout(config, gpu_number, found.cluster)).fits:
        fitting_plans.append(larger_plan)
    return sorted(fitting_plans, key=lambda plan: (plan.layout.world, plan.time.seconds))


@lru_cache(maxsize=1024)
def critical_stages(cut: Sequence[int], chunks: int = 1) -> tuple[int, ...]:
    """Stages among which the tightest must be: the first, the last, and the first and the last one of every size in
    between: later stages of the same size have fewer micro-batches in flight, and in ZB-H1 more weight gradients left.
    chunks: of a stage.
    """
    last_stage = (len(cut) - 1) // chunks - 1
    first_by_size: dict[tuple[int, ...], int] = {}
    last_by_size: dict[tuple[int, ...], int] = {}
    for stage_number in range(1, last_stage):
        stage_size = tuple(map(len, partition.list_chunk_blocks(cut, stage_number, chunks)))
        first_by_size.setdefault(stage_size, stage_number)
        last_by_size[stage_size] = stage_number
    return tuple(sorted({0, last_stage, *first_by_size.values(), *last_by_size.values()}))


def _judge(config: RunConfig, data: int, cluster: ClusterConfig) -> LayoutPlan:
    p = config.parallel
    layout = Layout(p.tensor, p.pipeline, data, p.context, p.replicas, p.expert)
    cut = tuple(partition.stage_bounds(config))
    device: Device = "cpu" if cluster.device == "cpu" else "cuda"
    stage_numbers = critical_stages(cut, config.parallel.model_chunks)
    footprints = list_footprints(config, layout, device=device, cut=cut, stages=stage_numbers)
    return LayoutPlan(config, layout, cluster, tuple(footprints))


@lru_cache(maxsize=4096)
def list_divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    low_divisors = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*low_divisors, *(number // low_divisor for low_divisor in low_divisors)}))
