"""Keeps snapshots, and what was trained on since the oldest: takes them, proves one good, restores it. Collective."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megastable.attribution.examination import examine_window
from megastable.attribution.sample_replay import Laboratory, Trained, collect_harmless
from megastable.base import free_memory
from megastable.base.collectives import gather_objects, mark_collective, run_on_all, run_on_first
from megastable.base.errors import HandoverError, MegastableError, UnstableError
from megastable.base.fingerprint import Marks
from megastable.checkpoint import snapshot_budget, store
from megastable.checkpoint.origin import Origin
from megastable.checkpoint.snapshot import Ring, Snapshot
from megastable.checkpoint.snapshot_budget import NO_SNAPSHOTS, SnapshotBudget
from megastable.checkpoint.store import RunState
from megastable.data.skips import Selection
from megastable.recovery.incident_log import IncidentLog
from megastable.recovery.run_parts import RunParts
from megastable.run.events.stability_events import AlertEvent, NoSnapshots, SnapshotRejected
from megastable_guard import conclusion
from megastable_guard.actions import Action, Cause, Decision
from megastable_guard.conclusion import Conclusion
from megastable_guard.detector import DetectorState
from megastable_guard.random_states import read_random_states
from megastable_guard.step_judge import StepJudge

Floats = npt.NDArray[np.float64]
TOLD = 4  # ranks named in a sentence
ALARM = 64  # steps, at least, that an alarm takes since the onset


class RewindState(NamedTuple):
    """What a snapshot keeps besides the engine's state. watches: `Watch.state_dict`, by name. adjusted: what it was
    trained with, of `Adjustments`."""

    state: RunState
    random: dict[str, Any]
    detector: DetectorState
    watches: Mapping[str, Mapping[str, Any]]
    adjusted: tuple[str, ...] = ()


class Points:
    """Of one process, which resumed where `origin` says, after a step of the scheduled rate `resumed_rate`, None if
    that is unknown. marks: fingerprints of the state, if there are any yet. may_look: whether there is room for the
    current state besides the points. laboratory: measures samples on the engine's state."""

    def __init__(
        self,
        parts: RunParts,
        origin: Origin,
        marks: Callable[[], Marks | None] = lambda: None,
        resumed_rate: float | None = None,
    ) -> None:
        self.config, self.engine, self.log = parts.config.stability, parts.engine, parts.log
        self.origin, self.marks = origin, marks
        self.laboratory = Laboratory(self.config.attribution, parts.engine, parts.loader)
        c = self.config.snapshots
        budget = budget_snapshots(parts) if parts.acts and c.interval else NO_SNAPSHOTS
        self.ring, self.may_look = Ring(parts.engine, budget.points, c.interval), budget.aside
        self._resumed_rate = resumed_rate
        # As many steps as the ring reaches back, whichever snapshots it keeps, or as what is waited for may last.
        reach_steps = max(2**c.keep * max(1, c.interval), self.config.policy.wait + ALARM)
        self.trained: deque[Trained] = deque(maxlen=min(512, reach_steps))
        self.finite: Snapshot | None = None  # the newest that `go_back_before` passed over although finite

    def take_snapshot(
        self,
        state: RunState,
        detector: DetectorState,
        watches: Mapping[str, Mapping[str, Any]],
        counters: dict[str, Any] | None = None,
    ) -> None:
        """Keep a snapshot of the engine's state, which is that after `state`. counters: if the engine's have advanced
        already, as after a refused step."""
        if state.step not in self.ring.steps:
            # Checkpoints fill in `stability` themselves; the vitals can be shared, as they are replaced as a whole.
            light = state.model_copy(update={"stability": {}, "vitals": None}).model_copy(deep=True)
            light.vitals = state.vitals
            rewind_state = RewindState(
                light, read_random_states(), detector, watches, self.engine.adjustments.now
            )
            self.ring.take_snapshot(state.step, rewind_state, counters, self.marks())

    @property
    def oldest(self) -> int | None:
        return self.ring.steps[0] if self.ring.steps else None

    def steps_since(self, onset: int) -> list[Trained]:
        return [trained_step for trained_step in self.trained if trained_step.step >= onset]

    def forget_after(self, step: int) -> None:
        """Drop the points and the samples of undone steps."""
        self.ring.forget_from(step + 1)
        while self.trained and self.trained[-1].step > step:
            self.trained.pop()

    # The scheduled learning rate

    @property
    def newest_rate(self) -> float | None:
        """At which the last step was scheduled, if known."""
        return self.rate_before(self.trained[-1].step if self.trained else self.origin.step)

    def rate_before(self, step: int) -> float | None:
        """The scheduled rate at which the state after `step` was last trained."""
        known = (t.scheduled for t in reversed(self.trained) if t.step <= step and t.scheduled is not None)
        return next(known, self._resumed_rate if step == self.origin.step else None)

    def highest_rate_since(self, step: int) -> float | None:
        return max((t.scheduled for t in self.steps_since(step) if t.scheduled is not None), default=None)

    # Rewinding

    def go_back_before(self, onset: int, older: int, left_out: Selection) -> Snapshot | None:
        """Restore the newest point before `onset` that is still good; older: skip so many. Bad ones are dropped, and a
        checkpoint that one of them proves bad is quarantined."""
        self.finite = None
        while (snapshot := self.ring.find_before(onset, older)) is not None:
            if why_rejected := self._changed(snapshot):
                rejected_text = f"  the snapshot of step {snapshot.step} {why_rejected}: further back"
            else:
                is_finite, good = self._tried(snapshot, left_out, self.origin.blame_checkpoint)
                if good:
                    return snapshot
                if is_finite and self.finite is None:
                    self.finite = snapshot
                why_rejected = "is worse on what it was trained on" if is_finite else "is not finite"
                rejected_text = f"  the state after step {snapshot.step} {why_rejected} already: further back"
            self.log.emit_event(SnapshotRejected(step=snapshot.step, reason=why_rejected), say=rejected_text)
            self.ring.forget_from(snapshot.step)
            onset = snapshot.step
        return None

    def look_back_before(self, onset: int, left_out: Selection) -> Snapshot | None:
        """As `go_back_before`, for inspection only: the run may stay where it is, so no point is dropped and no
        checkpoint quarantined."""
        while (snapshot := self.ring.find_before(onset)) is not None:
            explain = self.origin.explain_worse_state
            if not self._changed(snapshot) and self._tried(snapshot, left_out, explain)[1]:
                return snapshot
            onset = snapshot.step
        return None

    def _changed(self, snapshot: Snapshot) -> str:
        """Where memory holds other bytes than were copied into it: the end of a sentence; empty if nowhere."""
        bad_ranks = [
            rank
            for rank, is_intact in enumerate(gather_objects(self.ring.is_intact(snapshot)))
            if not is_intact
        ]
        if not bad_ranks:
            return ""
        hosts = self.engine.topology.hosts
        told_ranks = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in bad_ranks[:TOLD])
        more_text = f" and {len(bad_ranks) - TOLD} more" if len(bad_ranks) > TOLD else ""
        return f"has other bytes than were copied into it, in the memory of {told_ranks}{more_text}"

    def _tried(
        self, snapshot: Snapshot, left_out: Selection, blame: Callable[[int, Callable[[int], Floats]], str]
    ) -> tuple[bool, bool]:
        """Whether a point, which the engine has restored, is finite, and whether it is good."""
        self.restore_snapshot(snapshot)
        adjusted_now, numerics_switch = self.engine.adjustments.now, self.engine.adjustments.switch_to
        numerics_switch(snapshot.extra.adjusted)  # with others a good state may look bad
        try:
            recorded, now = self._reference(snapshot, left_out)
            state_norms = self.engine.flat_state().sum_norms()
            finite = math.isfinite(state_norms.parameters + state_norms.second_moment)
            blame_reason = blame(snapshot.step, lambda at: self._latest(at, left_out)) if finite else ""
        finally:
            numerics_switch(adjusted_now)
        return finite, finite and not blame_reason and not conclusion.is_worse(now[: recorded.size], recorded)

    def restore_snapshot(self, snapshot: Snapshot) -> None:
        self.ring.restore_snapshot(snapshot)
        self.engine.refresh_weights()

    def before_region(self, found: Conclusion, snapshot: Snapshot) -> Snapshot:
        """The point to resume from: `snapshot`, which the engine holds, or, if that was already trained on the bad
        region, the newest one before it, restored into the engine."""
        if found.region is None or found.region.first >= snapshot.extra.state.cursor:
            return snapshot
        applied_steps = [t for t in self.trained if t.applied]
        touched = [t.step for t in applied_steps if np.isin(t.positions, found.bad_positions).any()]
        older = self.ring.find_before(min(touched)) if touched else None
        if older is None or older.step >= snapshot.step:
            return snapshot
        # The state it was copied from led to a proven one, but its memory may have failed since.
        if self._changed(older):
            return snapshot
        is_whole = all(bool(torch.isfinite(t).all()) for t in older.tensors.values() if t.is_floating_point())
        if not all(gather_objects(is_whole)):
            return snapshot
        self.restore_snapshot(older)
        where = f"before step {snapshot.step}: further back, to step {older.step}"
        self.log.say_line(f"  the bad region begins {where}")
        return older

    # On the restored state

    def examine_window(
        self, window: list[Trained], snapshot: Snapshot, left_out: Selection, adjacent: bool
    ) -> Conclusion:
        """Find the bad samples of `window`."""
        history = [t for t in self.trained if t.applied and t.step <= snapshot.step]
        cursor = snapshot.extra.state.cursor
        return examine_window(self.laboratory, window, history, cursor, left_out, adjacent)

    def _reference(self, snapshot: Snapshot, left_out: Selection) -> tuple[Floats, Floats]:
        """Of harmless samples from before a snapshot: losses when trained on, losses on its state.

        Right after a start the former are unknown, and empty.
        """
        sample_count = self.config.attribution.reference
        steps_before = [t for t in self.trained if t.step <= snapshot.step and t.applied]
        batch_positions, recorded_losses = collect_harmless(steps_before, left_out)
        batch_positions, recorded_losses = batch_positions[-sample_count:], recorded_losses[-sample_count:]
        if not batch_positions.size:
            return recorded_losses, self._latest(snapshot.extra.state.cursor, left_out)
        return recorded_losses, self.laboratory.measure_losses(batch_positions)

    def _latest(self, cursor: int, left_out: Selection) -> Floats:
        """Losses of the latest harmless samples before a position, on the current state."""
        sample_count = self.config.attribution.reference
        latest_positions, _ = left_out.next_kept(max(0, cursor - sample_count), sample_count)
        return self.laboratory.measure_losses(latest_positions[latest_positions < cursor])


