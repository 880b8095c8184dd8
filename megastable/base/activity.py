"""What this process is doing now: written by the thread that trains, read by the one that sends heartbeats.

One per process. To enter an activity costs an assignment, so a step may do it several times.
"""

from __future__ import annotations

import time

# Within a step, in this order; the other ones are the phases of a run (rank_ipc.Progress).
DATA, FORWARD, BACKWARD, REDUCE, OPTIMIZER = "data", "forward", "backward", "reduce", "optimizer"

step: int | None = None  # steps done
_now: tuple[str, float] = ("starting", time.monotonic())


def enter(name: str) -> None:
    """From now on this process does `name`."""
    global _now
    _now = (name, time.monotonic())


def current() -> tuple[str, float]:
    """The activity, and for how many seconds."""
    name, since = _now
    return name, time.monotonic() - since
