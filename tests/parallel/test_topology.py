"""Ranks, coordinates and groups: a bijection, and the one that DeepSpeed's pipeline uses."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.parallel.layout import Layout

LAYOUTS = st.builds(Layout, st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
WITH_CONTEXT = st.builds(
    lambda tensor, pipeline, samples, context: Layout(tensor, pipeline, samples * context, context),
    *[st.integers(1, 4)] * 4,
)
AXES = ("tensor", "data", "pipeline")


@settings(deadline=None)
@given(LAYOUTS)
def test_coordinates_and_ranks_are_inverse(layout: Layout) -> None:
    found = [layout.coordinates(rank) for rank in range(layout.world)]
    assert set(found) == set(product(range(layout.pipeline), range(layout.data), range(layout.tensor)))
    assert [layout.rank(*coordinates) for coordinates in found] == list(range(layout.world))


@settings(deadline=None)
@given(LAYOUTS, st.sampled_from(AXES))
def test_every_rank_is_in_one_group_with_those_that_differ_along_the_axis(layout: Layout, axis: str) -> None:
    groups = layout.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    fixed = {"tensor": (0, 1), "data": (0, 2), "pipeline": (1, 2)}[axis]
    for group in groups:
        assert group == sorted(group)
        kept = {tuple(layout.coordinates(rank)[i] for i in fixed) for rank in group}
        assert len(kept) == 1
    size = {"tensor": layout.tensor, "data": layout.data, "pipeline": layout.pipeline}
    assert {len(group) for group in groups} == {size.get(axis, layout.tensor * layout.pipeline)}


@settings(deadline=None)
@given(LAYOUTS)
def test_a_tensor_group_is_a_run_of_neighbours(layout: Layout) -> None:
    for group in layout.groups("tensor"):
        assert group == list(range(group[0], group[0] + layout.tensor))
        assert group[0] % layout.tensor == 0


@settings(deadline=None)
@given(WITH_CONTEXT)
def test_a_context_group_shares_its_samples_and_nothing_else(layout: Layout) -> None:
    groups = layout.groups("context")
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    assert len(groups) == layout.tensor * layout.pipeline * layout.samples
    of = {}
    for group in groups:
        places = [layout.coordinates(rank) for rank in group]
        stages, data, tensor = zip(*places, strict=True)
        assert len(set(stages)) == len(set(tensor)) == 1
        # In the order of the tokens, and neighbours among the data ranks.
        assert list(data) == list(range(data[0], data[0] + layout.context))
        of[stages[0], tensor[0], data[0] // layout.context] = group
    assert len(of) == len(groups)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "data"), [(1, 1, 1), (2, 1, 2), (2, 3, 4), (4, 2, 1), (1, 4, 2), (8, 8, 8)]
)
def test_agrees_with_deepspeed(
    tensor: int, pipeline: int, data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    layout = Layout(tensor, pipeline, data)
    theirs = PipeModelDataParallelTopology(num_pp=pipeline, num_mp=tensor, num_dp=data)
    assert theirs.world_size() == layout.world
    for rank in range(layout.world):
        c = theirs.get_coord(rank)
        assert layout.coordinates(rank) == (c.pipe, c.data, c.model)
    for axis, name in (("tensor", "model"), ("data", "data"), ("pipeline", "pipe")):
        if getattr(layout, axis) > 1:  # of an axis of one it lists no groups
            assert sorted(layout.groups(axis)) == sorted(theirs.get_axis_comm_lists(name))


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="expert"):
        Layout().groups("expert")
