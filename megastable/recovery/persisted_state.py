"""Restores the stability system's memory after a restart: from the checkpoint, then the journal's later events. Pure.

The journal is the truth about incidents: every event of one carries the incident as it was then, and the policy's
memory. A crash loses what was trained since the checkpoint, but no budget and no incident.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from megastable.run.events.event import Event
from megastable.run.events.stability_events import AlertEvent, Handover, IncidentEvent
from megastable.run.events.training_events import CheckpointSaved, Training, Unstable
from megastable.stability.guard import GuardState
from megastable.stability.incident import Incident, LeftOutSamples
from megastable.stability.policy_state import PolicyState
from megastable.stability.sample_history import WatchState
from megastable.stability.signs import SignsState

TELLING = (IncidentEvent, Handover, AlertEvent, Unstable)  # events of the journal that may carry all this


class PersistedState(BaseModel):
    """What a checkpoint keeps. incident: the open one. incidents: how many there were. rate: scheduled, of the last
    step. left_out: by the last incident."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    guard: GuardState = GuardState()
    incident: Incident | None = None
    incidents: int = 0
    rate: float | None = None
    left_out: LeftOutSamples | None = None
    samples: WatchState = WatchState()
    signs: SignsState = SignsState()


ONGOING = ("open", "handed over")  # what the next process goes on with


class _Told(BaseModel):
    """What is of use here in an event; its other fields, and those of later versions, are not looked at."""

    model_config = ConfigDict(extra="ignore")

    policy: PolicyState
    summary: Incident | None = None
    left_out: LeftOutSamples | None = None


def recall(
    saved: dict[str, Any], events: Iterable[Event], simulated: bool = False
) -> tuple[PersistedState, list[str]]:
    """What is known at a start, and what of it was lost: saved by another version, or by another hand.

    saved: `RunState.stability` of the checkpoint. events: those of the journal that are `TELLING`, in order. simulated:
    this is a dry run.
    """
    memory, lost = _readable(saved)
    if memory.guard.simulated and not simulated:
        memory.guard = GuardState(detector=memory.guard.detector)  # a dry run spent nothing
    problem = ""
    for event in events:
        number = event.get("number")
        if isinstance(number, int):
            memory.incidents = max(memory.incidents, number)
        if "policy" not in event:
            continue
        try:
            told = _Told.model_validate(event.fields)
        except ValidationError as error:
            problem = f"{event.event} of the journal: {_what(error)}"
            continue
        problem = ""
        # A dry run has a clock of its own.
        if memory.guard.simulated or told.policy.clock < memory.guard.policy.clock:
            continue
        memory.guard.policy = told.policy
        memory.left_out = told.left_out or memory.left_out
        if told.summary is not None:
            memory.incident = told.summary if told.summary.outcome in ONGOING else None
    return memory, [*lost, problem] if problem else lost


def interrupted(events: Iterable[Event]) -> tuple[int, set[str]] | None:
    """What the last process went back behind and had not put away when it died: the first step that was undone, and the
    checkpoints that were written after that, which are good.

    events: the journal's "training", "incident" and "checkpoint", in order.
    """
    undone, since = None, set[str]()
    for event in events:
        what = event.get("what")
        if isinstance(event, Training) or (what == "closed" and "policy" in event):
            undone = None
        elif what == "opened" and "policy" in event:
            undone, since = event.get("onset"), set()
        elif what == "rewound" and isinstance(event.get("to_step"), int):
            undone, since = event["to_step"] + 1, set()
        elif isinstance(event, CheckpointSaved):
            since.add(str(event.get("name")))
    return (undone, since) if isinstance(undone, int) else None


def tried(events: Iterable[Event], clock: int, verify_steps: int) -> list[int]:
    """The steps of the checkpoints that processes went on from after a handover that no new ground followed: none of
    them is to be gone on from again.

    events: the journal's "handover" and "training", in order. clock: the farthest step by now; what lies `verify_steps`
    behind the farthest one of a handover is new ground.
    """
    steps, barren = list[int](), False
    for event in events:
        if isinstance(event, Handover):
            policy = event.get("policy")
            then = policy.get("clock") if isinstance(policy, dict) else None
            barren = isinstance(then, int) and clock - then <= verify_steps
            steps = steps if barren else []
        elif barren and isinstance(step := event.get("step"), int) and step:
            steps.append(step)
    return steps


def _readable(saved: dict[str, Any]) -> tuple[PersistedState, list[str]]:
    """The parts that can be read (detector, policy, open incident, ...): the others start anew, and are named."""
    tree, lost = copy.deepcopy(saved), list[str]()
    while True:
        try:
            return PersistedState.model_validate(tree), lost
        except ValidationError as error:
            where = [str(part) for part in error.errors()[0]["loc"]]
            above, part = (tree["guard"], where[1]) if where[0] == "guard" and where[1:] else (tree, where[0])
            lost.append(f"{part} of the checkpoint: {_what(error)}")
            del above[part]


def _what(error: ValidationError) -> str:
    detail = error.errors()[0]
    return f"{'.'.join(str(part) for part in detail['loc'])}: {detail['msg']}"
