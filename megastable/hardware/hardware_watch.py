"""All that looks for hardware that lies: copies that differ, memory that changes, gradients that stand out, results
that do not repeat. Collective."""

from __future__ import annotations

import socket
from collections.abc import Callable

from megastable.base.collectives import first, gathered
from megastable.config.tree import RunConfig
from megastable.data.loader import Loader, Step
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.hardware.gradient_watch import GradientWatch, Suspicion
from megastable.hardware.hardware_fault import FOUND, SEVERAL, FaultCounts, HardwareFault, passed
from megastable.hardware.message_watch import MessageWatch
from megastable.hardware.replay_check import ReplayCheck
from megastable.hardware.replica_watch import ReplicaWatch
from megastable.hardware.state_watch import StateWatch
from megastable.hardware.sum_watch import SumWatch
from megastable.run.directory import RunDirectory
from megastable.run.log import RunLog

SUSPECTED = "a gradient, the sum of all, or a message stands out; the step is repeated"


class HardwareWatch:
    """Of one process, which resumes after `step` steps. phase: the trainer's heartbeat.

    memory: what the last look at it found; suspicion: what the last gate found of the gradients, yet to be proven.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        loader: Loader,
        step: int,
        run: RunDirectory,
        log: RunLog,
        phase: Callable[[str], None],
    ) -> None:
        c = config.stability
        self._on, self._phase = c.enabled, phase
        self.sums = SumWatch(c.enabled and bool(c.hardware.fingerprint_interval), log)
        self.state = StateWatch(c.enabled and c.hardware.state, engine, step, log)
        self.messages = MessageWatch(engine, log)
        self.replicas = ReplicaWatch(c.hardware, engine, step, log, self.state)
        hosts = gathered(socket.gethostname())
        found, replayed = first(lambda: passed(run.events(*FOUND), hosts))
        self.replays = ReplayCheck(config, engine, loader, step, log, FaultCounts(hosts, replayed))
        self.gradients = GradientWatch(config, engine, loader, log)
        self.watches: list[Watch] = [
            self.sums, self.state, self.messages, self.replicas, self.replays, self.gradients,
        ]  # fmt: skip
        self.memory: HardwareFault | None = None
        self.suspicion: Suspicion | None = None
        self._proven = 0, 0  # a step at which hardware lied, and how often in a row
        # Memory and gradients that were wrong are repaired; without another host that is all that can be done.
        several = c.enabled and len(set(hosts)) > 1
        self._counts = FaultCounts(hosts, found) if several else None

    def judge(self, measured: Measured, step: int) -> None:
        """Before the update of `step`."""
        found = self.state.judge(measured), self.replicas.judge(measured)
        wrong_sum = self.sums.judge(measured, step)
        self.memory = self._remembered(*found, step) or wrong_sum
        if self.memory is None:
            self.replicas.look_again()
        self.suspicion = self.gradients.judge(measured, step)
        if self.messages.judge(measured):
            self.suspicion = Suspicion([], [], messages=True)  # a gradient that stands out follows from it

    @property
    def reason(self) -> str:
        """Why the update must not be applied; "": no reason."""
        if self.memory is not None:
            return self.memory.reason
        return SUSPECTED if self.suspicion is not None else ""

    def verify(self, step: int) -> HardwareFault | None:
        """Before the state after `step` is saved: whether memory holds what the step left, and copies are equal."""
        if self._on:
            self.memory = self._remembered(self.state.check(), self.replicas.check(step), step)
        return self.memory

    def _remembered(
        self, own: HardwareFault | None, copies: HardwareFault | None, step: int
    ) -> HardwareFault | None:
        """own: of a rank's memory, which knows whose it is. Copies that differ say less: a sum that reached some ranks
        wrong, on its way to most of them, makes these the majority, so nobody is counted for that."""
        if own is None:
            return copies
        self.replicas.explained()
        return self._counted(own, step)

    def prove(self, suspicion: Suspicion, batch: Step, step: int) -> HardwareFault | None:
        """As `GradientWatch.prove`."""
        fault = (
            self.messages.prove(step) if suspicion.messages else self.gradients.prove(suspicion, batch, step)
        )
        if fault is not None:
            at, times = self._proven
            self._proven = step, times + 1 if at == step else 1
        return self._counted(fault, step)

    @property
    def lasts(self) -> bool:
        """Whether the last step that was proven wrong was so several times in a row."""
        return self._proven[1] >= SEVERAL

    def _counted(self, fault: HardwareFault | None, step: int) -> HardwareFault | None:
        return fault if fault is None or self._counts is None else self._counts.counted(fault, step)

    def replay(self, batch: Step, step: int) -> HardwareFault | None:
        """After `step`, of its samples, where that is due."""
        if not self._on or not self.replays.due(step):
            return None
        self._phase("replay")
        return self.replays.check(batch, step)
