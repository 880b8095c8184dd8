"""The search finds what trying everything finds, suggests only what is legal and fits, and ranks by predicted time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.config import deepspeed_json, recipe
from megastable.config.training import Fp8Config
from megastable.config.tree import RunConfig
from megastable.parallel.layout import Layout
from megastable_tools.plan import published, search
from megastable_tools.plan.cluster import ClusterConfig, load_cluster
from megastable_tools.plan.memory import list_footprints
from megastable_tools.plan.partition import stage_bounds
from megastable_tools.plan.search import Choice
from megastable_tools.plan.time import step_time
from tests.tiers import examples

ROOT = Path(__file__).parents[2]
H100 = load_cluster(ROOT / "launch/clusters/h100.yaml")
SMALL = {
    "model": {"layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "sequence_length": 64,
              "vocab_size": 512},
    "train": {"global_batch": 12},
}  # fmt: skip


def small(**train: int) -> RunConfig:
    return RunConfig.model_validate(SMALL | {"train": SMALL["train"] | train})


def small_on(gpus: int) -> RunConfig:
    """On two GPUs with blocks enough for two chunks of the model on each."""
    return RunConfig.model_validate(SMALL | {"model": SMALL["model"] | {"layers": 4 if gpus == 2 else 3}})


def with_memory(bytes_: float) -> ClusterConfig:
    return H100.model_copy(update={"memory_gib": bytes_ / search.GIB, "reserve_gib": 0.0})


def everything(base: RunConfig, gpus: int) -> Iterator[tuple[RunConfig, Layout]]:
    """Every value of every setting that config/tree.py and the DeepSpeed files accept, without a thought; but one
    replica, as on one host, and without routed experts."""
    sizes = range(1, gpus + 1)
    settings_ = itertools.product(
        sizes, sizes, sizes, search.CONTEXT_BY, (False, True), range(4), search.RECOMPUTE, (False, True),
        search.ORDERS, (1, *search.CHUNKS), (1,), range(1, base.train.global_batch + 1), (base.precision.fp8,),
    )  # fmt: skip
    for *first, order, overlap, replicas, micro_batch, fp8 in settings_:
        choice = Choice(*first, *order, overlap, replicas, 1, micro_batch, fp8)
        if (
            gpus % (choice.tensor * choice.pipeline * choice.context)
            or base.train.global_batch % choice.micro_batch
            or (choice.context == 1 and choice.context_by == "ring")
            or choice.tensor_overlap > 1 > choice.sequence
            or choice.model_chunks > 1 > choice.pipeline - 1
            or choice.pipeline * choice.model_chunks > base.model.layers
        ):
            continue  # as deepspeed_config.data_parallel and config/rules.py say, but sooner
        tree = base.model_dump(mode="json")
        tree["train"]["micro_batch"] = choice.micro_batch
        tree["parallel"] = {name: getattr(choice, name) for name in Choice._fields[:-2]}
        try:
            config = recipe.validate_tree(tree, "test")
            data = deepspeed_json.size_of_data_parallel(config, gpus)
            deepspeed_json.build_deepspeed_json(config, gpus)
        except ConfigError:
            continue
        yield config, Layout(choice.tensor, choice.pipeline, data, choice.context)


@lru_cache
def tried(gpus: int) -> list[tuple[Choice, int, float]]:
    """(choice, bytes of the tightest of all stages, seconds) of everything for the small model."""
    found = []
    for c, lay in everything(small_on(gpus), gpus):
        zero = deepspeed_json.build_deepspeed_json(c, gpus)["zero_optimization"]
        total = max(f.total for f in list_footprints(c, lay))
        found.append((Choice.of(c), total, step_time(c, lay, H100, zero).seconds))
    return found


@pytest.mark.quick("0.3-1", "0.7-1")
@pytest.mark.parametrize("gpus", [1, 2, 6, 8])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_search_finds_what_trying_everything_finds(gpus: int, share: float) -> None:
    totals = sorted(total for _, total, _ in tried(gpus))
    memory = totals[round(share * (len(totals) - 1))]
    found = search.search_layouts(small_on(gpus), gpus, with_memory(memory))
    legal = {choice: seconds for choice, total, seconds in tried(gpus) if total <= memory}
    suggested = [Choice.of(plan.config) for plan in found.plans]
    assert len(set(suggested)) == len(suggested) and set(suggested) <= set(legal)
    assert [plan.time.seconds for plan in found.plans] == [legal[choice] for choice in suggested]
    # Whatever it left out has a twin that it did not, which is no slower; sequence parallelism it always takes. Chunks
    # are only for the fastest of a tensor x pipeline.
    legal = {choice: seconds for choice, seconds in legal.items() if choice.sequence == (choice.tensor > 1)}
    best: dict[tuple[object, ...], float] = {}

    def twins_of(choice: Choice) -> list[tuple[object, ...]]:
        twins: list[tuple[object, ...]] = [choice[:2]]
        if choice.tensor_overlap == 1:
            twins.append((*choice[:3], choice.zero, choice.micro_batch))
        return twins

    for choice in suggested:
        for twin in ((*choice[:3], choice.zero, choice.micro_batch), choice[:2]):
            best[twin] = min(legal[choice], best.get(twin, math.inf))
    for choice, seconds in legal.items():
        assert all(best[twin] <= seconds * (1 + 1e-12) for twin in twins_of(choice))
    assert found.plans[0].time.seconds == pytest.approx(min(legal.values()))


@pytest.mark.parametrize(("gpus", "replicas"), [(512, 1), (4096, 512)])
def test_a_replica_a_host_is_chosen_where_it_is_faster(gpus: int, replicas: int) -> None:
    """A ring of thousands takes long, however little it carries; with replicas more goes over the network."""
    given = ["model.vocab_size=32000", f"train.global_batch={2 * gpus}", "train.micro_batch=1", "parallel.tensor=1",
             "parallel.sequence=false", "parallel.zero=1", "parallel.recompute=full"]  # fmt: skip
    plan = search.plan_layout(recipe.load_recipe(ROOT / "launch/recipes/7b.yaml", given), gpus, H100)
    chosen = search._choose_replicas(plan)
    assert chosen.fits and chosen.layout.replicas == replicas
    assert chosen.time.seconds < plan.time.seconds or replicas == 1
    # A rank keeps more: the state is shared out over 8.
    state = [{i.name: i.bytes for i in p.tightest.items}["fp32 master weights"] for p in (plan, chosen)]
    assert state[1] == pytest.approx(replicas * state[0], rel=1e-3)


def test_overrides_make_the_plan_of_the_recipe() -> None:
    given = ["model.vocab_size=32000", "train.global_batch=32"]
    config = recipe.load_recipe(ROOT / "launch/recipes/7b.yaml", given)
    for plan in search.search_layouts(config, 16, H100).plans[::7]:
        said = search.list_overrides(plan.config, config)
        assert recipe.load_recipe(ROOT / "launch/recipes/7b.yaml", [*given, *said]) == plan.config
    assert search.list_overrides(config, config) == []
    eight = config.model_copy(update={"precision": config.precision.model_copy(update={"fp8": Fp8Config()})})
    assert search.list_overrides(eight, config) == ["precision.fp8=current"]
    assert search.list_overrides(config, eight) == ["precision.fp8=off"]


@given(st.integers(1, 40), st.integers(0, 10), st.integers(1, 8), st.integers(1, 64), st.booleans())
@settings(max_examples=examples(40))
def test_critical_stages_hold_the_tightest(
    stages: int, more: int, wide: int, batch: int, is_split: bool
) -> None:
    model = {
        "layers": stages + more,
        "hidden": 64 * wide,
        "heads": 4,
        "sequence_length": 64,
        "vocab_size": 5000,
    }
    config = RunConfig.model_validate(
        {"model": model, "train": {"global_batch": batch}, "parallel": {"pipeline": stages}}
        | ({"parallel": {"pipeline": stages, "schedule": "zero_bubble"}} if is_split and stages > 1 else {})
    )
    plan = search.plan_layout(config, stages, H100)
    every = list_footprints(config, plan.layout)
    assert plan.tightest.total == max(f.total for f in every)
    assert set(search.critical_stages(tuple(stage_bounds(config)))) <= set(range(stages))


def test_zero_bubble_is_tightest_on_a_late_stage() -> None:
    """Stage 6 of 8 keeps what the weight gradients of 7 micro-batches need, but for the block that the last of them is
    in."""
    given = [
        "model.vocab_size=128000",
        "model.layers=78",
        "parallel.schedule=zero_bubble",
        "parallel.tensor_overlap=1",
    ]
    config = recipe.load_recipe(ROOT / "launch/recipes/70b.yaml", given)
    plan = search.plan_layout(config, 512, H100)
    every = list_footprints(config, plan.layout)
    assert plan.tightest.total == max(f.total for f in every)
    assert plan.tightest.stage == 6 and plan.tightest.peak == "end"
    blocks = stage_bounds(config)[7] - stage_bounds(config)[6]
    inputs = 2 * 8192 // 8 + 8192 // 8 + 28672 // 8  # two shards, and of this rank's heads and SwiGLU
    outputs = (8192 + 2 * 1024) // 8 + 2 * 28672 // 8 + 2 * 8192
    kept = [
        i.bytes for i in plan.tightest.items if i.name == "deferred weight gradients" and "end" in i.phases
    ]
    assert kept == [2 * 8192 * (inputs + outputs) * (blocks * 7 - 1)]


# What to do where it does not fit


def test_remedies_fit_and_change_one_thing() -> None:
    config = recipe.load_recipe(
        ROOT / "launch/recipes/7b.yaml", ["model.vocab_size=32000", "parallel.tensor=1", "train.micro_batch=8",
                                          "parallel.sequence=false", "parallel.recompute=none"]
    )  # fmt: skip
    own = search.plan_layout(config, 64, H100)
    assert not own.fits
    found = search.list_remedies(own)
    assert found and all(plan.fits for plan in found)
    changed = {said.split("=")[0] for plan in found for said in search.list_overrides(plan.config, config)}
    assert {"parallel.recompute", "train.micro_batch"} <= changed
    for plan in found:
        differing = [said for said in search.list_overrides(plan.config, config) if "sequence" not in said]
        assert len(differing) == (plan.layout.world == 64)


# Layouts of others (docs/planning.md)


@pytest.mark.parametrize("run", published.read_runs(), ids=lambda run: f"{run.name}, {run.gpus}")
def test_published_layouts_fit(run: published.Published) -> None:
    """With the recomputation that they name; what names none, with full recomputation."""
    cluster = load_cluster(ROOT / f"launch/clusters/{run.cluster}.yaml")
    full = run.config.parallel.model_copy(update={"recompute": "full"})
    assert search.plan_layout(run.config.model_copy(update={"parallel": full}), run.gpus, cluster).fits
    if run.config.parallel.recompute != "none":
        assert search.plan_layout(run.config, run.gpus, cluster).fits
