"""Finds out which steps were undone: those that come again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megastable.training.trackers.curves import apart
from megastable.training.trackers.points import StepPoint, UndonePoint

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

    def dump(self) -> dict[str, Any]:
        """As a JSON object, for `load`."""
        points = [(p.step, p.tokens, p.time, dict(p.values)) for p in self._points]
        return {"last": self.last, "points": points}

    @classmethod
    def load(cls, dumped: Any) -> ToldSteps:
        """Of a `dump`; empty if it is none."""
        try:
            points = [
                StepPoint(
                    int(step), int(tokens), float(at), True, {str(k): float(v) for k, v in values.items()}
                )
                for step, tokens, at, values in dumped["points"]
            ]
            return cls(int(dumped["last"]), points)
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls()
