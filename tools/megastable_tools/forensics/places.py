"""Current position of a run, and the positions of its checkpoints, from its directory: no torch, no training
process."""

from __future__ import annotations

from collections.abc import Callable

from megastable.run.directory import RunDirectory, read_object
from megastable.run.events.event import whole
from megastable_tools.forensics.history import History


def live_place(history: History) -> tuple[int, int]:
    """Step and cursor of a run, by its processes, or else by its records."""
    told = read_object(history.run.progress)
    step, cursor = whole(told.get("step")), whole(told.get("cursor"))
    return (history.step, history.cursor) if step is None or cursor is None else (step, cursor)


def checkpoint_cursor(run: RunDirectory, choose: Callable[[list[int]], int]) -> int:
    """The cursor of one of a run's checkpoints: choose `min` or `max`; 0 if there is none."""
    # An unreadable one is also skipped when the run starts.
    told = (whole(read_object(path).get("cursor")) for path in run.checkpoints.glob("step-*/state.json"))
    found = [cursor for cursor in told if cursor is not None]
    return choose(found) if found else 0
