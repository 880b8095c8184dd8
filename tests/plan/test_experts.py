"""Mixtures in the plan: sums by hand, and experts that data ranks share out. Real steps: tests/benchmarks."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.config.tree import RunConfig
from megastable.model.sizes import count_parameters, flops_per_token
from megastable.parallel.layout import Layout
from megastable_tools.plan import activations, partition, search, volume, work
from megastable_tools.plan.cluster import ClusterConfig, load_cluster
from megastable_tools.plan.links import find_crossing
from megastable_tools.plan.memory import Footprint, list_footprints
from megastable_tools.plan.time import StepTime, step_time
from tests.plan.test_time import free

H100 = load_cluster("launch/clusters/h100.yaml")
EXPERTS = {"count": 8, "top_k": 2, "ffn": 512, "shared": 1, "first_dense": 1}


def make_config(expert: int = 1, experts: dict[str, Any] | None = None, **parts: Any) -> RunConfig:
    """expert: data ranks that share out experts."""
    model = {
        "layers": 6, "hidden": 1024, "heads": 16, "ffn": 2816, "sequence_length": 2048, "vocab_size": 32000,
        "experts": EXPERTS | (experts or {}),
    }  # fmt: skip
    tree = {
        "model": model | parts.pop("model", {}),
        "train": {"global_batch": 64, "micro_batch": 1} | parts.pop("train", {}),
        "parallel": parts | {"expert": expert},
    }  # fmt: skip
    return RunConfig.model_validate(tree)


def lay_out(c: RunConfig, data: int) -> Layout:
    p = c.parallel
    return Layout(p.tensor, p.pipeline, data, p.context, expert=p.expert)


def plan_time(c: RunConfig, data: int = 1, cluster: ClusterConfig = H100) -> StepTime:
    return step_time(c, lay_out(c, data), cluster)


def plan_memory(c: RunConfig, data: int = 1) -> Footprint:
    (found,) = list_footprints(c, lay_out(c, data))
    return found


def count_expert_elements(c: RunConfig) -> int:
    """Of the routed experts of the whole model."""
    assert c.model.experts is not None
    return c.model.expert_blocks * c.model.experts.count * 3 * c.model.expert_width * c.model.hidden


# What a rank holds


@given(
    st.integers(1, 40), st.integers(0, 39), st.integers(1, 5), st.sampled_from([1, 2]), st.booleans(), st.booleans()
)  # fmt: skip
def test_stages_hold_the_whole_model(
    layers: int, dense: int, stages: int, chunks: int, tied: bool, shared: bool
) -> None:
    dense %= layers
    stages = min(stages, layers // chunks) or 1
    parallel = {"pipeline": stages, "model_chunks": chunks if stages > 1 else 1}
    sizes = {"layers": layers, "hidden": 64, "heads": 4, "ffn": 128, "vocab_size": 500, "tied": tied}
    c = make_config(experts={"first_dense": dense, "shared": int(shared), "ffn": 32}, model=sizes, **parallel)
    cut, elements = partition.stage_bounds(c), 0
    for stage in range(stages):
        held = partition.stage_of(c, cut, stage)
        numbers = list(chain(*partition.list_chunk_blocks(cut, stage, c.parallel.model_chunks)))
        assert held.blocks == len(numbers) and held.routed == sum(number >= dense for number in numbers)
        elements += sum(map(sum, partition.parameter_sizes(c.model, held, 1)))
        grouped = chain(*(group.sizes for group in partition.parameter_groups(c, held)))
        sizes_held = chain(*partition.parameter_sizes(c.model, held, 1))
        assert sorted(grouped) == sorted(sizes_held)
    copies = c.model.padded_vocab * c.model.hidden * (tied and stages > 1)
    assert elements == count_parameters(c.model) + copies


@pytest.mark.parametrize("expert", [1, 2, 8])
@pytest.mark.parametrize("zero", [1, 2])
def test_state_of_experts_is_shared_out_over_those_that_have_them(expert: int, zero: int) -> None:
    """Of 16 data ranks, 16 / E have the same experts; the rest of the state is shared out over all 16."""
    c = make_config(expert, zero=zero)
    experts = count_expert_elements(c)
    rest = count_parameters(c.model) - experts
    held = plan_memory(c, 16).bytes_at("between")
    whole, own = rest + experts / expert, (rest + experts) / 16
    assert held["weights"] == pytest.approx(2 * whole, rel=1e-4)
    assert held["master"] == pytest.approx(4 * own, rel=1e-4)
    assert held["moments"] == pytest.approx(8 * own, rel=1e-4)
    assert held["gradients"] == pytest.approx(4 * whole if zero == 1 else 0, rel=1e-4)


def test_rows_of_experts_are_kept_for_every_choice() -> None:
    """Twice as many experts of a token keep twice as much, but for the choices; more experts to choose from do not."""
    names = "inputs of experts", "SwiGLU outputs of experts", "results of experts"

    def count_kept(**experts: int) -> int:
        items = plan_memory(make_config(experts={"shared": 0, **experts})).items
        return sum(i.bytes for i in items if i.name in names and "loss" in i.phases)

    assert count_kept() == 5 * 2048 * 2 * (3 * 1024 + 512) * 2
    assert count_kept(top_k=4) == 2 * count_kept() and count_kept(count=16) == count_kept()


# Time


def test_step_time_counts_the_work_of_a_token() -> None:
    """6 FLOPs a weight that a token uses, at 1 PFLOP/s; of 8 experts two, and the shared one."""
    c = make_config()
    found = plan_time(c, cluster=free())
    square = 12 * c.model.layers * c.model.hidden * c.model.sequence_length
    wanted = 64 * 2048 * (flops_per_token(c.model, False) - square) / 1e15
    assert found.parts["products"] == pytest.approx(wanted)
    assert found.flops == 64 * 2048 * flops_per_token(c.model, False)


def test_full_recomputation_repeats_all_products_but_the_last() -> None:
    """That of the shared expert; without one the routed experts' results are needed once more."""
    for shared, repeated in ((0, 3 * 2), (1, 3 * 2 + 2)):
        c = make_config(experts={"shared": shared, "first_dense": 0}, recompute="full")
        z = activations.shape_sizes_of(c)
        flops = sum(
            o.flops * o.times
            for o in work.list_block_work(c, z, frozenset(), True, 0, 1, True)
            if o.when == work.AGAIN and o.kind in (work.PRODUCT, work.EXPERT)
        )
        # Queries, keys, values and output: 4 x 1024 columns; an expert: 512 of each of its parts.
        assert flops == 2 * 2048 * 1024 * (4 * 1024 + 512 * repeated)


