"""Finds out which steps were undone: those that come again."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from megastable.training.trackers.curves import apart
from megastable.training.trackers.points import StepPoint, UndonePoint, line_of, point_of

KEPT = 2000  # accepted steps that are remembered, to be shown once they are undone


class ToldSteps:
    """The steps told so far. last: the newest one, 0 if there is none."""

    def __init__(self, last: int = 0, points: Iterable[StepPoint] = ()) -> None:
        self.last = last
        self._points = deque(points, maxlen=KEPT)

    def advance(self, point: StepPoint) -> UndonePoint | None:
        """Another step; what it undoes, if it is not a new one."""
        undone = self.back(point.step - 1, point.tokens, point.time)
        self.last = point.step
        if point.applied:
            self._points.append(replace(point, values=apart(point)))
        return undone

    def back(self, step: int, tokens: int, time: float) -> UndonePoint | None:
        """The run stands after `step`; tokens: an upper bound of those before the next one's end."""
        if step >= self.last:
            return None
        points = tuple(p for p in self._points if p.step > step)
        undone = UndonePoint(step + 1, self.last, min([tokens, *(p.tokens for p in points)]), time, points)
        self.last = step
        self._points = deque((p for p in self._points if p.step <= step), maxlen=KEPT)
        return undone

    def dump(self) -> str:
        """As text, for `load`."""
        return json.dumps({"last": self.last, "points": [line_of(p) for p in self._points]})

    @classmethod
    def load(cls, text: str) -> ToldSteps:
        """Of a `dump`; empty if it is none."""
        try:
            found = json.loads(text)
            points = [p for p in map(point_of, found["points"]) if isinstance(p, StepPoint)]
            return cls(int(found["last"]), points)
        except (ValueError, KeyError, TypeError, RecursionError):
            return cls()
