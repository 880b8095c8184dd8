"""Measures the activities of a step on a GPU, whose kernels run long after the host has entered them: by events in its
stream, read a step later, so that nobody waits for them.

An event marks where the GPU gets to what the host entered then. The time between two of them is that of the kernels
between, of what they wait for in the stream, and of gaps in which the host had not enqueued anything yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Protocol

PENDING = 4  # steps whose events are awaited


class DeviceEvent(Protocol):
    """torch.cuda.Event with timing."""

    def record(self) -> object: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds."""


class DeviceClock:
    """An `activity.Clock`. event: makes one."""

    def __init__(self, event: Callable[[], DeviceEvent]) -> None:
        self._event = event
        self._free: list[DeviceEvent] = []
        self._marks: list[tuple[str, DeviceEvent]] = []  # of this step
        self._pending: list[tuple[int, float, list[tuple[str, DeviceEvent]]]] = []

    def begin(self) -> None:
        """A step begins; what a step that was given up has marked is forgotten."""
        self._free += [event for _, event in self._marks]
        self._marks = []

    def enter(self, name: str) -> None:
        """The stream gets to `name` here."""
        if self._marks and self._marks[-1][0] == name:
            return
        event = self._free.pop() if self._free else self._event()
        event.record()
        self._marks.append((name, event))

    def end(self, step: int, seconds: float) -> list[tuple[int, float, Mapping[str, float]]]:
        """Those of earlier steps that the GPU is done with."""
        self._marks.append(("", mark := self._free.pop() if self._free else self._event()))
        mark.record()
        self._pending.append((step, seconds, self._marks))
        self._marks = []
        found = list[tuple[int, float, Mapping[str, float]]]()
        while self._pending and (len(self._pending) > PENDING or self._pending[0][2][-1][1].query()):
            number, took, marks = self._pending.pop(0)
            if marks[-1][1].query():
                found.append((number, took, _spent(marks)))
            self._free += [event for _, event in marks]
        return found


def _spent(marks: list[tuple[str, DeviceEvent]]) -> dict[str, float]:
    """Seconds by activity."""
    spent = defaultdict[str, float](float)
    for (name, event), (_, following) in pairwise(marks):
        spent[name] += event.elapsed_time(following) / 1000
    return spent
