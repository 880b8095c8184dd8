"""Current position of a run, and the positions of its checkpoints, from its directory: no torch, no training
process."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

from megastable.forensics.history import History
from megastable.run.directory import RunDirectory


def live_place(history: History) -> tuple[int, int]:
    """Step and cursor of a run, by its processes, or else by its records."""
    try:
        told = json.loads(history.run.progress.read_text())
        return int(told["step"]), int(told["cursor"])
    except (OSError, ValueError, KeyError, TypeError):
        return history.step, history.cursor


def checkpoint_cursor(run: RunDirectory, choose: Callable[[list[int]], int]) -> int:
    """The cursor of one of a run's checkpoints: choose `min` or `max`; 0 if there is none."""
    found = []
    for path in run.checkpoints.glob("step-*/state.json"):
        # An unreadable one is also skipped when the run starts.
        with suppress(OSError, ValueError, KeyError, TypeError):
            found.append(int(json.loads(path.read_text())["cursor"]))
    return choose(found) if found else 0
