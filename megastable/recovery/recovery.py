"""Executes the guard's decision: discard, rewind, skip, cut the learning rate.

In memory, without a restart: refuse an update, rewind to a snapshot, find the bad samples, skip them, go on, and
prove that it helped. Every decision is journaled with its reason. All methods are collective: every rank decides alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from megastable.attribution.sample_replay import Trained
from megastable.base.collectives import run_on_first
from megastable.base.errors import MegastableError
from megastable.checkpoint import store
from megastable.checkpoint.origin import CAUSES, Origin
from megastable.checkpoint.store import RunState
from megastable.data.loader import MicroBatch, Step
from megastable.engine import locators
from megastable.engine.measured import Judge, Measured
from megastable.hardware.gradient_watch import Suspicion
from megastable.hardware.hardware_fault import HardwareFault
from megastable.hardware.hardware_watch import HardwareWatch
from megastable.recovery.incident_log import IncidentLog
from megastable.recovery.replays import NumericsChoice, Replays
from megastable.recovery.rewind_points import LastResort, Points
from megastable.recovery.rewinding import Rewinding, Tripped
from megastable.recovery.run_parts import RunParts, StepResult
from megastable.recovery.watches import EVERY, ProbeWatch, SampleWatch, TensorWatch, Watches
from megastable.run.events.event import Event
from megastable.run.events.stability_events import (
    AlertEvent,
    BaselineReset,
    Handover,
    HostFaulty,
    IncidentEvent,
    Located,
    RateLifted,
    Would,
)
from megastable.run.events.training_events import Unstable, Warned
from megastable.warnings.noise_scale import NoiseScaleWatch
from megastable.warnings.routing import RoutingWatch
from megastable.warnings.signs import StartSigns
from megastable.warnings.trends import TrendWatch
from megastable_guard.actions import Action, Cause, Decision, Finding, Signals, Verdict
from megastable_guard.incident import Incident, LeftOutSamples
from megastable_guard.policy_state import PolicyState
from megastable_guard.step_judge import GuardState, StepJudge

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
        self, parts: RunParts, state: RunState, settle: Callable[[], None] = lambda: None,
        changed: Sequence[str] = (), held_out: Sequence[MicroBatch] = (), sets: int = 1,
    ) -> None:  # fmt: skip
        self.parts, self.config, self.settings = parts, parts.config, parts.config.stability
        self.engine, self.loader, self.run, self.log = parts.engine, parts.loader, parts.run, parts.log
        self.acts = parts.acts
        self.decision: Decision | None = None
        self._mixed = False  # whether the next step is the first of another data mix
        self._scheduled: float | None = None  # rate of the coming update, before cuts and caps
        self._located = ""  # result of replaying this step, refused as it is not finite
        c, read_events = self.settings, parts.run.iterate_events
        memory = run_on_first(lambda: recall_state(state.stability, read_events(*TELLING), c.dry_run))
        self.guard = StepJudge(c, memory.guard, c.dry_run, parts.engine.fp8 is not None)
        self.guard.policy.resume_from(state.step, state.updates)
        self.numerics = NumericsChoice(parts, self.guard)
        # What begins or ends with them in the state must not look like a fault of the memory.
        parts.engine.adjustments.switch_to(self.guard.policy.state.adjusted)
        self._before = self.guard.detector.state
        self.replays = Replays(parts.engine, self.config.run.deterministic)
        trend_watch = TrendWatch(self.config, parts.engine, parts.log)
        routing_watch = RoutingWatch(self.config, parts.engine, parts.log)
        self.incident_log = IncidentLog(
            parts, self.guard, lambda: [*trend_watch.standing, *routing_watch.standing]
        )
        self.incident_log.restore_incident(memory.incident, memory.incidents, state, memory.left_out)
        self.watches = Watches(
            HardwareWatch(
                self.config, parts.engine, parts.loader, state.step, parts.run, parts.log, parts.phase
            ),
            SampleWatch(parts, self.incident_log),
            trend_watch,
            routing_watch,
            StartSigns(self.config, parts.source, parts.log),
            ProbeWatch(parts.engine, parts.loader, held_out, parts.log, sets),
            TensorWatch(parts.engine),
            NoiseScaleWatch(self.config, parts.engine, parts.log),
        )
        self.hardware, self.samples = self.watches.hardware, self.watches.samples
        self.watches.load_state_dicts(state.stability)
        if any(changed_key.startswith(EVALUATED) for changed_key in changed):
            trend_watch.state.evaluations = []  # of other samples
        schedule = self.config.schedule
        # The steps are a cause, too, if the schedule follows them.
        follows = schedule.total_steps is None and schedule.total_tokens is None
        if any(changed_key.startswith((*CAUSES, *["train.steps"] * follows)) for changed_key in changed):
            self._train_otherwise(state.step)
        resume_origin = Origin(parts.run, self.config, state, changed, parts.log)
        self.points = Points(parts, resume_origin, self.hardware.state.current_marks, memory.rate)
        self.last_resort = LastResort(parts, self.guard, self.incident_log, self.points, settle)
        self.rewinding = Rewinding(
            parts, self.guard, self.points, self.replays, self.incident_log, self.last_resort, self.watches
        )
        if self.acts:
            self._take(state)
        self.numerics.choose_numerics(state)

    def dump_state(self) -> dict[str, Any]:
        log = self.incident_log
        persisted_state = PersistedState(
            guard=self.guard.state, incident=log.incident, incidents=log.count, rate=self.points.newest_rate,
            left_out=log.left_out,
        )  # fmt: skip
        return persisted_state.model_dump() | self.watches.state_dicts()

    @property
    def on_trend(self) -> bool:
        """Whether the last step was on trend, with no incident open."""
        if self.decision is None:
            return True
        found = self.decision.finding
        return found.verdict is Verdict.HEALTHY and found.on_trend and self.incident_log.incident is None

    # Before a step

    def prepare_step(self, state: RunState, other_data: bool, other_settings: Collection[str]) -> None:
        """Prepare the step after `state`. other_data: its data is of another mix or length on purpose: the detector
        accepts a new level of the loss as its effect. Also while an incident is open, whose proof is then judged by the
        new level. other_settings: keys that a person has changed: trends and tensors get another pace."""
        if other_data:
            self._mixed = True
            self.watches.trends.begin_again()
            self.watches.routing.begin_again()
        if other_settings:
            self.watches.signs.leave_rates(other_settings)
            self._train_otherwise(state.step)
        self.numerics.choose_numerics(state)

    def _train_otherwise(self, step: int) -> None:
        """A person has changed how the steps after `step` are trained: what follows at once is the effect of that."""
        self.watches.trends.begin_again()
        self.watches.routing.begin_again()
        for watch in (self.watches.tensors, self.watches.probe):
            watch.state.begin_again()
            watch.state.pause.hold_until_settled(step)

    # Before the update

    def make_judge(self, state: RunState, lr: float) -> Judge:
        """The judge of the step after `state`, at a learning rate."""
        return lambda measured: self.judge_update(measured, state.step + 1, lr)

    def judge_update(self, measured: Measured, step: int, lr: float) -> bool:
        """The gate: whether the update may be applied."""
        self.decision, self._located = None, ""
        hardware = self.hardware
        # Hardware is judged first, and what it did is kept from the guard: numbers that memory, a link or a chip has
        # changed say nothing about data or learning rate, and the detector must not learn from them.
        hardware.judge_step(measured, step)
        if hardware.suspicion is not None and self.settings.dry_run:
            self.log.emit_event(Would(step=step, action="repeat", reason=hardware.suspicion.reason), say=True)
        if measured.overflow:
            return False  # normal in fp16: the loss scale is reduced
        if not self.settings.enabled:
            return measured.finite
        if self.acts and hardware.reason:
            return False
        signals = Signals(step, measured.loss, measured.grad_norm, lr, self._mixed)
        self._mixed = False
        # All ranks have the same sums, and the guard is pure: so all decide alike without a word to each other. A dry
        # run asks as if there were a snapshot of every step, and lets the update pass whatever the answer is.
        oldest_snapshot = 0 if self.settings.dry_run else self.points.oldest
        self._before = self.guard.detector.state
        self.decision = self.guard.judge_step(signals, oldest_snapshot)
        return measured.finite if self.settings.dry_run else self.decision.applies

    def limit_rate(self, updates: int, scheduled: float) -> float:
        """The learning rate of the update after `updates` applied ones, where the schedule says `scheduled`: less after
        a cut or under a cap."""
        self._scheduled = scheduled
        self.guard.policy.follow_schedule(scheduled)
        return self.guard.policy.limit_rate(updates, scheduled) if self.acts else scheduled

    def explain_refusal(self, measured: Measured) -> tuple[str, str]:
        """Why the last update was refused: a verdict, and its reason."""
        if self.decision is not None:
            return self.decision.finding.verdict, self.decision.reason
        if measured.overflow:
            return "overflow", "beyond the range of fp16: the loss scale is lowered"
        if self.acts and self.hardware.reason:
            return Verdict.CORRUPTED, self.hardware.reason
        return Verdict.NON_FINITE, f"loss {measured.loss}, gradient norm {measured.grad_norm}"

    # After the step

    def carry_out_decision(self, done: StepResult) -> StepOutcome:
        """Execute the decision about a step. If the run is not rewound, suspected samples are examined. Raises
        HandoverError and UnstableError."""
        step_batch, measured, step = done.batch, done.measured, done.state.step
        losses = measured.losses.numpy()
        self.points.trained.append(Trained(step, step_batch.positions, losses, done.applied, self._scheduled))
        if done.applied:
            self.watches.after_update(measured, step, done.lr)
        if self.acts and (memory_fault := self.hardware.memory) is not None:
            return self._undo(done, memory_fault)
        if self.acts and (suspicion := self.hardware.suspicion) is not None:
            return self._repeat(done, suspicion)
        if not measured.overflow:
            self.samples.observe_batch(step_batch, measured, done.applied, step)
        rewound_state = self._carry_out(done)
        if rewound_state is None and self.acts and self.decision is not None:
            rewound_state = self._look_at_samples(self.decision, done)
        if rewound_state is None and self.acts and done.applied:
            rewound_state = (
                self._look_at_routing(done) or self._look_at_tensors(done) or self._look_at_probe(done)
            )
        if rewound_state is not None:
            return StepOutcome(rewound_state, rewound=True)
        return StepOutcome(done.state)

    def inspect_hardware(self, done: StepResult, saves: bool) -> StepOutcome:
        """After a step: at an interval whether the hardware computes right, and, if the state is to be saved, whether
        memory is whole. Else as `carry_out_decision`."""
        step = done.state.step
        fault = self.hardware.replay_step(done.batch, step)
        if fault is None or not fault.lasting:
            fault = self.hardware.verify_state(step) if saves else None
        return StepOutcome(done.state) if fault is None or not self.acts else self._undo(done, fault)

    def _blame_hardware(self, done: StepResult, fault: HardwareFault) -> MegastableError:
        """The end of this process, as a chip would go on lying: the next one does without its host."""
        state, guard_policy = done.state, self.guard.policy
        hosts, ranks = list(fault.hosts), list(fault.ranks)
        self.log.emit_event(HostFaulty(step=state.step, hosts=hosts, ranks=ranks, reason=fault.reason))
        first_wrong = self._onset(fault, state.step)
        finding = Finding(state.step, Verdict.CORRUPTED, 1.0, first_wrong, fault.reason, on_trend=False)
        decision = guard_policy.hand_over(finding, fault.reason, True, Cause.HARDWARE)
        self._open_incident(decision, done)
        decision = self.last_resort.weigh_handover(decision, damaged=True)
        return self.last_resort.make_ending_error(decision, state, Cause.HARDWARE)

    def _open_incident(self, decision: Decision, done: StepResult) -> None:
        window = self.points.steps_since(decision.finding.onset)
        self.incident_log.open_incident(decision, done.state, window, done.measured.grad_norm)

    def _undo(self, done: StepResult, fault: HardwareFault, damaged: bool = True) -> StepOutcome:
        """Back to a state from before it. damaged: as in `rewind_damaged_state`."""
        if fault.excludes_host:
            raise self._blame_hardware(done, fault)
        first_wrong = self._onset(fault, done.state.step)
        return self.rewind_damaged_state(done, fault.reason, Verdict.CORRUPTED, first_wrong, damaged)

    def _onset(self, fault: HardwareFault, step: int) -> int:
        """The first step that is not trusted. If nothing is left from before it, the newest state is better than none:
        every result of late may be wrong, but none is known to be."""
        wanted, oldest_snapshot = fault.after + 1, self.points.oldest
        has_snapshot = oldest_snapshot is not None and oldest_snapshot < wanted
        return wanted if has_snapshot or self.last_resort.can_go_back(wanted, damaged=True) else step

    def _repeat(self, done: StepResult, suspicion: Suspicion) -> StepOutcome:
        """Do a step again whose gradients were doubted, on the state before it: if hardware lied, as an incident."""
        self.parts.phase("repeat")
        before, counters = done.before, self.engine.counters_before
        fault = self.hardware.prove_suspicion(suspicion, done.batch, done.state.step)
        if fault is not None and fault.excludes_host:
            raise self._blame_hardware(done, fault)
        # Without snapshots, one fault that has passed is no reason to leave a state that it did not touch.
        if fault is not None and (self.points.ring.capacity or self.hardware.lasts):
            if self.points.ring.capacity:  # nothing else needs to be repeated
                self.points.take_snapshot(
                    before, self.guard.detector.state, self.watches.state_dicts(), counters
                )
            return self._undo(done, fault, damaged=not self.points.ring.capacity)
        self.watches.repeat_step(before.step)
        self.engine.restore_counters(counters)
        repeated_state = before.model_copy(update={"seconds": done.state.seconds})
        self.loader.go_to(repeated_state.cursor, self.loader.skips)
        self.points.forget_after(repeated_state.step)
        return StepOutcome(repeated_state, repeated=True)

    def _look_at_samples(self, decision: Decision, done: StepResult) -> RunState | None:
        """Note the samples of a refused update, examine suspected ones; the new state if the run is rewound for it."""
        state = done.state
        if decision.action is Action.DISCARD and self.replays.finite_again != state.step:
            self.samples.note_refused(done.batch, done.measured, state.step, decision, self._located)
        incident = self.incident_log.incident
        is_clear = incident is None and not self.guard.policy.state.watching
        # Trouble while another cause is handled, or unknown, is its consequence.
        is_data_alone = is_clear or (incident is not None and incident.cause is Cause.DATA)
        policy, points, samples = self.guard.policy, self.points, self.samples
        if is_data_alone and points.may_look:
            case = samples.take_waiting_batches(policy, state.step, points.oldest)
            if case is not None and (rewound := self.rewinding.look_back(case, done.measured, state)):
                return rewound
        is_quiet, choose_skips = is_clear and done.applied and self.on_trend, self.rewinding.choose_skips
        for found in samples.examine_cases(state, points.trained, points.laboratory, is_quiet, choose_skips):
            policy.note_skipped(found.bad_positions, found.proven)
        return None

    def _look_at_routing(self, done: StepResult) -> RunState | None:
        """Whether a router has left its history, which was warned of; the new state if the run is rewound for it."""
        routing_watch, guard_policy = self.watches.routing, self.guard.policy
        newest_sign = routing_watch.newest
        if newest_sign is None or done.state.step < routing_watch.state.pause.end or not self.points.may_look:
            return None
        if guard_policy.is_waiting(done.state.step):
            return None
        if not guard_policy.may_look_back(done.state.step, newest_sign.since, self.points.oldest):
            return None
        return self.rewinding.undo_change(
            newest_sign, done, routing_watch.measure_routing, routing_watch.accept_sign, newest_sign.remedies
        )

    def _look_at_tensors(self, done: StepResult) -> RunState | None:
        """Once in a while, whether a tensor has jumped; the new state if the run is rewound for it."""
        run_state, policy, tensors = done.state, self.guard.policy, self.watches.tensors
        if run_state.step % EVERY or (jump := tensors.look_at_tensors(run_state)) is None:
            return None
        if policy.may_look_back(run_state.step, jump.before + 1, self.points.oldest) and self.points.may_look:
            return self.rewinding.undo_change(jump, done, tensors.measure_norms, tensors.accept_jump)
        self._train_on(jump.reason, run_state)
        tensors.accept_jump()
        return None

    def _look_at_probe(self, done: StepResult) -> RunState | None:
        """At every snapshot, and once in a while, whether the model is worse on samples that it is not trained on; the
        new state if the run is rewound for it."""
        state, guard_policy = done.state, self.guard.policy
        is_due = not state.step % EVERY or state.step in self.points.ring.steps[-1:]
        if not is_due or guard_policy.is_waiting(state.step):
            return None
        rise = self.watches.probe.look_at_probe(state.step)
        if rise is None:
            return None
        may_look_back = guard_policy.may_look_back(state.step, rise.before + 1, self.points.oldest)
        if not may_look_back or not self.rewinding.trials.may_try(state):
            self._train_on(rise.reason, state)
            self.watches.probe.accept_rise(state.step)
            return None
        rise_finding = Finding(state.step, Verdict.DAMAGE, 1.0, rise.before + 1, rise.reason, on_trend=False)
        return self._rewind(guard_policy.undo_steps(rise_finding, rise.reason), done, "")

    def _train_on(self, reason: str, state: RunState) -> None:
        warning_text = f"{reason}; the run may not be rewound for it, and trains on"
        self.log.emit_event(Warned(step=state.step, text=warning_text), say=f"WARNING: {warning_text}")

    def _carry_out(self, done: StepResult) -> RunState | None:
        """Do what was decided about a step; the new state, if the run is rewound."""
        if self.decision is None:
            return None
        state = done.state
        step_decision, damage_reason = self._escalate_damage(self.decision, done)
        if self.settings.dry_run:
            action, reason = step_decision.action, step_decision.reason
            if action is not Action.APPLY:
                self.log.emit_event(Would(step=state.step, action=action, reason=reason), say=True)
            return None
        if step_decision.finding.reset:
            reason, step = step_decision.finding.reason, state.step
            self.log.emit_event(BaselineReset(step=step, reason=reason), say=f"step {step}: {reason}")
        if step_decision.healed:
            self.incident_log.close_incident(state, "healed")
        if step_decision.action is Action.DISCARD and not damage_reason:
            tripped_step = Tripped(step_decision, done, self._before, damage_reason)
            rewound_state = self.rewinding.leave_kernels(tripped_step, lambda: self._take_before(done))
            if rewound_state is not None:
                return rewound_state
        if step_decision.action.rewinds:
            rewound_state = self._rewind(step_decision, done, damage_reason)
            # What follows is judged otherwise than before: a rewind must not undo that.
            if rewound_state is None and not self.guard.policy.is_waiting(state.step):
                self._take(state)
            return rewound_state
        if step_decision.action is Action.APPLY or step_decision.action is Action.DISCARD:
            self._train_further(step_decision, done)
        else:
            self._conclude(step_decision, done, damage_reason)
        return None

    def _escalate_damage(self, decision: Decision, done: StepResult) -> tuple[Decision, str]:
        """The decision, where a step was not finite because the state already was not; and how that is known."""
        if decision.finding.verdict is not Verdict.NON_FINITE or done.applied:
            return decision, ""
        damage_reason = self._locate(done.batch, done.state)
        if damage_reason and not decision.action.ends and not decision.action.rewinds and self.acts:
            decision = self.guard.policy.escalate_trouble(
                decision.finding, damage_reason, self.points.oldest, True
            )
        return decision, damage_reason

    def _conclude(self, decision: Decision, done: StepResult, damage: str) -> None:
        """Hand over, alert or stop. Raises HandoverError and UnstableError."""
        state, finding = done.state, decision.finding
        self._open_incident(decision, done)
        hardware_reason = ""
        if not (damage or done.applied):  # an applied update has changed the state
            _, hardware_reason = self.replays.compare_replays(
                done.batch, done.measured, state.step, finding.verdict
            )
            decision = replace(decision, reason="; ".join(filter(None, [decision.reason, hardware_reason])))
        likely_cause = Cause.HARDWARE if damage or hardware_reason else Cause.UNKNOWN
        self.last_resort.end_or_alert(decision, state, likely_cause, damaged=bool(damage))

    def _train_further(self, decision: Decision, done: StepResult) -> None:
        """After a step that was applied or refused, and no more: lift limits, and keep a snapshot if one is due."""
        run_state, step_finding = done.state, decision.finding
        self.last_resort.tell_alert(run_state)
        if done.applied and self._scheduled is not None:
            lifted = self.guard.policy.lift_limits(step_finding, run_state.updates, self._scheduled)
            for lifted_reason in lifted:
                self.log.emit_event(RateLifted(step=run_state.step, reason=lifted_reason), say=True)
        if self.guard.policy.is_waiting(run_state.step):
            return  # the snapshots from before it must survive the wait
        first_refused = decision.action is Action.DISCARD and not done.before.discards_in_a_row
        if first_refused and self.points.ring.capacity > 1:
            # The weights are those before it: should more follow, nothing needs to be repeated. (A step draws no random
            # numbers, so the random states are those before it, too.)
            self._take_before(done)
            return
        is_healthy = done.applied and step_finding.verdict is Verdict.HEALTHY
        if is_healthy and self.points.ring.is_due(run_state.step, urgent=not step_finding.on_trend):
            self._take(run_state)

    def _take(self, state: RunState) -> None:
        self.points.take_snapshot(state, self.guard.detector.state, self.watches.state_dicts())

    def _take_before(self, done: StepResult) -> None:
        """Keep a snapshot of the state before a step whose update was refused."""
        watch_states = self.watches.state_dicts() | {self.samples.name: self.samples.before}
        self.points.take_snapshot(done.before, self._before, watch_states, self.engine.counters_before)

    def rewind_damaged_state(
        self, done: StepResult, damage: str, verdict: Verdict = Verdict.NON_FINITE, onset: int | None = None,
        damaged: bool = True,
    ) -> StepOutcome:  # fmt: skip
        """Rewind because the state itself is damaged, since the step `onset` (default: the last one); or, not damaged,
        because hardware was wrong in an update that was refused: with the rewinds spent the run goes on, and refuses.
        Raises HandoverError and UnstableError."""
        state = done.state
        onset = state.step if onset is None else onset
        finding = Finding(state.step, verdict, 1.0, onset, damage, on_trend=False)
        step_decision = self.guard.policy.escalate_trouble(finding, damage, self.points.oldest, damaged)
        if step_decision.action.rewinds:
            rewound_state = self._rewind(step_decision, done, damage)
            assert rewound_state is not None, "only what the detector suspects is tried"
            return StepOutcome(rewound_state, rewound=True)
        self._open_incident(step_decision, done)
        self.last_resort.end_or_alert(step_decision, state, Cause.HARDWARE, damaged)
        assert not damaged, "nothing is left but to end"
        return StepOutcome(done.state)

    def _locate(self, batch: Step, state: RunState) -> str:
        """The origin of the first non-finite number; not empty if the state already had it."""
        self.parts.phase("locate")
        number_origin = locators.locate_first_nonfinite(self.engine, batch.micro_batches)
        self._located = number_origin.sentence
        self.log.emit_event(Located(step=state.step, **asdict(number_origin)), say=True)
        self.replays.finite_again = state.step if not number_origin.reproduced else None
        return number_origin.sentence if number_origin.kind == "state" else ""

    def _rewind(self, decision: Decision, done: StepResult, damage: str) -> RunState | None:
        return self.rewinding.go_back(Tripped(decision, done, self._before, damage))

    def finish_run(self, state: RunState) -> None:
        """At the end of the run: an incident that nothing followed is closed."""
        last = self.decision.finding if self.decision is not None else None
        is_quiet = last is not None and last.verdict is Verdict.HEALTHY and last.on_trend
        seen = self.guard.policy.state.good >= self.settings.policy.verify_steps // 6
        self.incident_log.close_incident(state, "healed" if is_quiet and seen else "open")
        state.stability = self.dump_state()  # the summary reports it


TELLING = (IncidentEvent, Handover, AlertEvent, Unstable)  # events that may carry all this


class PersistedState(BaseModel):
    """Saved in checkpoints. incident: the open one. incidents: how many there were. rate: scheduled, of the last step.
    left_out: by the last incident."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    guard: GuardState = GuardState()
    incident: Incident | None = None
    incidents: int = 0
    rate: float | None = None
    left_out: LeftOutSamples | None = None


