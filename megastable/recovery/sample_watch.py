"""Watches the samples of whole batches: those that are elevated together, and every refused one. Collective.

Suspects of the running test in attribution/sample_history.py, and updates refused without an incident, become cases. A
case is examined as soon as the current state can judge samples: no incident is open and the loss is on trend. Bad
samples are skipped by identity; nothing is undone. All methods are collective: every rank decides alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megastable.attribution.conclusion import Conclusion
from megastable.attribution.examination import examine
from megastable.attribution.sample_history import Alarm, Rest, SampleTest, Waiting, WatchState
from megastable.attribution.sample_replay import Laboratory, Trained
from megastable.base.errors import DataError
from megastable.checkpoint.store import RunState
from megastable.data.loader import Step
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.recovery.incident_log import IncidentLog
from megastable.recovery.run_parts import RunParts
from megastable.run.events.stability_events import DiscardExamined, SamplesDropped, SamplesExamined, Would
from megastable_guard.actions import Action, Cause, Decision
from megastable_guard.policy import Policy
from megastable_guard.signals import Verdict

# What is to be skipped, or deferred, of the suspects of some steps; or why nothing is, as a sentence.
ChooseSkips = Callable[[Conclusion, Sequence[Trained], RunState], tuple[Conclusion, str]]

# Most waiting cases: more batches are refused only if the state is bad, and then no sample is guilty.
CASES = 8

UNKNOWN = "this process does not know the samples of its steps"
LEFT_OUT = "its samples are left out already"


class SampleWatch(Watch):
    """Of one process."""

    name = "samples"

    def __init__(self, parts: RunParts, incident_log: IncidentLog) -> None:
        self.parts, self.config, self.log = parts, parts.config.stability, parts.log
        self.incident_log = incident_log
        self._names = [corpus.name for corpus in parts.source.order.corpora]
        self._kept = Rest()  # after suspects that were trained on all the same
        self._rest = Rest()
        self.load_state_dict({})
        self.before = self.state_dict()  # before the last step with a refused update

    def state_dict(self) -> dict[str, Any]:
        state = WatchState(test=self._test.state, waiting=self._waiting, quiet=self._quiet, rest=self._rest)
        return state.model_dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = WatchState.model_validate(state)
        self._test = SampleTest(self.config.samples, saved.test)
        self._waiting, self._quiet = saved.waiting, saved.quiet
        # Only from a checkpoint: time already spent on searches stays spent.
        self._rest = max(self._rest, saved.rest, key=lambda rest: rest.until)

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        if saved is not None:
            self.load_state_dict(saved)

    def observe(self, batch: Step, measured: Measured, applied: bool, step: int) -> None:
        """Judge the samples of a step; suspects wait."""
        if not self.config.enabled:
            return
        if not applied:
            # Of a step that may leave a snapshot; a copy costs as much as the test.
            self.before = self.state_dict()
        corpora = self.parts.source.order.locate(batch.positions).corpus
        losses = measured.losses.numpy()
        alarm = self._test.observe(step, losses, corpora, self._names, applied, measured.grad_norm)
        if alarm is not None and step >= self._rest.until:
            self._suspect(alarm, step)

    def begin_again(self) -> None:
        self._test, self._quiet = SampleTest(self.config.samples), 0
        while self._waiting:
            case = self._waiting.pop(0)
            self.drop(case, case.last, "what comes now is new, and so may this have been")

    def _suspect(self, alarm: Alarm, step: int) -> None:
        if self.config.dry_run:
            event = Would(step=step, action=Action.SKIP, reason=alarm.reason)
            self.log.emit(event, say=f"step {step}: would examine samples: {alarm.reason}")
            return
        before = [case for case in self._waiting if case.kind == "batch"]
        self._waiting = [case for case in self._waiting if case.kind != "batch"]
        first = min([alarm.onset, *(case.first for case in before)])
        self._wait(Waiting(kind="batch", first=first, last=step, verdict=Verdict.SHIFT, reason=alarm.reason))

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
        event = examined(**describe(case, step, reason), seconds=round(seconds, 3))
        self.log.emit(event, say=f"step {step}: {case.reason}; examined: {reason}: nothing is skipped")

    def convicted(self, case: Waiting) -> None:
        """A sample of a case is guilty: the next rest of its kind is short."""
        if case.kind == "batch":
            self._rest = Rest(until=self._rest.until)

    def skip(
        self, case: Waiting, found: Conclusion, window: Sequence[Trained], state: RunState, seconds: float
    ) -> None:
        """Skip the guilty samples of a case; nothing is undone. Raises SpaceError."""
        self.convicted(case)
        self.incident_log.skip(found, case.first, window, case.verdict, case.reason, state, seconds)
        self.parts.loader.go_to(state.cursor, self.parts.select_unskipped())

    def act(
        self,
        state: RunState,
        trained: Sequence[Trained],
        laboratory: Laboratory,
        quiet: bool,
        choose_skips: ChooseSkips,
    ) -> list[Conclusion]:
        """Examine waiting cases, if possible now: skip bad samples, and go on. Returns what was skipped. Raises
        SpaceError.

        trained: the latest steps. quiet: no incident is open, no action awaits proof, and the update was applied and is
        on trend.
        """
        self._quiet = self._quiet + 1 if quiet else 0
        convicted = list[Conclusion]()
        ready = self._quiet >= self.config.samples.quiet_steps and state.step >= self._kept.until
        while ready and self._waiting:
            case = self._waiting.pop(0)
            found = self._examine(case, state, trained, laboratory, choose_skips)
            convicted += [found] if found is not None else []
        return convicted

    def _wait(self, case: Waiting) -> None:
        every = [*self._waiting, case]
        self._waiting = every[-CASES:]
        for dropped in every[:-CASES]:
            self.drop(dropped, case.last, f"{CASES} later ones wait")

    def drop(self, case: Waiting, step: int, reason: str) -> None:
        """Journal that a case is not examined, and why."""
        self.log.emit(
            SamplesDropped(**describe(case, step, reason)),
            say=f"step {step}: {case.reason}; not examined: {reason}",
        )

    def _examine(
        self,
        case: Waiting,
        state: RunState,
        trained: Sequence[Trained],
        laboratory: Laboratory,
        choose_skips: ChooseSkips,
    ) -> Conclusion | None:
        begin = time.perf_counter()
        self.parts.phase("examine samples")
        left_out = self.parts.select_unskipped()
        history = [t for t in trained if t.applied and t.step < case.first]
        if case.kind == "discard":
            positions, losses = np.array(case.positions), np.array(case.losses)
            window = [Trained(case.first, positions, losses, applied=False)]
        else:
            window = [t for t in trained if case.first <= t.step <= case.last]
        if not window or left_out.mask(window[-1].positions).all():
            self.drop(case, state.step, LEFT_OUT if window else UNKNOWN)
            return None
        try:
            found = examine(laboratory, window, history, state.cursor, left_out)
        except DataError as error:
            # On every rank. If it is yet to be trained on, training will report it.
            self.drop(case, state.step, str(error))
            return None
        seconds = time.perf_counter() - begin
        if found.cause is not Cause.DATA or not found.guilty:
            self.nobody(case, found, state.step, seconds)
            return None
        found, why = choose_skips(found, window, state)
        seconds = time.perf_counter() - begin
        if why:
            self._kept = self._kept.after(state.step)
            self.nobody(case, replace(found, reason=why), state.step, seconds)
            return None
        if case.verdict is Verdict.NON_FINITE:
            found = replace(found, proven=True)
        self._kept = Rest(until=self._kept.until)
        self.skip(case, found, window, state, seconds)
        return found


def describe(case: Waiting, step: int, reason: str) -> dict[str, Any]:
    """For the journal: what became of a case at `step`, and why."""
    place = {"first": case.first, "last": case.last, "positions": case.positions}
    return {"step": step, "suspected": case.reason, "reason": reason, **place}
