"""The first operation at which two runs differ by more than rounding, in layouts that need not be the same. Pure.

    found = first_beyond(pairs, tolerance=0.02)

Layouts cut tensors in other places and sum in another order, so whole tensors of a step are compared by their
statistics, taken over all micro-batches and ranks: root mean square, mean (relative to it) and largest magnitude; and
the losses of all samples, one by one. What this cannot see: elements of a tensor that have changed places; and what
only one layout has: products before their sum over a tensor group, a rank's own part of a gradient, values that are
recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megastable_tools.repeat.first_difference import Ranks
from megastable_tools.repeat.operations import PARTS, START, TracedOperation, when
from megastable_tools.repeat.trace_file import StepTrace

# Times the tolerance: rounding moves one element of a gradient more than all of them. Measured over 20 steps in bf16
# (docs/hardware.md): 0.056, where roots of mean squares and means move by 0.019.
LOOSER = {"largest": 4.0}
LOSSES = TracedOperation("forward", -1, 1 << 30, "losses of the samples")  # after all layers


@dataclass(frozen=True)
class Deviation:
    """How far two runs are apart at an operation (of all micro-batches and ranks). statistic: "rms", "mean",
    "largest", "loss of sample N of the batch", or "elements": their number. relative: the difference, as a share; nan:
    one of them is not a number."""

    step: int
    operation: TracedOperation
    statistic: str
    one: float
    other: float
    relative: float

    @property
    def weighted(self) -> float:
        """For the tolerance."""
        return self.relative / LOOSER.get(self.statistic, 1.0)

    def __str__(self) -> str:
        return (
            f"{when(self.step)}, {self.operation}: {self.statistic} {self.other:.6g} instead of {self.one:.6g} "
            f"({self.relative:.2g})"
        )


@dataclass(frozen=True)
class LayoutComparison:
    """steps: compared to the end. statistics: tensors compared. largest: the largest deviation that is within the
    tolerance; first: the first beyond it. unmatched: operations that only one of the runs has, by name."""

    steps: int
    tensors: int
    largest: Deviation | None
    first: Deviation | None
    unmatched: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Whole:
    """A tensor of a step, over all micro-batches and ranks. moments: float64 [4], as in `StepTrace`."""

    operation: TracedOperation
    moments: npt.NDArray[np.float64]


def first_beyond(pairs: Iterable[tuple[Ranks, Ranks]], tolerance: float) -> LayoutComparison:
    """Compares step by step, up to the first with a relative difference above `tolerance` (`LOOSER`)."""
    steps, tensors, largest, unmatched = 0, 0, None, dict[str, None]()
    for one, other in pairs:
        mine, theirs = whole_tensors(one), whole_tensors(other)
        unmatched |= dict.fromkeys(name for _, name in mine.keys() ^ theirs.keys())
        compared = 0
        for deviation in deviations(one, other):
            compared += 1
            if not deviation.weighted <= tolerance:
                return LayoutComparison(steps, tensors + compared, largest, deviation, tuple(unmatched))
            if deviation.weighted > (0.0 if largest is None else largest.weighted):
                largest = deviation
        tensors += compared
        steps += one[0].step > START
    return LayoutComparison(steps, tensors, largest, None, tuple(unmatched))


def deviations(one: Ranks, other: Ranks) -> Iterator[Deviation]:
    """Of every tensor that both runs have in a step, in order: that of its statistics which deviates most."""
    mine, theirs = whole_tensors(one), whole_tensors(other)
    step = one[0].step
    for key, tensor in mine.items():
        if tensor.operation is LOSSES:
            yield from _of_losses(step, one, other)
        elif key in theirs:
            yield _deviation(step, tensor, theirs[key])


def whole_tensors(ranks: Sequence[StepTrace]) -> dict[tuple[str, str], _Whole]:
    """By phase and name, in the order of the operations."""
    found: dict[tuple[str, str], _Whole] = {}
    places: dict[tuple[str, str], tuple[int, ...]] = {}
    for trace in ranks:
        if trace.losses:
            key = LOSSES.phase, LOSSES.name
            found[key] = _Whole(LOSSES, np.zeros(4))
            places[key] = (*_order(LOSSES), 0)
        if trace.moments is None:
            continue
        for index in np.flatnonzero(trace.moments[:, 0]).tolist():
            operation, moments = trace.operations[index], trace.moments[index]
            key = operation.phase, operation.name
            place = (*_order(operation), index)
            if key in found:
                before = found[key].moments
                highest = np.maximum(before[3:], moments[3:])  # nan if one is
                found[key] = replace(found[key], moments=np.concatenate((before[:3] + moments[:3], highest)))
                places[key] = min(places[key], place)
            else:
                found[key] = _Whole(operation._replace(micro_batch=-1), moments)
                places[key] = place
    return {key: found[key] for key in sorted(found, key=lambda key: places[key])}


def _order(operation: TracedOperation) -> tuple[int, ...]:
    """As if a step had one micro-batch."""
    return operation._replace(micro_batch=0 if PARTS[operation.phase] == PARTS["forward"] else -1).order


def _deviation(step: int, one: _Whole, other: _Whole) -> Deviation:
    (count, total, squares, highest), (count2, total2, squares2, highest2) = (
        w.moments.tolist() for w in (one, other)
    )
    if count != count2:
        return Deviation(step, one.operation, "elements", count, count2, abs(count - count2) / count)
    rms, rms2 = math.sqrt(squares / count), math.sqrt(squares2 / count)
    mean, mean2 = total / count, total2 / count
    found = [
        Deviation(step, one.operation, *told)
        for told in (
            ("rms", rms, rms2, _relative(rms, rms2)),
            ("mean", mean, mean2, _relative(mean, mean2, max(rms, rms2))),
            ("largest", highest, highest2, _relative(highest, highest2)),
        )
    ]
    return max(found, key=lambda one: math.inf if math.isnan(one.relative) else one.weighted)


def _of_losses(step: int, one: Ranks, other: Ranks) -> Iterator[Deviation]:
    mine, theirs = (next((t.losses for t in ranks if t.losses), ()) for ranks in (one, other))
    if len(mine) != len(theirs):
        apart = abs(len(mine) - len(theirs)) / len(mine)
        yield Deviation(step, LOSSES, "elements", len(mine), len(theirs), apart)
        return
    by_sample = [_relative(a, b) for a, b in zip(mine, theirs, strict=True)]
    worst = max(range(len(mine)), key=lambda i: math.inf if math.isnan(by_sample[i]) else by_sample[i])
    name = f"loss of sample {worst} of the batch"
    yield Deviation(step, LOSSES, name, mine[worst], theirs[worst], by_sample[worst])


def _relative(one: float, other: float, scale: float | None = None) -> float:
    """The difference, as a share of `scale`, or of the larger one; 0 for what is the same, nan included."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    of = max(abs(one), abs(other)) if scale is None else scale
    return abs(one - other) / of if math.isfinite(of) and of > 0 else math.nan