def budget_snapshots(parts: RunParts) -> SnapshotBudget:
    """The number of points for which every rank has room, printed with its calculation. Collective."""
    engine = parts.engine
    state_tensors, state_bytes = engine.optimizer_state().values(), engine.flat_state().count_bytes()
    every_demand = gather_objects(free_memory.measure_demand(state_tensors, state_bytes))
    found = run_on_all(lambda: snapshot_budget.plan_snapshots(every_demand, parts.config.stability.snapshots))
    if found.points:
        parts.log.say_line(found.text)
    else:
        parts.log.emit_event(NoSnapshots(bytes=found.snapshot, budget=found.budget), say=found.text)
    return found


class LastResort:
    """settle: waits until no checkpoint is in progress, so that existing ones can be counted."""

    def __init__(
        self, parts: RunParts, guard: StepJudge, incident_log: IncidentLog, points: Points,
        settle: Callable[[], None],
    ) -> None:  # fmt: skip
        self.run, self.log, self.settle = parts.run, parts.log, settle
        self.incident_log, self.points, self.guard = incident_log, points, guard
        self._alerted = guard.policy.state.alert is not None  # as last reported, also by the previous process

    def weigh_handover(self, decision: Decision, damaged: bool = False) -> Decision:
        """The decision in place of a hand-over: an alert if there is no checkpoint to go back to, or STOP if the state
        is not finite, either (damaged)."""
        onset = decision.finding.onset
        if decision.action is not Action.HANDOVER or self.can_go_back(onset, damaged):
            return decision
        reason = f"no checkpoint in {self.run.checkpoints} is from before step {self._before(onset)}"
        return self.guard.policy.cannot_hand_over(decision, reason, damaged)

    def end_or_alert(self, decision: Decision, state: RunState, cause: Cause, damaged: bool) -> None:
        """End the process, or alert and return. Raises HandoverError, UnstableError and SpaceError."""
        decision = self.weigh_handover(decision, damaged)
        if decision.action.ends:
            raise self.make_ending_error(decision, state, cause)
        self.tell_alert(state)

    def can_go_back(self, onset: int, damaged: bool = False) -> bool:
        """Whether a restart finds a checkpoint from before `onset`, and from before those that led here. damaged: the
        state is not finite; then having none is fine, too: the run starts over."""
        self.settle()
        before, folder = self._before(onset), self.run.checkpoints
        steps = run_on_first(lambda: [store.step_of(path) for path in store.newest_first(folder)])
        return any(step < before for step in steps) or (damaged and not steps)

    def tell_alert(self, state: RunState) -> None:
        """Journal and print the begin and end of an alert. Raises SpaceError."""
        alert = self.guard.policy.state.alert
        if (alert is not None) == self._alerted:
            return
        self._alerted = alert is not None
        if alert is not None:
            self.incident_log.record_alert(alert.reason, state)
        else:
            self.log.emit_event(AlertEvent(what="over", step=state.step), say=True)

    def make_ending_error(
        self, decision: Decision, state: RunState, cause: Cause, kernels: tuple[str, ...] = ()
    ) -> MegastableError:
        """The error that ends this process. A hand-over defers the window if the cause is unknown: it may be bad.
        kernels: names of those that the next process leaves."""
        onset, is_unknown = decision.finding.onset, cause is Cause.UNKNOWN
        if self.incident_log.incident is not None and not is_unknown:
            self.incident_log.incident.cause = cause
            self.incident_log.incident.kernels += kernels
        if decision.action is Action.HANDOVER:
            side_effects = self.guard.policy.carry_out_handover(cause, kernels)
            decision = replace(decision, reason=decision.reason + side_effects)
        before, window = self._before(onset), self.points.steps_since(onset)
        incident = self.incident_log.give_up(decision, state, window, is_unknown, before)
        where = f"step {state.step}: incident {incident.number} (began at step {onset}): {decision.reason}. "
        if decision.action is Action.HANDOVER:
            where += (
                f"It needs a restart from a checkpoint before step {before}: {self.run.resuming} does that"
            )
            later = f", and reads the suspect data later ({self.run.blends.name})" if is_unknown else ""
            return mark_collective(HandoverError(where + later))
        advice = "lower optimizer.lr, look at the data, or raise the budgets of stability.policy"
        return mark_collective(
            UnstableError(f"{where}A person is needed: look at {self.run.journal}; {advice}")
        )

    def _before(self, onset: int) -> int:
        """The step that the next process's checkpoint must precede."""
        return self.points.origin.find_step_before(onset, self.guard.policy.state.clock)
