"""The first operation at which two runs differ: bit for bit in one layout, or by more than rounding in any two.

    found = first_difference(pairs)              # pairs: (all ranks' traces of a step, the same of the other run)
    found = first_beyond(pairs, tolerance=0.02)

A difference spreads: to all that comes later, and by collectives to other ranks. What counts is the order of
`TracedOperation` over all ranks, so the difference named is not the consequence of another one that the traces have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megastable.base.text import count_noun
from megastable_tools.repeat.trace_file import PARTS, START, StepTrace, TracedOperation, describe_step

Ranks = Sequence[StepTrace]  # the traces of one step, by rank


@dataclass(frozen=True)
class FirstDifference:
    """step: from 1, 0 = the initial state. ranks: all that differ at this operation, the lowest first. other: what the
    second run did in its place, None = the same with another result. differing, compared: tensors of that step."""

    step: int
    ranks: tuple[int, ...]
    operation: TracedOperation
    other: str | None
    differing: int
    compared: int

    @property
    def rank(self) -> int:
        return self.ranks[0]

    def __str__(self) -> str:
        what = f"{describe_step(self.step)}, rank {self.rank}, {self.operation}"
        return what if self.other is None else f"{what}, in place of which the second run has {self.other}"


@dataclass(frozen=True)
class BitComparison:
    """steps: compared to the end, without the initial state. tensors: compared, of all ranks."""

    steps: int
    tensors: int
    difference: FirstDifference | None = None


def first_difference(pairs: Iterable[tuple[Ranks, Ranks]]) -> BitComparison:
    """Compares step by step, up to the first that differs."""
    step_count, tensors = 0, 0
    for one, second_ranks in pairs:
        found = difference_of_step(one, second_ranks)
        if found is not None:
            return BitComparison(step_count, tensors + found.compared, found)
        tensors += sum(len(rank_trace.operations) for rank_trace in one)
        step_count += one[0].step > START
    return BitComparison(step_count, tensors)


def difference_of_step(one: Ranks, other: Ranks) -> FirstDifference | None:
    """The earliest difference of a step, over all ranks."""
    found: list[tuple[tuple[int, ...], int, TracedOperation, str | None]] = []
    compared_count = 0
    for rank_number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        alike = _alike(mine.operations, theirs.operations)
        compared_count += alike
        for index in np.flatnonzero(mine.fingerprints[:alike] != theirs.fingerprints[:alike]).tolist():
            operation = mine.operations[index]
            found.append(((*operation.order, index), rank_number, operation, None))
        if alike < max(len(mine.operations), len(theirs.operations)):
            # From here on one does what the other does not: nothing can be compared.
            here, second_operation = (
                trace.operations[alike] if alike < len(trace.operations) else None for trace in (mine, theirs)
            )
            operation = min((o for o in (here, second_operation) if o is not None), key=lambda o: o.order)
            replacement_text = "nothing" if second_operation is None else str(second_operation)
            found.append(((*operation.order, alike), rank_number, here or operation, replacement_text))
    if not found:
        return None
    first_order, _, operation, replaced_text = min(found, key=lambda one: one[:2])
    differing_ranks = tuple(sorted({rank_number for other, rank_number, *_ in found if other == first_order}))
    return FirstDifference(one[0].step, differing_ranks, operation, replaced_text, len(found), compared_count)


def _alike(one: Sequence[TracedOperation], other: Sequence[TracedOperation]) -> int:
    """How many operations both begin with."""
    if one == other:
        return len(one)
    return next(i for i, (first, second) in enumerate(zip_longest(one, other)) if first != second)


# Layouts that need not be the same. They cut tensors in other places and sum in another order, so whole tensors of a
# step are compared by their statistics, taken over all micro-batches and ranks: root mean square, mean (relative to it)
# and largest magnitude; and the losses of all samples, one by one. What this cannot see: elements of a tensor that have
# changed places; and what only one layout has: products before their sum over a tensor group, a rank's own part of a
# gradient, values that are recomputed.


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
            f"{describe_step(self.step)}, {self.operation}: {self.statistic} {self.other:.6g} instead of "
            f"{self.one:.6g} ({self.relative:.2g})"
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
    """A tensor of a step, over all micro-batches and ranks. moments: float64 [4], as in `StepTrace`; place: in the
    order of the operations."""

    operation: TracedOperation
    moments: npt.NDArray[np.float64]
    place: tuple[int, ...]


def first_beyond(pairs: Iterable[tuple[Ranks, Ranks]], tolerance: float) -> LayoutComparison:
    """Compares step by step, up to the first with a relative difference above `tolerance` (`LOOSER`)."""
    step_count, tensors, largest, unmatched = 0, 0, None, dict[str, None]()
    for first_ranks, second_ranks in pairs:
        mine, second_tensors = whole_tensors(first_ranks), whole_tensors(second_ranks)
        unmatched |= dict.fromkeys(tensor_name for _, tensor_name in mine.keys() ^ second_tensors.keys())
        compared = 0
        for deviation in deviations(first_ranks, second_ranks):
            compared += 1
            if not deviation.weighted <= tolerance:
                return LayoutComparison(step_count, tensors + compared, largest, deviation, tuple(unmatched))
            if deviation.weighted > (0.0 if largest is None else largest.weighted):
                largest = deviation
        tensors += compared
        step_count += first_ranks[0].step > START
    return LayoutComparison(step_count, tensors, largest, None, tuple(unmatched))


def deviations(one: Ranks, other: Ranks) -> Iterator[Deviation]:
    """Of every tensor that both runs have in a step, in order: that of its statistics which deviates most."""
    first_tensors, second_tensors = whole_tensors(one), whole_tensors(other)
    step = one[0].step
    for tensor_key, tensor in first_tensors.items():
        if tensor.operation is LOSSES:
            yield from _of_losses(step, one, other)
        elif tensor_key in second_tensors:
            yield _deviation(step, tensor, second_tensors[tensor_key])


def whole_tensors(ranks: Sequence[StepTrace]) -> dict[tuple[str, str], _Whole]:
    """By phase and name, in the order of the operations."""
    found: dict[tuple[str, str], _Whole] = {}
    for rank_trace in ranks:
        if rank_trace.losses:
            found[LOSSES.phase, LOSSES.name] = _Whole(LOSSES, np.zeros(4), (*_order(LOSSES), 0))
        if rank_trace.moments is None:
            continue
        for index in np.flatnonzero(rank_trace.moments[:, 0]).tolist():
            operation, moments = rank_trace.operations[index], rank_trace.moments[index]
            place = (*_order(operation), index)
            if (before := found.get((operation.phase, operation.name))) is not None:
                highest = np.maximum(before.moments[3:], moments[3:])  # nan if one is
                moments = np.concatenate((before.moments[:3] + moments[:3], highest))
                place = min(before.place, place)
            whole = _Whole(operation._replace(micro_batch=-1), moments, place)
            found[operation.phase, operation.name] = whole
    return dict(sorted(found.items(), key=lambda item: item[1].place))


def _order(operation: TracedOperation) -> tuple[int, ...]:
    """As if a step had one micro-batch."""
    return operation._replace(micro_batch=0 if PARTS[operation.phase] == PARTS["forward"] else -1).order


def _deviation(step: int, one: _Whole, other: _Whole) -> Deviation:
    (count, first_total, first_squares, first_highest), (count2, second_total, second_squares, highest2) = (
        whole_tensor.moments.tolist() for whole_tensor in (one, other)
    )
    if count != count2:
        return Deviation(step, one.operation, "elements", count, count2, abs(count - count2) / count)
    rms, second_rms = math.sqrt(first_squares / count), math.sqrt(second_squares / count)
    first_mean, second_mean = first_total / count, second_total / count
    statistic_deviations = [
        Deviation(step, one.operation, "rms", rms, second_rms, _relative(rms, second_rms)),
        Deviation(
            step, one.operation, "mean", first_mean, second_mean,
            _relative(first_mean, second_mean, max(rms, second_rms)),
        ),
        Deviation(
            step, one.operation, "largest", first_highest, highest2, _relative(first_highest, highest2)
        ),
    ]  # fmt: skip
    return max(statistic_deviations, key=lambda one: math.inf if math.isnan(one.relative) else one.weighted)


def _of_losses(step: int, one: Ranks, other: Ranks) -> Iterator[Deviation]:
    mine, second_losses = (
        next((run_rank.losses for run_rank in run_ranks if run_rank.losses), ()) for run_ranks in (one, other)
    )
    if len(mine) != len(second_losses):
        share_apart = abs(len(mine) - len(second_losses)) / len(mine)
        yield Deviation(step, LOSSES, "elements", len(mine), len(second_losses), share_apart)
        return
    by_sample = [_relative(first_loss, b) for first_loss, b in zip(mine, second_losses, strict=True)]
    worst = max(range(len(mine)), key=lambda i: math.inf if math.isnan(by_sample[i]) else by_sample[i])
    statistic_name = f"loss of sample {worst} of the batch"
    yield Deviation(step, LOSSES, statistic_name, mine[worst], second_losses[worst], by_sample[worst])


def _relative(one: float, other: float, scale: float | None = None) -> float:
    """The difference, as a share of `scale`, or of the larger one; 0 for what is the same, nan included."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    of = max(abs(one), abs(other)) if scale is None else scale
    return abs(one - other) / of if math.isfinite(of) and of > 0 else math.nan


