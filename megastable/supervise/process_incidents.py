"""Tracks incidents of processes, which only the supervisor notices: from the failure until training has recovered; and
checks the data behind one: are the corpora readable, and which samples did the step have?
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from megastable.base.errors import MegastableError
from megastable.config.tree import RunConfig
from megastable.data.blends import read_blends
from megastable.data.corpora import Corpora, open_corpora
from megastable.data.skip_ledger import Ledger, SampleEntry, sample_entries
from megastable.data.skips import Range
from megastable.run.directory import RunDirectory
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
        # When the failure now being handled was noticed; None = by another process.
        self._noticed: float | None = None

    def failure_noticed(self) -> None:
        """Start the clock for the time until training goes on."""
        self._noticed = time.monotonic()

    def open_incident(
        self, verdict: Breakdown, cause: Cause, failure: str, evidence: Sequence[str] = ()
    ) -> Incident:
        self.journal.read_new_events()  # the training process numbers its own
        run_state = self.journal.state
        incident = Incident(
            number=run_state.number + 1, step=run_state.clock, onset=run_state.clock, verdict=verdict,
            kind="recoverable", cause=cause, failure=failure, evidence=list(evidence),
        )  # fmt: skip
        self._tell("opened", incident)
        return incident

    def journal_remedy(
        self, end: End, remedy: Remedy, skipped: Sequence[Range], evidence: Sequence[str]
    ) -> None:
        """Journal the remedy for a failure, in a new incident or the open one."""
        incident = next(iter(self.journal.state.open.values()), None)
        if incident is None:
            verdict = Breakdown.HANG if end.hung else Breakdown.CRASH
            incident = self.open_incident(verdict, remedy.cause, end.failure, evidence)
        acted_before = bool(incident.actions)
        incident.actions.append(remedy.action)
        incident.reasons.append(f"{end.failure}: {remedy.reason}" if acted_before else remedy.reason)
        incident.cause = remedy.cause
        incident.evidence = list(dict.fromkeys([*incident.evidence, *evidence]))
        incident.kind = "lingering" if acted_before else "recoverable"
        incident.positions = sorted({*incident.positions, *skipped})
        if remedy.action is Action.STOP:
            incident.kind = "divergent"
            self.close_incident(incident, "stopped")
        else:
            self._tell("attributed", incident)

    def judge_open_incidents(self, progress: Progress | None) -> None:
        """Judge open incidents by a running attempt: it trains again, then gets past the step that failed."""
        run_state = self.journal.state
        if progress is None or progress.seconds is None or progress.step is None:
            return
        if run_state.failed is not None and run_state.open:
            # Noticed by another process: only the wall clock is known.
            passed_seconds = max(0.0, time.time() - run_state.failed)
            if self._noticed is not None:
                passed_seconds, self._noticed = time.monotonic() - self._noticed, None
            for incident in list(run_state.open.values()):
                incident.seconds = round(incident.seconds + passed_seconds, 3)
                incident.steps_lost += max(0, run_state.clock - max(run_state.began_step, run_state.rejected))
                self._tell("restarted", incident, step=run_state.began_step)
                self.journal.listener.print_line(
                    f"training again after {passed_seconds:.1f} s, from step {run_state.began_step} on"
                )
        for incident in list(run_state.open.values()):
            if progress.step > incident.step:
                self.close_incident(incident, "healed")

    def close_incident(self, incident: Incident, outcome: Outcome) -> None:
        incident.outcome = outcome
        self._tell("closed", incident)

    def close_all(self, outcome: Outcome) -> None:
        for incident in list(self.journal.state.open.values()):
            self.close_incident(incident, outcome)

    def _tell(self, what: str, incident: Incident, **fields: Any) -> None:
        summary = incident.model_dump(mode="json")
        self.journal.journal_event(
            IncidentEvent(what=what, number=incident.number, summary=summary, **fields)
        )
        self.journal.read_new_events()


RECHECK = 20.0  # seconds in which unreadable data may recover, as on a flaky file system
LOOK = 0.2  # seconds between polls


def find_bad_data(config: RunConfig, run: RunDirectory, hurry: Callable[[], bool]) -> str:
    """What is wrong with the corpora now, such as a shard truncated in mid-run, on this host, which may not be one of
    the training hosts; "" = nothing. hurry: whether to stop retrying."""
    end_time = time.monotonic() + RECHECK
    while True:
        try:
            _open(config, run)
        except MegastableError as error:
            if hurry() or time.monotonic() >= end_time:
                return str(error)
        else:
            return ""
        time.sleep(LOOK)


def find_failed_samples(
    config: RunConfig, run: RunDirectory, end: End, cursor: int, incident: int
) -> tuple[list[int], list[SampleEntry]]:
    """The positions of the failed step's samples, which began at `cursor`, and the lines that skip them, none if the
    ledger has them all.

    Harmless samples of the step are skipped along with the bad one. Left in, that one would return in another step
    of every epoch and kill processes again before it is suspected.
    """
    order = _open(config, run).train.order
    skip_reason = f"{end.what} at step {end.step}, again and again"
    ledger = Ledger.read_ledger(run.skips, [])
    # Ignore the lines of this incident, which a supervisor that was killed may have written: the next batch is
    # harmless.
    ledger_before = ledger.without_reason(incident, skip_reason)
    usable_ledger, _ = ledger_before.select_usable(run.skips, order, config.data.skip)
    positions, _ = usable_ledger.next_kept(cursor, config.batches.value_at(cursor))
    sample_lines = sample_entries(order, positions, skip_reason, incident=incident, step=end.step)
    is_missing = len(ledger.entries) - len(ledger_before.entries) < len(sample_lines)
    return positions.tolist(), sample_lines if is_missing else []


def _open(config: RunConfig, run: RunDirectory) -> Corpora:
    return open_corpora(
        config.data.corpora, config.model.sequence_length, config.run.seed, read_blends(run.blends)
    )
