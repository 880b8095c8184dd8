"""Skip-step baseline: the rule of OLMo-core's SkipStepOptimizer, as a pure function of past steps.

An update is skipped if loss or gradient norm is more than `SIGMA` standard deviations above the mean of the `WINDOW`
steps before it, skipped ones included; none is before half of them are known. Non-finite steps are skipped and not
recorded: they would make mean and deviation non-finite, and every later step skipped.
Source: allenai/OLMo-core, src/olmo_core/optim/skip_step_optimizer.py (rolling_interval_length 128, sigma_factor 6).
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, stdev

WINDOW = 128
SIGMA = 6.0


class SkipStep:
    """The rule for one run; called once for every step, in order."""

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
    # OLMo-core includes the present value.
    return len(seen) + 1 < WINDOW // 2 or value - fmean(seen) <= SIGMA * stdev(seen)
