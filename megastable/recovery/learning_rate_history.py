"""Remembers the scheduled learning rates of the latest steps, to tell whether the rate jumped since a good state."""

from __future__ import annotations

from collections import deque


class RateHistory:
    """Rates before cuts and caps, by step. The newest one outlives the process: it may be restarted with another
    rate."""

    def __init__(self, most: int) -> None:
        self.coming: float | None = None  # of the next update
        self._known: deque[tuple[int, float]] = deque(maxlen=most)

    def resume(self, step: int, rate: float | None) -> None:
        """The state after `step` was last trained at `rate`, if known."""
        if rate is not None:
            self._known.append((step, rate))

    def done(self, step: int) -> None:
        """The step of the next update is done."""
        if self.coming is not None:
            self._known.append((step, self.coming))

    def forget_after(self, step: int) -> None:
        while self._known and self._known[-1][0] > step:
            self._known.pop()

    @property
    def newest(self) -> float | None:
        return self._known[-1][1] if self._known else None

    def highest_since(self, step: int) -> float | None:
        return max((rate for at, rate in self._known if at >= step), default=None)

    def before(self, step: int) -> float | None:
        """The rate at which the state after `step` was last trained."""
        return next((rate for at, rate in reversed(self._known) if at <= step), None)
