"""Executes the guard's decision: discard, rewind, skip, cut the learning rate.

In memory, without a restart: refuse an update, rewind to a snapshot, find the guilty samples, skip them, go on, and
prove that it helped. Every decision is journaled with its reason. All methods are collective: every rank decides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megastable.attribution.sample_replay import Trained
from megastable.base.collectives import first
from megastable.base.errors import MegastableError
from megastable.checkpoint.origin import CAUSES, Origin
from megastable.checkpoint.store import RunState
from megastable.data.loader import MicroBatch, Step
from megastable.engine import nan_locator
from megastable.engine.measured import Judge, Measured
from megastable.hardware.gradient_watch import Suspicion
from megastable.hardware.hardware_fault import HardwareFault
from megastable.hardware.hardware_watch import HardwareWatch
from megastable.recovery.damage_watch import EVERY, ProbeWatch, TensorWatch
from megastable.recovery.incident_log import IncidentLog
from megastable.recovery.last_resort import LastResort
from megastable.recovery.persisted_state import TELLING, PersistedState, recall
from megastable.recovery.replays import NumericsChoice, Replays
from megastable.recovery.rewind_points import Points
from megastable.recovery.rewinding import Rewinding, Tripped
from megastable.recovery.run_parts import RunParts, StepResult
from megastable.recovery.sample_watch import SampleWatch
from megastable.recovery.watches import Watches
from megastable.run.events.stability_events import (
    BaselineReset,
    HostFaulty,
    Located,
    RateLifted,
    Would,
)
from megastable.run.events.training_events import Warned
from megastable.warnings.noise_scale import NoiseScaleWatch
from megastable.warnings.signs import StartSigns
from megastable.warnings.trends import TrendWatch
from megastable_guard.actions import Action, Cause, Decision
from megastable_guard.guard import Guard
from megastable_guard.signals import Finding, Signals, Verdict

EVALUATED = "data.validation", "train.eval_samples"  # keys that say which samples are evaluated


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step: where the run stands, and whether that is an earlier state than the step led to. repeated:
    the update was refused, and the same step follows, from the state that it began with."""

    state: RunState
    rewound: bool = False
    repeated: bool = False