@pytest.mark.parametrize(("experts", "rows"), [(8, 512), (16, 256), (64, 64)])
def test_experts_with_few_tokens_are_slower(experts: int, rows: int) -> None:
    """As a product of as many rows as one has: 256 rows reach half of the speed."""
    efficiency = free().efficiency.model_copy(update={"half_size": 256.0})
    cluster = free().model_copy(update={"efficiency": efficiency})
    given = {"count": experts, "shared": 0, "first_dense": 0}
    lines = {line.what: line.seconds for line in plan_time(make_config(experts=given), cluster=cluster).lines}
    flops = 64 * 2048 * 6 * 6 * 2 * 3 * 512 * 1024
    assert lines["products of experts"] == pytest.approx(flops * (1 + 256 / rows) / 1e15)


def test_without_a_grouped_kernel_every_expert_is_launched() -> None:
    """On an A100, and wherever products are replaced or wait for their weights."""
    slow = free().model_copy(update={"kernel_us": 1e6})
    c = make_config(experts={"shared": 0, "first_dense": 0})

    def count_launches(config: RunConfig, cluster: ClusterConfig) -> float:
        lines = plan_time(config, cluster=cluster).lines
        return sum(line.seconds for line in lines if line.what == "products of experts") / 64 / 6

    assert count_launches(c, slow) == pytest.approx(2 * 3)
    a100 = slow.model_copy(update={"tflops": slow.tflops.model_copy(update={"fp8": None})})
    assert count_launches(c, a100) == pytest.approx(8 * 2 * 3)
    loop = c.model_copy(update={"kernels": c.kernels.model_copy(update={"experts": "loop"})})
    zero3 = make_config(experts={"shared": 0, "first_dense": 0}, zero=3)
    assert count_launches(loop, slow) == count_launches(zero3, slow) == pytest.approx(8 * 2 * 3)


# Experts on several data ranks