# Bits: flipped, and told apart


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def flip_bit(x: Tensor) -> None:
    """Flip a bit of the element in the middle, in place: the highest of a float's mantissa, or an integer's lowest one.
    Autograd does not hear of it, as it would not of a fault."""
    middle_index = torch.unravel_index(torch.tensor(x.numel() // 2), x.shape)
    element = x.data[tuple(int(index_part) for index_part in middle_index)]
    element.view(INTEGERS[x.element_size()]).bitwise_xor_(1 << planted_bit(x.dtype))


def planted_bit(dtype: torch.dtype) -> int:
    """The bit that `flip_bit` flips."""
    return round(-math.log2(torch.finfo(dtype).eps)) - 1 if dtype.is_floating_point else 0


@dataclass(frozen=True)
class BitDifference:
    """elements: that differ, of so many; first: the first of them, in the flat tensor, its values in both. bits: how
    many elements differ in each, 0 = the lowest."""

    differing: int
    elements: int
    first: int
    one: float
    other: float
    bits: dict[int, int]

    def __str__(self) -> str:
        """E.g. "1 of 4,096 elements, bit 14: the first is number 17, 0.5 instead of 2"."""
        if len(self.bits) > 3:
            bits_text = f"bits {min(self.bits)} to {max(self.bits)}"
        else:
            bits_text = f"bit{'s' if len(self.bits) > 1 else ''} {', '.join(map(str, self.bits))}"
        first = f"number {self.first:,}, {self.other:.9g} instead of {self.one:.9g}"
        elements_text = f"{self.differing:,} of {count_noun(self.elements, 'element')}"
        return f"{elements_text}, {bits_text}; the first is {first}"


def bit_difference(one: Tensor, other: Tensor) -> BitDifference | None:
    """None if they are the same, or of another shape or dtype. Both on the CPU."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return None
    a, b = (given_tensor.contiguous().flatten() for given_tensor in (one, other))
    bits_apart = a.view(INTEGERS[a.element_size()]) ^ b.view(INTEGERS[b.element_size()])
    where = bits_apart.nonzero().flatten()
    if not len(where):
        return None
    first, differing_bits = int(where[0]), bits_apart[where]
    bit_counts = {bit: int(((differing_bits >> bit) & 1).sum()) for bit in range(8 * a.element_size())}
    bit_counts = {bit: count for bit, count in bit_counts.items() if count}
    return BitDifference(len(where), a.numel(), first, float(a[first]), float(b[first]), bit_counts)
