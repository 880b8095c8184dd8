"""What stands between a step and its consequences: asks the guard before every update, and carries out what it decides.

In memory, without a restart: refuse an update, go back to a snapshot, find out who is guilty, skip, go on, and prove
that it helped. Every decision is journaled with its reason. All methods are collective: every rank decides alike.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megastable import diagnose, room
from megastable.casebook import Casebook
from megastable.checkpoint import store
from megastable.checkpoint.store import RunState
from megastable.config import RunConfig
from megastable.data.loader import Loader, Step
from megastable.data.skips import Selection
from megastable.data.source import Source
from megastable.deterministic import exact
from megastable.engine import Engine, Measured
from megastable.errors import HandoverError, MegastableError, UnstableError
from megastable.evidence import Laboratory, Trained, harmless
from megastable.ranks import agree, first, gathered, shared
from megastable.recall import TELLING, Memory, recall
from megastable.rng import rng_state, set_rng_state
from megastable.rundir import RunDirectory
from megastable.skipping import Skipping
from megastable.stability import attribution
from megastable.stability.attribution import Conclusion, Replay, Result
from megastable.stability.detector import Detector, DetectorState
from megastable.stability.guard import Guard
from megastable.stability.policy import Action, Cause, Decision
from megastable.stability.signals import Finding, Signals, Verdict
from megastable.stability.snapshot import Ring, Snapshot

QUIET = 500  # steps between two warnings: what moves, moves for long
UNSTEADY = "the same data on the same state gives other numbers every time: hardware"

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Recovery:
    """The stability system of one training process. skipping: what it leaves out, and adds to; note, say, phase: the
    trainer's journal, console and heartbeat; settle: waits until no checkpoint is under way, so that those that are
    there can be counted."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        source: Source,
        run: RunDirectory,
        skipping: Skipping,
        note: Callable[..., None],
        say: Callable[[str], None],
        phase: Callable[[str], None],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.settings = config, config.stability
        self.engine, self.source, self.run, self.skipping = engine, source, run, skipping
        self.note, self.say, self.phase, self.settle_saves = note, say, phase, settle
        self.decision: Decision | None = None
        self.indicators: dict[str, float] = {}
        self._quiet_until = 0
        self._irreproducible: int | None = None  # step whose numbers were finite when it was done again
        c = self.settings
        self._in_fp8 = True  # as was said last; an engine begins with it
        self.guard = Guard(c, simulated=c.dry_run, fp8=engine.fp8 is not None)
        self.casebook = Casebook(run, source, lambda: self.guard.policy.state, note, say)
        self._before = self.guard.detector.state
        self.ring = Ring(engine, 0, c.snapshots.interval)
        self.laboratory: Laboratory | None = None
        # As many steps as the ring reaches back, whichever snapshots it keeps.
        self._trained: deque[Trained] = deque(
            maxlen=min(512, 2**c.snapshots.keep * max(1, c.snapshots.interval))
        )

    # Starting

    def begin(self, state: RunState, loader: Loader) -> None:
        """When the state is loaded: what is remembered, and the first snapshot."""
        memory = self._recall(state)
        in_fp8 = self.engine.fp8 is not None
        self.guard = Guard(self.settings, memory.guard, self.settings.dry_run, in_fp8)
        self.guard.policy.resumed(state.step, state.updates)
        self.casebook.restore(memory.incident, memory.incidents, state.step)
        batch = self.config.train.global_batch
        self.laboratory = Laboratory(self.settings.attribution, self.engine, loader, batch)
        if self.acts:
            self.ring = Ring(self.engine, self._capacity(), self.settings.snapshots.interval)
            self._snapshot(state, self.guard.detector.state)
        self.choose_precision(state)

    def begin_anew(self, step: int, old: dict[str, float], new: dict[str, float]) -> None:
        """Other data is read from here on, on purpose: what was usual of its loss is learnt again, so that nobody takes
        the change for an incident. Not while one is open: its proof needs what was usual before it."""
        if not self.acts or self.casebook.incident is not None:
            return
        self.guard.rewind(DetectorState())
        self.note("baseline_anew", step=step, old=old, new=new)
        self.say(
            f"step {step}: the corpora are mixed in another way from here on: what is usual is learnt anew"
        )

    def memory(self) -> dict[str, Any]:
        """For the checkpoint."""
        book = self.casebook
        memory = Memory(guard=self.guard.state, incident=book.incident, incidents=book.count)
        return memory.model_dump()

    def _recall(self, state: RunState) -> Memory:
        memory, lost = first(
            lambda: recall(state.stability, self.run.events(*TELLING), self.settings.dry_run)
        )
        for problem in lost:
            self.note("stability_state_dropped", step=state.step, problem=problem)
            self.say(f"WARNING: what was remembered of stability cannot be read and starts anew: {problem}")
        return memory

    def _capacity(self) -> int:
        """How many snapshots every rank has room for; said, with the numbers."""
        c = self.settings.snapshots
        if not c.interval:
            return 0
        state, pinned = self.engine.optimizer_state().values(), torch.cuda.is_initialized()
        everyone = gathered(room.demand(state, self.engine.masters, self.engine.flat_state().moments, pinned))
        found = agree(lambda: room.plan(everyone, c))
        if not found.points:
            self.note("no_snapshots", bytes=found.snapshot, budget=found.budget)
        self.say(found.text)
        return found.points

    @property
    def acts(self) -> bool:
        """Whether anything is done beyond refusing updates that are not finite."""
        return self.settings.enabled and not self.settings.dry_run

    @property
    def calm(self) -> bool:
        """Whether the last step was on trend, with no incident open."""
        if self.decision is None:
            return True
        found = self.decision.finding
        return found.verdict is Verdict.HEALTHY and found.on_trend and self.casebook.incident is None

    # Before a step

    def choose_precision(self, state: RunState) -> None:
        """FP8, or what the rest of the run computes in, for the step after `state`; a change is journaled and said."""
        fp8, policy = self.engine.fp8, self.guard.policy
        if fp8 is None:
            return
        fp8.on = wanted = not self.acts or policy.fp8
        if wanted == self._in_fp8:
            return
        self._in_fp8 = wanted
        event, other = ("returned", "FP8") if wanted else ("fell_back", self.config.precision.kind)
        self.note(
            event, step=state.step, to=other, reason=policy.precision, fallbacks=len(policy.state.fallbacks)
        )
        self.say(f"step {state.step}: goes on in {other}: {policy.precision}")

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
        oldest = 0 if self.settings.dry_run else self._oldest()
        self._before = self.guard.detector.state
        self.decision = self.guard.judge(signals, oldest)
        return measured.finite if self.settings.dry_run else self.decision.applies

    def rate_factor(self, updates: int) -> float:
        """What the learning rate is multiplied by: less than one after a cut."""
        return 1.0 if self.settings.dry_run else self.guard.policy.rate_factor(updates)

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
        if decision.finding.verdict is Verdict.NON_FINITE and not applied:
            damage = self._locate(batch, state)
            if damage and decision.action is Action.DISCARD and not self.settings.dry_run:
                decision = self.guard.policy.escalate(decision.finding, damage, self._oldest())
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
            if not damage:
                _, damage = self._replay(batch, measured, state, decision.finding.verdict)
                decision = replace(decision, reason="; ".join(filter(None, [decision.reason, damage])))
            raise self._end(decision, state, Cause.HARDWARE if damage else Cause.UNKNOWN)
        if decision.action is Action.DISCARD and not before.discards_in_a_row and self.ring.capacity > 1:
            # The weights are those of before it: should more follow, nothing needs to be done again. (Nothing random
            # happens in a step, so the random states are those of before it, too.)
            self._snapshot(before, self._before, self.engine.counters_before)
            return state
        calm, finding = applied and decision.finding.verdict is Verdict.HEALTHY, decision.finding
        if calm and self.ring.due(state.step, urgent=not finding.on_trend):
            self._snapshot(state, self.guard.detector.state)
        return state

    def rescue(
        self, batch: Step, measured: Measured, state: RunState, loader: Loader, damage: str
    ) -> RunState:
        """Go back because the state itself is found to be damaged. Raises HandoverError and UnstableError."""
        finding = Finding(state.step, Verdict.NON_FINITE, 1.0, state.step, damage, on_trend=False)
        decision = self.guard.policy.escalate(finding, damage, self._oldest())
        if decision.action.rewinds:
            return self._rewind(decision, batch, measured, state, loader, damage)
        self.casebook.open(decision, state, self._since(state.step), measured.grad_norm)
        raise self._end(decision, state, Cause.HARDWARE)

    def _locate(self, batch: Step, state: RunState) -> str:
        """Where the first number that is not finite arose; not empty when it was in the state already."""
        self.phase("locate")
        found = diagnose.locate(self.engine, batch.micro_batches)
        self.note("located", step=state.step, **asdict(found))
        self.say(f"step {state.step}: {found.sentence}")
        self._irreproducible = state.step if not found.reproduced else None
        return found.sentence if found.kind == "state" else ""

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
        self.phase("rewind")
        c = self.settings.policy
        window = self._since(finding.onset)
        self.casebook.open(decision, state, window, measured.grad_norm)
        recurred = policy.recurred()
        unsteady = False
        if not damage:
            unsteady, damage = self._replay(batch, measured, state, finding.verdict)
        numerics = "" if damage else self._without_fp8(batch, measured)
        if numerics and self.engine.fp8 is not None:
            self.engine.fp8.on = False  # what has failed is no measure of samples and states
        left_out = self._selection()
        snapshot = self._restore(finding.onset, 1 if recurred and not numerics else 0, left_out)
        if snapshot is None:
            cause = Cause.HARDWARE if damage else Cause.NUMERICS if numerics else Cause.UNKNOWN
            why = "; ".join(filter(None, ["no snapshot is good", damage, numerics]))
            raise self._end(policy.leave(decision, why, cause), state, cause)
        saved, random_states, detector = snapshot.extra
        if unsteady and not damage and not attribution.alike(self._again(batch), self._again(batch)):
            damage = UNSTEADY  # on a good state, too: there is nothing that would magnify the last bits
        if damage:
            conclusion = Conclusion(Cause.HARDWARE, [], [], damage)
        elif numerics:
            conclusion = Conclusion(Cause.NUMERICS, [], [], numerics)
        else:
            conclusion = self._examine(window, snapshot, left_out, recurred)
        culprit = self._culprit(conclusion)
        may_swap = culprit is not None and left_out.share_without(culprit) >= 1 - c.swap_most
        action, reason = policy.remedy(conclusion.cause, saved.updates, culprit, may_swap)
        seconds = time.perf_counter() - begin
        lost = state.step - snapshot.step
        swap = culprit if action is Action.SWAP_CORPUS else None
        self.casebook.attribute(conclusion, window, action, reason, lost, seconds, swap)
        if action.ends:
            raise self._end(replace(decision, action=action, reason=reason), state, conclusion.cause)
        back: RunState = saved.model_copy(deep=True)
        back.seconds = state.seconds
        self.indicators = {}  # of the state that is undone
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

    def _replay(self, batch: Step, measured: Measured, state: RunState, verdict: Verdict) -> tuple[bool, str]:
        """The step that tripped, again, on the state that it was refused on: whether every run of it differs, and what
        that proves of the hardware: a sentence, or nothing yet, as a bad state may magnify the last bits."""
        if verdict is Verdict.NON_FINITE and self._irreproducible != state.step:
            return False, ""
        found = attribution.replay(_result(measured), self._again(batch), lambda: self._again(batch))
        if found is Replay.OTHER:
            return False, "the same data on the same state gave other numbers: hardware, or a race"
        unsteady = found is Replay.UNSTEADY
        proven = unsteady and exact(self.config.run.deterministic, self.engine.device)
        return unsteady, UNSTEADY if proven else ""

    def _again(self, batch: Step) -> Result:
        return _result(self.engine.measure(batch.micro_batches))

    def _without_fp8(self, batch: Step, measured: Measured) -> str:
        """The very step that tripped, on the state that it was refused on, but not in FP8: a sentence if that is
        harmless. Not asked where FP8 is off, or not to be left any more."""
        engine, fp8 = self.engine, self.engine.fp8
        if fp8 is None or not measured.fp8 or not self.guard.policy.may_fall_back:
            return ""
        counters = engine.counters()
        fp8.on = False
        try:
            other = engine.measure(batch.micro_batches)
        finally:
            fp8.on = True
            engine.restore_counters(counters)  # magnitudes of the last steps, which switching forgets
        expected = Detector(self.settings.detector, self._before).expected()
        with_fp8, without = ((m.loss, math.log(max(m.grad_norm, 1e-30))) for m in (measured, other))
        if not attribution.gone(with_fp8, without, expected):
            return ""
        return (
            f"the same step without FP8 is harmless: a loss of {other.loss:.4g} in place of {measured.loss:.4g}, a "
            f"gradient norm of {other.grad_norm:.3g} in place of {measured.grad_norm:.3g}"
        )

    def _culprit(self, found: Conclusion) -> str | None:
        """The corpus that most of the guilty samples come from."""
        if not found.guilty:
            return None
        corpora = self.source.order.locate(np.array(found.guilty)).corpus
        return self.source.order.corpora[int(np.bincount(corpora).argmax())].name

    def _restore(self, onset: int, older: int, left_out: Selection) -> Snapshot | None:
        """Put the engine back to the newest snapshot before `onset` that is still good."""
        while (snapshot := self.ring.before(onset, older)) is not None:
            self.ring.restore(snapshot)
            self.engine.refresh_weights()
            recorded, now = self._reference(snapshot, left_out)
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

    def _reference(self, snapshot: Snapshot, left_out: Selection) -> tuple[Floats, Floats]:
        """Of harmless samples of before a snapshot: losses when they were trained on, losses on its state.

        Right after a start the former are not known, and empty.
        """
        assert self.laboratory is not None
        count, saved = self.settings.attribution.reference, snapshot.extra[0]
        before = [t for t in self._trained if t.step <= snapshot.step and t.applied]
        positions, recorded = harmless(before, left_out)
        positions, recorded = positions[-count:], recorded[-count:]
        if not positions.size:
            latest, _ = left_out.next_kept(max(0, saved.cursor - count), count)
            positions = latest[latest < saved.cursor]
        return recorded, self.laboratory.losses(positions)

    def _examine(
        self, window: list[Trained], snapshot: Snapshot, left_out: Selection, recurred: bool
    ) -> Conclusion:
        assert self.laboratory is not None
        history = [t for t in self._trained if t.applied and t.step <= snapshot.step]
        return self.laboratory.examine(window, history, snapshot.extra[0].cursor, left_out, recurred)

    def _selection(self) -> Selection:
        found, odd = self.skipping.usable(self.source.order)
        for problem in odd:
            self.note("skips_refused", problem=problem)
        return found

    def _forget(self, step: int) -> None:
        """The samples of the steps that are undone."""
        while self._trained and self._trained[-1].step > step:
            self._trained.pop()

    def finish(self, state: RunState) -> None:
        """At the end of the run: an incident that nothing came after is over."""
        last = self.decision.finding if self.decision is not None else None
        calm = last is not None and last.verdict is Verdict.HEALTHY and last.on_trend
        seen = self.guard.policy.state.good >= self.settings.policy.verify_steps // 6
        self.casebook.close(state, "healed" if calm and seen else "open")
        state.stability = self.memory()  # the summary tells of it

    def _end(self, decision: Decision, state: RunState, cause: Cause) -> MegastableError:
        """What ends this process; all that a restart needs is written down. The window is skipped if the cause is not
        known: its data may be guilty."""
        onset, unknown = decision.finding.onset, cause is Cause.UNKNOWN
        if self.casebook.incident is not None and not unknown:
            self.casebook.incident.cause = cause
        if decision.action is Action.HANDOVER and not self._can_go_back(onset):
            why = f"no checkpoint in {self.run.checkpoints} is from before step {onset}"
            decision = replace(decision, action=Action.STOP, reason=f"{decision.reason}; {why}")
            self.guard.policy.cannot_hand_over()
        number = self.casebook.give_up(decision, state, self._since(onset), skip=unknown).number
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
                f"{where}A person is needed: look at {self.run.journal}; lower optimizer.lr, look at the data, or "
                "raise the budgets of stability.policy"
            )
        )

    def _can_go_back(self, onset: int) -> bool:
        """Whether a restart finds a checkpoint of before `onset`; or none at all: then little has been done yet."""
        self.settle_saves()
        steps = first(lambda: [store.step_of(path) for path in store.newest_first(self.run.checkpoints)])
        return not steps or min(steps) < onset

    def _since(self, onset: int) -> list[Trained]:
        return [t for t in self._trained if t.step >= onset]


def _result(measured: Measured) -> Result:
    return Result(measured.losses.numpy(), measured.grad_norm)
