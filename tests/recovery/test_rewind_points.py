"""Snapshots: what is kept of where the run stands."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from megastable.checkpoint.vitals import Vitals
from megastable.recovery.rewind_points import Points, RewindState
from megastable_guard.detector_state import DetectorState
from tests.checkpoint.states import state_of


def test_what_only_checkpoints_need_is_not_copied() -> None:
    kept = list[RewindState]()
    ring = SimpleNamespace(steps=[], take=lambda step, extra, counters, marks: kept.append(extra))
    engine = SimpleNamespace(adjustments=SimpleNamespace(now=()))
    points: Any = SimpleNamespace(ring=ring, marks=lambda: None, engine=engine)
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


def test_a_snapshot_is_judged_with_the_changes_that_it_was_trained_with() -> None:
    """And those of now are in force again, whatever happens."""
    switched = list[tuple[str, ...]]()
    adjustments = SimpleNamespace(now=("swiglu_clamp",), switch=switched.append)
    norms = SimpleNamespace(parameters=1.0, second_moment=1.0)
    engine = SimpleNamespace(adjustments=adjustments, flat_state=lambda: SimpleNamespace(norms=lambda: norms))

    def reference(*_: object) -> tuple[np.ndarray, np.ndarray]:
        assert switched == [()]
        return np.full(8, 3.0), np.full(8, 2.9)

    points: Any = SimpleNamespace(engine=engine, restore=lambda snapshot: None, _reference=reference)
    snapshot: Any = SimpleNamespace(step=20, extra=SimpleNamespace(adjusted=()))
    selection: Any = None
    assert Points._tried(points, snapshot, selection, lambda step, measure: "") == (True, True)
    assert switched == [(), ("swiglu_clamp",)]
