"""Whole tensors and shards: inverse of each other, section by section."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megastable.parallel.sharding import Placement, place, placement_of, shard, unshard


@st.composite
def placed(draw: st.DrawFn) -> tuple[torch.Tensor, Placement, int]:
    """A tensor of distinct numbers, its placement, and a size of the tensor group that divides its sections."""
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    dim = draw(st.sampled_from([None, 0, 1]))
    sections = tuple(n * size for n in draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    shape = [draw(st.integers(1, 5)), draw(st.integers(1, 5))]
    if dim is not None:
        shape[dim] = sum(sections)
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    return whole, Placement("w", dim, sections if dim is not None else ()), size


@settings(deadline=None)
@given(placed())
def test_unshard_is_the_inverse_of_shard(case: tuple[torch.Tensor, Placement, int]) -> None:
    whole, placement, size = case
    shards = [shard(whole, placement, rank, size) for rank in range(size)]
    assert torch.equal(unshard(shards, placement), whole)


@settings(deadline=None)
@given(placed())
def test_shards_are_disjoint_and_equal_in_size(case: tuple[torch.Tensor, Placement, int]) -> None:
    whole, placement, size = case
    shards = [shard(whole, placement, rank, size) for rank in range(size)]
    assert len({tuple(s.shape) for s in shards}) == 1
    if placement.dim is None:
        assert all(torch.equal(s, whole) for s in shards)
    else:
        assert torch.equal(torch.cat([s.flatten() for s in shards]).sort().values, whole.flatten())


def test_sections_are_split_one_by_one() -> None:
    """q of 4 rows, k and v of 2: each rank holds a part of all three."""
    placement = Placement("qkv", 0, (4, 2, 2))
    whole = torch.arange(8).view(8, 1)
    assert shard(whole, placement, 0, 2).flatten().tolist() == [0, 1, 4, 6]
    assert shard(whole, placement, 1, 2).flatten().tolist() == [2, 3, 5, 7]


@pytest.mark.parametrize(
    ("dim", "size", "marked"), [(0, 2, True), (1, 4, True), (0, 1, False), (None, 2, False)]
)
def test_only_parameters_that_are_split_are_marked_for_deepspeed(
    dim: int | None, size: int, marked: bool
) -> None:
    parameter = nn.Parameter(torch.zeros(4, 4))
    placement = Placement("w", dim, (4,))
    place(parameter, placement, size)
    assert placement_of(parameter) == placement
    assert parameter.tensor_model_parallel is marked  # type: ignore[attr-defined]


def test_a_parameter_without_a_placement_is_found_out() -> None:
    with pytest.raises(AssertionError, match="placement"):
        placement_of(nn.Parameter(torch.zeros(1)))
