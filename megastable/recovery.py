"""What stands between a step and its consequences: asks the guard before every update, and carries out what it decides.

In memory, without a restart: refuse an update, go back to a snapshot, find out who is guilty, skip, go on, and prove
that it helped. Every decision is journaled with its reason. All methods are collective: every rank decides alike.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict

from megastable import diagnose
from megastable.casebook import Casebook
from megastable.checkpoint import store
from megastable.checkpoint.store import RunState
from megastable.config import RunConfig
from megastable.data.loader import Loader, Source, Step
from megastable.data.skips import Selection, read_ledger
from megastable.engine import Engine, Measured
from megastable.errors import ConfigError, HandoverError, MegastableError, UnstableError
from megastable.evidence import Laboratory, Trained
from megastable.ranks import first, shared
from megastable.rng import rng_state, set_rng_state
from megastable.rundir import RunDirectory
from megastable.stability import attribution
from megastable.stability.attribution import Conclusion
from megastable.stability.detector import DetectorState
from megastable.stability.guard import Guard, GuardState
from megastable.stability.incident import Incident
from megastable.stability.policy import Action, Cause, Decision, PolicyState
from megastable.stability.signals import Signals, Verdict
from megastable.stability.snapshot import Ring, Snapshot
from megastable.stability.spacing import capacity

QUIET = 500  # steps between two warnings: what moves, moves for long

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Memory(BaseModel):
    """What a checkpoint keeps of all this."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    guard: GuardState = GuardState()
    incident: Incident | None = None
    incidents: int = 0


