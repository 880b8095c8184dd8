"""What this process is doing now, and how long each step took it: written by the thread that trains, read by the one
that sends heartbeats.

One per process. To enter an activity costs a few assignments, so a step may do it several times. On a GPU, which runs
behind the host, a clock of its own measures the activities (engine/measured.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

# Within a step, in this order; the other ones are the phases of a run (rank_ipc.Progress).
DATA, FORWARD, BACKWARD, REDUCE, OPTIMIZER = "data", "forward", "backward", "reduce", "optimizer"
GATE = "gate"  # before the update: the sum over all ranks of what it is judged by, and the judgement
REST = "step"  # what is none of these
EXCHANGE = "exchange"  # of activations or gradients with another stage of a pipeline: mostly waits for it
STORE = (
    "object store"  # in place of data, while what is to be read has to come from a store that does not answer
)
OWN = (DATA, FORWARD, BACKWARD, OPTIMIZER)  # what a rank does itself; the others wait for other ranks
# Of a step in its record; the rest is "other".
PHASES = (DATA, FORWARD, BACKWARD, REDUCE, EXCHANGE, GATE, OPTIMIZER)

step: int | None = None  # steps done
_now: tuple[str, float] = ("starting", time.monotonic())
# Torch's count of what was entered in the world group: how much of it were sends and receives, and what it was before
# the exchange that is under way.
_exchanged: tuple[int, int | None] = (0, None)

# A step: its number, its seconds, and those of OWN in that order, without waits for other ranks.
StepTimes = tuple[int, float, tuple[float, ...]]
timed: deque[StepTimes] = deque(maxlen=4096)  # steps that no heartbeat has told of yet, oldest first
# A step: its number, and its seconds by activity, with waits for other ranks in OWN under REDUCE.
Spent = tuple[int, Mapping[str, float]]
# Steps that no record has told of yet, oldest first; for the thread that trains.
spent: deque[Spent] = deque(maxlen=16)


class Clock(Protocol):
    """Measures activities by another clock than the host's."""

    def begin_step(self) -> None: ...

    def enter_activity(self, name: str) -> None: ...

    def end_step(self, step: int, seconds: float) -> Iterable[tuple[int, float, Mapping[str, float]]]:
        """The step is over; returns those whose times are known by now: number, seconds in all and by activity."""


class ActivityListener(Protocol):
    """Is told of the activities of every step, by the thread that trains."""

    def begin_step(self, step: int) -> None:
        """A step begins after so many."""

    def enter_activity(self, name: str) -> None: ...

    def end_step(self) -> None: ...


clock: Clock | None = None
listener: ActivityListener | None = None
_in_step, _trainer = False, 0
_spent: dict[str, float] = {}  # seconds by activity, in this step


def begin_step(steps: int) -> None:
    """A step begins after so many. What an evaluation or a rewind has entered before is not part of it."""
    global step, _in_step, _trainer
    step, _in_step, _trainer = steps, True, threading.get_ident()
    if clock is not None:
        clock.begin_step()
    if listener is not None:
        listener.begin_step(steps)
    enter_activity(_now[0])
    _spent.clear()


def end_step(seconds: float) -> None:
    """The step is over, which took so long in all. Without `begin_step` nothing happens."""
    global _in_step
    if not _in_step or step is None:
        return
    enter_activity(_now[0])
    _in_step = False
    if listener is not None:
        listener.end_step()
    steps_over = [(step, seconds, dict(_spent))] if clock is None else clock.end_step(step, seconds)
    for step_number, step_seconds, by_activity in steps_over:
        timed.append((step_number, step_seconds, tuple(by_activity.get(name, 0.0) for name in OWN)))
        spent.append((step_number, by_activity))


def count_wait(seconds: float) -> None:
    """So much of the present activity was a wait for other ranks. Ignored of any thread but the one that trains."""
    if _in_step and threading.get_ident() == _trainer and (activity_name := _now[0]) in OWN:
        _spent[activity_name] = _spent.get(activity_name, 0.0) - seconds
        _spent[REDUCE] = _spent.get(REDUCE, 0.0) + seconds


def enter_activity(name: str) -> None:
    """From now on this process does `name`."""
    global _now
    current_time = time.monotonic()
    if _in_step:
        previous_name, previous_time = _now
        _spent[previous_name] = _spent.get(previous_name, 0.0) + current_time - previous_time
        if clock is not None:
            clock.enter_activity(name)
        if listener is not None:
            listener.enter_activity(name)
    _now = (name, current_time)


def current_activity() -> tuple[str, float]:
    """The activity, and for how many seconds."""
    activity_name, since_time = _now
    return activity_name, time.monotonic() - since_time


def process_age() -> float:
    """Seconds since this process was started, by the kernel's clock; 0 if it does not say."""
    try:
        # Field 22 of proc(5), in ticks since boot; psutil knows the time of the boot to a second only.
        start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def set_exchanged(count: int) -> None:
    """So many sends and receives were before the first exchange."""
    global _exchanged
    _exchanged = (count, None)


def begin_exchange(count: int) -> None:
    """count: torch's, of the world group."""
    global _exchanged
    _exchanged = (_exchanged[0], count)
    enter_activity(EXCHANGE)


def end_exchange(count: int) -> None:
    """count: torch's, of the world group."""
    global _exchanged
    past_exchanges, count_before = _exchanged
    assert count_before is not None
    _exchanged = (past_exchanges + count - count_before, None)


def count_collectives(count: int) -> int:
    """How many of `count`, torch's of the world group, were collectives. Gloo counts sends and receives too, which the
    stages of a pipeline do not all do equally often."""
    past_exchanges, count_before = _exchanged
    return (count if count_before is None else count_before) - past_exchanges
