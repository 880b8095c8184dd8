"""Where a run is, and where it may go back to, from its directory: no torch, no training process."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

from megastable.forensics.history import History
from megastable.run.directory import RunDirectory


def live_place(history: History) -> tuple[int, int]:
    """Step and cursor of a run, as its processes say, or its records."""
    try:
        told = json.loads(history.run.progress.read_text())
        return int(told["step"]), int(told["cursor"])
    except (OSError, ValueError, KeyError, TypeError):
        return history.step, history.cursor


def checkpoint_cursor(run: RunDirectory, choose: Callable[[list[int]], int]) -> int:
    """The cursor of one of a run's checkpoints: choose `min` or `max`; 0 where there is none."""
    found = []
    for path in run.checkpoints.glob("step-*/state.json"):
        # One that cannot be read is passed over when the run starts, too.
        with suppress(OSError, ValueError, KeyError, TypeError):
            found.append(int(json.loads(path.read_text())["cursor"]))
    return choose(found) if found else 0
