"""Whole tensors, shards of the tensor group and fragments of flat buffers: every element where it belongs, once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megastable.parallel.sharding import (
    Fragment,
    Placement,
    cut_shard,
    join_shards,
    placement_of,
    set_placement,
    split_in_rectangles,
    whole_index,
)


@st.composite
def placed(draw: st.DrawFn) -> tuple[torch.Tensor, Placement, int, list[int]]:
    """A matrix of distinct numbers, its placement, a size of the tensor group that divides its sections, and the cuts
    of a shard over data ranks."""
    size = draw(st.sampled_from([1, 2, 3, 8]))
    dim = draw(st.sampled_from([None, 0, 1]))
    sections = tuple(n * size for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = [draw(st.integers(1, 4)), draw(st.integers(1, 4))]
    if dim is not None:
        shape[dim] = sum(sections)
    numel = shape[0] * shape[1] // (1 if dim is None else size)
    cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=4)))
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    return whole, Placement("w", dim, sections if dim is not None else ()), size, [0, *cuts, numel]


@settings(deadline=None)
@given(placed())
def test_shards_are_disjoint_and_make_the_whole(case: tuple[torch.Tensor, Placement, int, list[int]]) -> None:
    whole, placement, size, _ = case
    shards = [cut_shard(whole, placement, rank, size) for rank in range(size)]
    assert torch.equal(join_shards(shards, placement), whole) and len({s.shape for s in shards}) == 1
    if placement.dim is None:
        assert all(torch.equal(s, whole) for s in shards)
    else:
        assert torch.equal(torch.cat([s.flatten() for s in shards]).sort().values, whole.flatten())


def test_shard_splits_sections_one_by_one() -> None:
    """q of 4 rows, k and v of 2: each rank holds a part of all three."""
    placement, whole = Placement("qkv", 0, (4, 2, 2)), torch.arange(8).view(8, 1)
    assert cut_shard(whole, placement, 0, 2).flatten().tolist() == [0, 1, 4, 6]
    assert cut_shard(whole, placement, 1, 2).flatten().tolist() == [2, 3, 5, 7]


@settings(deadline=None)
@given(placed())
def test_rectangles_lie_at_their_rows_and_columns_of_the_whole(
    case: tuple[torch.Tensor, Placement, int, list[int]],
) -> None:
    whole, placement, size, cuts = case
    seen = torch.zeros(whole.shape, dtype=torch.int64)
    for rank in range(size):
        mine = cut_shard(whole, placement, rank, size)
        for start, end in pairwise(cuts):
            f = Fragment(
                name="w", dim=placement.dim, sections=placement.sections, shape=tuple(mine.shape), group=0, offset=0,
                start=start, numel=end - start, counted=True,
            )  # fmt: skip
            piece, found = mine.flatten()[start:end], split_in_rectangles(f)
            rows, columns = whole_index(f, 0, rank, size), whole_index(f, 1, rank, size)
            assert len(found) <= 3 and sum(r.view_of(piece).numel() for r in found) == f.numel
            for r in found:
                i, j = rows[r.rows], columns[r.columns]
                assert torch.equal(r.view_of(piece), whole[i[:, None], j])
                assert torch.equal(r.view_of(piece), mine[r.rows, r.columns])
                seen[i[:, None], j] += 1
    assert bool((seen == (size if placement.dim is None else 1)).all())


def test_rectangles_of_a_vector() -> None:
    f = Fragment(
        name="b", dim=0, sections=(4, 2), shape=(3,), group=0, offset=5, start=1, numel=2, counted=True
    )
    (r,) = split_in_rectangles(f)
    assert (r.rows, r.columns, r.part) == (slice(1, 3), slice(0, 1), slice(0, 2))
    assert whole_index(f, 0, 1, 2).tolist() == [2, 3, 5]


def test_place_marks_only_parameters_that_are_split_for_deepspeed() -> None:
    for dim, size, marked in ((0, 2, True), (1, 4, True), (0, 1, False), (None, 2, False)):
        parameter = nn.Parameter(torch.zeros(4, 4))
        set_placement(parameter, Placement("w", dim, (4,)), size)
        assert placement_of(parameter) == Placement("w", dim, (4,))
        assert parameter.tensor_model_parallel is marked  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="placement"):
        placement_of(nn.Parameter(torch.zeros(1)))
