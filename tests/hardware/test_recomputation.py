from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.engine.rank_checks import Digest
from megastable.hardware.recomputation import find_causes, find_fault


def digest(sample: int, times: float = 1.0) -> Digest:
    """Of a gradient of two slices, which a sample decides, times a number."""
    checks = 3.0 + sample, 1.0 - 2 * sample
    squares = 20.0 + sample, 30.0
    return Digest(tuple(times * x for x in checks), tuple(times**2 * x for x in squares))


def computed(groups: list[list[int]], shift: int, turns: int) -> dict[int, list[list[Digest]]]:
    """On sound hardware: what is computed depends on the samples, and on the part of the model."""
    found = {}
    for part, ranks in enumerate(groups):
        for d, rank in enumerate(ranks):
            samples = [(d + turn * shift) % len(ranks) for turn in range(turns + 1)]
            found[rank] = [[digest(100 * part + sample)] for sample in samples]
            found[rank][0] *= 2
    return found


LAYOUTS = [
    ([[0, 1]], 1, 1),
    ([[0, 1, 2]], 1, 2),
    ([[0, 2, 4, 6], [1, 3, 5, 7]], 1, 2),
    ([[0, 1, 2, 3]], 2, 1),
]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("groups", "shift", "turns"), LAYOUTS)
def test_sound_hardware_is_not_blamed(groups: list[list[int]], shift: int, turns: int, exact: bool) -> None:
    assert find_fault(computed(groups, shift, turns), groups, shift, exact) is None


@given(st.sampled_from(LAYOUTS), st.integers(0, 7), st.sampled_from([-1.0, 3.0, 0.0, 1 + 2**-30]))
def test_what_is_not_repeated_was_by_chance(
    layout: tuple[list[list[int]], int, int], wrong: int, times: float
) -> None:
    groups, shift, turns = layout
    held = computed(groups, shift, turns)
    rank = sorted(held)[wrong % len(held)]
    checks, squares, *_ = held[rank][0][0]
    held[rank][0][0] = Digest(tuple(times * x for x in checks), tuple(times**2 * x for x in squares))
    proof = find_fault(held, groups, shift, exact=True)
    assert proof is not None and proof[:3] == ((rank,), True, False)
    assert {-1.0: "negated", 3.0: "scaled by 3", 0.0: "zero"}.get(times, "scaled by 1") == proof.what


@pytest.mark.parametrize(("groups", "shift", "turns"), LAYOUTS)
def test_others_samples_that_are_computed_again_tell_a_chance_too(
    groups: list[list[int]], shift: int, turns: int
) -> None:
    for rank in sorted(computed(groups, shift, turns)):
        held = computed(groups, shift, turns)
        for results in held.values():
            results[1] *= 2
        assert find_fault(held, groups, shift, exact=True) is None
        held[rank][1][0] = held[rank][1][0]._replace(checks=(0.0, 0.0))
        proof = find_fault(held, groups, shift, exact=True)
        assert proof is not None and proof[:3] == ((rank,), True, False)


@pytest.mark.parametrize("own_only", [True, False])
@pytest.mark.parametrize(("groups", "shift", "turns"), LAYOUTS)
def test_a_third_result_tells_who_is_always_wrong(
    groups: list[list[int]], shift: int, turns: int, own_only: bool
) -> None:
    """own_only: the chip is wrong on these samples alone."""
    for rank in sorted(computed(groups, shift, turns)):
        held = computed(groups, shift, turns)
        for same in held[rank][: 1 if own_only else None]:
            same[:] = [one._replace(checks=tuple(-x for x in one.checks)) for one in same]
        proof = find_fault(held, groups, shift, exact=True)
        assert proof is not None and proof.lasting
        if turns == 2:
            assert (proof.ranks, proof.proven, proof.what) == ((rank,), True, "negated")
        else:
            assert rank in proof.ranks and not proof.proven


def test_kernels_that_sum_in_any_order_are_alike_within_a_bound() -> None:
    near = Digest(tuple(x * 1.001 for x in digest(1)[0]), tuple(x * 1.002 for x in digest(1)[1]))
    assert digest(1).is_like(near, exact=False) and not digest(1).is_like(near, exact=True)
    assert not digest(1).is_like(digest(1, -1.0), exact=False)
    assert not digest(1).is_like(digest(1, 3.0), exact=False)
    assert digest(1).describe_difference(digest(2)) == "another gradient"


NONE: frozenset[int] = frozenset()


@pytest.mark.parametrize(
    ("changed", "moved", "tied", "found"),
    [
        ([1], [NONE, NONE, NONE], False, (1,)),  # its own gradient alone
        ([0, 1, 2], [{1}, {2, 0}, {1}], False, (0,)),  # what it sent on changed all that came after
        ([0, 1, 2], [NONE, {2, 0}, {1}], False, (1,)),
        ([0, 1, 2], [NONE, {0}, {1}], False, (2,)),  # the loss
        (
            [0],
            [NONE, {0}, NONE],
            False,
            (1,),
        ),  # the gradient of what it received, which its own has no part in
        ([0, 2], [NONE, {0}, NONE], False, (1, 2)),  # the last stage's is no consequence of that
        ([0, 2], [NONE, {0}, NONE], True, (1,)),  # but if it has the first one's in it
        ([0, 2], [NONE, NONE, NONE], True, (0, 2)),
    ],
)
def test_the_cause_is_told_from_its_consequences(
    changed: list[int], moved: list[set[int]], tied: bool, found: tuple[int, ...]
) -> None:
    hops = [{(stage, other) for other in others} for stage, others in enumerate(moved)]
    assert find_causes(changed, [[0, 1, 2]], hops, tied) == found


BACK = [{(3, 2)}, {(4, 3), (1, 0)}, {(2, 1), (5, 4)}]


@pytest.mark.parametrize(
    ("on", "back", "found"),
    [
        ([(4, 5)], BACK, (1,)),  # the second chunk of the second stage: all before it get something else back
        ([(2, 3), (3, 4), (4, 5)], BACK, (2,)),  # the first chunk of the last stage, to the first stage
        ([], [{(3, 2)}, {(1, 0)}, {(2, 1)}], (0,)),  # the second chunk of the first stage, to the last one
        ([], BACK, (2,)),  # the loss
    ],
)
def test_the_cause_is_told_by_chunk_of_the_model(
    on: list[tuple[int, int]], back: list[set[tuple[int, int]]], found: tuple[int, ...]
) -> None:
    moved = [{hop for hop in on if hop[0] % 3 == stage} | back[stage] for stage in range(3)]
    assert find_causes([0, 1, 2], [[0, 1, 2]], moved, tied=False) == found
