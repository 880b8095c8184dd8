"""The baseline that skips steps: the rule of OLMo-core's SkipStepOptimizer, as a pure function of what was seen.

An update is skipped when loss or gradient norm is more than `SIGMA` standard deviations above the mean of the `WINDOW`
steps before it, skipped ones included; none is before half of them are known. What is not finite is skipped, too, and
not remembered: its mean and deviation would be none, and everything after it skipped.
Source: allenai/OLMo-core, src/olmo_core/optim/skip_step_optimizer.py (rolling_interval_length 128, sigma_factor 6).
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, stdev

WINDOW = 128
SIGMA = 6.0


class SkipStep:
    """Of one run; asked once for every step, in order."""

    def __init__(self) -> None:
        self._seen: tuple[deque[float], deque[float]] = (deque(maxlen=WINDOW), deque(maxlen=WINDOW))

    def applies(self, loss: float, grad_norm: float) -> bool:
        """Whether the update of a step with this loss (nats) and gradient norm before clipping is applied."""
        values = (loss, grad_norm)
        if not all(map(math.isfinite, values)):
            return False
        usual = all(_usual(value, seen) for value, seen in zip(values, self._seen, strict=True))
        for value, seen in zip(values, self._seen, strict=True):
            seen.append(value)
        return usual


def _usual(value: float, seen: deque[float]) -> bool:
    # OLMo-core counts the present value along.
    return len(seen) + 1 < WINDOW // 2 or value - fmean(seen) <= SIGMA * stdev(seen)
