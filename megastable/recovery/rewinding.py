"""Rewinds in memory: restores a proven snapshot, finds and skips the bad samples, applies a remedy. Collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from megastable.attribution.sample_history import Waiting
from megastable.attribution.sample_replay import Trained
from megastable.base.collectives import find_least
from megastable.checkpoint.snapshot import Snapshot
from megastable.checkpoint.store import RunState
from megastable.engine import locators
from megastable.engine.measured import Measured
from megastable.recovery.incident_log import IncidentLog
from megastable.recovery.replay_trials import Trials, TrialStart
from megastable.recovery.replays import UNSTEADY, Harmless, Replays
from megastable.recovery.rewind_points import LastResort, Points
from megastable.recovery.run_parts import RunParts, StepResult
from megastable.recovery.watches import UNKNOWN, Watches
from megastable.run.events.stability_events import Located, RateCut, RateWarmup, SettingsAdjusted
from megastable.run.events.training_events import Warned
from megastable.warnings.routing import choose_remedies
from megastable_guard import policy_state, scores
from megastable_guard.actions import Action, Cause, Decision, Finding, Remedy, Verdict
from megastable_guard.conclusion import Conclusion
from megastable_guard.detector import Detector, DetectorState
from megastable_guard.policy import ADJUSTED, BLAMELESS, ONCE, REWARM_FROM, Offer
from megastable_guard.random_states import restore_random_states
from megastable_guard.step_judge import StepJudge
from megastable_guard.trials import HarmTrial, TrialVerdict, is_clear, is_harmless

# Most samples that one trial takes away: so many, or this share of those read.
TAKEN_AWAY, TAKEN_SHARE = 1024, 0.001
AGAIN = 16  # most applied updates that are done again so that refused batches of new data are trained on

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Change(Protocol[T_contra]):
    """What no update should do, after step `before`. reason: a sentence with the numbers."""

    @property
    def before(self) -> int: ...
    @property
    def reason(self) -> str: ...
    def is_repeated(self, again: T_contra, /) -> bool:
        """Whether a replay of the steps has made at least half of it again."""
        ...


@dataclass(frozen=True)
class Tripped:
    """The step at which a rewind was decided. detector: its state before that step; damage: what is already proven
    about the hardware, a sentence, or ""; harmless: how it is known to be harmless already."""

    decision: Decision
    done: StepResult
    detector: DetectorState
    damage: str
    harmless: Harmless | None = None


@dataclass(frozen=True)
class Tried:
    """What trials leave of a conclusion. harmless: the trial by which nothing is wrong, None if something is.
    blameless: no sample is to blame, and all are read again. offer: the remedy that has won. heals: how a branch
    without any change has healed, so that the run waits for it."""

    conclusion: Conclusion
    harmless: HarmTrial | None = None
    blameless: bool = False
    offer: Offer | None = None
    heals: str = ""


class Rewinding:
    """Carries out a decision to go back."""

    def __init__(
        self, parts: RunParts, guard: StepJudge, points: Points, replays: Replays, incident_log: IncidentLog,
        last_resort: LastResort, watches: Watches,
    ) -> None:  # fmt: skip
        self.parts, self.config, self.engine, self.log = parts, parts.config, parts.engine, parts.log
        self.guard, self.points, self.replays, self.watches = guard, points, replays, watches
        self.incident_log, self.last_resort = incident_log, last_resort
        self.trials = Trials(parts, guard, points)

    def go_back(self, t: Tripped) -> RunState | None:
        """Rewind, and return where the run stands; None: nothing was wrong, and it stays where it is. Raises
        HandoverError, UnstableError and SpaceError."""
        begin_time, finding, policy = time.perf_counter(), t.decision.finding, self.guard.policy
        self.parts.phase("rewind")
        suspect_window = self.points.steps_since(finding.onset)
        self.incident_log.open_incident(t.decision, t.done.state, suspect_window, t.done.measured.grad_norm)
        is_adjacent = self.incident_log.is_adjacent(suspect_window)
        has_recurred = policy.has_recurred(is_adjacent)

        # On the state that tripped, which is gone afterwards: what is proven, and all that trials are compared with.
        is_unsteady, damage_reason, harmless_way = self._replayed(t)
        left_out, present, trial_outlook = self.parts.select_unskipped(), None, None
        output_sizes: locators.Sizes = {}
        is_proven = bool(damage_reason) or harmless_way is not None or finding.verdict is Verdict.CORRUPTED
        if not is_proven:  # what is proven needs no trial
            trial_outlook = self.trials.look_ahead(t.done.state, left_out)
            present = self.points.ring.copy_aside(t.done.state.step) if self.points.may_look else None
            if finding.verdict is not Verdict.NON_FINITE:  # of which `locate` has told already
                output_sizes = locators.measure_sizes(self.engine, t.done.batch.micro_batches)

        # On a good state from before the onset: the cause.
        goes_further = has_recurred and not harmless_way
        snapshot = self.points.go_back_before(finding.onset, int(goes_further), left_out)
        if snapshot is None:
            return self._unproven(t, damage_reason, harmless_way)
        if is_unsteady and not damage_reason and self.replays.do_runs_differ(t.done.batch):
            damage_reason = UNSTEADY  # also on a good state, where nothing would magnify the last bits
        offer = None
        if damage_reason:
            conclusion = Conclusion(Cause.HARDWARE, [], [], damage_reason)
        elif harmless_way:
            conclusion = Conclusion(Cause.NUMERICS, [], [], harmless_way.reason, kernels=harmless_way.kernels)
        else:
            conclusion = self.points.examine_window(suspect_window, snapshot, left_out, is_adjacent)
            snapshot = self.points.before_region(conclusion, snapshot)
            conclusion = self.incident_log.blame_returned(conclusion, suspect_window)
            if not is_proven:
                conclusion, grown_layer = self._locate_growth(conclusion, t, output_sizes)
                start = TrialStart(suspect_window, snapshot, left_out, trial_outlook)
                has_come_back = has_recurred or policy.state.recurrences > 0
                tried_all = self._try_all(t, conclusion, start, has_come_back, grown_layer)
                conclusion, offer = tried_all.conclusion, tried_all.offer
                if tried_all.harmless is not None:
                    trial = tried_all.harmless
                    return self._train_through(t, conclusion, trial, snapshot, present, begin_time)
                if tried_all.heals and present is not None:
                    self._wait(t, conclusion, present, begin_time)
                    return None
                if tried_all.blameless:
                    suspect_window = []  # all of them are read again

        # Back to that state, without the cause, unless the checkpoint that the run resumed from is to blame.
        origin = self.points.origin
        suspect = conclusion.cause in BLAMELESS and origin.note_return(snapshot.step, finding.onset)
        if suspect and policy.may_suspect and self.last_resort.can_go_back(snapshot.step):
            why = f"the checkpoint of step {origin.step} is the suspect: {origin.suspect_checkpoint()}"
            step_decision = policy.abandon_checkpoint(t.decision, why, proven=False)
            raise self.last_resort.make_ending_error(step_decision, t.done.state, Cause.STORAGE)
        chosen_remedy = None
        if offer is not None:
            chosen_remedy = policy.adopt_remedy(offer, conclusion.reason)
            self._carry_out(offer, snapshot)
        start = TrialStart(suspect_window, snapshot, left_out, trial_outlook)
        return self._undo(t.decision, t.done.state, conclusion, start, begin_time, chosen_remedy)

    def _locate_growth(self, found: Conclusion, t: Tripped, sizes: locators.Sizes) -> tuple[Conclusion, str]:
        """A conclusion that says which layer grew first, and its name, if any did. The engine holds a good state.
        sizes: those of the tripping samples on the state that tripped."""
        if not sizes:
            return found, ""
        good = locators.measure_sizes(self.engine, t.done.batch.micro_batches)
        growth = locators.find_first_growth(good, sizes)
        if growth is None:
            return found, ""
        told = {"sentence": growth.sentence, "layer": growth.first.layer, "tensor": growth.first.tensor}
        self.log.emit_event(Located(step=t.done.state.step, kind="growth", reproduced=True, **told), say=True)
        return replace(found, reason=f"{found.reason}; {growth.sentence}"), growth.first.layer

    def _train_through(
        self, t: Tripped, found: Conclusion, trial: HarmTrial, snapshot: Snapshot, present: Snapshot | None,
        begin: float,
    ) -> RunState | None:  # fmt: skip
        """Go on with data that is new, or does no harm, from where the run stands: None; or from the snapshot: the
        state after it. That is where updates were refused since, so that their batches are trained on, unless that
        undoes many others; or where the present state could not be kept. Raises SpaceError."""
        run_state, rewound_state, spent_seconds = t.done.state, None, time.perf_counter() - begin
        since = self.points.steps_since(snapshot.step + 1)
        applied_count = sum(trained_step.applied for trained_step in since)
        are_few = not applied_count or (applied_count <= AGAIN and self.guard.policy.may_redo(applied_count))
        does_again = applied_count < len(since) and are_few
        if t.decision.finding.verdict is Verdict.DAMAGE:
            self.watches.probe.accept_rise(run_state.step)
        if present is not None and not does_again:
            self.points.restore_snapshot(present)
        else:
            rewound_state = self._go_on_from(snapshot, run_state, begin, trial.reason, spent_seconds)
        self.guard.policy.trained_through(alone=not self.incident_log.has_acted)
        if t.decision.finding.verdict is not Verdict.DAMAGE:
            self._begin_again(trial)
        lost_steps = 0 if rewound_state is None else run_state.step - rewound_state.step
        self.incident_log.train_through(found, run_state, trial.reason, lost_steps, spent_seconds)
        return rewound_state

    def _wait(self, t: Tripped, found: Conclusion, present: Snapshot, begin: float) -> None:
        """Stay where the run stands, and leave it to itself for some steps. Raises SpaceError."""
        self.points.restore_snapshot(present)
        waits_until = self.guard.policy.begin_waiting(t.decision.finding)
        remedy, spent_seconds = f"it is left to itself until step {waits_until}", time.perf_counter() - begin
        self.incident_log.record_conclusion(found, [], Action.WAIT, remedy, 0, spent_seconds)

    def _begin_again(self, trial: HarmTrial) -> None:
        """What was usual until now is not usual any more: what comes would trip again. Samples that are new are not
        suspected again, either."""
        self.guard.detector.begin_again()
        if trial.verdict is TrialVerdict.NEW:
            self.watches.begin_again()

    def _bounded(self, found: Conclusion, trial: HarmTrial | None, read: int) -> Conclusion:
        """What may be taken away of what a conclusion names. What teaches something is deferred, and so is what is too
        much to skip without a clear win; of a clear win, what lies beyond a limit is tried on the state that reaches
        it. read: samples so far."""
        if trial is not None:
            found = replace(found, reason=f"{found.reason}. {trial.reason}")
        if found.cause is not Cause.DATA or not found.bad_positions:
            return found
        found = found.keep_first(max(TAKEN_AWAY, int(TAKEN_SHARE * read)))
        if self.guard.policy.are_costly(found.bad_positions):
            why = "they were deferred, as they cost more than they teach, and trouble comes with them again"
            return replace(found, proven=True, reason=f"{found.reason}. {why}")
        deferred = replace(found, bad=[], later=sorted({*found.bad_positions, *found.later}))
        if trial is not None and is_clear(trial):
            kept_conclusion = deferred if trial.verdict is TrialVerdict.MIXED and not found.few else found
            return replace(kept_conclusion, proven=True)
        if not self.guard.policy.may_take_untried(len(found.bad_positions)):
            return deferred
        self.guard.policy.take_untried(len(found.bad_positions))
        return found

    def choose_skips(
        self, found: Conclusion, window: Sequence[Trained], state: RunState
    ) -> tuple[Conclusion, str]:
        """What is to be skipped, or deferred, of the samples that were found bad on the present state; or why none is,
        as a sentence. Those that are few and far out by themselves need no trial."""
        policy, suspects = self.guard.policy, found.bad_positions
        are_few = (found.few and policy.may_take_untried(len(suspects))) or policy.are_costly(suspects)
        harm_trial = None if are_few else self._try_aside(found, window, state)
        if harm_trial is not None and is_harmless(harm_trial, few=False):
            if harm_trial.verdict is TrialVerdict.NEW:
                self._begin_again(harm_trial)
            return found, harm_trial.reason
        chosen_skips = self._bounded(found, harm_trial, state.cursor)
        # Nothing is undone: a sample behind the cursor cannot change places with one that is yet to be read.
        chosen_skips = replace(chosen_skips, later=[p for p in chosen_skips.later if p >= state.cursor])
        if not chosen_skips.bad_positions and not chosen_skips.later:
            return (found, f"{chosen_skips.reason}; they are too many to skip, and were read already")
        return chosen_skips, ""

    def _try_aside(self, found: Conclusion, window: Sequence[Trained], state: RunState) -> HarmTrial | None:
        """Try suspects on the newest good snapshot from before `window`, and return to the state of now, where the run
        stays. None: there is no room for it, or no such snapshot."""
        if not self.points.may_look or not window:
            return None
        left_out, present = self.parts.select_unskipped(), self.points.ring.copy_aside(state.step)
        outlook = self.trials.look_ahead(state, left_out)

        def try_on_snapshot() -> HarmTrial | None:
            snapshot = self.points.look_back_before(min(done.step for done in window), left_out)
            if snapshot is None:
                return None
            tried_suspects = self.trials.try_suspects(found, TrialStart(window, snapshot, left_out, outlook))
            return tried_suspects.verdict if tried_suspects is not None else None

        try:
            return self.trials.unless_unreadable(state.step, try_on_snapshot)
        finally:
            self.points.restore_snapshot(present)

    def leave_kernels(self, t: Tripped, keep_before: Callable[[], None]) -> RunState | None:
        """After a single refused update that is harmless without some kernels, leave them and do the step again: where
        the run stands then. Without a snapshot, or rewinds left, they are left from the next step on. None: the run
        was not rewound.

        One such step is enough: unlike hard data, a kernel that computes wrong numbers does not get easier, and makes
        harmless samples look bad. keep_before: keeps the state before the step, so that no other one is repeated.
        """
        wrong, guard_policy, step_finding = self._wrong_kernels(t), self.guard.policy, t.decision.finding
        if wrong is None:
            return None
        keep_before()
        if not guard_policy.may_look_back(step_finding.step, step_finding.step, self.points.oldest):
            policy_state.leave_kernels(guard_policy.state, wrong.kernels)
            return None
        step_decision = guard_policy.undo_steps(replace(step_finding, onset=step_finding.step), wrong.reason)
        return self.go_back(replace(t, decision=step_decision, harmless=wrong))

    def _wrong_kernels(self, t: Tripped) -> Harmless | None:
        """The kernels without which a refused step is harmless, on the state that refused it."""
        if not self.guard.policy.may_leave_kernels:
            return None
        return self.replays.without_kernels(t.done.batch, self._detector_of(t).expect_next())

    def _detector_of(self, t: Tripped) -> Detector:
        return Detector(self.config.stability.detector, t.detector)

    def look_back(self, case: Waiting, measured: Measured, state: RunState) -> RunState | None:
        """Examine the steps of a case on a proven state from before them. If a crowd of their samples is bad there,
        the run resumes from it without them, and that state is returned; else it stays where it is: samples
        that are bad by themselves are skipped, and with none nothing changes. Raises SpaceError."""
        begin_time, guard_policy = time.perf_counter(), self.guard.policy
        self.parts.phase("examine samples")
        window = [t for t in self.points.steps_since(case.first) if t.step <= case.last]
        if not window:
            self.watches.samples.drop_case(case, state.step, UNKNOWN)
            return None
        left_out = self.parts.select_unskipped()
        present_state = self.points.ring.copy_aside(state.step)
        outlook = self.trials.look_ahead(state, left_out)
        past_snapshot = self.points.look_back_before(case.first, left_out)
        found = Conclusion(Cause.UNKNOWN, [], [], "no snapshot is good")
        if past_snapshot is not None:
            found = self.points.examine_window(window, past_snapshot, left_out, False)
        if past_snapshot is None or found.cause is not Cause.DATA or len(found.bad) < scores.CROWD:
            self.points.restore_snapshot(present_state)
            few_individuals = found.keep_individuals({p for t in window for p in t.positions.tolist()})
            spent_seconds = time.perf_counter() - begin_time
            if few_individuals.bad:
                self.watches.samples.skip_bad_samples(case, few_individuals, window, state, spent_seconds)
                guard_policy.note_skipped(few_individuals.bad_positions, few_individuals.proven)
            else:
                self.watches.samples.record_nobody_bad(case, found, state.step, spent_seconds)
            return None
        tried_suspects = self.trials.try_suspects(found, TrialStart(window, past_snapshot, left_out, outlook))
        trial = tried_suspects.verdict if tried_suspects is not None else None
        if trial is not None and is_harmless(trial, few=False):
            self.points.restore_snapshot(present_state)
            spent_seconds = time.perf_counter() - begin_time
            self.watches.samples.record_nobody_bad(
                case, replace(found, reason=trial.reason), state.step, spent_seconds
            )
            if trial.verdict is TrialVerdict.NEW:
                self._begin_again(trial)
            return None
        found = self._bounded(found, trial, state.cursor)
        past_snapshot = self.points.before_region(found, past_snapshot)
        case_finding = Finding(state.step, Verdict.SHIFT, 1.0, case.first, case.reason, on_trend=False)
        decision = guard_policy.undo_steps(case_finding, case.reason)
        self.incident_log.open_incident(decision, state, window, measured.grad_norm)
        self.watches.samples.shorten_rest(case)
        return self._undo(
            decision, state, found, TrialStart(window, past_snapshot, left_out, outlook), begin_time
        )

    def undo_change(
        self, change: Change[T], done: StepResult, measure: Callable[[], T], accept: Callable[[], None],
        remedies: Collection[str] = (),
    ) -> RunState | None:  # fmt: skip
        """Repeat the steps in which a tensor or a router changed, on a state from before them. If it does not change
        again, something else than these steps changed it: the run goes on from that state, and nothing is taken away.
        Else it stays where it is, None, unless a remedy wins. Raises SpaceError.

        Args:
            measure: what a change is told by, of the state that the engine holds.
            accept: called if the change is the run's own work.
            remedies: that are then tried.
        """
        begin_time, state, guard_policy = time.perf_counter(), done.state, self.guard.policy
        self.parts.phase("replay steps")
        left_out, present_state = self.parts.select_unskipped(), self.points.ring.copy_aside(state.step)
        trial_outlook = self.trials.look_ahead(state, left_out) if remedies else None

        def repeat_from_snapshot() -> tuple[Snapshot | None, T | None]:
            past_snapshot = self.points.look_back_before(change.before + 1, left_out)
            if past_snapshot is None:
                return None, None
            return past_snapshot, self.trials.repeat_steps(past_snapshot, state, measure)

        repeated = self.trials.unless_unreadable(state.step, repeat_from_snapshot)
        past_snapshot, found_again = repeated or (None, None)
        if past_snapshot is None or found_again is None or not _is_gone(change, found_again):
            if remedies and past_snapshot is not None and found_again is not None:
                window = self.points.steps_since(change.before + 1)
                trial_start = TrialStart(window, past_snapshot, left_out, trial_outlook)
                if (
                    rewound_state := self._mend_change(change, done, trial_start, remedies, measure)
                ) is not None:
                    return rewound_state
            self.points.restore_snapshot(present_state)
            accept()
            why_kept = "cannot be done again" if found_again is None else "make it again"
            warning = Warned(step=state.step, text=f"{change.reason}: the same steps {why_kept}")
            self.log.emit_event(warning, say=True)
            return None
        reason = f"{change.reason}; the same steps from step {past_snapshot.step} on do not make it again"
        finding = Finding(state.step, Verdict.DAMAGE, 1.0, change.before + 1, reason, on_trend=False)
        decision, window = guard_policy.undo_steps(finding, reason), self.points.steps_since(finding.onset)
        self.incident_log.open_incident(decision, state, window, done.measured.grad_norm)
        trial_start = TrialStart([], past_snapshot, left_out, None)
        return self._undo(decision, state, Conclusion(Cause.STATE, [], [], reason), trial_start, begin_time)

    def _mend_change(
        self, change: Change[T], done: StepResult, start: TrialStart, remedies: Collection[str],
        measure: Callable[[], T],
    ) -> RunState | None:  # fmt: skip
        """Try remedies for what the run's own steps make again, from the snapshot that the engine holds, whether or not
        other data helps as well. The state that the run goes on from if one wins; None: the policy is as it was."""
        begin_time, guard_policy, state = time.perf_counter(), self.guard.policy, done.state
        state_before = guard_policy.state.model_copy(deep=True)
        finding = Finding(state.step, Verdict.DAMAGE, 1.0, change.before + 1, change.reason, on_trend=False)
        decision = guard_policy.undo_steps(finding, change.reason)
        chosen_offer, why_chosen = self._try_named(remedies, start, lambda: _is_gone(change, measure()))
        if chosen_offer is None or not decision.action.rewinds:
            guard_policy.state = state_before.model_copy(update={"tried": guard_policy.state.tried})
            return None
        self.incident_log.open_incident(decision, state, start.window, done.measured.grad_norm)
        chosen_remedy = guard_policy.adopt_remedy(chosen_offer, why_chosen)
        self._carry_out(chosen_offer, start.snapshot)
        reason = f"{change.reason}; {why_chosen}"
        conclusion, all_harmless = (
            Conclusion(chosen_offer.remedy.cause, [], [], reason),
            replace(start, window=[]),
        )
        return self._undo(decision, state, conclusion, all_harmless, begin_time, chosen_remedy)

    def _try_named(
        self, names: Collection[str], start: TrialStart, heals: Callable[[], bool] = lambda: False
    ) -> tuple[Offer | None, str]:
        """The remedy, of those of `names`, that is clearly better than nothing and than other data, whether or not that
        helps as well, and why; None: none is. heals: see `Trials.try_remedies`."""
        every_offer = self.guard.policy.offer_remedies(start.snapshot.extra.state.updates, None, None)
        own_offers = [offer for offer in every_offer if offer.name in names]
        trial = self.trials.try_remedies(own_offers, start, needs_harm=False, heals=heals)
        if trial is None:
            return None, ""
        return next((offer for offer in own_offers if offer.name == trial.chosen), None), trial.reason

    def _replayed(self, t: Tripped) -> tuple[bool, str, Harmless | None]:
        """Whether all runs of the step differ; what is proven about the hardware, a sentence, or ""; how the step is
        harmless."""
        is_unsteady, damage_reason, harmless_way = False, t.damage, t.harmless
        if t.done.applied:  # the state that it was done on is gone
            return False, damage_reason, harmless_way
        if not damage_reason and not harmless_way:
            is_unsteady, damage_reason = self.replays.compare_replays(
                t.done.batch, t.done.measured, t.done.state.step, t.decision.finding.verdict
            )
        if not damage_reason and not harmless_way:
            if self.guard.policy.may_fall_back:
                harmless_way = self.replays.without_fp8(
                    t.done.batch, t.done.measured, self._detector_of(t).expect_next()
                )
            harmless_way = harmless_way or self._wrong_kernels(t)
        if harmless_way:
            # Failed numerics must not measure samples and states.
            self.engine.numerics.switch_to(harmless_way.numerics)
        return is_unsteady, damage_reason, harmless_way

    def _try_all(self, t: Tripped, found: Conclusion, start: TrialStart, again: bool, layer: str) -> Tried:
        """Try the suspects of a conclusion, and remedies where other data does not help either; again: the trouble came
        back. Where no sample is bad, or those that are do no harm, but a router grew first (`layer`), those of routers
        are tried. Samples that are not finite are bad without a trial."""
        if self.guard.policy.are_costly(found.bad_positions):
            return Tried(self._bounded(found, None, t.done.state.cursor))
        harm_trial, harms_anyway = None, False
        is_finite = t.decision.finding.verdict is not Verdict.NON_FINITE
        if is_finite and (suspects := self.trials.try_suspects(found, start)) is not None:
            harm_trial, harms_anyway = suspects
        if again or harms_anyway:
            offer, reason = self._try_remedies(t, start)
            if offer is not None:
                found = Conclusion(offer.remedy.cause, [], found.suspects, reason, kernels=offer.kernels)
                return Tried(found, offer=offer, blameless=True)
            if healing_reason := self._try_waiting(t, start):
                found = Conclusion(Cause.STATE, [], found.suspects, f"{found.reason}; {healing_reason}")
                return Tried(found, blameless=True, heals=healing_reason)
        if not is_finite:
            return Tried(replace(found, proven=True))
        # Where all samples are as hard on the good state, as of another kind, a few that are harder still are no cause.
        are_few = found.few and found.explains_losses(self._detector_of(t).find_alarming_loss())
        are_few = are_few and self.guard.policy.may_take_untried(len(found.bad_positions))
        does_harm = harm_trial is None or not is_harmless(harm_trial, are_few)
        if not (does_harm and found.bad_positions):
            offer, reason = self._try_named(choose_remedies(layer), start)
            if offer is not None:
                reason = f"{found.reason}; {reason}"
                found = Conclusion(offer.remedy.cause, [], found.suspects, reason)
                return Tried(found, offer=offer, blameless=True)
        if harm_trial is None or does_harm:
            return Tried(self._bounded(found, harm_trial, t.done.state.cursor))
        if not harm_trial.damaged:
            return Tried(found, harmless=harm_trial)
        found, healing_reason = _of_state(found, harm_trial), self._try_waiting(t, start)
        found = replace(found, reason="; ".join(filter(None, [found.reason, healing_reason])))
        return Tried(found, blameless=True, heals=healing_reason)  # something else damaged the state

    def _try_waiting(self, t: Tripped, start: TrialStart) -> str:
        """How the trouble heals by itself, a sentence; "": it does not, or must not be waited for."""
        may_wait = self.guard.policy.may_wait and self.points.may_look
        return self.trials.try_nothing(start, t.done.state) if may_wait else ""

    def _try_remedies(self, t: Tripped, start: TrialStart) -> tuple[Offer | None, str]:
        """The remedy whose branch has won, and why; None: none has, or the run has tried enough."""
        guard_policy, saved_state = self.guard.policy, start.snapshot.extra.state
        if failed_changes := guard_policy.take_back_failed():
            self.engine.adjustments.switch_to(guard_policy.state.adjusted)
            numerics = self.engine.numerics
            numerics.switch_to(replace(numerics.now, plain=numerics.kinds_of(guard_policy.state.kernels)))
            reason = f"without {', '.join(failed_changes)} again: the trouble came back"
            settings = guard_policy.state.adjusted
            event = SettingsAdjusted(step=saved_state.step, settings=settings, reason=reason)
            self.log.emit_event(event, say=True)
        good_rate = self.points.rate_before(saved_state.step)
        highest_rate = self.points.highest_rate_since(t.decision.finding.onset)
        kernel_names = list(self.engine.numerics.kernels.values())
        offers = guard_policy.offer_remedies(saved_state.updates, good_rate, highest_rate, kernel_names)
        trial = self.trials.try_remedies(offers, start)
        if trial is None:
            return None, ""
        return next((offer for offer in offers if offer.name == trial.chosen), None), trial.reason

    def _carry_out(self, offer: Offer, snapshot: Snapshot) -> None:
        """What a remedy changes at once on the snapshot, which the engine holds; the rest follows from the policy at
        every step."""
        saved_state: RunState = snapshot.extra.state
        self.engine.adjustments.switch_to(self.guard.policy.state.adjusted)
        self.engine.change_once(offer.name)
        if offer.name == "reset_moments":
            self.watches.tensors.state.begin_again()
        if offer.name in ONCE:
            # The snapshot has the old ones: a further rewind to it must not bring them back.
            self.points.ring.forget_from(snapshot.step)
            self.points.ring.take_snapshot(snapshot.step, snapshot.extra)
        if offer.name in ("rewarm", "reset_moments"):
            warmup_updates = self.guard.policy.config.rewarm_steps
            self.log.emit_event(RateWarmup(step=saved_state.step, begin=REWARM_FROM, updates=warmup_updates))
        if offer.name in (*ONCE, *ADJUSTED):
            reason = offer.remedy.reason
            self.log.emit_event(SettingsAdjusted(step=saved_state.step, settings=[offer.name], reason=reason))

    def _remedy(self, found: Conclusion, start: TrialStart) -> Remedy:
        """The remedy for a conclusion. A corpus of which samples were bad again and again is tried to be left out."""
        policy, corpus, swap = self.guard.policy, self._corpus_of(found), ""
        least_share = 1 - self.config.stability.policy.swap_most
        if corpus is not None and found.proven and policy.may_swap(corpus):
            bad = sorted([*found.bad_positions, *found.later])
            enough_left = start.left_out.share_without(corpus) >= least_share
            corpus_trial = self.trials.try_corpus(corpus, bad, start) if enough_left else None
            swap = corpus_trial.reason if corpus_trial is not None and corpus_trial.helps else ""
        updates = start.snapshot.extra.state.updates
        proven, positions = found.proven, found.bad_positions
        return policy.choose_remedy(found.cause, updates, corpus, swap, proven, positions, found.kernels)

    def _corpus_of(self, found: Conclusion) -> str | None:
        """The corpus that most of the bad samples are of, if more than half are."""
        bad_positions = [*found.bad_positions, *found.later]
        if found.cause is not Cause.DATA or not bad_positions:
            return None
        data_order = self.parts.source.order
        corpus_counts = np.bincount(data_order.locate_samples(np.array(bad_positions)).corpus)
        most = int(corpus_counts.argmax())
        return data_order.corpora[most].name if 2 * corpus_counts[most] > len(bad_positions) else None

    def _undo(
        self, decision: Decision, state: RunState, found: Conclusion, start: TrialStart, begin: float,
        remedy: Remedy | None = None,
    ) -> RunState:  # fmt: skip
        """Record a conclusion and its remedy in journal and ledgers, and go on from the snapshot. Raises HandoverError
        and UnstableError if the remedy ends the process."""
        snapshot, remedy = start.snapshot, remedy or self._remedy(found, start)
        seconds = time.perf_counter() - begin
        if remedy.action is Action.HANDOVER:
            decision = replace(decision, reason=remedy.reason)
            weighed_decision = self.last_resort.weigh_handover(replace(decision, action=remedy.action))
            remedy = replace(remedy, action=weighed_decision.action, reason=weighed_decision.reason)
        swap = self._corpus_of(found) if remedy.action is Action.SWAP_CORPUS else None
        action, lost_steps = remedy.action, state.step - snapshot.step
        self.incident_log.record_conclusion(
            found, start.window, action, remedy.reason, lost_steps, seconds, swap
        )
        if remedy.release:
            self.incident_log.release_samples(remedy.release, snapshot.extra.state.cursor, remedy.reason)
        if remedy.action in (Action.CUT_LR, Action.CAP_LR):
            rate_limits = [rate_limit.model_dump() for rate_limit in self.guard.policy.state.limits]
            self.log.emit_event(RateCut(step=state.step, reason=remedy.reason, limits=rate_limits))
        if remedy.action.ends:
            decision = replace(decision, action=remedy.action, reason=remedy.reason)
            raise self.last_resort.make_ending_error(decision, state, found.cause)
        return self._go_on_from(snapshot, state, begin, remedy.reason, seconds)

    def _unproven(self, t: Tripped, damage: str, harmless: Harmless | None) -> RunState:
        """No snapshot is proven good: hand over; if impossible, alert, and resume from the newest finite one.
        Raises HandoverError and UnstableError."""
        policy, begin_time, snapshot = self.guard.policy, time.perf_counter(), self.points.finite
        origin, step_finding = self.points.origin, t.decision.finding
        if origin.reason:
            likely_cause = Cause.STORAGE
            quarantine_reason = f"the checkpoint of step {origin.step} is quarantined: {origin.reason}"
            decision = policy.abandon_checkpoint(t.decision, quarantine_reason, proven=True)
        else:
            likely_cause = Cause.HARDWARE if damage else Cause.NUMERICS if harmless else Cause.UNKNOWN
            told = [t.decision.reason, "no snapshot is good", damage, harmless.reason if harmless else ""]
            decision = policy.hand_over(step_finding, "; ".join(filter(None, told)), snapshot is None)
        decision = self.last_resort.weigh_handover(decision, damaged=snapshot is None)
        wrong_kernels = harmless.kernels if harmless else ()
        if decision.action.ends or snapshot is None:
            raise self.last_resort.make_ending_error(decision, t.done.state, likely_cause, wrong_kernels)
        policy_state.leave_kernels(policy.state, wrong_kernels)
        if self.incident_log.incident is not None:
            self.incident_log.incident.cause = likely_cause
        self.points.restore_snapshot(snapshot)
        return self._go_on_from(snapshot, t.done.state, begin_time, "the newest that is finite")

    def _go_on_from(
        self, snapshot: Snapshot, state: RunState, begin: float, reason: str, told: float = 0.0
    ) -> RunState:
        """Rewind everything but the engine to the snapshot that the engine has restored; where the run stands. told:
        the seconds since `begin` that the incident already counts."""
        kept_state = snapshot.extra
        back: RunState = kept_state.state.model_copy(deep=True)
        back.seconds = state.seconds
        self.guard.rewind_detector(kept_state.detector)
        open_incident = self.incident_log.incident
        # After a fault of the hardware the same steps are done again, as they should have been.
        is_hardware = open_incident is not None and open_incident.cause is Cause.HARDWARE
        if not is_hardware and self.guard.policy.note_rewind(back.updates, state.step - back.step):
            c = self.guard.policy.config
            warmup = RateWarmup(step=back.step, begin=c.rewind_warmup_from, updates=c.rewind_warmup)
            self.log.emit_event(warmup, say=True)
        self.watches.note_rewind(back.step, kept_state.watches)
        restore_random_states(kept_state.random)
        self.parts.loader.go_to(back.cursor, self.parts.select_unskipped())
        self.points.forget_after(snapshot.step)
        spent_seconds, lost = time.perf_counter() - begin, state.step - back.step
        self.incident_log.record_rewind(back.step, back.cursor, spent_seconds - told)
        self.log.say_line(
            f"  rewound {lost} step{'' if lost == 1 else 's'} to step {back.step}, without a restart: found and "
            f"undone in {spent_seconds:.1f} s; {reason}"
        )
        self.last_resort.tell_alert(back)
        return back


def _of_state(found: Conclusion, trial: HarmTrial) -> Conclusion:
    """The state was worse than the samples can explain, which are harmless. A cause other than data stays."""
    remedy_reason = f"the state was damaged, but not by the data: {trial.reason}"
    if found.bad_positions:
        return Conclusion(Cause.STATE, [], found.suspects, remedy_reason)
    return replace(found, reason=f"{found.reason}; {remedy_reason}")


def _is_gone(change: Change[T], found: T) -> bool:
    """Whether a change is found again on no rank: what is measured in a rank's own memory may be on one alone.
    Collective."""
    return bool(find_least([not change.is_repeated(found)])[0])
