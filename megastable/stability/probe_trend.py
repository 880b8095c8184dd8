"""Judges the probe: the losses of a few samples that are never trained on, measured again and again. Pure.

The samples are the same at every look, so what differs is the model: the difference of two looks has hardly any noise.
A model that gets worse on them within a look is damaged, or learns something else; which of the two, replays decide
(attribution/harm.py).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEAST = 0.03  # nats by which the mean loss must rise
SURE = 4.0  # standard errors, and usual scatters of the changes
KNOWN, NEWEST = 3, 16  # changes that tell their scatter: at least, and at most
# Steps without a judgement after a rise that was no damage, twice as many each time it happens again.
REST = 25


@dataclass(frozen=True)
class Rise:
    """The probe rose by so many nats between the looks after steps `before` and `step`."""

    before: int
    step: int
    nats: float
    limit: float

    @property
    def reason(self) -> str:
        """As a sentence."""
        return (
            f"the loss of the probe samples, which are never trained on, rose by {self.nats:.3f} nats from step "
            f"{self.before} to step {self.step}; usual are at most {self.limit:.3f}"
        )


class ProbeTrend:
    """One `judge` per look, in order."""

    def __init__(self) -> None:
        self.looks: list[tuple[int, Floats]] = []  # the newest ones
        self._changes: deque[float] = deque(maxlen=NEWEST)
        self._rest, self._vain = 0, 0

    def judge(self, step: int, losses: Floats) -> Rise | None:
        """A look after `step`: losses of the samples, [n] nats. A rise is no part of the trend until it is accepted."""
        if not self.looks:
            self.looks.append((step, losses))
            return None
        before, known = self.looks[-1]
        change = losses - known
        mean = float(change.mean()) if np.isfinite(losses).all() else math.inf
        error = float(change.std()) / math.sqrt(max(1, change.size - 1)) if math.isfinite(mean) else 0.0
        limit = max(self._usual(), SURE * error)
        if mean > limit and step >= self._rest:
            return Rise(before, step, mean, limit)
        self._learn(step, losses, mean)
        return None

    def accept(self, step: int, losses: Floats) -> None:
        """A rise was no damage: it is the level from now on."""
        self._vain += 1
        self._rest = step + REST * 2**self._vain
        self.looks = [(step, losses)]

    def rewind(self, step: int) -> None:
        """The run is back after `step`."""
        self.looks = [(at, losses) for at, losses in self.looks if at <= step]

    def _learn(self, step: int, losses: Floats, change: float) -> None:
        if math.isfinite(change):
            self._changes.append(change)
            self.looks = [*self.looks[-NEWEST:], (step, losses)]

    def _usual(self) -> float:
        """The largest rise that is usual. At the start of a run, while the rate rises, any is."""
        if len(self._changes) < KNOWN:
            return math.inf
        middle = float(np.median(self._changes))
        scatter = 1.4826 * float(np.median(np.abs(np.array(self._changes) - middle)))
        return max(LEAST, middle + SURE * scatter)
