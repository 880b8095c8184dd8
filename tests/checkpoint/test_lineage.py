"""Which points in a host's memory still belong to the run's history, by the journal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.checkpoint.held_points import PointKey
from megastable.checkpoint.lineage import HISTORY, TRIES, outdated, tainted
from megastable.run.events.event import Event
from megastable.run.events.reading import event_of

A, B = "a" * 16, "b" * 16


def history(*lines: dict[str, Any]) -> list[Event]:
    events = [event_of(line) for line in lines]
    assert all(isinstance(event, HISTORY) for event in events)
    return events


def training(step: int, lineage: str | None = None) -> dict[str, Any]:
    return {"event": "training", "step": step, **({"lineage": lineage} if lineage else {})}


def dropped(step: int) -> dict[str, Any]:
    return {"event": "memory_dropped", "step": step}


def tried(step: int) -> dict[str, Any]:
    return {"event": "memory_resume", "step": step, "lineage": A, "epoch": 0}


def point(step: int = 100, epoch: int = 0) -> PointKey:
    return PointKey(step=step, epoch=epoch, lineage=A)


BEGAN = training(0, A)


@pytest.mark.parametrize(
    ("lines", "key", "why"),
    [
        ([BEGAN], point(), ""),
        ([], point(), "earlier run"),
        ([training(0), training(0, B)], point(), "earlier run"),
        ([BEGAN, training(100, B)], point(), ""),  # which was resumed from it, and died
        ([BEGAN, training(90, B)], point(), "gone on from step 90"),
        ([training(50, B), BEGAN], point(), ""),
        ([BEGAN, dropped(80)], point(), "rewound to step 80"),
        ([BEGAN, dropped(80)], point(80), ""),
        ([BEGAN, dropped(80)], point(100, 1), ""),  # taken after it
        ([BEGAN, dropped(80), dropped(99)], point(100, 1), "rewound to step 99"),
        ([BEGAN, training(100, B), dropped(99)], point(100, 1), "rewound to step 99"),
        ([dropped(80), BEGAN], point(), ""),
        ([BEGAN, {"event": "handover", "step": 104, "before": 103}], point(), "handed over"),
        ([BEGAN, {"event": "unstable", "step": 104}], point(), "unstable"),
        ([{"event": "unstable", "step": 104}, BEGAN], point(), ""),
        (
            [BEGAN, {"event": "incident", "what": "opened", "onset": 95, "policy": {}}],
            point(),
            "undid step 95",
        ),
        ([BEGAN, {"event": "incident", "what": "opened", "onset": 101, "policy": {}}], point(), ""),
        (
            [BEGAN, {"event": "incident", "what": "rewound", "to_step": 90, "policy": {}}],
            point(),
            "undid step 91",
        ),
        ([BEGAN, {"event": "rolled_back", "step": 60}], point(), "rolled the run back to step 60"),
        ([BEGAN, {"event": "rolled_back", "step": 100}], point(), ""),
        ([{"event": "rolled_back", "step": 60}, BEGAN], point(), ""),
        ([BEGAN, *[tried(100)] * (TRIES - 1)], point(), ""),
        ([BEGAN, *[tried(100)] * TRIES], point(), f"{TRIES} times"),
        ([BEGAN, *[tried(90)] * TRIES], point(), ""),
    ],
)
def test_what_happened_since_decides(lines: list[dict[str, Any]], key: PointKey, why: str) -> None:
    found = outdated(history(*lines), key)
    assert (why in found) if why else not found


@given(
    st.lists(
        st.builds(training, st.integers(0, 9), st.sampled_from([A, B, None]))
        | st.builds(dropped, st.integers(0, 9)),
        max_size=8,
    ),
    st.integers(0, 9),
    st.integers(0, 2),
)
def test_what_came_before_does_not_matter_and_undone_steps_never_return(
    lines: list[dict[str, Any]], step: int, epoch: int
) -> None:
    """Against a model: which steps of the current state are of lineage A."""
    key, known, mine, drops = point(step, epoch), False, False, 0
    valid = False
    for line in lines:
        if line["event"] == "training":
            begins = line.get("lineage") == A and not known
            if begins:
                known = mine = valid = True
            else:
                mine, valid = False, valid and line["step"] >= step
        elif known:
            drops += mine
            if line["step"] < step and (not mine or epoch < drops):
                valid = False
    assert (outdated(history(*lines), key) == "") == valid


@pytest.mark.parametrize(
    ("convicted", "bad"),
    [
        ([], False),
        ([50], False),
        ([80], False),
        ([90], True),
        ([100], True),
        ([110], False),
        ([50, 90], True),
    ],
)
def test_a_point_after_a_convicted_checkpoint_is_tainted(convicted: list[int], bad: bool) -> None:
    assert bool(tainted(point(100), 80, convicted)) == bad
