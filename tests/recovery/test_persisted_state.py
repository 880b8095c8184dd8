"""What outlives a process: of the checkpoint, of the journal, and what to do with what cannot be read."""

from __future__ import annotations

from typing import Any

import pytest

from megastable.base.errors import CheckpointError
from megastable.checkpoint.lineage import interrupted
from megastable.checkpoint.whole import policy_of
from megastable.recovery.persisted_state import PersistedState, recall
from megastable.run.events.reading import event_of
from megastable_guard.actions import Action
from megastable_guard.detector_state import DetectorState
from megastable_guard.guard import GuardState
from megastable_guard.incident import Incident
from megastable_guard.policy_state import PolicyState, Taken
from megastable_guard.signals import Verdict
from tests.checkpoint.states import state_of


def policy(clock: int) -> PolicyState:
    return PolicyState(clock=clock, taken=[Taken(clock=clock, step=clock, action=Action.REWIND)])


def incident(number: int = 1, **changes: Any) -> Incident:
    given = {"number": number, "step": 33, "onset": 31, "verdict": Verdict.SPIKE, "kind": "recoverable"}
    return Incident.model_validate({**given, **changes})


def event(what: str, clock: int, about: Incident, kind: str = "incident") -> dict[str, Any]:
    return {
        "event": kind, "what": what, "number": about.number, "policy": policy(clock).model_dump(mode="json"),
        "summary": about.model_dump(mode="json"), "time": 1.5,
    }  # fmt: skip


def saved(clock: int = 0, **parts: Any) -> dict[str, Any]:
    guard = GuardState(detector=DetectorState(seen=40), policy=policy(clock))
    return PersistedState(guard=guard, **parts).model_dump(mode="json")


def test_without_a_journal_the_checkpoint_is_all() -> None:
    memory = recall(saved(40, incident=incident(2), incidents=2), [])
    assert memory.model_dump(mode="json") == saved(40, incident=incident(2), incidents=2)
    assert recall({}, []) == PersistedState()


def test_what_happened_after_the_checkpoint_is_known_from_the_journal() -> None:
    opened, attributed = incident(), incident(steps_lost=8, positions=[(3, 5)])
    told = [
        event("opened", 33, opened),
        event("attributed", 33, attributed),
        event("rewound", 33, attributed),
    ]
    for before in (saved(20), {}):
        memory = recall(before, map(event_of, told))
        assert memory.incident == attributed and memory.incidents == 1
        assert memory.guard.policy == policy(33)
        assert memory.guard.detector == PersistedState.model_validate(before).guard.detector
    # A checkpoint of after it knows better.
    later = saved(50, incident=None, incidents=1)
    assert recall(later, map(event_of, told)).model_dump(mode="json") == later


@pytest.mark.parametrize("outcome", ["healed", "stopped"])
def test_an_incident_that_is_over_is_not_open(outcome: str) -> None:
    over = incident(outcome=outcome)
    told = [event("opened", 33, incident()), event("closed", 60, over), event("", 60, over, kind="unstable")]
    memory = recall(saved(40, incident=incident(), incidents=1), map(event_of, told))
    assert memory.incident is None and memory.incidents == 1
    assert memory.guard.policy.clock == 60


def test_one_that_was_not_proven_to_be_over_goes_on() -> None:
    told = [event("opened", 33, incident()), event("closed", 40, incident(outcome="open"))]
    assert recall(saved(20), map(event_of, told)).incident == incident()


def test_a_dry_run_has_a_clock_of_its_own() -> None:
    dry = PersistedState(guard=GuardState(simulated=True, policy=policy(5))).model_dump(mode="json")
    told = [event("opened", 33, incident(4))]
    memory = recall(dry, map(event_of, told), simulated=True)
    assert memory.guard.policy == policy(5) and memory.incident is None and memory.incidents == 4
    memory = recall(dry, map(event_of, told))  # back in earnest: what was done before the dry run counts
    assert memory.guard.policy.clock == 33 and memory.incident is not None


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("guard", "detector", "shape"), 1, "guard.detector.shape: Extra"),
        (("guard", "policy", "karma"), 1, "guard.policy.karma: Extra"),
        (("incident", "verdict"), "odd", "incident.verdict"),
        (("incidents",), "many", "incidents: Input"),
    ],
)
def test_a_state_of_another_version_is_refused(place: tuple[str, ...], value: Any, named: str) -> None:
    tree = below = saved(40, incident=incident(), incidents=1)
    for key in place[:-1]:
        below = below[key]
    below[place[-1]] = value
    with pytest.raises(CheckpointError, match=rf"the checkpoint remembers .*another version .*\({named}"):
        recall(tree, [])


def test_an_event_of_another_version_is_refused() -> None:
    strange = event("attributed", 34, incident())
    strange["policy"]["karma"] = 1
    with pytest.raises(CheckpointError, match=r"event incident remembers .*policy\.karma: Extra"):
        recall(saved(20), [event_of(strange)])


@pytest.mark.parametrize("fields", [{}, {"number": "one"}, {"number": 1, "what": "opened"}])
def test_events_without_what_is_looked_for(fields: dict[str, Any]) -> None:
    memory = recall(saved(20), map(event_of, [{"event": "incident", **fields}]))
    assert memory.guard.policy.clock == 20 and memory.incident is None


def told(what: str, **fields: Any) -> dict[str, Any]:
    return event(what, 33, incident()) | fields


TRAINING = {"event": "training"}


def saved_as(name: str) -> dict[str, Any]:
    return {"event": "checkpoint", "name": name}


OPENED, REWOUND = told("opened", onset=31), told("rewound", to_step=20)


@pytest.mark.parametrize(
    ("events", "left"),
    [
        ([], None),
        ([TRAINING, saved_as("step-40")], None),
        ([TRAINING, saved_as("step-40"), OPENED], (31, set())),
        ([OPENED, REWOUND], (21, set())),
        ([OPENED, REWOUND, saved_as("step-30")], (21, {"step-30"})),
        # It came back: what was written in between, before it did, is as good as it was.
        ([OPENED, REWOUND, saved_as("step-30"), told("opened", onset=38)], (38, set())),
        ([OPENED, REWOUND, told("closed")], None),
        ([OPENED, REWOUND, TRAINING], None),
        ([OPENED, TRAINING, {"event": "incident", "what": "opened", "onset": 3}], None),
    ],
)
def test_what_a_dead_process_went_back_behind(
    events: list[dict[str, Any]], left: tuple[int, set[str]] | None
) -> None:
    assert interrupted(map(event_of, events)) == left


def test_what_the_policy_remembers_is_read_though_the_detector_cannot_be() -> None:
    """A checkpoint is computed and exported by it."""
    tree = saved(40)
    tree["guard"]["policy"]["adjusted"], tree["guard"]["detector"]["shape"] = ["swiglu_clamp"], 1
    assert policy_of(state_of(stability=tree)).adjusted == ["swiglu_clamp"]
    with pytest.raises(CheckpointError, match="another version"):
        policy_of(state_of(stability={"guard": []}))
