"""Runs a case on a device again and again, and says how its result was wrong.

The first result is compared on the CPU, with the answer that the CPU has. So that the device has more to do than
copies, the others are compared on the device; if it sees a difference, the CPU looks at it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megastable.cluster.burn_in.bits import BitMismatch, mismatch, same_bits
from megastable.cluster.burn_in.exact_cases import KnownCase, Run
from megastable.cluster.burn_in.faults import AGAIN
from megastable.cluster.burn_in.repeat_cases import RepeatCase

UNSEEN = BitMismatch(0, 0, (), "", "", "", ())  # a difference that only the device sees
Compared = Callable[[tuple[Tensor, ...]], BitMismatch | None]


@dataclass(frozen=True)
class CaseTrial:
    """runs of a case, the last of them wrong if there is a mismatch; again: how many of `AGAIN` more were."""

    what: str
    runs: int
    mismatch: BitMismatch | None = None
    again: int = 0


def tried(case: KnownCase, device: torch.device, seconds: float) -> CaseTrial:
    """Until it is wrong, for about `seconds`, at least twice."""
    run = case.setup(device)
    return _trial(case.what, run, case.answers, seconds, done=0)


def repeated(case: RepeatCase, device: torch.device, seconds: float) -> CaseTrial:
    """Until a result differs from the first one, for about `seconds`, at least twice. The first one must be near to
    what the CPU computes in fp64, where the case knows it; of different ones the majority of three is right."""
    run = case.setup(device)
    first = on_cpu(run())
    if case.nearly is not None:
        compared = _nearly(case.nearly)
        if found := compared(first):
            return CaseTrial(case.what, 1, found, _again(run, compared))
    trial = _trial(case.what, run, first, seconds, done=1)
    if trial.mismatch is None or trial.mismatch is UNSEEN:
        return trial
    second, third = on_cpu(run()), on_cpu(run())
    right = tuple(map(majority, first, second, third))
    if found := _compared(right)(first):  # it was the first result that was wrong
        return CaseTrial(case.what, trial.runs, found, _again(run, _compared(right)))
    return trial


def majority(one: Tensor, two: Tensor, three: Tensor) -> Tensor:
    """Of each element the bits that two of three have; of three different ones the third's."""
    a, b, c = (x.contiguous().view(torch.uint8).view(*x.shape, -1) for x in (one, two, three))
    agree = (a == b).all(-1, keepdim=True)
    return torch.where(agree, a, c).contiguous().view(one.dtype).view(one.shape)


def on_cpu(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies: what is on the CPU may be overwritten, too."""
    return tuple(x.detach().cpu().clone(memory_format=torch.contiguous_format) for x in results)


def _trial(what: str, run: Run, answers: tuple[Tensor, ...], seconds: float, done: int) -> CaseTrial:
    """done: runs that were compared on the CPU before."""
    compared = _compared(answers)
    until, runs, there = time.monotonic() + seconds, done, list[Tensor]()
    while runs < 2 or time.monotonic() < until:
        got = run()
        runs += 1
        if not there:
            found = compared(on_cpu(got))
            there = [x.to(got[0].device) for x in answers]
        elif all(map(same_bits, there, got)):
            found = None
        else:
            found = compared(on_cpu(got)) or compared(on_cpu(there)) or UNSEEN
        if found is not None:
            return CaseTrial(what, runs, found, _again(run, compared))
    return CaseTrial(what, runs)


def _again(run: Run, compared: Compared) -> int:
    return sum(compared(on_cpu(run())) is not None for _ in range(AGAIN))


def _compared(answers: tuple[Tensor, ...]) -> Compared:
    return lambda got: next(filter(None, map(mismatch, answers, got)), None)


def _nearly(nearly: Callable[[], tuple[tuple[Tensor, Tensor], ...]]) -> Compared:
    """Elements within the tolerance count as right."""

    def compared(got: tuple[Tensor, ...]) -> BitMismatch | None:
        for (right, tolerance), result in zip(nearly(), got):
            off = (result.double() - right).abs() > tolerance
            off |= result.isnan() != right.isnan()
            nearest = right.to(result.dtype)
            if found := mismatch(nearest, torch.where(off, result, nearest)):
                return found
        return None

    return compared
