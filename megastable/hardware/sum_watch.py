"""Compares, in the sum of a step, what the sum before was on every rank, which each of them decides by. Collective."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist

from megastable.base.collectives import gathered
from megastable.base.fingerprint import mark_of
from megastable.base.text import ranks_on
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.hardware.equality import columns, equal, odd_ones
from megastable.hardware.hardware_fault import HardwareFault
from megastable.run.events.stability_events import ReplicasDiffer
from megastable.run.log import RunLog


class SumWatch(Watch):
    """Of one process. A rank that clips by another norm than the others is seen nowhere else: what it updates is
    gathered by all."""

    name = "sums"

    def __init__(self, on: bool, log: RunLog) -> None:
        self._world = dist.get_world_size()
        self._on = on and self._world > 1
        self._log, self._step, self._mark = log, 0, 0

    def ballot(self, step: int) -> Sequence[float]:
        return columns(self._mark) if self._on else ()

    def judge(self, measured: Measured, step: int) -> HardwareFault | None:
        """What the ballot of `step` shows of the step that was judged before. Collective if that differs."""
        if not self._on:
            return None
        mark, before, self._mark, self._step = self._mark, self._step, _mark(measured), step
        same = equal(measured.ballot.get(self.name, ()), self._world)
        return None if same else self._named(mark, before)

    def _named(self, mark: int, step: int) -> HardwareFault:
        everyone = gathered((socket.gethostname(), mark))
        hosts = [host for host, _ in everyone]
        odd, most = odd_ones({rank: mark for rank, (_, mark) in enumerate(everyone)})
        ranks = list(odd) if most else []
        who = (
            f"{ranks_on(ranks, hosts)} received something else than most"
            if most
            else "whose is wrong is not known"
        )
        reason = f"the sum of step {step} over all ranks was not the same on all of them: {who}"
        where = [hosts[rank] for rank in ranks]
        self._log.emit(
            ReplicasDiffer(step=step, proven=step - 1, ranks=ranks, hosts=where, reason=reason), say=True
        )
        return HardwareFault(step - 1, False, ranks, sorted(set(where)), reason, link=True)


def _mark(measured: Measured) -> int:
    ballot = chain.from_iterable(measured.ballot.values())
    numbers = (measured.grad_norm, *ballot, *measured.gradients)
    return int(
        mark_of(
            torch.cat((measured.losses, measured.squares, torch.tensor(numbers, dtype=torch.float64)))
        ).value
    )