@pytest.mark.parametrize(("recompute", "passes"), [("none", 1), ("full", 2)])
@pytest.mark.parametrize("tensor", [1, 2])
def test_tokens_go_to_experts_and_back(recompute: str, passes: int, tensor: int) -> None:
    """Every row of a rank, each way, in both passes; and how many there are of each expert."""
    c = make_config(4, recompute=recompute, tensor=tensor)
    cut = partition.stage_bounds(c)
    terms = [t for t in volume.list_step_terms(c, 8, 0, cut, "chunked") if t.group == "expert"]
    calls, rows = 5 * 64 // 8, 2048 * 2 * 1024 * 2
    assert {t.collective for t in terms} == {"all-to-all"}
    sent = sorted((t.bytes, t.calls) for t in terms)
    assert sent == sorted([(8 * 8, calls * passes), (rows, 2 * calls * passes), (rows, 2 * calls)])
    assert volume.count_members(c, 8)["expert"] == 4 and volume.count_members(c, 8)["expert data"] == 2
    assert not [t for t in volume.list_step_terms(make_config(), 8, 0, cut, "chunked") if t.group == "expert"]


def test_gradients_of_experts_are_summed_by_those_that_have_them() -> None:
    c = make_config(4)
    settings = {"reduce_bucket_size": 10**9}
    terms = volume.list_step_terms(c, 8, 0, partition.stage_bounds(c), "chunked", zero=settings)
    summed, gathered = Counter[str](), Counter[str]()
    for term in terms:
        summed[term.group] += term.total * (term.what == "gradients")
        gathered[term.group] += term.total * (term.what == "weights" and term.collective == "all-gather")
    experts = count_expert_elements(c)
    assert summed["expert data"] == 4 * experts // 4
    assert summed["data"] == pytest.approx(4 * (count_parameters(c.model) - experts), rel=1e-3)
    assert gathered["expert data"] == 2 * experts // 4 // 2  # of two ranks this one's half


@pytest.mark.parametrize(
    ("layout", "group", "link", "together"),
    [
        (Layout(data=16, expert=8), "expert", "host", 8),
        (Layout(data=16, expert=16), "expert", "network", 8),
        (Layout(tensor=2, data=16, expert=4), "expert", "host", 4),
        (Layout(tensor=2, data=16, expert=8), "expert", "network", 4),
        (Layout(data=16, expert=8), "expert data", "network", 1),
        (Layout(data=16, expert=2), "expert data", "network", 4),
        (Layout(data=8, expert=2), "expert data", "host", 4),
        (Layout(pipeline=2, data=8, expert=8), "expert", "host", 8),
    ],
)
def test_crossing_of_experts(layout: Layout, group: str, link: str, together: int) -> None:
    found = find_crossing(group, layout, H100)
    assert (found.name, found.together) == (link, together)


def test_experts_of_two_hosts_are_slower_than_of_one() -> None:
    """What a rank sends goes over its own network card, in place of the host's links."""
    experts = {"count": 64, "top_k": 8, "ffn": 1024, "shared": 0}
    seconds = {expert: plan_time(make_config(expert, experts), 16).parts["expert"] for expert in (1, 8, 16)}
    assert seconds[1] == 0
    # 7/8 of the rows at 360 GB/s; 8/16 at 42.5. Each message has its latency, too.
    assert seconds[16] / seconds[8] == pytest.approx((8 / 16) / 42.5 / ((7 / 8) / 360), rel=0.03)


def test_search_tries_ways_to_share_experts_out() -> None:
    """None, as many as there can be in a host and at all; and for the fastest plans those in between."""
    c = make_config(model={"layers": 2}, train={"global_batch": 16})

    def try_on(gpus: int) -> set[int]:
        return {axes[-1] for axes, _ in search.list_families(c, gpus, 2) if axes[:3] == (1, 1, 1)}

    assert try_on(16) == {1, 2, 8} and try_on(6) == set() and try_on(4) == {1, 2, 4} and try_on(1) == {1}
    split_plans = search.search_layouts(c, 16, H100).plans
    assert search.Choice.of(split_plans[0].config).expert in (1, 2, 4, 8)
    plans = search.search_layouts(c, 2, H100).plans
    shared_out = [plan for plan in plans if search.Choice.of(plan.config).expert == 2]
    assert shared_out and len(shared_out) < len(plans)
    assert "parallel.expert=2" in search.list_overrides(shared_out[0].config, c)


def test_routers_are_measured_as_there() -> None:
    from megastable.model import experts

    assert len(experts.TOTALS) == volume.ROUTER_TOTALS
