"""Judges the probe: the losses of a few samples that are never trained on, measured again and again. Pure.

The samples are the same at every look, so what differs is the model: the difference of two looks has hardly any noise.
While a run learns they get easier, ever more slowly. A model that is worse on them than that lets expect is damaged, or
learns something else; which of the two, replays decide (attribution/harm.py).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megastable.guard.robust import MAD_TO_SIGMA

Floats = npt.NDArray[np.float64]

LEAST = 0.03  # nats by which the mean loss must lie above what was to be expected
# Usual scatters of these differences, and standard errors over the samples, beyond which one is clear: a trial decides.
SURE, ERRORS = 4.0, 3.0
KNOWN, NEWEST = 3, 16  # differences that tell their scatter: at least, and at most
APART = 5  # steps between looks that tell how fast the loss falls, at least
REST = 25  # steps


class JudgementPause:
    """No judgement for a while after a find that was the run's own work, twice as long each time that happens soon."""

    def __init__(self) -> None:
        self._end, self._times = 0, 0

    def begin(self, step: int) -> None:
        self._times = self._times + 1 if step <= self._end + REST * 2**self._times else 1
        self._end = step + REST * 2**self._times

    def is_over(self, step: int) -> bool:
        return step >= self._end


@dataclass(frozen=True)
class Rise:
    """The probe changed by `change` nats between the looks after steps `before` and `step`, which is `nats` more than
    expected."""

    before: int
    step: int
    change: float
    nats: float
    limit: float

    @property
    def reason(self) -> str:
        """As a sentence."""
        return (
            f"the loss of the probe samples, which are never trained on, changed by {self.change:+.3f} nats from step "
            f"{self.before} to step {self.step}, {self.nats:.3f} more than expected; usual are at most {self.limit:.3f}"
        )


class ProbeTrend:
    """One `judge` per look, in order."""

    def __init__(self) -> None:
        self.looks: list[tuple[int, Floats]] = []  # the newest ones
        # Changes less the expected ones, in units of these: while a run learns fast, its surprises are larger.
        self._surprises: deque[float] = deque(maxlen=NEWEST)
        self._pause = JudgementPause()

    def judge(self, step: int, losses: Floats) -> Rise | None:
        """A look after `step`: losses of the samples, [n] nats. A rise is no part of the trend until it is accepted."""
        if not self.looks:
            self.looks.append((step, losses))
            return None
        before, known = self.looks[-1]
        change = losses - known
        mean = float(change.mean()) if np.isfinite(losses).all() else math.inf
        error = float(change.std()) / math.sqrt(max(1, change.size - 1)) if math.isfinite(mean) else 0.0
        expected = self.expect(step)
        if expected is not None:
            unit = LEAST / SURE + abs(expected)
            limit = max(LEAST, ERRORS * error, unit * self._usual())
            if mean - expected > limit and self._pause.is_over(step):
                return Rise(before, step, mean, mean - expected, limit)
            if math.isfinite(mean):
                self._surprises.append((mean - expected) / unit)
        if math.isfinite(mean):
            self.looks = [*self.looks[-2 * NEWEST :], (step, losses)]
        return None

    def expect(self, step: int) -> float | None:
        """The change of the mean loss from the newest look to one after `step`: what the last rate of its fall makes,
        which goes on to slow down as it did; a loss that rose is expected to stay. None: too few looks are known."""
        known = [(at, float(losses.mean())) for at, losses in self.looks]
        spread = [known[-1]]
        for at, loss in reversed(known[:-1]):
            if spread[-1][0] - at >= APART:
                spread.append((at, loss))
        if len(spread) < 3:
            return None
        (last, level), (middle, before), (first, start) = spread[:3]
        rate, earlier = (level - before) / (last - middle), (before - start) / (middle - first)
        slows = min(1.0, rate / earlier) if earlier < 0 else 1.0
        return min(0.0, rate) * slows * (step - last)

    def accept(self, step: int, losses: Floats) -> None:
        """A rise was no damage: it is the level from now on."""
        if not np.isfinite(losses).all():
            return
        self._pause.begin(step)
        # At another level the loss falls as fast as before, for want of anything better.
        shift = losses - self.looks[-1][1]
        self.looks = [*((at, known + shift) for at, known in self.looks[:-1]), (step, losses)]

    def rewind(self, step: int) -> None:
        """The run is back after `step`."""
        self.looks = [(at, losses) for at, losses in self.looks if at <= step]

    def _usual(self) -> float:
        """The largest surprise that is usual, in its unit. At the start of a run, while the rate rises, any is."""
        if len(self._surprises) < KNOWN:
            return math.inf
        middle = float(np.median(self._surprises))
        scatter = MAD_TO_SIGMA * float(np.median(np.abs(np.array(self._surprises) - middle)))
        return middle + SURE * scatter