ONGOING = ("open", "handed over")  # continued by the next process


class _Told(BaseModel):
    """The parts of an event used here; other fields, and those of later versions, are ignored."""

    model_config = ConfigDict(extra="ignore")

    policy: PolicyState
    summary: Incident | None = None
    left_out: LeftOutSamples | None = None


def recall_state(saved: dict[str, Any], events: Iterable[Event], simulated: bool = False) -> PersistedState:
    """The state at a start. Raises CheckpointError for one that this version cannot read.

    saved: `RunState.stability` of the checkpoint. events: those of the journal that are `TELLING`, in order. simulated:
    this is a dry run.
    """
    known_fields = {name: state for name, state in saved.items() if name in PersistedState.model_fields}
    try:
        memory = PersistedState.model_validate(copy.deepcopy(known_fields))
    except ValidationError as error:
        raise store.refuse_stability("the checkpoint", error) from None
    if not simulated:
        memory.guard = memory.guard.of_kind(False)  # a dry run spent no budget
    for event in events:
        incident_number = event.get("number")
        if isinstance(incident_number, int):
            memory.incidents = max(memory.incidents, incident_number)
        if "policy" not in event:
            continue
        try:
            told_state = _Told.model_validate(event.fields)
        except ValidationError as error:
            raise store.refuse_stability(f"the journal's event {event.event}", error) from None
        # A dry run has its own clock.
        if memory.guard.simulated or told_state.policy.clock < memory.guard.policy.clock:
            continue
        memory.guard.policy = told_state.policy
        memory.left_out = told_state.left_out or memory.left_out
        if told_state.summary is not None:
            memory.incident = told_state.summary if told_state.summary.outcome in ONGOING else None
    return memory
