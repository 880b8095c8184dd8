"""Compares, in the sum of a step, what the sum before was on every rank, which each of them decides by. Collective."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megastable.base.collectives import gathered
from megastable.base.fingerprint import mark_of
from megastable.base.text import ranks_on
from megastable.engine.measured import Measured
from megastable.hardware.equality import COLUMNS, columns, equal, odd_ones
from megastable.hardware.hardware_fault import HardwareFault
from megastable.run.events.stability_events import ReplicasDiffer
from megastable.run.log import RunLog


class SumWatch:
    """Of one process. A rank that clips by another norm than the others is seen nowhere else: what it updates is
    gathered by all."""

    def __init__(self, on: bool, log: RunLog) -> None:
        self._world = dist.get_world_size()
        self.columns = COLUMNS if on and self._world > 1 else 0  # of the votes
        self._log, self._step, self._mark = log, 0, 0

    def votes(self) -> tuple[float, ...]:
        """For the sum of the next step."""
        return tuple(columns(self._mark)) if self.columns else ()

    def judge(self, votes: Sequence[float], measured: Measured, step: int) -> HardwareFault | None:
        """Of the step that was judged before this one, what the summed votes show. Collective if that differs."""
        if not self.columns:
            return None
        mark, before, self._mark, self._step = self._mark, self._step, _mark(measured), step
        return None if equal(votes, self._world) else self._named(mark, before)

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
    numbers = (measured.grad_norm, *measured.votes, *measured.gradients)
    return int(
        mark_of(
            torch.cat((measured.losses, measured.squares, torch.tensor(numbers, dtype=torch.float64)))
        ).value
    )
