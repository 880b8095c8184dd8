"""Checks at the gate that pipeline stages received what was sent to them. Collective."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from megastable.base.collectives import gathered
from megastable.base.text import ranks_on
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.hardware.hardware_fault import HardwareFault
from megastable.run.events.stability_events import MessagesDiffer
from megastable.run.log import RunLog


class MessageWatch(Watch):
    """Of one process. Without pipeline parallelism it does nothing."""

    name = "messages"

    def __init__(self, engine: Engine, log: RunLog) -> None:
        self.engine, self.log, self.messages = engine, log, engine.zero.messages

    def ballot(self, step: int) -> Sequence[float]:
        """What was sent less what has arrived."""
        return () if self.messages is None else (self.messages.left,)

    def judge(self, measured: Measured) -> bool:
        """Whether a message was changed on its way."""
        return any(measured.ballot.get(self.name, ()))

    def prove(self, step: int) -> HardwareFault:
        """Which one. Collective."""
        assert self.messages is not None
        everyone = gathered((socket.gethostname(), *self.messages.by_stage()))
        hosts, found = [host for host, *_ in everyone], dict[int, int]()  # sender, by receiver
        for ranks in self.engine.topology.layout.groups("pipeline"):
            for stage, rank in enumerate(ranks):
                for other, arrived in everyone[rank][2].items():
                    if everyone[ranks[other]][1].get(stage) != arrived:
                        found[rank] = ranks[other]
        pairs = [f"{ranks_on([to], hosts)} received from {ranks_on([by], hosts)}" for to, by in found.items()]
        what = ", and what ".join(pairs) or "a stage received from another one"
        reason = f"what {what} is not what was sent: a link or a chip lies"
        ranks = sorted(found)
        theirs = [hosts[rank] for rank in ranks]
        self.log.emit(MessagesDiffer(step=step, ranks=ranks, hosts=theirs, reason=reason), say=True)
        return HardwareFault(step - 1, False, ranks, sorted(set(theirs)), reason, link=True)
