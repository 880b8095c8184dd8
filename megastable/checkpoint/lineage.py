"""Decides from the journal which checkpoints, and snapshots in hosts' memory, still belong to the run's history. Pure.

A checkpoint that no longer counts is renamed. A copy in the memory of a host that was away cannot be: so each carries
its lineage, and what the journal says happened after it decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from megastable.checkpoint.held_points import PointKey
from megastable.run.events.event import Event
from megastable.run.events.stability_events import Handover, IncidentEvent
from megastable.run.events.training_events import (
    CheckpointSaved,
    MemoryDropped,
    MemoryResume,
    RolledBack,
    Training,
    Unstable,
)

HISTORY = (
    Training,
    IncidentEvent,
    Handover,
    Unstable,
    CheckpointSaved,
    MemoryDropped,
    MemoryResume,
    RolledBack,
)  # what `outdated` needs
TRIES = 2  # of the same point: a third failure may be its own


def outdated(events: Sequence[Event], key: PointKey) -> str:
    """Why the point must not be used; "" if it may. events: of the journal, those of `HISTORY`, in order."""
    starts = (i for i, e in enumerate(events) if isinstance(e, Training) and e.lineage == key.lineage)
    began = next(starts, None)
    if began is None:
        return "the journal does not know it: of an earlier run in this directory"
    drops, own, tries = 0, True, 0
    for event in events[began + 1 :]:
        step = event.get("step")
        earlier = isinstance(step, int) and step < key.step
        if isinstance(event, Handover | Unstable):
            return "the run was handed over, or was unstable, after it"
        if isinstance(event, RolledBack) and earlier:
            return f"a person rolled the run back to step {step} after it"
        if isinstance(event, Training):
            own = False
            if earlier:
                return f"training has gone on from step {step} since"
        elif isinstance(event, MemoryDropped):
            drops += own
            if earlier and (not own or key.epoch < drops):
                return f"the run was rewound to step {step} after it"
        elif isinstance(event, MemoryResume):
            tries += (step, event.lineage, event.epoch) == (key.step, key.lineage, key.epoch)
    undone = interrupted(events)
    if undone is not None and undone[0] <= key.step:
        return f"an incident was open that undid step {undone[0]} and what came after"
    if tries >= TRIES:
        return f"training was restored from it {tries} times, and did not get to another one"
    return ""


def interrupted(events: Iterable[Event]) -> tuple[int, set[str]] | None:
    """Leftovers of a rewind that the last process had not put aside when it died: the first undone step, and the
    checkpoints written after the rewind, which are good.

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
    """The steps of checkpoints that processes resumed from after a handover without reaching new ground: none may be
    resumed from again.

    events: the journal's "handover" and "training", in order. clock: the farthest step by now; steps more than
    `verify_steps` past the farthest one of a handover are new ground.
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


def tainted(key: PointKey, newest: int, convicted: Collection[int]) -> str:
    """Why a point must not be used if checkpoints of the steps `convicted` hold bad states; newest: the step of the
    newest one that does not, -1 if there is none."""
    bad = [step for step in convicted if newest < step <= key.step]
    return f"the checkpoint of step {max(bad)}, which it descends from, was convicted" if bad else ""
