"""Measure how much wider than white noise a series scatters over many steps, online and in constant memory.

A sequential test sums residuals. If these are correlated (autocorrelation, slowly changing levels), their sum scatters
by more than the square root of their number: by the long-run variance, the sum of all autocovariances (Newey and West,
Econometrica 55, 1987). A residual divided by its root counts as one of white noise; Siegmund (Sequential Analysis,
1985, chapter 2): the logarithm of the time between false alarms of a cumulative sum with limit h and allowance k is
2kh / variance.

The variance of an exponential average of white noise is known. The measured variance of the averages over that is the
long-run variance up to lags of about their length.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LENGTH = 16  # length of an average in observations: half of an excursion that recovers
_CLIP = 4.0  # sigma; outliers are handled elsewhere
_PRIOR = 100  # prior: observations of white noise
_GAIN = 2.0 / (LENGTH + 1)
_WHITE = _GAIN / (2.0 - _GAIN)  # variance of the average of white noise

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Scatter(BaseModel):
    """seen: residuals so far. average: of the newest ones. variance: of the averages."""

    model_config = ConfigDict(extra="forbid")

    seen: int = 0
    average: Finite = 0.0
    variance: Finite = _WHITE

    def add(self, residual: float, memory: int) -> None:
        """residual: in sigma. memory: number of observations to remember."""
        self.seen += 1
        self.average += _GAIN * (max(-_CLIP, min(_CLIP, residual)) - self.average)
        share = 1.0 / min(self.seen + _PRIOR, memory)
        self.variance += share * (self.average**2 - self.variance)

    def factor(self, usual: float, most: float) -> float:
        """The divisor of a residual: the root of the long-run variance over the `usual` one, from 1 to `most`."""
        return min(most, math.sqrt(max(1.0, self.variance / _WHITE / usual)))