class Recovery:
    """The stability system of one training process. note, say: the trainer's journal and console."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        source: Source,
        run: RunDirectory,
        note: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        self.config, self.settings = config, config.stability
        self.engine, self.source, self.run = engine, source, run
        self.note, self.say = note, say
        self.decision: Decision | None = None
        self.indicators: dict[str, float] = {}
        self._quiet_until = 0
        c = self.settings
        self.guard = Guard(c, simulated=c.dry_run)
        self.casebook = Casebook(run, source, lambda: self.guard.policy.state, note, say)
        self._before = self.guard.detector.state
        self.ring = Ring(engine, 0, c.snapshots.interval)
        self.laboratory: Laboratory | None = None
        # As many steps as the ring reaches back, whichever snapshots it keeps.
        self._trained: deque[Trained] = deque(maxlen=2**c.snapshots.keep * max(1, c.snapshots.interval))

    # Starting

    def begin(self, state: RunState, loader: Loader) -> None:
        """When the state is loaded: what is remembered, and the first snapshot."""
        memory = Memory.model_validate(state.stability)
        memory.guard.policy = self._newest_policy(memory.guard.policy)
        self.guard = Guard(self.settings, memory.guard, simulated=self.settings.dry_run)
        self.casebook.restore(memory.incident, memory.incidents)
        batch = self.config.train.global_batch
        self.laboratory = Laboratory(self.settings.attribution, self.engine, loader, batch)
        if self.settings.enabled and not self.settings.dry_run:
            self.ring = Ring(self.engine, self._capacity(), self.settings.snapshots.interval)
            self._snapshot(state, self.guard.detector.state)

    def memory(self) -> dict[str, Any]:
        """For the checkpoint."""
        book = self.casebook
        memory = Memory(guard=self.guard.state, incident=book.incident, incidents=book.count)
        return memory.model_dump()

    def _newest_policy(self, saved: PolicyState) -> PolicyState:
        """Of the checkpoint, or of the journal: what was done after the checkpoint counts against the budgets."""

        def read() -> PolicyState:
            last = None
            for event in self.run.events("incident", "handover", "unstable"):
                last = event.get("policy", last)
            journaled = PolicyState.model_validate(last) if last else saved
            return journaled if journaled.clock > saved.clock else saved

        return first(read)

    def _capacity(self) -> int:
        """How many snapshots every rank has room for; said, with the numbers."""
        c, size = self.settings.snapshots, sum(
            t.numel() * t.element_size() for t in self.engine.optimizer_state().values()
        )  # fmt: skip
        # Adam's moments are made at the first update.
        size = max(size, 3 * sum(t.numel() * t.element_size() for t in self.engine.masters))
        if not c.interval:
            return 0
        given = c.memory_gib is not None
        budget = c.memory_gib * 2**30 if c.memory_gib else psutil.virtual_memory().available / 4 / _local()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (capacity(c.keep, size, budget), size, budget))
        fit, size, budget = min(everyone)
        numbers = (
            f"a snapshot takes {size / 2**30:.3f} GiB a rank, and there is room for {budget / 2**30:.3f}"
        )
        if not fit and given:
            raise shared(
                ConfigError(
                    f"stability.snapshots.memory_gib={c.memory_gib}: {numbers}. Give it at least {size / 2**30:.3f}, "
                    "or set stability.snapshots.interval=0 to train without rewinding"
                )
            )
        if fit < 1:
            self.note("no_snapshots", bytes=size, budget=budget)
            self.say(
                f"WARNING: {numbers}: a spike cannot be rewound in memory, and leads to a restart from a checkpoint"
            )
        else:
            self.say(f"rewind points: every {c.interval} steps, {fit} of {size / 2**30:.3f} GiB a rank")
        return fit

    # Before the update

    def judge(self, measured: Measured, step: int, lr: float) -> bool:
        """The gate: whether the update may be applied."""
        self.decision = None
        if measured.overflow:
            return False  # part of fp16: a smaller loss scale mends it
        if not self.settings.enabled:
            return measured.finite
        signals = Signals(step, measured.loss, measured.grad_norm, lr, self.indicators)
        self.indicators = {}
        oldest = self.ring.steps[0] if self.ring.steps else None
        if self.settings.dry_run:
            oldest = 0
        self._before = self.guard.detector.state
        self.decision = self.guard.judge(signals, oldest)
        return measured.finite if self.settings.dry_run else self.decision.applies

    def rate_factor(self, updates: int) -> float:
        """What the learning rate is multiplied by: less than one after a cut."""
        return self.guard.policy.rate_factor(updates)

    def refusal(self, measured: Measured) -> tuple[str, str]:
        """Why the last update was refused: a verdict, and its reason."""
        if self.decision is not None:
            return self.decision.finding.verdict, self.decision.reason
        if measured.overflow:
            return "overflow", "beyond the range of fp16: the loss scale is lowered"
        return Verdict.NON_FINITE, f"loss {measured.loss}, gradient norm {measured.grad_norm}"

    # After the step

    def settle(
        self,
        batch: Step,
        measured: Measured,
        applied: bool,
        before: RunState,
        state: RunState,
        loader: Loader,
    ) -> RunState:
        """Carry out what was decided about the step from `before` to `state`; where the run stands then.

        Raises HandoverError and UnstableError.
        """
        decision, damage = self.decision, ""
        self._trained.append(Trained(state.step, batch.positions, measured.losses.numpy(), applied))
        if decision is None:
            return state
        if decision.action is Action.DISCARD and not self.settings.dry_run:
            # The weights are those of before it: should more follow, nothing needs to be done again.
            self._snapshot(before, self._before, self.engine.counters_before)
        if decision.action is Action.DISCARD and decision.finding.verdict is Verdict.NON_FINITE:
            found = diagnose.locate(self.engine, batch.micro_batches)
            self.note("located", step=state.step, **asdict(found))
            self.say(f"step {state.step}: {found.sentence}")
            if found.kind == "state" and not self.settings.dry_run:
                damage = found.sentence
                decision = self.guard.policy.escalate(decision.finding, found.sentence, self._oldest())
        if self.settings.dry_run:
            self._rehearse(decision, state)
            return state
        self._warn(decision, state)
        if decision.healed:
            self.casebook.close(state, "healed")
        if decision.action.rewinds:
            return self._rewind(decision, batch, measured, state, loader, damage)
        if decision.action.ends:
            self.casebook.open(decision, state, self._since(decision.finding.onset), measured.grad_norm)
            raise self._end(decision, state)
        calm = applied and decision.finding.verdict is Verdict.HEALTHY and decision.finding.on_trend
        if calm and self.ring.due(state.step):
            self._snapshot(state, self.guard.detector.state)
        return state

    def _snapshot(
        self, state: RunState, detector: DetectorState, counters: dict[str, Any] | None = None
    ) -> None:
        if state.step not in self.ring.steps:
            self.ring.take(state.step, (state.model_copy(deep=True), rng_state(), detector), counters)

    def _oldest(self) -> int | None:
        return self.ring.steps[0] if self.ring.steps else None

    def _warn(self, decision: Decision, state: RunState) -> None:
        """Journal leading indicators when they begin to move; nobody acts on them."""
        if decision.finding.warnings and state.step >= self._quiet_until:
            self._quiet_until = state.step + QUIET
            for text in decision.finding.warnings:
                self.note("warning", step=state.step, text=text)
                self.say(f"step {state.step}: warning: {text}")

    def _rehearse(self, decision: Decision, state: RunState) -> None:
        if decision.action is not Action.APPLY:
            self.note("would", step=state.step, action=decision.action, reason=decision.reason)
            self.say(f"step {state.step}: would {decision.action.value}: {decision.reason}")

    # Going back

    def _rewind(
        self,
        decision: Decision,
        batch: Step,
        measured: Measured,
        state: RunState,
        loader: Loader,
        damage: str,
    ) -> RunState:
        begin, finding, policy = time.perf_counter(), decision.finding, self.guard.policy
        window = self._since(finding.onset)
        self.casebook.open(decision, state, window, measured.grad_norm)
        recurred = policy.recurred()
        # On the state that the update was refused on: the very experiment again.
        if not damage:
            again = self.engine.measure(batch.micro_batches)
            if not attribution.reproduced(measured.losses.numpy(), again.losses.numpy()):
                damage = "the same data on the same state gave other losses: hardware, or a race"
        snapshot = self._restore(finding.onset, 1 if recurred else 0)
        if snapshot is None:
            reason = f"{decision.reason}; no snapshot is good"
            raise self._end(replace(decision, action=Action.HANDOVER, reason=reason), state)
        saved, random_states, detector = snapshot.extra
        if damage:
            conclusion = Conclusion(Cause.HARDWARE, [], [], damage)
        else:
            conclusion = self._examine(window, recurred)
        corpora = self._selection().corpora_left
        action, reason = policy.remedy(conclusion.cause, saved.updates, corpora)
        seconds = time.perf_counter() - begin
        lost = state.step - snapshot.step
        self.casebook.attribute(conclusion, window, action, reason, lost, seconds)
        if action.ends:
            raise self._end(replace(decision, action=action, reason=reason), state)
        back: RunState = saved.model_copy(deep=True)
        back.seconds = state.seconds
        self.guard.rewind(detector)
        set_rng_state(random_states)
        loader.go_to(back.cursor, self._selection())
        self._forget(snapshot.step)
        self.casebook.rewound(back.step, back.cursor)
        self.say(
            f"  rewound {lost} steps to step {back.step} in {time.perf_counter() - begin:.1f} s, without a restart; "
            f"{reason}"
        )
        return back

    def _restore(self, onset: int, older: int) -> Snapshot | None:
        """Put the engine back to the newest snapshot before `onset` that is still good."""
        while (snapshot := self.ring.before(onset, older)) is not None:
            self.ring.restore(snapshot)
            self.engine.refresh_weights()
            self._known = self._reference(snapshot)
            _, recorded, now = self._known
            norms = self.engine.flat_state().norms()
            finite = math.isfinite(norms.parameters + norms.second_moment)
            if finite and not attribution.is_worse(now[: recorded.size], recorded):
                return snapshot
            why = "is worse on what it was trained on" if finite else "is not finite"
            self.note("snapshot_rejected", step=snapshot.step, reason=why)
            self.say(f"  the state after step {snapshot.step} {why} already: further back")
            self.ring.forget_from(snapshot.step)
            onset = snapshot.step
        return None

    def _reference(self, snapshot: Snapshot) -> tuple[Int64s, Floats, Floats]:
        """Harmless samples of before a snapshot: positions, losses when they were trained on, losses on its state.

        Right after a start their losses are not known: then the second is empty.
        """
        assert self.laboratory is not None
        count, saved = self.settings.attribution.reference, snapshot.extra[0]
        before = [t for t in self._trained if t.step <= snapshot.step and t.applied]
        positions = np.concatenate([np.empty(0, np.int64), *(t.positions for t in before)])[-count:]
        recorded = np.concatenate([np.empty(0), *(t.losses for t in before)])[-count:]
        if not positions.size:
            kept, _ = self._selection().next_kept(max(0, saved.cursor - count), count)
            positions = kept[kept < saved.cursor]
        return positions, recorded, self.laboratory.losses(positions)

    def _examine(self, window: list[Trained], recurred: bool) -> Conclusion:
        assert self.laboratory is not None
        suspects = window[: self.settings.attribution.window]
        harmless, _, reference = self._known
        return self.laboratory.examine(suspects, harmless, reference, self._selection(), recurred)

    def _selection(self) -> Selection:
        return selection(self.config, self.source, self.run)

    def _forget(self, step: int) -> None:
        """What was kept of the steps that are undone: records of positions, and checkpoints."""
        while self._trained and self._trained[-1].step > step:
            self._trained.pop()

        for name in first(lambda: store.set_aside_newer(self.run.checkpoints, step)):
            self.note(
                "checkpoint_suspect", name=name, reason=f"written after step {step}, which was returned to"
            )

    def finish(self, state: RunState) -> None:
        """At the end of the run: an incident that nothing came after is over."""
        last = self.decision.finding if self.decision is not None else None
        calm = last is not None and last.verdict is Verdict.HEALTHY and last.on_trend
        self.casebook.close(state, "healed" if calm else "open")

    def _end(self, decision: Decision, state: RunState) -> MegastableError:
        """What ends this process; all that a restart needs is written down."""
        onset = decision.finding.onset
        number = self.casebook.give_up(decision, state, self._since(onset)).number
        where = f"step {state.step}: incident {number} (began at step {onset}): {decision.reason}. "
        if decision.action is Action.HANDOVER:
            return shared(
                HandoverError(
                    f"{where}It needs a restart from a checkpoint before step {onset}: the same command does that, "
                    f"and skips the suspect data ({self.run.skips.name})"
                )
            )
        return shared(
            UnstableError(
                f"{where}All budgets of stability.policy are spent. Look at {self.run.journal}; lower optimizer.lr, "
                "look at the data, or raise the budgets"
            )
        )

    def _since(self, onset: int) -> list[Trained]:
        return [t for t in self._trained if t.step >= onset]


def selection(config: RunConfig, source: Source, run: RunDirectory) -> Selection:
    """What the recipe and the ledger leave of the data. Rank 0 reads: no rank sees a line that others do not."""
    entries = first(lambda: read_ledger(run.skips))
    return Selection(source.order, entries, config.data.skip)


def _local() -> int:
    """Ranks on this host."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
