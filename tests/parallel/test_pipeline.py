"""Where the pipeline is cut, against every way to cut it."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.parallel.pipeline import partition
from tests.tiers import examples


def stages(bounds: list[int], values: list[int] | list[bool]) -> list[int]:
    return [sum(values[a:b]) for a, b in pairwise(bounds)]


def all_cuts(layers: int, count: int) -> list[list[int]]:
    return [[0, *inner, layers] for inner in combinations(range(1, layers), count - 1)]


@settings(deadline=None, max_examples=examples(300))
@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=9),
    st.integers(1, 5),
)
def test_no_cut_is_better(layers: list[tuple[int, bool]], count: int) -> None:
    costs, required = [cost for cost, _ in layers], [needed for _, needed in layers]
    allowed = [cut for cut in all_cuts(len(layers), count) if all(stages(cut, required))]
    if sum(required) < count:
        assert not allowed
        with pytest.raises(ValueError, match=f"{sum(required)} blocks"):
            partition(costs, count, required)
        return
    bounds = partition(costs, count, required)
    assert bounds in allowed
    assert max(stages(bounds, costs)) == min(max(stages(cut, costs)) for cut in allowed)


def test_the_first_stages_get_less_where_it_does_not_even_out() -> None:
    assert partition([1] * 5, 2, [True] * 5) == [0, 2, 5]
    assert partition([1] * 7, 4, [True] * 7) == [0, 1, 3, 5, 7]


def test_embedding_and_head_go_with_a_block() -> None:
    """However dear the head is, it never makes a stage of its own."""
    required = [False, True, True, True, True, False, False]
    assert partition([1, 10, 10, 10, 10, 1, 1000], 4, required) == [0, 2, 3, 4, 7]
    assert partition([1, 10, 10, 10, 10, 1, 10], 4, required)[-2] == 4


def test_large_models_are_cut_at_once() -> None:
    """126 blocks (Llama 3 405B) on 32 stages: nothing combinatorial about it."""
    required = [False] + [True] * 126 + [False, False]
    bounds = partition([1.0] + [100.0] * 126 + [1.0, 150.0], 32, required)
    assert len(bounds) == 33 and all(a < b for a, b in pairwise(bounds))
    assert set(stages(bounds, [int(r) for r in required])) <= {2, 3, 4}
