"""The first difference is the cause of all others, in any layout; comparing without the order does not find it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.fingerprint import fingerprint
from megastable_tools.repeat.first_difference import BitComparison, FirstDifference, Ranks, first_difference
from megastable_tools.repeat.flipped_bit import bit_difference, flip, planted_bit
from megastable_tools.repeat.operations import TracedOperation
from megastable_tools.repeat.trace_file import StepTrace
from tests.repeat.traces import changed, of_rank, steps_of

Steps = list[list[StepTrace]]
Found = tuple[int, int, TracedOperation] | None


@dataclass(frozen=True)
class Fault:
    """Two runs, the second with a fault at an operation of one rank, and with some of what can follow from it."""

    one: Steps
    other: Steps
    step: int
    rank: int
    operation: TracedOperation

    @property
    def pairs(self) -> Iterable[tuple[Ranks, Ranks]]:
        return zip(self.one, self.other, strict=True)


def fault(stages: int, data: int, seed: int) -> Fault:
    random = np.random.default_rng(seed)
    one = steps_of(3, stages, data, 3, seed)
    at, rank = int(random.integers(3)), int(random.integers(stages * data))
    index = int(random.integers(len(one[at][rank].operations)))
    operation = one[at][rank].operations[index]
    cause = (*operation.order, index)
    other = [list(ranks) for ranks in one]
    for step in range(at, 3):
        for number, trace in enumerate(one[step]):
            after = [
                i for i, o in enumerate(trace.operations)
                if (step > at or (*o.order, i) > cause) and random.random() < 0.7
            ]  # fmt: skip
            other[step][number] = changed(trace, after)
    other[at][rank] = changed(other[at][rank], [index])
    return Fault(one, other, at + 1, rank, operation)


def named(pairs: Iterable[tuple[Ranks, Ranks]]) -> Found:
    found = first_difference(pairs).difference
    return None if found is None else (found.step, found.rank, found.operation)


LAYOUTS = st.sampled_from([(1, 1), (1, 3), (2, 1), (3, 2)])


@given(LAYOUTS, st.integers(0, 2**32))
def test_the_cause_is_named(layout: tuple[int, int], seed: int) -> None:
    case = fault(*layout, seed)
    assert named(case.pairs) == (case.step, case.rank, case.operation)
    assert named(zip(case.one, case.one, strict=True)) is None
    # And which run was the first does not matter.
    assert named(zip(case.other, case.one, strict=True)) == (case.step, case.rank, case.operation)


def all_of(pairs: Iterable[tuple[Ranks, Ranks]]) -> list[tuple[int, int, int, TracedOperation]]:
    """Every difference: step, rank, index, operation."""
    return [
        (mine.step, rank, index, mine.operations[index])
        for one, other in pairs
        for rank, (mine, theirs) in enumerate(zip(one, other, strict=True))
        for index in np.flatnonzero(mine.fingerprints != theirs.fingerprints).tolist()
    ]


MUTANTS: dict[str, Callable[..., object]] = {
    "a set": lambda d: str(d[3]),
    "rank by rank": lambda d: (d[1], d[0], d[2]),
    "by the clock of each rank": lambda d: (d[0], d[2], d[1]),
    "steps last": lambda d: (d[3].order, d[2], d[0], d[1]),
    "without micro-batches": lambda d: (d[0], d[3].phase, d[3].depth, d[2], d[1]),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_comparison_that_ignores_the_order_is_caught(mutant: str) -> None:
    wrong = 0
    for seed in range(60):
        case = fault(2, 2, seed)
        step, rank, _, operation = min(all_of(case.pairs), key=MUTANTS[mutant])  # type: ignore[arg-type]
        wrong += (step, rank, operation) != (case.step, case.rank, case.operation)
    assert wrong


def test_all_ranks_that_differ_at_the_same_place_are_named() -> None:
    (ranks,) = steps_of(1, 1, 3, 2)
    spread = [changed(ranks[0], [6]), changed(ranks[1], [4, 5, 9]), changed(ranks[2], [4, 8])]
    found = first_difference([(ranks, spread)])
    difference = found.difference
    assert difference is not None
    assert (difference.ranks, difference.operation) == ((1, 2), ranks[0].operations[4])
    assert (difference.differing, difference.compared) == (6, sum(len(r.operations) for r in ranks))
    assert str(difference) == f"step 1, rank 1, micro-batch 0, {ranks[0].operations[4].name} (forward)"


def test_one_who_does_something_else_differs_there() -> None:
    """An update that one run refuses has no moments: from there on nothing can be compared."""
    (ranks,) = steps_of(1, 1, 2, 1)
    whole = ranks[1]
    cut = StepTrace(1, whole.operations[:-3], whole.fingerprints[:-3])
    found = first_difference([(ranks, [ranks[0], cut])]).difference
    assert found is not None and (found.rank, found.operation, found.other) == (
        1, whole.operations[-3], "nothing",
    )  # fmt: skip
    back = first_difference([([ranks[0], cut], ranks)]).difference
    assert back is not None and (back.rank, back.operation) == (1, whole.operations[-3])
    # What differs before is what counts.
    early = first_difference([(ranks, [changed(ranks[0], [0]), cut])]).difference
    assert early is not None and (early.rank, early.operation, early.other) == (0, whole.operations[0], None)


def test_what_was_compared_is_counted_up_to_the_difference() -> None:
    steps = steps_of(3, 2, 1, 2)
    each = sum(len(of_rank(stage, 2, 2)) for stage in range(2))
    assert first_difference(zip(steps, steps, strict=True)) == BitComparison(3, 3 * each, None)
    start = [StepTrace(0, t.operations, t.fingerprints) for t in steps[0]]
    assert first_difference(zip([start, *steps], [start, *steps], strict=True)).steps == 3
    other = [steps[0], [changed(steps[1][0], [3]), steps[1][1]], steps[2]]
    found = first_difference(zip(steps, other, strict=True))
    assert (found.steps, found.tensors) == (1, 2 * each)
    assert isinstance(found.difference, FirstDifference) and found.difference.step == 2


def test_the_order_of_one_stage_is_that_of_execution() -> None:
    operations = of_rank(0, 1, 4)
    assert [o for o in operations if o.phase != "data"] == sorted(
        (o for o in operations if o.phase != "data"), key=lambda o: o.order
    )
    names = {str(o) for o in chain(*(of_rank(stage, 3, 2) for stage in range(3)))}
    assert len(names) > 40


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_of_the_middle_one(dtype: torch.dtype) -> None:
    x = torch.arange(1, 25, dtype=torch.float64).to(dtype).view(2, 3, 4)
    for whole in (x.clone(), x.clone().transpose(0, 2)):
        before = whole.clone()
        flip(whole)
        found = bit_difference(before, whole)
        assert found is not None
        assert (found.differing, found.elements, found.bits) == (1, 24, {planted_bit(dtype): 1})
        assert found.first == 12 and found.one != found.other
        assert not torch.equal(fingerprint([before]), fingerprint([whole]))
        if dtype.is_floating_point:  # by half at most: no infinity, no nan
            assert 0.6 < found.other / found.one < 1.5 and torch.isfinite(whole).all()


def test_autograd_does_not_hear_of_it() -> None:
    """As it would if an output that it has saved were changed in the usual way."""
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    flip(y)
    y.sum().backward()
    assert x.grad is not None


def test_what_differs_in_many_bits() -> None:
    one = torch.zeros(5, dtype=torch.float32)
    other = torch.tensor([0.0, -0.0, 1.0, 0.0, float("nan")])
    found = bit_difference(one, other)
    assert found is not None and (found.differing, found.first) == (3, 1)
    assert found.bits[31] == 1 and found.bits[23] == 2
    assert str(found).startswith("3 of 5 elements, bits 22 to 31; the first is number 1, -0 instead of 0")
    assert bit_difference(one, one.clone()) is None
    assert bit_difference(other, other.clone()) is None  # nan included
    assert bit_difference(one, one[:3]) is None and bit_difference(one, one.double()) is None
