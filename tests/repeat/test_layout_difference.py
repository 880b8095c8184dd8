"""Whole tensors by their statistics, however they are cut; what is beyond rounding is named at its first place."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable_tools.repeat.layout_difference import LayoutComparison, first_beyond, whole_tensors
from megastable_tools.repeat.operations import TracedOperation
from megastable_tools.repeat.trace_file import StepTrace

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
def test_a_tensor_is_the_same_however_it_is_cut(ranks: int, micro_batches: int, seed: int) -> None:
    """Over ranks and micro-batches, also into nothing."""
    random = np.random.default_rng(seed)
    x = random.normal(size=int(random.integers(1, 50)))
    edges = sorted([0, x.size, *random.integers(0, x.size + 1, ranks * micro_batches - 1).tolist()])
    cut = iter([x[a:b] for a, b in pairwise(edges)])
    split = [trace([(layer(1, m), next(cut)) for m in range(micro_batches)]) for _ in range(ranks)]
    found = first_beyond([([trace([(layer(1), x)])], split)], 1e-9)
    assert (found.first, found.tensors, found.steps, found.unmatched) == (None, 1, 1, ())


@given(st.integers(0, 2**32))
def test_the_first_beyond_the_tolerance_is_named(seed: int) -> None:
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


def test_each_statistic_sees_what_the_others_do_not() -> None:
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


def test_the_largest_element_may_move_further() -> None:
    x = np.concatenate((np.ones(1000), [3.0]))
    assert beyond(x, np.where(x == 3, 3 * 1.15, x), 0.05).first is None
    assert beyond(x, np.where(x == 3, 3 * 1.35, x), 0.05).first is not None


def test_what_is_no_number_is_beyond_every_tolerance() -> None:
    x = np.ones(3)
    for other in (np.array([1, math.nan, 1]), np.array([1, math.inf, 1])):
        assert beyond(x, other, 1e9).first is not None
        assert beyond(other, x, 1e9).first is not None
        assert beyond(other, other).first is None


def test_losses_are_compared_sample_by_sample() -> None:
    """Also where their mean is the same."""
    one, other = trace([], losses=(2.0, 3.0, 4.0)), trace([], losses=(2.0, 4.0, 3.0))
    found = first_beyond([([one], [other])], 0.05).first
    assert found is not None and found.statistic == "loss of sample 1 of the batch"
    # On whichever rank they are.
    assert first_beyond([([one], [trace([]), one])], 0.05).first is None


def test_what_only_one_layout_has_is_said_and_not_compared() -> None:
    mine, extra = (layer(1), np.ones(2)), (TracedOperation("forward", 0, 2, "blocks.2 product"), np.ones(2))
    found = first_beyond([([trace([mine, extra])], [trace([mine])])], 0.05)
    assert (found.first, found.unmatched, found.tensors) == (None, ("blocks.2 product",), 1)
    assert list(whole_tensors([trace([(layer(1), np.array([]))])])) == []
