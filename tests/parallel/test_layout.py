"""Ranks, coordinates and groups, as DeepSpeed numbers them; where the pipeline is cut; the exchange of a tied
embedding's gradient."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.parallel.layout import Layout, cut_into_stages
from megastable.parallel.mappings import count_overlaps
from megastable.parallel.topology import Topology
from tests.distributed import run_ranks
from tests.tiers import examples

LAYOUTS = st.builds(Layout, st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
WITH_CONTEXT = st.builds(
    lambda tensor, pipeline, samples, context: Layout(tensor, pipeline, samples * context, context),
    *[st.integers(1, 4)] * 4,
)


def _make_groups_after_some() -> list[float]:
    """Groups of all kinds, after one that the middle stage is not in: what all_reduce sums in each."""
    topology = Topology(Layout(pipeline=3), dist.get_rank(), timeout=20)
    made_groups = [topology.tied_group(), topology._make_own_group("pipeline"), topology.stage_group()]
    found_sums = []
    for group in made_groups:
        summed = torch.tensor(10.0 ** dist.get_rank())
        if group is not None:
            dist.all_reduce(summed, group=group)
        found_sums.append(float(summed))
    return found_sums


def test_groups_can_be_made_after_those_that_only_some_stages_are_in() -> None:
    assert run_ranks(3, _make_groups_after_some) == [[101, 111, 1], [10, 111, 10], [101, 111, 100]]


@settings(deadline=None)
@given(LAYOUTS)
def test_coordinates_and_ranks_are_inverse_and_groups_differ_along_their_axis(layout: Layout) -> None:
    found = [layout.coordinates_of(rank) for rank in range(layout.world)]
    assert set(found) == set(product(range(layout.pipeline), range(layout.data), range(layout.tensor)))
    assert [layout.rank_at(*coordinates) for coordinates in found] == list(range(layout.world))
    for axis, fixed in {"tensor": (0, 1), "data": (0, 2), "pipeline": (1, 2)}.items():
        groups = layout.list_groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
        for group in groups:
            assert group == sorted(group) and len(group) == getattr(layout, axis)
            assert len({tuple(layout.coordinates_of(rank)[i] for i in fixed) for rank in group}) == 1
    assert all(
        group == list(range(group[0], group[0] + layout.tensor)) for group in layout.list_groups("tensor")
    )


@settings(deadline=None)
@given(WITH_CONTEXT)
def test_context_group_shares_its_samples_and_nothing_else(layout: Layout) -> None:
    groups = layout.list_groups("context")
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    assert len(groups) == layout.tensor * layout.pipeline * layout.samples
    for group in groups:
        stages, data, tensor = zip(*map(layout.coordinates_of, group), strict=True)
        assert len(set(stages)) == len(set(tensor)) == 1
        # In the order of the tokens, and neighbours among the data ranks.
        assert list(data) == list(range(data[0], data[0] + layout.context)) and not data[0] % layout.context


@settings(deadline=None)
@given(*[st.integers(1, 4)] * 4)
def test_replicas_are_neighbours_and_the_ranks_of_a_shard_one_of_each(
    tensor: int, pipeline: int, shards: int, replicas: int
) -> None:
    layout = Layout(tensor, pipeline, shards * replicas, replicas=replicas)
    groups = {axis: layout.list_groups(axis) for axis in ("shard", "replica", "copies")}
    for axis, size in {"shard": shards, "replica": replicas, "copies": replicas * tensor}.items():
        assert sorted(rank for group in groups[axis] for rank in group) == list(range(layout.world))
        assert {len(group) for group in groups[axis]} == {size} and all(g == sorted(g) for g in groups[axis])
    places = {axis: [[layout.coordinates_of(r) for r in g] for g in of] for axis, of in groups.items()}
    for group in places["shard"]:
        assert len({(stage, data // shards, rank) for stage, data, rank in group}) == 1
    for group in places["replica"]:
        assert len({(stage, data % shards, rank) for stage, data, rank in group}) == 1
    for group in places["copies"]:
        assert len({(stage, data % shards) for stage, data, _ in group}) == 1
    if pipeline > 1:
        for group in layout.list_groups("tied"):
            ends = [layout.coordinates_of(rank) for rank in group]
            assert [stage for stage, *_ in ends] == [0] * shards + [pipeline - 1] * shards
            assert len({(data // shards, rank) for _, data, rank in ends}) == 1


@settings(deadline=None)
@given(*[st.integers(1, 3)] * 5)
def test_expert_ranks_are_neighbours_and_those_with_the_same_experts_one_of_each(
    tensor: int, pipeline: int, groups: int, expert: int, context: int
) -> None:
    layout = Layout(tensor, pipeline, groups * expert * context, context, expert=expert)
    sizes = {"expert": expert, "expert data": groups * context}
    for axis, size in sizes.items():
        of_axis = layout.list_groups(axis)
        assert sorted(rank for group in of_axis for rank in group) == list(range(layout.world))
        assert {len(group) for group in of_axis} == {size} and all(
            group == sorted(group) for group in of_axis
        )
        for group in of_axis:
            stages, data, ranks = zip(*map(layout.coordinates_of, group), strict=True)
            assert len({*stages}) == len({*ranks}) == 1
            assert len({rank // expert if axis == "expert" else rank % expert for rank in data}) == 1
    # Whoever shares samples or experts with a rank is in its team, and so are their samples' and experts' ranks.
    for rank in (0, layout.world // 2, layout.world - 1):
        team = set(layout.find_replicas([rank]))
        for axis in ("expert", "context", "tensor", "pipeline"):
            assert team >= {other for group in layout.list_groups(axis) if team & {*group} for other in group}


@pytest.mark.parametrize(("tensor", "pipeline", "data"), [(2, 3, 4), (4, 2, 1), (1, 4, 2), (8, 8, 8)])
def test_layout_agrees_with_deepspeed(
    tensor: int, pipeline: int, data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    layout = Layout(tensor, pipeline, data)
    theirs = PipeModelDataParallelTopology(num_pp=pipeline, num_mp=tensor, num_dp=data)
    for rank in range(layout.world):
        c = theirs.get_coord(rank)
        assert layout.coordinates_of(rank) == (c.pipe, c.data, c.model)
    for axis, name in (("tensor", "model"), ("data", "data"), ("pipeline", "pipe")):
        if getattr(layout, axis) > 1:  # of an axis of one it lists no groups
            assert sorted(layout.list_groups(axis)) == sorted(theirs.get_axis_comm_lists(name))


def test_groups_of_both_ends_of_the_pipeline_and_of_an_unknown_axis() -> None:
    assert Layout(tensor=2, pipeline=3, data=2).list_groups("tied") == [[0, 2, 8, 10], [1, 3, 9, 11]]
    with pytest.raises(ValueError, match="row"):
        Layout().list_groups("row")


def sums(bounds: list[int], values: list[int] | list[bool]) -> list[int]:
    return [sum(values[a:b]) for a, b in pairwise(bounds)]


@settings(deadline=None, max_examples=examples(300))
@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=9), st.integers(1, 5))
def test_partition_is_the_best_of_all_cuts(layers: list[tuple[int, bool]], count: int) -> None:
    costs, required = [cost for cost, _ in layers], [needed for _, needed in layers]
    cuts = ([0, *inner, len(layers)] for inner in combinations(range(1, len(layers)), count - 1))
    allowed = [cut for cut in cuts if all(sums(cut, required))]
    if sum(required) < count:
        assert not allowed
        with pytest.raises(ValueError, match=f"{sum(required)} blocks"):
            cut_into_stages(costs, count, required)
        return
    bounds = cut_into_stages(costs, count, required)
    assert bounds in allowed
    assert max(sums(bounds, costs)) == min(max(sums(cut, costs)) for cut in allowed)


def test_partition_fills_later_stages_and_gives_each_a_block() -> None:
    assert cut_into_stages([1] * 5, 2, [True] * 5) == [0, 2, 5]
    assert cut_into_stages([1] * 7, 4, [True] * 7) == [0, 1, 3, 5, 7]
    # However costly the head is, it never makes a stage of its own.
    required = [False, True, True, True, True, False, False]
    assert cut_into_stages([1, 10, 10, 10, 10, 1, 1000], 4, required) == [0, 2, 3, 4, 7]
    # 126 blocks (Llama 3 405B) on 32 stages: nothing combinatorial about it.
    required = [False] + [True] * 126 + [False, False]
    bounds = cut_into_stages([1.0] + [100.0] * 126 + [1.0, 150.0], 32, required)
    assert set(sums(bounds, [int(r) for r in required])) <= {2, 3, 4} and len(bounds) == 33


def cut(numel: int, size: int, ranks: int) -> list[range]:
    """A weight at the beginning of a flat buffer that ZeRO cuts into pieces of `size` elements."""
    return [range(min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(ranks)]


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 20), st.integers(0, 20))
def test_overlaps_send_every_element_to_the_rank_that_updates_its_copy(
    ranks: int, numel: int, more: int, others: int
) -> None:
    one, other = (cut(numel, -(-numel // ranks) + extra, ranks) for extra in (more, others))
    for i, own in enumerate(one):
        counts = count_overlaps(own, other)
        assert counts == [
            count_overlaps(there, one)[i] for there in other
        ]  # what one sends, the other waits for
        # In the order of the piece: nothing is to be sorted.
        sent = [(j, element) for j, there in enumerate(other) for element in own if element in there]
        assert [j for j, _ in sent] == [j for j, n in enumerate(counts) for _ in range(n)]
        assert [element for _, element in sent] == list(own)
