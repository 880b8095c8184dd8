"""Ends or limits a run when rewinding does not help: hand over to an older checkpoint, alert, or stop.

All methods are collective. An error that ends the process is returned, to be raised; all that a restart needs is
written before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megastable.base.collectives import first, shared
from megastable.base.errors import HandoverError, MegastableError, UnstableError
from megastable.checkpoint import store
from megastable.checkpoint.store import RunState
from megastable.recovery.incident_log import IncidentLog
from megastable.recovery.rewind_points import Points
from megastable.recovery.run_parts import RunParts
from megastable.run.events.stability_events import AlertEvent
from megastable_guard.actions import Action, Cause, Decision
from megastable_guard.guard import Guard


class LastResort:
    """settle: waits until no checkpoint is in progress, so that existing ones can be counted."""

    def __init__(
        self,
        parts: RunParts,
        guard: Guard,
        incident_log: IncidentLog,
        points: Points,
        settle: Callable[[], None],
    ) -> None:
        self.run, self.log, self.settle = parts.run, parts.log, settle
        self.incident_log, self.points, self.guard = incident_log, points, guard
        self._alerted = guard.policy.state.alert is not None  # as last reported, also by the previous process

    def weigh(self, decision: Decision, damaged: bool = False) -> Decision:
        """The decision in place of a hand-over: an alert if there is no checkpoint to go back to, or STOP if the state
        is not finite, either (damaged)."""
        onset = decision.finding.onset
        if decision.action is not Action.HANDOVER or self.can_go_back(onset, damaged):
            return decision
        reason = f"no checkpoint in {self.run.checkpoints} is from before step {self._before(onset)}"
        return self.guard.policy.cannot_hand_over(decision, reason, damaged)

    def conclude(self, decision: Decision, state: RunState, cause: Cause, damaged: bool) -> None:
        """End the process, or alert and return. Raises HandoverError, UnstableError and SpaceError."""
        decision = self.weigh(decision, damaged)
        if decision.action.ends:
            raise self.end(decision, state, cause)
        self.tell_alert(state)

    def can_go_back(self, onset: int, damaged: bool = False) -> bool:
        """Whether a restart finds a checkpoint from before `onset`, and from before those that led here. damaged: the
        state is not finite; then having none is fine, too: the run starts over."""
        self.settle()
        before = self._before(onset)
        steps = first(lambda: [store.step_of(path) for path in store.newest_first(self.run.checkpoints)])
        return any(step < before for step in steps) or (damaged and not steps)

    def tell_alert(self, state: RunState) -> None:
        """Journal and print the begin and end of an alert. Raises SpaceError."""
        alert = self.guard.policy.state.alert
        if (alert is not None) == self._alerted:
            return
        self._alerted = alert is not None
        if alert is not None:
            self.incident_log.alert(alert.reason, state)
        else:
            self.log.emit(AlertEvent(what="over", step=state.step), say=True)

    def end(
        self, decision: Decision, state: RunState, cause: Cause, kernels: tuple[str, ...] = ()
    ) -> MegastableError:
        """The error that ends this process. A hand-over defers the window if the cause is unknown: it may be guilty.
        kernels: names of those that the next process leaves."""
        onset, unknown = decision.finding.onset, cause is Cause.UNKNOWN
        if self.incident_log.incident is not None and not unknown:
            self.incident_log.incident.cause = cause
            self.incident_log.incident.kernels += kernels
        if decision.action is Action.HANDOVER:
            more = self.guard.policy.handing_over(cause, kernels)
            decision = replace(decision, reason=decision.reason + more)
        before = self._before(onset)
        incident = self.incident_log.give_up(decision, state, self.points.since(onset), unknown, before)
        where = f"step {state.step}: incident {incident.number} (began at step {onset}): {decision.reason}. "
        if decision.action is Action.HANDOVER:
            return shared(
                HandoverError(
                    f"{where}It needs a restart from a checkpoint before step {before}: {self.run.resuming} does that"
                    + (f", and reads the suspect data later ({self.run.blends.name})" if unknown else "")
                )
            )
        return shared(
            UnstableError(
                f"{where}A person is needed: look at {self.run.journal}; lower optimizer.lr, look at the data, or "
                "raise the budgets of stability.policy"
            )
        )

    def _before(self, onset: int) -> int:
        """The step that the next process's checkpoint must precede."""
        return self.points.origin.before(onset, self.guard.policy.state.clock)
