"""The first difference is the cause of all others, in any layout; comparing without the order does not find it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.fingerprint import fingerprint_tensors
from megastable_tools.repeat.differences import (
    LayoutComparison,
    Ranks,
    bit_difference,
    first_beyond,
    first_difference,
    flip_bit,
    planted_bit,
)
from megastable_tools.repeat.trace_file import StepTrace, TracedOperation
from tests.repeat.traces import changed, steps_of

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
def test_first_difference_is_the_cause(layout: tuple[int, int], seed: int) -> None:
    case = fault(*layout, seed)
    assert named(case.pairs) == (case.step, case.rank, case.operation)
    assert named(zip(case.one, case.one, strict=True)) is None
    # And which run was the first does not matter.
    assert named(zip(case.other, case.one, strict=True)) == (case.step, case.rank, case.operation)


def test_first_difference_names_all_ranks() -> None:
    (ranks,) = steps_of(1, 1, 3, 2)
    spread = [changed(ranks[0], [6]), changed(ranks[1], [4, 5, 9]), changed(ranks[2], [4, 8])]
    found = first_difference([(ranks, spread)])
    difference = found.difference
    assert difference is not None
    assert (difference.ranks, difference.operation) == ((1, 2), ranks[0].operations[4])
    assert (difference.differing, difference.compared) == (6, sum(len(r.operations) for r in ranks))
    assert str(difference) == f"step 1, rank 1, micro-batch 0, {ranks[0].operations[4].name} (forward)"


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flip_changes_one_bit_of_the_middle_element(dtype: torch.dtype) -> None:
    x = torch.arange(1, 25, dtype=torch.float64).to(dtype).view(2, 3, 4)
    for whole in (x.clone(), x.clone().transpose(0, 2)):
        before = whole.clone()
        flip_bit(whole)
        found = bit_difference(before, whole)
        assert found is not None
        assert (found.differing, found.elements, found.bits) == (1, 24, {planted_bit(dtype): 1})
        assert found.first == 12 and found.one != found.other
        assert not torch.equal(fingerprint_tensors([before]), fingerprint_tensors([whole]))
        if dtype.is_floating_point:  # by half at most: no infinity, no nan
            assert 0.6 < found.other / found.one < 1.5 and torch.isfinite(whole).all()


Numbers = npt.NDArray[np.float64]


def moments(x: Numbers) -> list[float]:
    return [x.size, x.sum(), (x**2).sum(), np.abs(x).max()] if x.size else [0, 0, 0, 0]


def trace(
    parts: list[tuple[TracedOperation, Numbers]], step: int = 1, losses: tuple[float, ...] = ()
) -> StepTrace:
    of = np.array([moments(x) for _, x in parts], dtype=np.float64).reshape(-1, 4)
    return StepTrace(step, tuple(o for o, _ in parts), np.zeros(len(parts), dtype=np.int64), of, losses)


def layer(n: int, micro_batch: int = 0, phase: str = "forward") -> TracedOperation:
    return TracedOperation(phase, micro_batch, n if phase == "forward" else -n, f"blocks.{n} output")


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32))
def test_first_beyond_takes_tensors_however_they_are_cut(ranks: int, micro_batches: int, seed: int) -> None:
    """Over ranks and micro-batches, also into nothing."""
    random = np.random.default_rng(seed)
    x = random.normal(size=int(random.integers(1, 50)))
    edges = sorted([0, x.size, *random.integers(0, x.size + 1, ranks * micro_batches - 1).tolist()])
    cut = iter([x[a:b] for a, b in pairwise(edges)])
    split = [trace([(layer(1, m), next(cut)) for m in range(micro_batches)]) for _ in range(ranks)]
    found = first_beyond([([trace([(layer(1), x)])], split)], 1e-9)
    assert (found.first, found.tensors, found.steps, found.unmatched) == (None, 1, 1, ())


@given(st.integers(0, 2**32))
def test_first_beyond_names_the_first(seed: int) -> None:
    """By the order of the data: blocks of two stages, forward up and backward down, all that follows differs."""
    random = np.random.default_rng(seed)
    operations = [layer(n) for n in range(1, 5)] + [layer(n, phase="backward") for n in range(4, 0, -1)]
    values = {o: random.normal(size=8) + 0.1 for o in operations}
    at = int(random.integers(8))
    worse = {o: x * (1.2 if i >= at else 1.001) for i, (o, x) in enumerate(values.items())}

    def ranks(of: dict[TracedOperation, Numbers]) -> list[StepTrace]:
        return [
            trace([(o, x) for o, x in of.items() if (abs(o.depth) > 2) == last]) for last in (False, True)
        ]

    whole = [trace(list(values.items()))]
    found = first_beyond([(whole, ranks(worse))], 0.05)
    assert found.first is not None
    assert (found.first.operation.name, found.first.operation.phase) == (
        operations[at].name, operations[at].phase,
    )  # fmt: skip
    assert found.first.relative == pytest.approx(1 / 6) and found.tensors == at + 1
    assert (found.largest is None) == (at == 0)
    back = first_beyond([(ranks(worse), whole)], 0.2)
    assert back.first is None and back.largest is not None


def beyond(one: Numbers, other: Numbers, tolerance: float = 0.05) -> LayoutComparison:
    return first_beyond([([trace([(layer(1), one)])], [trace([(layer(1), other)])])], tolerance)


def test_first_beyond_sees_by_each_statistic() -> None:
    x = np.tile([1.0, -1.0], 500)
    for other, statistic in (
        (x * 1.1, "rms"),
        (np.abs(x), "mean"),
        (np.concatenate(([4.0, -4.0], x[2:])), "largest"),
        (x[:-2], "elements"),
    ):
        found = beyond(x, other, 0.0005)
        assert found.first is not None and found.first.statistic == statistic
        assert beyond(x, other, 100).first is None


def test_first_beyond_takes_no_nan() -> None:
    x = np.ones(3)
    for other in (np.array([1, math.nan, 1]), np.array([1, math.inf, 1])):
        assert beyond(x, other, 1e9).first is not None
        assert beyond(other, x, 1e9).first is not None
        assert beyond(other, other).first is None


def test_first_beyond_compares_losses_sample_by_sample() -> None:
    """Also where their mean is the same."""
    one, other = trace([], losses=(2.0, 3.0, 4.0)), trace([], losses=(2.0, 4.0, 3.0))
    found = first_beyond([([one], [other])], 0.05).first
    assert found is not None and found.statistic == "loss of sample 1 of the batch"
    # On whichever rank they are.
    assert first_beyond([([one], [trace([]), one])], 0.05).first is None
