"""All that looks for silent data corruption: copies that differ, memory that changes, gradients that stand out, results
that do not repeat. Collective."""

from __future__ import annotations

from collections.abc import Callable

from megastable.base.collectives import run_on_first
from megastable.config.tree import RunConfig
from megastable.data.loader import Loader, Step
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.hardware.gradient_watch import GradientWatch, MessageWatch, Suspicion
from megastable.hardware.hardware_fault import (
    FOUND,
    SEVERAL,
    FaultCounts,
    FaultLog,
    HardwareFault,
    read_counts,
)
from megastable.hardware.recomputation import Recomputation, ReplayCheck
from megastable.hardware.state_watch import ReplicaWatch, StateWatch, SumWatch
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
        fault_log = FaultLog(log, engine.topology.hosts)
        found_faults, replayed_faults = run_on_first(
            lambda: read_counts(run.iterate_events(*FOUND), fault_log.hosts)
        )
        replay_counts, replay_interval = FaultCounts(replayed_faults), c.hardware.replay_interval
        gradient_recomputation = Recomputation(config, engine, loader, fault_log)
        self.sums = SumWatch(c.enabled and bool(c.hardware.fingerprint_interval), fault_log)
        self.state = StateWatch(c.enabled and c.hardware.state, engine, step, fault_log)
        self.messages = MessageWatch(engine, fault_log)
        self.replicas = ReplicaWatch(c.hardware, engine, step, fault_log, self.state)
        self.replays = ReplayCheck(replay_interval, engine, gradient_recomputation, step, replay_counts)
        self.gradients = GradientWatch(engine, gradient_recomputation)
        # In the order of their numbers in the ballot. Replicas use what the watch over the state has read.
        self.watches: list[Watch] = [
            self.sums, self.state, self.messages, self.replicas, self.replays, self.gradients,
        ]  # fmt: skip
        self.memory: HardwareFault | None = None
        self.suspicion: Suspicion | None = None
        self._proven = 0, 0  # a step at which hardware was wrong, and how often in a row
        # Memory and gradients that were wrong are repaired; without another host that is all that can be done.
        several_hosts = c.enabled and len(set(fault_log.hosts)) > 1
        self._counts = FaultCounts(found_faults) if several_hosts else None

    def judge_step(self, measured: Measured, step: int) -> None:
        """Before the update of `step`."""
        # What each watch has put into the ballot comes back summed over all ranks, so that all see the same and go the
        # same way. Memory that changed explains copies that differ; copies explain a sum that differs, not vice versa.
        memory_fault, copies_fault = (
            self.state.judge_memory(measured),
            self.replicas.judge_copies(measured, step),
        )
        wrong_sum = self.sums.judge_sums(measured, step)
        self.memory = self._explain_copies(memory_fault, copies_fault, step) or wrong_sum
        if self.memory is None:
            self.replicas.look_again(step)
        gradient_suspicion = self.gradients.judge_gradients(measured, step)
        # A gradient that stands out follows from a wrong message.
        self.suspicion = self.messages.judge_messages(measured) or gradient_suspicion

    @property
    def reason(self) -> str:
        """Why the update must not be applied; "": no reason."""
        if self.memory is not None:
            return self.memory.reason
        return SUSPECTED if self.suspicion is not None else ""

    def verify_state(self, step: int) -> HardwareFault | None:
        """Before the state after `step` is saved: whether memory holds what the step left, and copies are equal."""
        if self._on:
            self.memory = self._explain_copies(
                self.state.check_memory(), self.replicas.check_copies(step), step
            )
        return self.memory

    def _explain_copies(
        self, own: HardwareFault | None, copies: HardwareFault | None, step: int
    ) -> HardwareFault | None:
        """own: of a rank's memory, which knows whose it is. Copies that differ say less: a sum that reached some ranks
        wrong, on its way to most of them, makes these the majority, so nobody is counted for that."""
        if own is None:
            return copies
        self.replicas.forget_differing()
        return self._count(own, step)

    def prove_suspicion(self, suspicion: Suspicion, batch: Step, step: int) -> HardwareFault | None:
        watch = self.messages if suspicion.messages else self.gradients
        proven_fault = watch.prove_doubts(suspicion, batch, step)
        if proven_fault is not None:
            proven_step, proven_times = self._proven
            self._proven = step, proven_times + 1 if proven_step == step else 1
        return self._count(proven_fault, step)

    @property
    def lasts(self) -> bool:
        """Whether the last step that was proven wrong was so several times in a row."""
        return self._proven[1] >= SEVERAL

    def _count(self, fault: HardwareFault | None, step: int) -> HardwareFault | None:
        return fault if fault is None or self._counts is None else self._counts.count_fault(fault, step)

    def replay_step(self, batch: Step, step: int) -> HardwareFault | None:
        """After `step`, of its samples, where that is due."""
        if not self._on or not self.replays.is_due(step):
            return None
        self._phase("replay")
        return self.replays.check_batch(batch, step)
