"""Where a run is, and where it may go back to, from its directory: no torch, no training process."""

from __future__ import annotations

from collections.abc import Callable

from megastable.forensics.history import History
from megastable.run.directory import RunDirectory, read_object
from megastable.run.events.event import whole


def live_place(history: History) -> tuple[int, int]:
    """Step and cursor of a run, as its processes say, or its records."""
    told = read_object(history.run.progress)
    step, cursor = whole(told.get("step")), whole(told.get("cursor"))
    return (history.step, history.cursor) if step is None or cursor is None else (step, cursor)


def checkpoint_cursor(run: RunDirectory, choose: Callable[[list[int]], int]) -> int:
    """The cursor of one of a run's checkpoints: choose `min` or `max`; 0 where there is none."""
    # One that cannot be read is passed over when the run starts, too.
    told = (whole(read_object(path).get("cursor")) for path in run.checkpoints.glob("step-*/state.json"))
    found = [cursor for cursor in told if cursor is not None]
    return choose(found) if found else 0
