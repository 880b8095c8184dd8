"""Rewinds in memory: restores a proven snapshot, finds and skips the bad samples, applies a remedy. Collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megastable.attribution import groups
from megastable.attribution.conclusion import Conclusion
from megastable.attribution.harm import HarmTrial, TrialVerdict, is_clear, is_harmless
from megastable.attribution.sample_history import Waiting
from megastable.attribution.sample_replay import Trained
from megastable.base.rng import set_rng_state
from megastable.checkpoint.snapshot import Snapshot
from megastable.checkpoint.store import RunState
from megastable.engine import growth_locator
from megastable.engine.measured import Measured
from megastable.recovery.incident_log import IncidentLog
from megastable.recovery.last_resort import LastResort
from megastable.recovery.replay_trials import Trials, TrialStart
from megastable.recovery.replays import UNSTEADY, Harmless, Replays
from megastable.recovery.rewind_points import Points
from megastable.recovery.run_parts import RunParts, StepResult
from megastable.recovery.sample_watch import UNKNOWN
from megastable.recovery.watches import Watches
from megastable.run.events.stability_events import Located, RateCut, RateWarmup, SettingsAdjusted
from megastable.run.events.training_events import Warned
from megastable_guard import policy_state
from megastable_guard.actions import Action, Cause, Decision, Remedy
from megastable_guard.damage import TensorJump, TensorNorms
from megastable_guard.detector import Detector
from megastable_guard.detector_state import DetectorState
from megastable_guard.guard import Guard
from megastable_guard.policy import ADJUSTED, BLAMELESS, REWARM_FROM, Offer
from megastable_guard.robust import Trend
from megastable_guard.signals import Finding, Verdict

# Most samples that one trial takes away: so many, or this share of those read.
TAKEN_AWAY, TAKEN_SHARE = 1024, 0.001
AGAIN = 16  # most applied updates that are done again so that refused batches of new data are trained on


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
        self,
        parts: RunParts,
        guard: Guard,
        points: Points,
        replays: Replays,
        incident_log: IncidentLog,
        last_resort: LastResort,
        watches: Watches,
    ) -> None:
        self.parts, self.config, self.engine, self.log = parts, parts.config, parts.engine, parts.log
        self.guard, self.points, self.replays, self.watches = guard, points, replays, watches
        self.incident_log, self.last_resort = incident_log, last_resort
        self.trials = Trials(parts, guard, points)

    def go_back(self, t: Tripped) -> RunState | None:
        """Rewind, and return where the run stands; None: nothing was wrong, and it stays where it is. Raises
        HandoverError, UnstableError and SpaceError."""
        begin, finding, policy = time.perf_counter(), t.decision.finding, self.guard.policy
        self.parts.phase("rewind")
        window = self.points.since(finding.onset)
        self.incident_log.open(t.decision, t.done.state, window, t.done.measured.grad_norm)
        adjacent = self.incident_log.adjacent(window)
        recurred = policy.recurred(adjacent)

        # On the state that tripped, which is gone afterwards: what is proven, and all that trials are compared with.
        unsteady, damage, harmless = self._replayed(t)
        left_out, present, outlook = self.parts.select_unskipped(), None, None
        sizes: growth_locator.Sizes = {}
        proven = bool(damage) or harmless is not None or finding.verdict is Verdict.CORRUPTED
        if not proven:  # what is proven needs no trial
            outlook = self.trials.look_ahead(t.done.state, left_out)
            present = self.points.ring.aside(t.done.state.step) if self.points.may_look else None
            if finding.verdict is not Verdict.NON_FINITE:  # of which nan_locator has told already
                sizes = growth_locator.measure_sizes(self.engine, t.done.batch.micro_batches)

        # On a good state from before the onset: the cause.
        snapshot = self.points.back(finding.onset, 1 if recurred and not harmless else 0, left_out)
        if snapshot is None:
            return self._unproven(t, damage, harmless)
        if unsteady and not damage and self.replays.differ(t.done.batch):
            damage = UNSTEADY  # also on a good state, where nothing would magnify the last bits
        offer = None
        if damage:
            conclusion = Conclusion(Cause.HARDWARE, [], [], damage)
        elif harmless:
            conclusion = Conclusion(Cause.NUMERICS, [], [], harmless.reason, kernels=harmless.kernels)
        else:
            conclusion = self.points.examine(window, snapshot, left_out, adjacent)
            snapshot = self.points.before_region(conclusion, snapshot)
            conclusion = self.incident_log.returned_again(conclusion, window)
            if not proven:
                conclusion = self._locate_growth(conclusion, t, sizes)
                start = TrialStart(window, snapshot, left_out, outlook)
                tried = self._try_all(t, conclusion, start, recurred or policy.state.recurrences > 0)
                conclusion, offer = tried.conclusion, tried.offer
                if tried.harmless is not None:
                    return self._train_through(t, conclusion, tried.harmless, snapshot, present, begin)
                if tried.heals and present is not None:
                    self._wait(t, conclusion, present, begin)
                    return None
                if tried.blameless:
                    window = []  # all of them are read again

        # Back to that state, without the cause, unless the checkpoint that the run resumed from is to blame.
        suspect = conclusion.cause in BLAMELESS and self.points.origin.again(snapshot.step, finding.onset)
        if suspect and policy.may_suspect and self.last_resort.can_go_back(snapshot.step):
            why = f"the checkpoint of step {self.points.origin.step} is the suspect: {self.points.origin.suspect()}"
            decision = policy.abandon(t.decision, why, proven=False)
            raise self.last_resort.end(decision, t.done.state, Cause.STORAGE)
        remedy = None
        if offer is not None:
            remedy = policy.adopt(offer, conclusion.reason)
            self._carry_out(offer, snapshot)
        start = TrialStart(window, snapshot, left_out, outlook)
        return self._undo(t.decision, t.done.state, conclusion, start, begin, remedy)

    def _locate_growth(self, found: Conclusion, t: Tripped, sizes: growth_locator.Sizes) -> Conclusion:
        """A conclusion that says which layer grew first, if any did. The engine holds a good state. sizes: those of the
        tripping samples on the state that tripped."""
        if not sizes:
            return found
        good = growth_locator.measure_sizes(self.engine, t.done.batch.micro_batches)
        growth = growth_locator.find_first_growth(good, sizes)
        if growth is None:
            return found
        told = {"sentence": growth.sentence, "layer": growth.first.layer, "tensor": growth.first.tensor}
        self.log.emit(Located(step=t.done.state.step, kind="growth", reproduced=True, **told), say=True)
        return replace(found, reason=f"{found.reason}; {growth.sentence}")

    def _train_through(
        self,
        t: Tripped,
        found: Conclusion,
        trial: HarmTrial,
        snapshot: Snapshot,
        present: Snapshot | None,
        begin: float,
    ) -> RunState | None:
        """Go on with data that is new, or does no harm, from where the run stands: None; or from the snapshot: the
        state after it. That is where updates were refused since, so that their batches are trained on, unless that
        undoes many others; or where the present state could not be kept. Raises SpaceError."""
        state, back, seconds = t.done.state, None, time.perf_counter() - begin
        since = self.points.since(snapshot.step + 1)
        applied = sum(step.applied for step in since)
        few = not applied or (applied <= AGAIN and self.guard.policy.may_redo(applied))
        again = applied < len(since) and few
        if t.decision.finding.verdict is Verdict.DAMAGE:
            self.watches.probe.accept(state.step)
        if present is not None and not again:
            self.points.restore(present)
        else:
            back = self._go_on_from(snapshot, state, begin, trial.reason, seconds)
        self.guard.policy.trained_through(alone=not self.incident_log.has_acted)
        if t.decision.finding.verdict is not Verdict.DAMAGE:
            self._begin_again(trial)
        lost = 0 if back is None else state.step - back.step
        self.incident_log.train_through(found, state, trial.reason, lost, seconds)
        return back

    def _wait(self, t: Tripped, found: Conclusion, present: Snapshot, begin: float) -> None:
        """Stay where the run stands, and leave it to itself for some steps. Raises SpaceError."""
        self.points.restore(present)
        until, seconds = self.guard.policy.wait(t.decision.finding), time.perf_counter() - begin
        self.incident_log.attribute(
            found, [], Action.WAIT, f"it is left to itself until step {until}", 0, seconds
        )

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
        if found.cause is not Cause.DATA or not found.convicted:
            return found
        found = found.keep_first(max(TAKEN_AWAY, int(TAKEN_SHARE * read)))
        if self.guard.policy.are_costly(found.convicted):
            reason = (
                "they were deferred, as they cost more than they teach, and trouble comes with them again"
            )
            return replace(found, proven=True, reason=f"{found.reason}. {reason}")
        deferred = replace(found, guilty=[], later=sorted({*found.convicted, *found.later}))
        if trial is not None and is_clear(trial):
            kept = deferred if trial.verdict is TrialVerdict.MIXED and not found.few else found
            return replace(kept, proven=True)
        if not self.guard.policy.may_take_untried(len(found.convicted)):
            return deferred
        self.guard.policy.take_untried(len(found.convicted))
        return found

    def choose_skips(
        self, found: Conclusion, window: Sequence[Trained], state: RunState
    ) -> tuple[Conclusion, str]:
        """What is to be skipped, or deferred, of the samples that were found bad on the present state; or why none is,
        as a sentence. Those that are few and far out by themselves need no trial."""
        policy, count = self.guard.policy, len(found.convicted)
        few = (found.few and policy.may_take_untried(count)) or policy.are_costly(found.convicted)
        trial = None if few else self._try_aside(found, window, state)
        if trial is not None and is_harmless(trial, few=False):
            if trial.verdict is TrialVerdict.NEW:
                self._begin_again(trial)
            return found, trial.reason
        chosen = self._bounded(found, trial, state.cursor)
        # Nothing is undone: a sample behind the cursor cannot change places with one that is yet to be read.
        chosen = replace(chosen, later=[p for p in chosen.later if p >= state.cursor])
        if not chosen.convicted and not chosen.later:
            return (found, f"{chosen.reason}; they are too many to skip, and were read already")
        return chosen, ""

    def _try_aside(self, found: Conclusion, window: Sequence[Trained], state: RunState) -> HarmTrial | None:
        """Try suspects on the newest good snapshot from before `window`, and return to the state of now, where the run
        stays. None: there is no room for it, or no such snapshot."""
        if not self.points.may_look or not window:
            return None
        left_out, present = self.parts.select_unskipped(), self.points.ring.aside(state.step)
        outlook = self.trials.look_ahead(state, left_out)

        def attempt() -> HarmTrial | None:
            snapshot = self.points.look(min(t.step for t in window), left_out)
            if snapshot is None:
                return None
            tried = self.trials.try_suspects(found, TrialStart(window, snapshot, left_out, outlook))
            return tried.verdict if tried is not None else None

        try:
            return self.trials.unless_unreadable(state.step, attempt)
        finally:
            self.points.restore(present)

    def leave_kernels(self, t: Tripped, keep_before: Callable[[], None]) -> RunState | None:
        """After a single refused update that is harmless without some kernels, leave them and do the step again: where
        the run stands then. Without a snapshot, or rewinds left, they are left from the next step on. None: the run
        was not rewound.

        One such step is enough: unlike hard data, a kernel that computes wrong numbers does not get easier, and makes
        harmless samples look guilty. keep_before: keeps the state before the step, so that no other one is repeated.
        """
        wrong, policy, finding = self._wrong_kernels(t), self.guard.policy, t.decision.finding
        if wrong is None:
            return None
        keep_before()
        if not policy.may_look_back(finding.step, finding.step, self.points.oldest):
            policy_state.leave_kernels(policy.state, wrong.kernels)
            return None
        decision = policy.undo(replace(finding, onset=finding.step), wrong.reason)
        return self.go_back(replace(t, decision=decision, harmless=wrong))

    def _wrong_kernels(self, t: Tripped) -> Harmless | None:
        """The kernels without which a refused step is harmless, on the state that refused it."""
        if not self.guard.policy.may_leave_kernels:
            return None
        return self.replays.without_kernels(t.done.batch, self._expected(t))

    def _expected(self, t: Tripped) -> tuple[Trend | None, Trend | None]:
        return Detector(self.config.stability.detector, t.detector).expected()

    def look_back(self, case: Waiting, measured: Measured, state: RunState) -> RunState | None:
        """Examine the steps of a case on a proven state from before them. If a crowd of their samples is guilty there,
        the run resumes from it without them, and that state is returned; else it stays where it is: individually
        convicted samples are skipped, and with none nothing changes. Raises SpaceError."""
        begin, policy = time.perf_counter(), self.guard.policy
        self.parts.phase("examine samples")
        window = [t for t in self.points.since(case.first) if t.step <= case.last]
        if not window:
            self.watches.samples.drop(case, state.step, UNKNOWN)
            return None
        left_out = self.parts.select_unskipped()
        present = self.points.ring.aside(state.step)
        outlook = self.trials.look_ahead(state, left_out)
        snapshot = self.points.look(case.first, left_out)
        found = Conclusion(Cause.UNKNOWN, [], [], "no snapshot is good")
        if snapshot is not None:
            found = self.points.examine(window, snapshot, left_out, False)
        if snapshot is None or found.cause is not Cause.DATA or len(found.guilty) < groups.CROWD:
            self.points.restore(present)
            few = found.individuals({p for t in window for p in t.positions.tolist()})
            seconds = time.perf_counter() - begin
            if few.guilty:
                self.watches.samples.skip(case, few, window, state, seconds)
                policy.skipped(few.convicted, few.proven)
            else:
                self.watches.samples.nobody(case, found, state.step, seconds)
            return None
        tried = self.trials.try_suspects(found, TrialStart(window, snapshot, left_out, outlook))
        trial = tried.verdict if tried is not None else None
        if trial is not None and is_harmless(trial, few=False):
            self.points.restore(present)
            seconds = time.perf_counter() - begin
            self.watches.samples.nobody(case, replace(found, reason=trial.reason), state.step, seconds)
            if trial.verdict is TrialVerdict.NEW:
                self._begin_again(trial)
            return None
        found = self._bounded(found, trial, state.cursor)
        snapshot = self.points.before_region(found, snapshot)
        finding = Finding(state.step, Verdict.SHIFT, 1.0, case.first, case.reason, on_trend=False)
        decision = policy.undo(finding, case.reason)
        self.incident_log.open(decision, state, window, measured.grad_norm)
        self.watches.samples.convicted(case)
        return self._undo(decision, state, found, TrialStart(window, snapshot, left_out, outlook), begin)

    def undo_jump(self, jump: TensorJump, done: StepResult) -> RunState | None:
        """Repeat the steps in which a tensor jumped, on a state from before them. If it does not jump again, something
        else than these steps changed it: the run goes on from that state, and nothing is taken away. Else it stays
        where it is: None. Raises SpaceError."""
        begin, state, policy = time.perf_counter(), done.state, self.guard.policy
        self.parts.phase("replay steps")
        left_out, present = self.parts.select_unskipped(), self.points.ring.aside(state.step)

        def repeat() -> tuple[Snapshot | None, Mapping[str, TensorNorms] | None]:
            snapshot = self.points.look(jump.before + 1, left_out)
            return snapshot, None if snapshot is None else self.trials.repeat(
                snapshot, state, self.watches.tensors.measure
            )

        snapshot, found = self.trials.unless_unreadable(state.step, repeat) or (None, None)
        if snapshot is None or found is None or jump.is_repeated(found):
            self.points.restore(present)
            self.watches.tensors.accept()
            why = "cannot be done again" if found is None else "make it again"
            self.log.emit(Warned(step=state.step, text=f"{jump.reason}: the same steps {why}"), say=True)
            return None
        reason = f"{jump.reason}; the same steps from step {snapshot.step} on do not make it again"
        finding = Finding(state.step, Verdict.DAMAGE, 1.0, jump.before + 1, reason, on_trend=False)
        decision = policy.undo(finding, reason)
        self.incident_log.open(decision, state, self.points.since(finding.onset), done.measured.grad_norm)
        start = TrialStart([], snapshot, left_out, None)
        return self._undo(decision, state, Conclusion(Cause.STATE, [], [], reason), start, begin)

    def _replayed(self, t: Tripped) -> tuple[bool, str, Harmless | None]:
        """Whether all runs of the step differ; what is proven about the hardware, a sentence, or ""; how the step is
        harmless."""
        unsteady, damage, harmless = False, t.damage, t.harmless
        if t.done.applied:  # the state that it was done on is gone
            return unsteady, damage, harmless
        if not damage and not harmless:
            unsteady, damage = self.replays.compare(
                t.done.batch, t.done.measured, t.done.state.step, t.decision.finding.verdict
            )
        if not damage and not harmless:
            if self.guard.policy.may_fall_back:
                harmless = self.replays.without_fp8(t.done.batch, t.done.measured, self._expected(t))
            harmless = harmless or self._wrong_kernels(t)
        if harmless:
            # Failed numerics must not measure samples and states.
            self.engine.numerics.switch(harmless.numerics)
        return unsteady, damage, harmless

    def _try_all(self, t: Tripped, found: Conclusion, start: TrialStart, again: bool) -> Tried:
        """Try the suspects of a conclusion, and remedies where other data does not help either; again: the trouble came
        back. Samples that are not finite are bad without a trial."""
        if self.guard.policy.are_costly(found.convicted):
            return Tried(self._bounded(found, None, t.done.state.cursor))
        trial, harms_anyway = None, False
        finite = t.decision.finding.verdict is not Verdict.NON_FINITE
        if finite and (suspects := self.trials.try_suspects(found, start)) is not None:
            trial, harms_anyway = suspects
        if again or harms_anyway:
            offer, reason = self._try_remedies(t, start)
            if offer is not None:
                found = Conclusion(offer.remedy.cause, [], found.suspects, reason, kernels=offer.kernels)
                return Tried(found, offer=offer, blameless=True)
            if heals := self._try_waiting(t, start):
                found = Conclusion(Cause.STATE, [], found.suspects, f"{found.reason}; {heals}")
                return Tried(found, blameless=True, heals=heals)
        if not finite:
            return Tried(replace(found, proven=True))
        few = found.few and self.guard.policy.may_take_untried(len(found.convicted))
        if trial is None or not is_harmless(trial, few):
            return Tried(self._bounded(found, trial, t.done.state.cursor))
        if not trial.damaged:
            return Tried(found, harmless=trial)
        found, heals = _of_state(found, trial), self._try_waiting(t, start)
        found = replace(found, reason="; ".join(filter(None, [found.reason, heals])))
        return Tried(found, blameless=True, heals=heals)  # something else damaged the state

    def _try_waiting(self, t: Tripped, start: TrialStart) -> str:
        """How the trouble heals by itself, a sentence; "": it does not, or must not be waited for."""
        may = self.guard.policy.may_wait and self.points.may_look
        return self.trials.try_nothing(start, t.done.state) if may else ""

    def _try_remedies(self, t: Tripped, start: TrialStart) -> tuple[Offer | None, str]:
        """The remedy whose branch has won, and why; None: none has, or the run has tried enough."""
        policy, saved = self.guard.policy, start.snapshot.extra.state
        if gone := policy.take_back_failed():
            self.engine.adjustments.switch(policy.state.adjusted)
            numerics = self.engine.numerics
            numerics.switch(replace(numerics.now, plain=numerics.kinds_of(policy.state.kernels)))
            self.log.emit(
                SettingsAdjusted(
                    step=saved.step,
                    settings=policy.state.adjusted,
                    reason=f"without {', '.join(gone)} again: the trouble came back",
                ),
                say=True,
            )
        good_rate = self.points.rate_before(saved.step)
        rate = self.points.highest_rate_since(t.decision.finding.onset)
        kernels = list(self.engine.numerics.kernels.values())
        offers = policy.offer_remedies(saved.updates, good_rate, rate, kernels)
        trial = self.trials.try_remedies(offers, start)
        if trial is None:
            return None, ""
        return next((offer for offer in offers if offer.name == trial.chosen), None), trial.reason

    def _carry_out(self, offer: Offer, snapshot: Snapshot) -> None:
        """What a remedy changes at once on the snapshot, which the engine holds; the rest follows from the policy at
        every step."""
        saved: RunState = snapshot.extra.state
        if offer.name == "reset_moments":
            self.engine.reset_moments()
            self.watches.tensors.state.begin_again()
            # The snapshot has the old moments: a further rewind to it must not bring them back.
            self.points.ring.forget_from(snapshot.step)
            self.points.ring.take(snapshot.step, snapshot.extra)
        if offer.name in ("rewarm", "reset_moments"):
            updates = self.guard.policy.config.rewarm_steps
            self.log.emit(RateWarmup(step=saved.step, begin=REWARM_FROM, updates=updates))
        if offer.name in ("reset_moments", *ADJUSTED):
            self.log.emit(
                SettingsAdjusted(step=saved.step, settings=[offer.name], reason=offer.remedy.reason)
            )

    def _remedy(self, found: Conclusion, start: TrialStart) -> Remedy:
        """The remedy for a conclusion. A corpus of which samples were bad again and again is tried to be left out."""
        policy, corpus, swap = self.guard.policy, self._corpus_of(found), ""
        least = 1 - self.config.stability.policy.swap_most
        if corpus is not None and found.proven and policy.may_swap(corpus):
            bad = sorted([*found.convicted, *found.later])
            enough = start.left_out.share_without(corpus) >= least
            trial = self.trials.try_corpus(corpus, bad, start) if enough else None
            swap = trial.reason if trial is not None and trial.helps else ""
        updates = start.snapshot.extra.state.updates
        return policy.remedy(found.cause, updates, corpus, swap, found.proven, found.convicted, found.kernels)

    def _corpus_of(self, found: Conclusion) -> str | None:
        """The corpus that most of the bad samples are of, if more than half are."""
        bad = [*found.convicted, *found.later]
        if found.cause is not Cause.DATA or not bad:
            return None
        order = self.parts.source.order
        counts = np.bincount(order.locate(np.array(bad)).corpus)
        most = int(counts.argmax())
        return order.corpora[most].name if 2 * counts[most] > len(bad) else None

    def _undo(
        self,
        decision: Decision,
        state: RunState,
        found: Conclusion,
        start: TrialStart,
        begin: float,
        remedy: Remedy | None = None,
    ) -> RunState:
        """Record a conclusion and its remedy in journal and ledgers, and go on from the snapshot. Raises HandoverError
        and UnstableError if the remedy ends the process."""
        snapshot, window = start.snapshot, start.window
        remedy = remedy or self._remedy(found, start)
        seconds = time.perf_counter() - begin
        if remedy.action is Action.HANDOVER:
            decision = replace(decision, reason=remedy.reason)
            given = self.last_resort.weigh(replace(decision, action=remedy.action))
            remedy = replace(remedy, action=given.action, reason=given.reason)
        swap = self._corpus_of(found) if remedy.action is Action.SWAP_CORPUS else None
        lost = state.step - snapshot.step
        self.incident_log.attribute(found, window, remedy.action, remedy.reason, lost, seconds, swap)
        if remedy.release:
            self.incident_log.release(remedy.release, snapshot.extra.state.cursor, remedy.reason)
        if remedy.action in (Action.CUT_LR, Action.CAP_LR):
            limits = [limit.model_dump() for limit in self.guard.policy.state.limits]
            self.log.emit(RateCut(step=state.step, reason=remedy.reason, limits=limits))
        if remedy.action.ends:
            decision = replace(decision, action=remedy.action, reason=remedy.reason)
            raise self.last_resort.end(decision, state, found.cause)
        return self._go_on_from(snapshot, state, begin, remedy.reason, seconds)

    def _unproven(self, t: Tripped, damage: str, harmless: Harmless | None) -> RunState:
        """No snapshot is proven good: hand over; if impossible, alert, and resume from the newest finite one.
        Raises HandoverError and UnstableError."""
        policy, begin, snapshot = self.guard.policy, time.perf_counter(), self.points.finite
        origin, finding = self.points.origin, t.decision.finding
        if origin.reason:
            why = f"the checkpoint of step {origin.step} is convicted: {origin.reason}"
            cause, decision = Cause.STORAGE, policy.abandon(t.decision, why, proven=True)
        else:
            cause = Cause.HARDWARE if damage else Cause.NUMERICS if harmless else Cause.UNKNOWN
            told = [t.decision.reason, "no snapshot is good", damage, harmless.reason if harmless else ""]
            decision = policy.hand_over(finding, "; ".join(filter(None, told)), snapshot is None)
        decision = self.last_resort.weigh(decision, damaged=snapshot is None)
        kernels = harmless.kernels if harmless else ()
        if decision.action.ends or snapshot is None:
            raise self.last_resort.end(decision, t.done.state, cause, kernels)
        policy_state.leave_kernels(policy.state, kernels)
        if self.incident_log.incident is not None:
            self.incident_log.incident.cause = cause
        self.points.restore(snapshot)
        return self._go_on_from(snapshot, t.done.state, begin, "the newest that is finite")

    def _go_on_from(
        self, snapshot: Snapshot, state: RunState, begin: float, reason: str, told: float = 0.0
    ) -> RunState:
        """Rewind everything but the engine to the snapshot that the engine has restored; where the run stands. told:
        the seconds since `begin` that the incident already counts."""
        kept = snapshot.extra
        back: RunState = kept.state.model_copy(deep=True)
        back.seconds = state.seconds
        self.guard.rewind(kept.detector)
        incident = self.incident_log.incident
        # After a fault of the hardware the same steps are done again, as they should have been.
        hardware = incident is not None and incident.cause is Cause.HARDWARE
        if not hardware and self.guard.policy.rewound(back.updates, state.step - back.step):
            c = self.guard.policy.config
            self.log.emit(
                RateWarmup(step=back.step, begin=c.rewind_warmup_from, updates=c.rewind_warmup), say=True
            )
        self.watches.rewound(back.step, kept.watches)
        set_rng_state(kept.random)
        self.parts.loader.go_to(back.cursor, self.parts.select_unskipped())
        self.points.forget_after(snapshot.step)
        seconds, lost = time.perf_counter() - begin, state.step - back.step
        self.incident_log.rewound(back.step, back.cursor, seconds - told)
        self.log.say(
            f"  rewound {lost} step{'' if lost == 1 else 's'} to step {back.step}, without a restart: found and "
            f"undone in {seconds:.1f} s; {reason}"
        )
        self.last_resort.tell_alert(back)
        return back


def _of_state(found: Conclusion, trial: HarmTrial) -> Conclusion:
    """The state was worse than the samples can explain, which are harmless. A cause other than data stays."""
    reason = f"the state was damaged, but not by the data: {trial.reason}"
    if found.convicted:
        return Conclusion(Cause.STATE, [], found.suspects, reason)
    return replace(found, reason=f"{found.reason}; {reason}")
