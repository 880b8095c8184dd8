"""The pieces of matrices: every element of every rank's fragments lies at its row and column of the whole."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.parallel.fragments import Fragment, rectangles, whole_index
from megastable.parallel.sharding import Placement, shard


@st.composite
def cut(draw: st.DrawFn) -> tuple[int, int, Placement, tuple[int, int], list[int]]:
    """A tensor size, a number of data ranks, a matrix split over the former, and the cuts over the latter."""
    size = draw(st.sampled_from([1, 2, 3]))
    dim = draw(st.sampled_from([None, 0, 1]))
    sections = tuple(n * size for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    other = draw(st.integers(1, 4))
    whole = (other, sum(sections)) if dim == 1 else (sum(sections), other)
    numel = whole[0] * whole[1] // (1 if dim is None else size)
    cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=4)))
    return size, numel, Placement("w", dim, sections if dim is not None else ()), whole, [0, *cuts, numel]


@given(cut())
def test_rows_and_columns(case: tuple[int, int, Placement, tuple[int, int], list[int]]) -> None:
    size, _, placement, shape, cuts = case
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    for rank in range(size):
        mine = shard(whole, placement, rank, size)
        for start, end in pairwise(cuts):
            f = Fragment(
                name="w", dim=placement.dim, sections=placement.sections, shape=tuple(mine.shape), group=0, offset=0,
                start=start, numel=end - start, counted=True,
            )  # fmt: skip
            piece = mine.flatten()[start:end]
            rows, columns = whole_index(f, 0, rank, size), whole_index(f, 1, rank, size)
            found = rectangles(f)
            assert len(found) <= 3
            assert sum(r.of(piece).numel() for r in found) == f.numel
            for r in found:
                i, j = rows[r.rows], columns[r.columns]
                assert torch.equal(r.of(piece), whole[i[:, None], j])
                assert torch.equal(r.of(piece), mine[r.rows, r.columns])
                seen[i[:, None], j] += 1
    assert bool((seen == (size if placement.dim is None else 1)).all())


def test_vector() -> None:
    f = Fragment(
        name="b", dim=0, sections=(4, 2), shape=(3,), group=0, offset=5, start=1, numel=2, counted=True
    )
    (r,) = rectangles(f)
    assert (r.rows, r.columns, r.part) == (slice(1, 3), slice(0, 1), slice(0, 2))
    assert whole_index(f, 0, 1, 2).tolist() == [2, 3, 5]
