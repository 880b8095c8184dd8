"""The first operation at which two runs of one layout differ bit for bit. Pure.

    found = first_difference(pairs)    # pairs: (all ranks' traces of a step, the same of the other run), step by step

A difference spreads: to all that comes later, and by collectives to other ranks. What counts is the order of
operations.py over all ranks, so the difference named is not the consequence of another one that the traces have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from megastable_tools.repeat.operations import START, TracedOperation, when
from megastable_tools.repeat.trace_file import StepTrace

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
        what = f"{when(self.step)}, rank {self.rank}, {self.operation}"
        return what if self.other is None else f"{what}, in place of which the second run has {self.other}"


@dataclass(frozen=True)
class BitComparison:
    """steps: compared to the end, without the initial state. tensors: compared, of all ranks."""

    steps: int
    tensors: int
    difference: FirstDifference | None = None


def first_difference(pairs: Iterable[tuple[Ranks, Ranks]]) -> BitComparison:
    """Compares step by step, up to the first that differs."""
    steps, tensors = 0, 0
    for one, other in pairs:
        found = difference_of_step(one, other)
        tensors += sum(len(trace.operations) for trace in one) if found is None else found.compared
        if found is not None:
            return BitComparison(steps, tensors, found)
        steps += one[0].step > START
    return BitComparison(steps, tensors)


def difference_of_step(one: Ranks, other: Ranks) -> FirstDifference | None:
    """The earliest difference of a step, over all ranks."""
    found: list[tuple[tuple[int, ...], int, TracedOperation, str | None]] = []
    compared = 0
    for rank, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        alike = _alike(mine.operations, theirs.operations)
        compared += alike
        for index in np.flatnonzero(mine.fingerprints[:alike] != theirs.fingerprints[:alike]).tolist():
            operation = mine.operations[index]
            found.append(((*operation.order, index), rank, operation, None))
        if alike < max(len(mine.operations), len(theirs.operations)):
            # From here on one does what the other does not: nothing can be compared.
            here, there = (
                trace.operations[alike] if alike < len(trace.operations) else None for trace in (mine, theirs)
            )
            operation = min((o for o in (here, there) if o is not None), key=lambda o: o.order)
            told = "nothing" if there is None else str(there)
            found.append(((*operation.order, alike), rank, here or operation, told))
    if not found:
        return None
    order, _, operation, replaced = min(found, key=lambda one: one[:2])
    ranks = tuple(sorted({rank for other, rank, *_ in found if other == order}))
    return FirstDifference(one[0].step, ranks, operation, replaced, len(found), compared)


def _alike(one: Sequence[TracedOperation], other: Sequence[TracedOperation]) -> int:
    """How many operations both begin with."""
    if one == other:
        return len(one)
    return next(i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b)
