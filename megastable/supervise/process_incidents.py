"""Tracks incidents of processes, which only the supervisor notices: from the failure until training has recovered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from megastable.data.skips import Range
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.rank_ipc import Progress
from megastable.supervise.exit_cause import End
from megastable.supervise.supervisor_journal import SupervisorJournal
from megastable_guard.actions import Action, Cause, Remedy
from megastable_guard.incident import Breakdown, Incident, Outcome


class ProcessIncidents:
    """Open ones are in the journal's state: at most one, which further failures belong to."""

    def __init__(self, journal: SupervisorJournal) -> None:
        self.journal = journal
        self._noticed: float | None = (
            None  # when the failure now being handled was noticed; None = by another process
        )

    def failure_noticed(self) -> None:
        """Start the clock for the time until training goes on."""
        self._noticed = time.monotonic()

    def open(self, verdict: Breakdown, cause: Cause, failure: str, evidence: Sequence[str] = ()) -> Incident:
        self.journal.listen()  # the training process numbers its own
        state = self.journal.state
        incident = Incident(
            number=state.number + 1, step=state.clock, onset=state.clock, verdict=verdict,
            kind="recoverable", cause=cause, failure=failure, evidence=list(evidence),
        )  # fmt: skip
        self._tell("opened", incident)
        return incident

    def act(self, end: End, remedy: Remedy, skipped: Sequence[Range], evidence: Sequence[str]) -> None:
        """Journal the remedy for a failure, in a new incident or the open one."""
        incident = next(iter(self.journal.state.open.values()), None)
        if incident is None:
            verdict = Breakdown.HANG if end.hung else Breakdown.CRASH
            incident = self.open(verdict, remedy.cause, end.failure, evidence)
        again = bool(incident.actions)
        incident.actions.append(remedy.action)
        incident.reasons.append(f"{end.failure}: {remedy.reason}" if again else remedy.reason)
        incident.cause = remedy.cause
        incident.evidence = list(dict.fromkeys([*incident.evidence, *evidence]))
        incident.kind = "lingering" if again else "recoverable"
        incident.positions = sorted({*incident.positions, *skipped})
        if remedy.action is Action.STOP:
            incident.kind = "divergent"
            self.close(incident, "stopped")
        else:
            self._tell("attributed", incident)

    def proven(self, progress: Progress | None) -> None:
        """Judge open incidents by a running attempt: it trains again, then gets past the step that failed."""
        state = self.journal.state
        if progress is None or progress.seconds is None or progress.step is None:
            return
        if state.failed is not None and state.open:
            # Noticed by another process: only the wall clock is known.
            passed = max(0.0, time.time() - state.failed)
            if self._noticed is not None:
                passed, self._noticed = time.monotonic() - self._noticed, None
            for incident in list(state.open.values()):
                incident.seconds = round(incident.seconds + passed, 3)
                incident.steps_lost += max(0, state.clock - max(state.began_step, state.rejected))
                self._tell("restarted", incident, step=state.began_step)
                self.journal.listener.say(
                    f"training again after {passed:.1f} s, from step {state.began_step} on"
                )
        for incident in list(state.open.values()):
            if progress.step > incident.step:
                self.close(incident, "healed")

    def close(self, incident: Incident, outcome: Outcome) -> None:
        incident.outcome = outcome
        self._tell("closed", incident)

    def close_all(self, outcome: Outcome) -> None:
        for incident in list(self.journal.state.open.values()):
            self.close(incident, outcome)

    def _tell(self, what: str, incident: Incident, **fields: Any) -> None:
        summary = incident.model_dump(mode="json")
        self.journal.emit(IncidentEvent(what=what, number=incident.number, summary=summary, **fields))
        self.journal.listen()
