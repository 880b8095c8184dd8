"""Restores the stability system's memory after a restart: from the checkpoint, then the journal's later events. Pure.
What watches the run has states of its own (`Watches`).

The journal is the source of truth about incidents: each event carries the incident as it was then, and the policy's
memory. A crash loses the training since the checkpoint, but no budget and no incident.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from megastable.checkpoint import store
from megastable.run.events.event import Event
from megastable.run.events.stability_events import AlertEvent, Handover, IncidentEvent
from megastable.run.events.training_events import Unstable
from megastable_guard.guard import GuardState
from megastable_guard.incident import Incident, LeftOutSamples
from megastable_guard.policy_state import PolicyState

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


def recall(saved: dict[str, Any], events: Iterable[Event], simulated: bool = False) -> PersistedState:
    """The state at a start. Raises CheckpointError for one that this version cannot read.

    saved: `RunState.stability` of the checkpoint. events: those of the journal that are `TELLING`, in order. simulated:
    this is a dry run.
    """
    known = {name: state for name, state in saved.items() if name in PersistedState.model_fields}
    try:
        memory = PersistedState.model_validate(copy.deepcopy(known))
    except ValidationError as error:
        raise store.refuse_stability("the checkpoint", error) from None
    if not simulated:
        memory.guard = memory.guard.of_kind(False)  # a dry run spent no budget
    for event in events:
        number = event.get("number")
        if isinstance(number, int):
            memory.incidents = max(memory.incidents, number)
        if "policy" not in event:
            continue
        try:
            told = _Told.model_validate(event.fields)
        except ValidationError as error:
            raise store.refuse_stability(f"the journal's event {event.event}", error) from None
        # A dry run has its own clock.
        if memory.guard.simulated or told.policy.clock < memory.guard.policy.clock:
            continue
        memory.guard.policy = told.policy
        memory.left_out = told.left_out or memory.left_out
        if told.summary is not None:
            memory.incident = told.summary if told.summary.outcome in ONGOING else None
    return memory
