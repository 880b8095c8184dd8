"""Watches single samples: examines a trickle of bad ones, and every refused batch, without rewinding. Collective.

Suspects of the running test in stability/samples.py, and updates refused without an incident, become cases. A case is
examined as soon as the current state can judge samples: most are ordinary, or no incident is open and the loss is on
trend. Guilty samples are skipped by identity, including those ahead; nothing is undone. All methods are collective:
every rank decides alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from megastable.base.errors import DataError
from megastable.checkpoint.store import RunState
from megastable.config.stability import StabilityConfig
from megastable.data.loader import Loader, Step
from megastable.data.skips import Selection
from megastable.engine.measured import Measured
from megastable.recovery import new_kinds
from megastable.recovery.by_heart import ByHeart
from megastable.recovery.incident_log import IncidentLog
from megastable.recovery.sample_replay import Laboratory, Trained, harmless
from megastable.recovery.trickle import Trickle
from megastable.run.events.stability_events import DiscardExamined, SamplesDropped, SamplesExamined, Would
from megastable.run.events.training_events import Warned
from megastable.run.log import RunLog
from megastable.stability import novelty, suspects
from megastable.stability.actions import Action, Cause, Decision
from megastable.stability.attribution import Conclusion
from megastable.stability.policy import Policy
from megastable.stability.sample_history import Alarm, AlarmKind, Rest, SampleTest, Waiting, WatchState
from megastable.stability.signals import Verdict
from megastable.stability.suspects import Seen

CASES = (
    8  # most waiting cases: more batches are refused only if the state is bad, and then no sample is guilty
)

EARLIER = 2  # steps before the onset of an easy region that are examined: its first batch is a mixed one
MOST = (
    1 << 14
)  # of the latest samples since the onset of an easy region, so many are read, and two steps at least
UNKNOWN = "this process does not know the samples of its steps"
LEFT_OUT = "its samples are left out already"
WaitingKind = Literal["trickle", "batch", "easy"]


class SampleWatch:
    """Of one process. phase: the trainer's heartbeat; selection: what is skipped, by the current ledger."""

    def __init__(
        self,
        config: StabilityConfig,
        incident_log: IncidentLog,
        log: RunLog,
        phase: Callable[[str], None],
        selection: Callable[[], Selection],
        state: WatchState | None = None,
    ) -> None:
        self.config, self.incident_log = config, incident_log
        self.log, self.phase, self.selection = log, phase, selection
        # What is to be skipped of the suspects of some steps; set by who can rewind.
        self.choose_skips: Callable[[Conclusion, Sequence[Trained], RunState], tuple[Conclusion, str]] = (
            _untried
        )
        self._kept = Rest()  # after suspects that were trained on all the same
        self._names = [corpus.name for corpus in incident_log.source.order.corpora]
        self._looked, self._rest, self._kinds = 0, Rest(), Rest()
        self.rewind(state or WatchState())
        self.before = self.state  # before the last step with a refused update

    @property
    def state(self) -> WatchState:
        """A copy."""
        waiting = [case.model_copy() for case in self._waiting]
        return WatchState(
            test=self._test.state,
            easy=self._easy.state,
            waiting=waiting,
            quiet=self._quiet,
            looked=self._looked,
            rest=self._rest.until,
            rested=self._rest.steps,
            kinds=self._kinds,
        )

    def rewind(self, state: WatchState) -> None:
        """Undo what came after `state`, including its suspicions."""
        self._test = SampleTest(self.config.samples, state.test)
        # Easy samples are skipped without a rewind: no more false ones allowed than for a trickle.
        self._easy = SampleTest(self.config.samples, state.easy, self.config.samples.false_alarms)
        self._waiting, self._quiet = [case.model_copy() for case in state.waiting], state.quiet
        self._pools: new_kinds.Pools = {}  # samples may have been moved since
        self._due = 0  # step of the next search for new kinds
        self._ordinary, self._looked = False, max(state.looked, self._looked)
        # Only from a checkpoint: time already spent on searches stays spent.
        self._rest = max(self._rest, Rest(until=state.rest, steps=state.rested), key=_until)
        self._kinds = max(self._kinds, state.kinds, key=_until)

    def observe(self, batch: Step, measured: Measured, applied: bool, step: int) -> None:
        """Judge the samples of a step; suspects wait."""
        if not self.config.enabled:
            return
        if not applied:
            self.before = self.state  # of a step that may leave a snapshot; a copy costs as much as the test
        corpora = self.incident_log.source.order.locate(batch.positions).corpus
        losses = measured.losses.numpy()
        scored, alarm = self._test.observe(
            step, batch.positions, losses, corpora, self._names, applied, measured.grad_norm
        )
        # A shift shared by all samples is left to the other test; single easy samples mean nothing.
        _, low = self._easy.observe(step, batch.positions, -losses, corpora, self._names, applied)
        self._ordinary = scored.ordinary
        for case in self._waiting:
            # Nothing was trained on since the refusal, so these are the same weights.
            if case.kind == "discard" and case.proven is None and (scored.ordinary or applied):
                case.proven = scored.ordinary
        if alarm is not None and (alarm.kind is AlarmKind.TRICKLE or step >= self._rest.until):
            self._suspect(alarm.kind.value, alarm, alarm.reason, step)
        if low is not None and low.kind is AlarmKind.BATCH:
            reason = (
                f"since step {low.onset} all samples together lie far below what is usual for their corpora"
            )
            self._suspect("easy", low, reason, step)

    def begin_again(self) -> None:
        """What comes is of another kind than what came before: forget what is usual, and what was suspected."""
        self._test = SampleTest(self.config.samples)
        self._easy = SampleTest(self.config.samples, None, self.config.samples.false_alarms)
        self._waiting.clear()
        self._pools.clear()
        self._quiet = 0

    def _suspect(self, kind: WaitingKind, alarm: Alarm, reason: str, step: int) -> None:
        if self.config.dry_run:
            event = Would(step=step, action=Action.SKIP, reason=reason)
            self.log.emit(event, say=f"step {step}: would examine samples: {reason}")
            return
        before = [case for case in self._waiting if case.kind == kind]
        self._waiting = [case for case in self._waiting if case.kind != kind]
        first = min([alarm.onset, *(case.first for case in before)])
        known = {p: loss for case in before for p, loss in zip(case.positions, case.losses, strict=True)}
        if kind == "trickle":
            known |= {far.position: far.loss for far in self._test.far(alarm.onset)}
        self._wait(
            Waiting(kind=kind, first=first, last=step, verdict=Verdict.TRICKLE, reason=reason,
                    positions=list(known), losses=list(known.values()))
        )  # fmt: skip

    def refused(
        self, batch: Step, measured: Measured, step: int, decision: Decision, located: str = ""
    ) -> None:
        """An update was refused, and nothing more is done about it now. located: the origin of its first non-finite
        number, if it was replayed."""
        positions, losses = batch.positions.tolist(), measured.losses.tolist()
        verdict, reason = decision.finding.verdict, decision.reason
        self._wait(
            Waiting(kind="discard", first=step, last=step, verdict=verdict, reason=reason, positions=positions,
                    losses=losses, located=located)
        )  # fmt: skip

    def lifted(self, policy: Policy, step: int, oldest: int | None) -> Waiting | None:
        """A case of whole batches that need not wait any longer, as a state from before it is available. oldest: step
        of the oldest snapshot."""
        case = next((case for case in self._waiting if case.kind == "batch"), None)
        if case is None or not policy.may_look_back(step, case.first, oldest):
            return None
        self._waiting.remove(case)
        return case

    def nobody(self, case: Waiting, found: Conclusion, step: int, seconds: float) -> None:
        """Journal that no sample of a case is guilty. Whole batches then rest before the next examination, twice as
        long if they recur soon."""
        if case.kind == "batch":
            self._rest = self._rest.after(step)
        examined = DiscardExamined if case.kind == "discard" else SamplesExamined
        reason = "; ".join(filter(None, [found.reason, case.located]))
        event = examined(
            step=step, first=case.first, last=case.last, suspected=case.reason,
            positions=case.positions, reason=reason, seconds=round(seconds, 3),
        )  # fmt: skip
        self.log.emit(event, say=f"step {step}: {case.reason}; examined: {reason}: nothing is skipped")

    def convicted(self, case: Waiting) -> None:
        """A sample of a case is guilty: the next rest of its kind is short."""
        if case.kind == "batch":
            self._rest = Rest(until=self._rest.until)
        if case.kind == "kind":
            self._kinds = Rest(until=self._kinds.until)

    def skip(
        self,
        case: Waiting,
        found: Conclusion,
        window: Sequence[Trained],
        state: RunState,
        loader: Loader,
        seconds: float,
    ) -> None:
        """Skip the guilty samples of a case; nothing is undone. Raises SpaceError."""
        self.convicted(case)
        self.incident_log.skip(found, case.first, window, case.verdict, case.reason, state, seconds)
        for test in (self._test, self._easy):
            test.convict(found.convicted)
        loader.go_to(state.cursor, self.selection())

    def act(
        self,
        state: RunState,
        trained: Sequence[Trained],
        laboratory: Laboratory,
        clear: bool,
        calm: bool,
    ) -> list[Conclusion]:
        """Examine waiting cases, if possible now: skip guilty samples, and go on. Returns the convictions. Raises
        SpaceError.

        trained: the latest steps. clear: no incident is open, and no action awaits proof; calm: also, the update was
        applied and is on trend. A trickle may keep the loss high and an incident open for as long as it lasts, so
        mostly ordinary samples in a step are enough to trust the state.
        """
        self._quiet = self._quiet + 1 if clear and calm else 0
        convicted = list[Conclusion]()
        trickle = any(case.kind == "trickle" for case in self._waiting)
        for case in list(self._waiting):
            ready = case.kind == "easy" or (case.kind == "trickle" and self._ordinary)
            ready &= state.step >= self._kept.until
            if ready or self._quiet >= self.config.samples.quiet_steps:
                self._waiting.remove(case)
                found = self._examine(case, state, trained, laboratory)
                convicted += [found] if found is not None else []
        # Losses are the better evidence; if they convict none of a trickle, likeness may.
        due = trickle or state.step >= self._due
        if due and self._ordinary and state.step >= self._kinds.until:
            self._due = state.step + novelty.PERIOD
            for case in self._new_kinds(state.step, trained, laboratory):
                looked = self._looked
                found = self._examine(case, state, trained, laboratory)
                convicted += [found] if found is not None else []
                if found is None:
                    ahead = self._looked > looked
                    self._kinds = self._kinds.after(state.step) if ahead else self._kinds.briefly(state.step)
        return convicted

    def _new_kinds(self, step: int, trained: Sequence[Trained], laboratory: Laboratory) -> list[Waiting]:
        """A case for each corpus with a new kind of text, of which one sample is known."""
        self.phase("look for new kinds of text")
        try:
            return laboratory.led(lambda lab: new_kinds.look(trained, lab, self.config.samples, self._pools))
        except DataError as error:
            # On every rank. Unreadable samples have been trained on anyway.
            self._kinds = self._kinds.after(step)
            text = f"new kinds of text are not looked for until step {self._kinds.until}: {error}"
            self.log.emit(Warned(step=step, text=text), say=True)
            return []

    def _wait(self, case: Waiting) -> None:
        every = [*self._waiting, case]
        self._waiting = every[-CASES:]
        for dropped in every[:-CASES]:
            self.drop(dropped, case.last, f"{CASES} later ones wait")

    def drop(self, case: Waiting, step: int, reason: str) -> None:
        """Journal that a case is not examined, and why."""
        event = SamplesDropped(
            step=step, first=case.first, last=case.last, suspected=case.reason,
            positions=case.positions, reason=reason,
        )  # fmt: skip
        self.log.emit(event, say=f"step {step}: {case.reason}; not examined: {reason}")

    def _examine(
        self, case: Waiting, state: RunState, trained: Sequence[Trained], laboratory: Laboratory
    ) -> Conclusion | None:
        begin = time.perf_counter()
        self.phase("examine samples")
        left_out = self.selection()
        history = [t for t in trained if t.applied and t.step < case.first]
        if case.kind == "discard":
            positions, losses = np.array(case.positions), np.array(case.losses)
            window = [Trained(case.first, positions, losses, applied=False)]
        else:
            window = [t for t in trained if case.first <= t.step <= case.last]
        if case.kind == "easy":
            window = [t for t in trained if case.first - EARLIER <= t.step <= case.last]
            window = window[-max(2, MOST // laboratory.batch) :]
            history = [t for t in history if t.step < case.first - EARLIER]
        try:
            found, self._looked = laboratory.led(
                lambda lab: (self._concluded(case, window, history, state, lab, left_out), self._looked)
            )
        except DataError as error:
            # On every rank. If it is yet to be trained on, training will report it.
            self.drop(case, state.step, str(error))
            return None
        if found is None:
            self.drop(case, state.step, LEFT_OUT if window or case.positions else UNKNOWN)
            return None
        seconds = time.perf_counter() - begin
        if found.cause is not Cause.DATA or not found.guilty:
            self.nobody(case, found, state.step, seconds)
            return None
        found, why = self.choose_skips(found, window, state)
        seconds = time.perf_counter() - begin
        if why:
            self._kept = self._kept.after(state.step)
            self.nobody(case, replace(found, reason=why), state.step, seconds)
            return None
        self._kept = Rest(until=self._kept.until)
        self.skip(case, found, window, state, laboratory.loader, seconds)
        return found

    def _concluded(
        self,
        case: Waiting,
        window: Sequence[Trained],
        history: Sequence[Trained],
        state: RunState,
        laboratory: Laboratory,
        left_out: Selection,
    ) -> Conclusion | None:
        """The conclusion; None if no sample is left to be examined."""
        if case.kind in ("trickle", "kind"):
            met = self._met(case, window, left_out, laboratory)
            if not met.positions.size:
                return None
            usual = self._usual(met, history, laboratory, left_out)
            search = Trickle(laboratory, self.config, met, usual, case, state.cursor, left_out)
            found = search.conclude(self._may_look(state.step))
            self._looked += search.looked
            return found
        if case.kind == "easy":
            return self._by_heart(window, history, state, laboratory, left_out)
        if not window or left_out.mask(window[-1].positions).all():
            return None
        found = laboratory.examine(window, history, state.cursor, left_out)
        if not found.guilty and case.proven:
            found = self._refused(window[0], found, history, laboratory, left_out)
        return found

    def _met(
        self, case: Waiting, window: Sequence[Trained], left_out: Selection, laboratory: Laboratory
    ) -> Seen:
        """The samples since the onset; of steps before this process began only those in the tails are known."""
        positions, losses = harmless(window, left_out)
        before = np.array(case.positions, dtype=np.int64)
        new = ~np.isin(before, positions) & ~left_out.mask(before)
        positions = np.concatenate([before[new], positions])
        losses = np.concatenate([np.array(case.losses)[new], losses])
        return Seen(positions, losses, laboratory.corpora(positions))

    def _usual(
        self, met: Seen, history: Sequence[Trained], laboratory: Laboratory, left_out: Selection
    ) -> Seen:
        """Harmless samples. Those right before may be the first bad ones: if they are measured separately, none of them
        may define how far harmless ones reach."""
        config, begin = self.config.attribution, int(met.positions.min())
        early = begin - config.behind * laboratory.batch
        before = early if early >= config.reference else begin
        return Seen(*laboratory.usual(history, met.corpora, before, left_out))

    def _refused(
        self,
        batch: Trained,
        found: Conclusion,
        history: Sequence[Trained],
        laboratory: Laboratory,
        left_out: Selection,
    ) -> Conclusion:
        """The samples of a refused batch that were bad on the weights that refused it, which the next batch proved
        good: samples soon memorized are no longer bad by now."""
        met = Seen(batch.positions, batch.losses, laboratory.corpora(batch.positions))
        usual = self._usual(met, history, laboratory, left_out)
        guilty = met.of(suspects.suspects(met, usual, self.config.attribution.threshold))
        if not guilty.positions.size:
            return found
        worst = suspects.numbers(guilty, usual)
        reason = (
            f"{guilty.positions.size} of {met.positions.size} samples were bad when they were refused, on weights on "
            f"which the next batch was ordinary: the worst had a loss of {worst[0].loss:.2f} ({worst[0].z:.0f} robust "
            "deviations above harmless ones)"
        )
        return Conclusion(Cause.DATA, sorted(guilty.positions.tolist()), worst, reason)

    def _by_heart(
        self,
        window: Sequence[Trained],
        history: Sequence[Trained],
        state: RunState,
        laboratory: Laboratory,
        left_out: Selection,
    ) -> Conclusion:
        """Samples of `window` that are repetitive, if that made it easy; and further ones ahead, until no more come."""
        positions, losses = harmless(window, left_out)
        met = Seen(positions, losses, laboratory.corpora(positions))
        usual = self._usual(met, history, laboratory, left_out) if positions.size else met
        budget, threshold = self._may_look(state.step), self.config.attribution.threshold
        search = ByHeart(laboratory, window, met, usual, state.cursor, left_out, budget, threshold)
        found = search.conclude()
        self._looked += search.looked
        return found

    def _may_look(self, step: int) -> int:
        """Number of batches ahead that may be measured."""
        c = self.config.samples
        return max(0, min(c.ahead, c.ahead + step // c.ahead_every - self._looked))


def _untried(found: Conclusion, window: Sequence[Trained], state: RunState) -> tuple[Conclusion, str]:
    return found, ""


def _until(rest: Rest) -> int:
    return rest.until
