"""Computes the cost of an incident: steps, seconds, GPU-hours, money. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megastable.report.postmortem.facts import Cost, IncidentFacts, RunFacts, StepRow
from megastable.report.postmortem.journal import Journal
from megastable.run.events.stability_events import Handover
from megastable.run.events.supervisor_events import Ended, Hang, Launched, SupervisorEvent
from megastable.run.events.training_events import Training


def cost_of(i: IncidentFacts, run: RunFacts, rows: Sequence[StepRow], silent: float, down: float) -> Cost:
    """rows: the steps around the incident; silent, down: its `outage`."""
    known = [row.seconds for row in rows if row.seconds]
    usual = statistics.median(known) if known else None
    redone, spent = i.steps_lost * (usual or 0.0), i.seconds
    if i.breakdown:  # the supervisor counts the same time, up to the end of the first step
        down, spent = max(down, spent), 0.0
    tokens = None
    if run.global_batch is not None and run.sequence_length is not None:
        tokens = i.steps_lost * run.global_batch * run.sequence_length
    hours = None if run.world is None else run.world * (redone + spent + down + silent) / 3600
    return Cost(
        steps=i.steps_lost, batches_refused=i.batches_discarded, tokens=tokens, step_seconds=usual,
        redone_seconds=redone, recovery_seconds=spent, downtime_seconds=down, silent_seconds=silent,
        gpu_hours=hours, money=None if hours is None or run.price is None else hours * run.price,
    )  # fmt: skip


def outage(journal: Journal, begin: int, end: int, breakdown: bool) -> tuple[float, float]:
    """Seconds of the processes that an incident ended, which lies between two lines of the journal: from the last
    progress of each until its end was noticed, and from then to the first step, or the end, of the next."""
    ends = (Ended, Hang) if breakdown else (Handover,)
    events = journal.events
    silent, down, since, again = 0.0, 0.0, 0.0, False
    for number in journal.turns(begin):
        event = events[number]
        again = again or isinstance(event, Launched)
        over = isinstance(event, Training) or (again and isinstance(event, Ended))
        if since and (over or (isinstance(event, SupervisorEvent) and event.what == "ended")):
            down, since = down + max(0.0, event["time"] - since), 0.0
        if number > end and not since:
            break
        # A supervisor says of an end that was none of failure that it was "".
        if isinstance(event, ends) and not since and event.get("what") != "":
            quiet = event.get("waited" if isinstance(event, Hang) else "silent")
            silent += quiet if isinstance(quiet, int | float) and 0 < quiet < event["time"] else 0.0
            since, again = event["time"], False
    return silent, down