class Recovery:
    """The stability system of one training process, which resumes from `state`.

    settle: waits until no checkpoint is in progress, so that existing ones can be counted; changed: see `Origin`;
    held_out: this rank's validation samples; sets: see `ProbeWatch`.
    """

    def __init__(
        self,
        parts: RunParts,
        state: RunState,
        settle: Callable[[], None] = lambda: None,
        changed: Sequence[str] = (),
        held_out: Sequence[MicroBatch] = (),
        sets: int = 1,
    ) -> None:
        self.parts, self.config, self.settings = parts, parts.config, parts.config.stability
        self.engine, self.loader, self.run, self.log = parts.engine, parts.loader, parts.run, parts.log
        self.acts = parts.acts
        self.decision: Decision | None = None
        self._mixed = False  # whether the next step is the first of another data mix
        self._scheduled: float | None = None  # rate of the coming update, before cuts and caps
        self._located = ""  # result of replaying this step, refused as it is not finite
        c, events = self.settings, parts.run.events
        memory = first(lambda: recall(state.stability, events(*TELLING), c.dry_run))
        self.guard = Guard(c, memory.guard, c.dry_run, parts.engine.fp8 is not None)
        self.guard.policy.resumed(state.step, state.updates)
        self.numerics = NumericsChoice(parts, self.guard)
        self._before = self.guard.detector.state
        self.replays = Replays(parts.engine, self.config.run.deterministic)
        trends = TrendWatch(self.config, parts.engine, parts.log)
        self.incident_log = IncidentLog(parts, self.guard, lambda: trends.standing)
        self.incident_log.restore(memory.incident, memory.incidents, state, memory.left_out)
        self.watches = Watches(
            HardwareWatch(
                self.config, parts.engine, parts.loader, state.step, parts.run, parts.log, parts.phase
            ),
            SampleWatch(parts, self.incident_log),
            trends,
            StartSigns(self.config, parts.source, parts.log),
            ProbeWatch(parts.engine, parts.loader, held_out, parts.log, sets),
            TensorWatch(parts.engine),
            NoiseScaleWatch(self.config, parts.engine, parts.log),
        )
        self.hardware, self.samples = self.watches.hardware, self.watches.samples
        self.watches.load_state_dicts(state.stability)
        if any(change.startswith(EVALUATED) for change in changed):
            trends.state.evaluations = []  # of other samples
        schedule = self.config.schedule
        # The steps are a cause, too, if the schedule follows them.
        follows = schedule.total_steps is None and schedule.total_tokens is None
        if any(change.startswith((*CAUSES, *["train.steps"] * follows)) for change in changed):
            self._train_otherwise(state.step)
        origin = Origin(parts.run, self.config, state, changed, parts.log)
        self.points = Points(parts, origin, self.hardware.state.current, memory.rate)
        self.last_resort = LastResort(parts, self.guard, self.incident_log, self.points, settle)
        self.rewinding = Rewinding(
            parts, self.guard, self.points, self.replays, self.incident_log, self.last_resort, self.watches
        )
        if self.acts:
            self._take(state)
        self.numerics.choose(state)

    def memory(self) -> dict[str, Any]:
        """For the checkpoint."""
        book = self.incident_log
        memory = PersistedState(
            guard=self.guard.state,
            incident=book.incident,
            incidents=book.count,
            rate=self.points.newest_rate,
            left_out=book.left_out,
        )
        return memory.model_dump() | self.watches.state_dicts()

    @property
    def calm(self) -> bool:
        """Whether the last step was on trend, with no incident open."""
        if self.decision is None:
            return True
        found = self.decision.finding
        return found.verdict is Verdict.HEALTHY and found.on_trend and self.incident_log.incident is None

    # Before a step

    def begin(self, state: RunState, other_data: bool, other_settings: Collection[str]) -> None:
        """Prepare the step after `state`. other_data: its data is of another mix or length on purpose: the detector
        accepts a new level of the loss as its effect. Also while an incident is open, whose proof is then judged by the
        new level. other_settings: keys that a person has changed: trends and tensors get another pace."""
        if other_data:
            self._mixed = True
            self.watches.trends.begin_again()
        if other_settings:
            self.watches.signs.leave_rates(other_settings)
            self._train_otherwise(state.step)
        self.numerics.choose(state)

    def _train_otherwise(self, step: int) -> None:
        """A person has changed how the steps after `step` are trained: what follows at once is the effect of that."""
        self.watches.trends.begin_again()
        for watch in (self.watches.tensors, self.watches.probe):
            watch.state.begin_again()
            watch.state.pause.hold(step)

    # Before the update

    def gate(self, state: RunState, lr: float) -> Judge:
        """The judge of the step after `state`, at a learning rate."""
        return lambda measured: self.judge(measured, state.step + 1, lr)

    def judge(self, measured: Measured, step: int, lr: float) -> bool:
        """The gate: whether the update may be applied."""
        self.decision, self._located = None, ""
        hardware = self.hardware
        hardware.judge(measured, step)
        if hardware.suspicion is not None and self.settings.dry_run:
            self.log.emit(Would(step=step, action="repeat", reason=hardware.suspicion.reason), say=True)
        if measured.overflow:
            return False  # normal in fp16: the loss scale is reduced
        if not self.settings.enabled:
            return measured.finite
        if self.acts and hardware.reason:
            return False
        signals = Signals(step, measured.loss, measured.grad_norm, lr, self._mixed)
        self._mixed = False
        oldest = 0 if self.settings.dry_run else self.points.oldest
        self._before = self.guard.detector.state
        self.decision = self.guard.judge(signals, oldest)
        return measured.finite if self.settings.dry_run else self.decision.applies

    def rate(self, updates: int, scheduled: float) -> float:
        """The learning rate of the update after `updates` applied ones, where the schedule says `scheduled`: less after
        a cut or under a cap."""
        self._scheduled = scheduled
        self.guard.policy.follow(scheduled)
        return self.guard.policy.rate(updates, scheduled) if self.acts else scheduled

    def refusal(self, measured: Measured) -> tuple[str, str]:
        """Why the last update was refused: a verdict, and its reason."""
        if self.decision is not None:
            return self.decision.finding.verdict, self.decision.reason
        if measured.overflow:
            return "overflow", "beyond the range of fp16: the loss scale is lowered"
        if self.acts and self.hardware.reason:
            return Verdict.CORRUPTED, self.hardware.reason
        return Verdict.NON_FINITE, f"loss {measured.loss}, gradient norm {measured.grad_norm}"

    # After the step

    def settle(self, done: StepResult) -> StepOutcome:
        """Execute the decision about a step. If the run is not rewound, suspected samples are examined. Raises
        HandoverError and UnstableError."""
        batch, measured, step = done.batch, done.measured, done.state.step
        losses = measured.losses.numpy()
        self.points.trained.append(Trained(step, batch.positions, losses, done.applied, self._scheduled))
        if done.applied:
            self.watches.after_update(measured, step, done.lr)
        if self.acts and (fault := self.hardware.memory) is not None:
            return self._undo(done, fault)
        if self.acts and (suspicion := self.hardware.suspicion) is not None:
            return self._repeat(done, suspicion)
        if not measured.overflow:
            self.samples.observe(batch, measured, done.applied, step)
        back = self._carry_out(done)
        if back is None and self.acts and self.decision is not None:
            back = self._look_at_samples(self.decision, done)
        if back is None and self.acts and done.applied:
            back = self._look_at_tensors(done) or self._look_at_probe(done)
        if back is not None:
            return StepOutcome(back, rewound=True)
        return StepOutcome(done.state)

    def inspect(self, done: StepResult, saves: bool) -> StepOutcome:
        """After a step: at an interval whether the hardware computes right, and, if the state is to be saved, whether
        memory is whole. Else as `settle`."""
        step = done.state.step
        fault = self.hardware.replay(done.batch, step)
        if fault is None or not fault.lasting:
            fault = self.hardware.verify(step) if saves else None
        return StepOutcome(done.state) if fault is None or not self.acts else self._undo(done, fault)

    def _accuse(self, done: StepResult, fault: HardwareFault) -> MegastableError:
        """The end of this process, as a chip would go on lying: the next one does without its host."""
        state, policy = done.state, self.guard.policy
        self.log.emit(
            HostFaulty(step=state.step, hosts=list(fault.hosts), ranks=list(fault.ranks), reason=fault.reason)
        )
        onset = self._onset(fault, state.step)
        finding = Finding(state.step, Verdict.CORRUPTED, 1.0, onset, fault.reason, on_trend=False)
        decision = policy.hand_over(finding, fault.reason, True, Cause.HARDWARE)
        self.incident_log.open(decision, state, self.points.since(finding.onset), done.measured.grad_norm)
        return self.last_resort.end(self.last_resort.weigh(decision, damaged=True), state, Cause.HARDWARE)

    def _undo(self, done: StepResult, fault: HardwareFault, damaged: bool = True) -> StepOutcome:
        """Back to a state from before it. damaged: as in `rescue`."""
        if fault.excludes_host:
            raise self._accuse(done, fault)
        onset = self._onset(fault, done.state.step)
        return self.rescue(done, fault.reason, Verdict.CORRUPTED, onset, damaged)

    def _onset(self, fault: HardwareFault, step: int) -> int:
        """The first step that is not trusted. If nothing is left from before it, the newest state is better than none:
        every result of late may be wrong, but none is known to be."""
        wanted, oldest = fault.after + 1, self.points.oldest
        kept = oldest is not None and oldest < wanted
        return wanted if kept or self.last_resort.can_go_back(wanted, damaged=True) else step

    def _repeat(self, done: StepResult, suspicion: Suspicion) -> StepOutcome:
        """Do a step again whose gradients were doubted, on the state before it: if hardware lied, as an incident."""
        self.parts.phase("repeat")
        before, counters = done.before, self.engine.counters_before
        fault = self.hardware.prove(suspicion, done.batch, done.state.step)
        if fault is not None and fault.excludes_host:
            raise self._accuse(done, fault)
        # Without snapshots, one fault that has passed is no reason to leave a state that it did not touch.
        if fault is not None and (self.points.ring.capacity or self.hardware.lasts):
            if self.points.ring.capacity:  # nothing else needs to be repeated
                self.points.take(before, self.guard.detector.state, self.watches.state_dicts(), counters)
            return self._undo(done, fault, damaged=not self.points.ring.capacity)
        self.watches.repeated(before.step)
        self.engine.restore_counters(counters)
        back = before.model_copy(update={"seconds": done.state.seconds})
        self.loader.go_to(back.cursor, self.loader.skips)
        self.points.forget_after(back.step)
        return StepOutcome(back, repeated=True)

    def _look_at_samples(self, decision: Decision, done: StepResult) -> RunState | None:
        """Note the samples of a refused update, examine suspected ones; the new state if the run is rewound for it."""
        state = done.state
        if decision.action is Action.DISCARD and self.replays.finite_again != state.step:
            self.samples.refused(done.batch, done.measured, state.step, decision, self._located)
        incident = self.incident_log.incident
        clear = incident is None and not self.guard.policy.state.watching
        # Trouble while another cause is handled, or unknown, is its consequence.
        alone = clear or (incident is not None and incident.cause is Cause.DATA)
        may_look = alone and self.points.may_look
        case = self.samples.lifted(self.guard.policy, state.step, self.points.oldest) if may_look else None
        if case is not None:
            back = self.rewinding.look_back(case, done.measured, state)
            if back is not None:
                return back
        quiet, points = clear and done.applied and self.calm, self.points
        choose_skips = self.rewinding.choose_skips
        for found in self.samples.act(state, points.trained, points.laboratory, quiet, choose_skips):
            self.guard.policy.skipped(found.convicted, found.proven)
        return None

    def _look_at_tensors(self, done: StepResult) -> RunState | None:
        """Once in a while, whether a tensor has jumped; the new state if the run is rewound for it."""
        state, policy, tensors = done.state, self.guard.policy, self.watches.tensors
        if state.step % EVERY or (jump := tensors.look(state)) is None:
            return None
        if policy.may_look_back(state.step, jump.before + 1, self.points.oldest) and self.points.may_look:
            return self.rewinding.undo_jump(jump, done)
        self._train_on(jump.reason, state)
        tensors.accept()
        return None

    def _look_at_probe(self, done: StepResult) -> RunState | None:
        """At every snapshot, and once in a while, whether the model is worse on samples that it is not trained on; the
        new state if the run is rewound for it."""
        state, policy = done.state, self.guard.policy
        due = not state.step % EVERY or state.step in self.points.ring.steps[-1:]
        if not due or policy.is_waiting(state.step):
            return None
        rise = self.watches.probe.look(state.step)
        if rise is None:
            return None
        allowed = policy.may_look_back(state.step, rise.before + 1, self.points.oldest)
        if not allowed or not self.rewinding.trials.may_try(state):
            self._train_on(rise.reason, state)
            self.watches.probe.accept(state.step)
            return None
        finding = Finding(state.step, Verdict.DAMAGE, 1.0, rise.before + 1, rise.reason, on_trend=False)
        return self._rewind(policy.undo(finding, rise.reason), done, "")

    def _train_on(self, reason: str, state: RunState) -> None:
        text = f"{reason}; the run may not be rewound for it, and trains on"
        self.log.emit(Warned(step=state.step, text=text), say=f"WARNING: {text}")

    def _carry_out(self, done: StepResult) -> RunState | None:
        """Do what was decided about a step; the new state, if the run is rewound."""
        if self.decision is None:
            return None
        state = done.state
        decision, damage = self._escalate_damage(self.decision, done)
        if self.settings.dry_run:
            if decision.action is not Action.APPLY:
                self.log.emit(
                    Would(step=state.step, action=decision.action, reason=decision.reason), say=True
                )
            return None
        if decision.finding.reset:
            reason = decision.finding.reason
            self.log.emit(BaselineReset(step=state.step, reason=reason), say=f"step {state.step}: {reason}")
        if decision.healed:
            self.incident_log.close(state, "healed")
        if decision.action is Action.DISCARD and not damage:
            tripped = Tripped(decision, done, self._before, damage)
            back = self.rewinding.leave_kernels(tripped, lambda: self._take_before(done))
            if back is not None:
                return back
        if decision.action.rewinds:
            back = self._rewind(decision, done, damage)
            # What follows is judged otherwise than before: a rewind must not undo that.
            if back is None and not self.guard.policy.is_waiting(state.step):
                self._take(state)
            return back
        if decision.action is Action.APPLY or decision.action is Action.DISCARD:
            self._train_further(decision, done)
        else:
            self._conclude(decision, done, damage)
        return None

    def _escalate_damage(self, decision: Decision, done: StepResult) -> tuple[Decision, str]:
        """The decision, where a step was not finite because the state already was not; and how that is known."""
        if decision.finding.verdict is not Verdict.NON_FINITE or done.applied:
            return decision, ""
        damage = self._locate(done.batch, done.state)
        if damage and not decision.action.ends and not decision.action.rewinds and self.acts:
            decision = self.guard.policy.escalate(decision.finding, damage, self.points.oldest, True)
        return decision, damage

    def _conclude(self, decision: Decision, done: StepResult, damage: str) -> None:
        """Hand over, alert or stop. Raises HandoverError and UnstableError."""
        state, finding = done.state, decision.finding
        self.incident_log.open(decision, state, self.points.since(finding.onset), done.measured.grad_norm)
        found = ""
        if not (damage or done.applied):  # an applied update has changed the state
            _, found = self.replays.compare(done.batch, done.measured, state.step, finding.verdict)
            decision = replace(decision, reason="; ".join(filter(None, [decision.reason, found])))
        cause = Cause.HARDWARE if damage or found else Cause.UNKNOWN
        self.last_resort.conclude(decision, state, cause, damaged=bool(damage))

    def _train_further(self, decision: Decision, done: StepResult) -> None:
        """After a step that was applied or refused, and no more: lift limits, and keep a snapshot if one is due."""
        state, finding = done.state, decision.finding
        self.last_resort.tell_alert(state)
        if done.applied and self._scheduled is not None:
            for reason in self.guard.policy.relax(finding, state.updates, self._scheduled):
                self.log.emit(RateLifted(step=state.step, reason=reason), say=True)
        if self.guard.policy.is_waiting(state.step):
            return  # the snapshots from before it must survive the wait
        first_refused = decision.action is Action.DISCARD and not done.before.discards_in_a_row
        if first_refused and self.points.ring.capacity > 1:
            # The weights are those before it: should more follow, nothing needs to be repeated. (A step draws no random
            # numbers, so the random states are those before it, too.)
            self._take_before(done)
            return
        healthy = done.applied and finding.verdict is Verdict.HEALTHY
        if healthy and self.points.ring.due(state.step, urgent=not finding.on_trend):
            self._take(state)

    def _take(self, state: RunState) -> None:
        """Keep a snapshot."""
        self.points.take(state, self.guard.detector.state, self.watches.state_dicts())

    def _take_before(self, done: StepResult) -> None:
        """Keep a snapshot of the state before a step whose update was refused."""
        watches = self.watches.state_dicts() | {self.samples.name: self.samples.before}
        self.points.take(done.before, self._before, watches, self.engine.counters_before)

    def rescue(
        self,
        done: StepResult,
        damage: str,
        verdict: Verdict = Verdict.NON_FINITE,
        onset: int | None = None,
        damaged: bool = True,
    ) -> StepOutcome:
        """Rewind because the state itself is damaged, since the step `onset` (default: the last one); or, not damaged,
        because hardware was wrong in an update that was refused: with the rewinds spent the run goes on, and refuses.
        Raises HandoverError and UnstableError."""
        state = done.state
        onset = state.step if onset is None else onset
        finding = Finding(state.step, verdict, 1.0, onset, damage, on_trend=False)
        decision = self.guard.policy.escalate(finding, damage, self.points.oldest, damaged)
        if decision.action.rewinds:
            back = self._rewind(decision, done, damage)
            assert back is not None, "only what the detector suspects is tried"
            return StepOutcome(back, rewound=True)
        self.incident_log.open(decision, state, self.points.since(onset), done.measured.grad_norm)
        self.last_resort.conclude(decision, state, Cause.HARDWARE, damaged)
        assert not damaged, "nothing is left but to end"
        return StepOutcome(done.state)

    def _locate(self, batch: Step, state: RunState) -> str:
        """The origin of the first non-finite number; not empty if the state already had it."""
        self.parts.phase("locate")
        found = nan_locator.locate(self.engine, batch.micro_batches)
        self._located = found.sentence
        self.log.emit(Located(step=state.step, **asdict(found)), say=True)
        self.replays.finite_again = state.step if not found.reproduced else None
        return found.sentence if found.kind == "state" else ""

    def _rewind(self, decision: Decision, done: StepResult, damage: str) -> RunState | None:
        return self.rewinding.go_back(Tripped(decision, done, self._before, damage))

    def finish(self, state: RunState) -> None:
        """At the end of the run: an incident that nothing followed is closed."""
        last = self.decision.finding if self.decision is not None else None
        calm = last is not None and last.verdict is Verdict.HEALTHY and last.on_trend
        seen = self.guard.policy.state.good >= self.settings.policy.verify_steps // 6
        self.incident_log.close(state, "healed" if calm and seen else "open")
        state.stability = self.memory()  # the summary reports it
