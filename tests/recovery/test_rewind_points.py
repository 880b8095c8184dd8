"""Snapshots: what is kept of where the run stands."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from megastable.checkpoint.vitals import Vitals
from megastable.guard.detector_state import DetectorState
from megastable.recovery.rewind_points import Points, RewindState
from tests.checkpoint.states import state_of


def test_what_only_checkpoints_need_is_not_copied() -> None:
    kept = list[RewindState]()
    ring = SimpleNamespace(steps=[], take=lambda step, extra, counters, marks: kept.append(extra))
    points: Any = SimpleNamespace(ring=ring, marks=lambda: None)
    state = state_of(recent_losses=[3.0], stability={"samples": [1.0]}, vitals=Vitals(losses=[2.5]))
    Points.take(points, state, DetectorState(), {})
    state.recent_losses.append(4.0)
    (point,) = kept
    assert point.state.recent_losses == [3.0] and point.state.stability == {}
    assert point.state.vitals is state.vitals and state.stability == {"samples": [1.0]}


def test_what_is_undone_leaves_no_point_and_no_samples() -> None:
    dropped = list[int]()
    trained = deque(SimpleNamespace(step=step) for step in range(1, 10))
    points: Any = SimpleNamespace(ring=SimpleNamespace(forget_from=dropped.append), trained=trained)
    Points.forget_after(points, 6)
    assert dropped == [7] and [t.step for t in trained] == [1, 2, 3, 4, 5, 6]
