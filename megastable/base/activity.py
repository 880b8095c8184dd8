"""What this process is doing now: written by the thread that trains, read by the one that sends heartbeats.

One per process. To enter an activity costs an assignment, so a step may do it several times.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

# Within a step, in this order; the other ones are the phases of a run (rank_ipc.Progress).
DATA, FORWARD, BACKWARD, REDUCE, OPTIMIZER = "data", "forward", "backward", "reduce", "optimizer"
EXCHANGE = "exchange"  # of activations or gradients with another stage of a pipeline: mostly waits for it

step: int | None = None  # steps done
_now: tuple[str, float] = ("starting", time.monotonic())
# Torch's count of what was entered in the world group: how much of it were sends and receives, and what it was before
# the exchange that is under way.
_exchanged: tuple[int, int | None] = (0, None)


def enter(name: str) -> None:
    """From now on this process does `name`."""
    global _now
    _now = (name, time.monotonic())


def current() -> tuple[str, float]:
    """The activity, and for how many seconds."""
    name, since = _now
    return name, time.monotonic() - since


def age() -> float:
    """Seconds since this process was started, by the kernel's clock; 0 if it does not say."""
    try:
        # Field 22 of proc(5), in ticks since boot; psutil knows the time of the boot to a second only.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def exchanged(count: int) -> None:
    """So many sends and receives were before the first exchange."""
    global _exchanged
    _exchanged = (count, None)


def exchange_begins(count: int) -> None:
    """count: torch's, of the world group."""
    global _exchanged
    _exchanged = (_exchanged[0], count)
    enter(EXCHANGE)


def exchange_ends(count: int) -> None:
    """count: torch's, of the world group."""
    global _exchanged
    past, before = _exchanged
    assert before is not None
    _exchanged = (past + count - before, None)


def collectives(count: int) -> int:
    """How many of `count`, torch's of the world group, were collectives. Gloo counts sends and receives too, which the
    stages of a pipeline do not all do equally often."""
    past, before = _exchanged
    return (count if before is None else before) - past
