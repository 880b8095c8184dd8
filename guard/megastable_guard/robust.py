"""Robust statistics, short or online: a trend insensitive to outliers, a sequential sum that one step cannot raise, and
how much wider than white noise a series scatters.

Plain Python on purpose: sorting 100 floats takes less than one call into numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import sub
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAD_TO_SIGMA = 1.4826  # of a normal distribution
LENGTH = 16  # observations that an average of `Scatter` is long: half of an excursion that recovers
_NEWEST = 15  # values for the latest level
_CLIP = 4.0  # sigma that count for `Scatter`; outliers are handled elsewhere
_PRIOR = 100  # its prior: observations of white noise
_GAIN = 2.0 / (LENGTH + 1)
_WHITE = _GAIN / (2.0 - _GAIN)  # variance of its average of white noise


def median(values: Iterable[float]) -> float:
    return _middle(sorted(values))


def neighbour_difference(values: Sequence[float]) -> float:
    """The median difference, without its sign, of values from those before them."""
    return median(map(abs, map(sub, values[1:], values)))


def _middle(ordered: Sequence[float]) -> float:
    half_length = len(ordered) // 2
    return ordered[half_length] if len(ordered) % 2 else (ordered[half_length - 1] + ordered[half_length]) / 2


@dataclass(frozen=True)
class Trend:
    """The expected value of the next observation, and its scatter.

    level: expected now. low: the least to be expected, if the fall continues at its steepest. scale: sigma of the
    scatter about the line. noise: the same from successive differences alone, which a curved trend does not inflate.
    late: level of the newest values.
    """

    level: float
    low: float
    scale: float
    noise: float
    late: float


def fit_trend(times: Sequence[int], values: Sequence[float], now: int, *, floor: float, full: int) -> Trend:
    """Tukey's resistant line (Exploratory Data Analysis, 1977, chapter 5), extrapolated to `now`.

    The slope is the shallower of the two between the medians of the outer thirds and of the last two, and never rises:
    a curve that flattens out is not extrapolated below itself, and a rising loss is never expected. The scale
    is the median absolute deviation, at least `floor`. A window with fewer than `full` values is a start: its first
    third, with the steep initial fall, is left out.
    """
    if len(values) < full:
        start = len(values) // 3
        times, values = times[start:], values[start:]
    third_length = len(values) // 3
    third_slices = (slice(0, third_length), slice(third_length, -third_length), slice(-third_length, None))
    x0, x1, x2 = [_middle(times[third_slice]) for third_slice in third_slices]
    y0, y1, y2 = [median(values[third_slice]) for third_slice in third_slices]
    slopes = [min(0.0, (y2 - y0) / (x2 - x0)), min(0.0, (y2 - y1) / (x2 - x1))]
    slope = max(slopes)
    level_now = (
        [value - slope * (known_time - now) for known_time, value in zip(times, values)] if slope else values
    )
    level = median(level_now)
    scale = MAD_TO_SIGMA * median(map(abs, map(sub, level_now, repeat(level))))
    neighbour_noise = MAD_TO_SIGMA * neighbour_difference(values) / math.sqrt(2.0)
    lowest_level = level + (min(slopes) - slope) * (now - x1)
    return Trend(
        level, lowest_level, max(scale, floor), max(neighbour_noise, floor), median(values[-_NEWEST:])
    )


class Sum(BaseModel):
    """A one-sided cumulative sum (Page, Biometrika 41, 1954) of which the largest term does not count.

    So a single step of any size raises no alarm. since, onset: the observation and the step at which it last left zero.
    """

    model_config = ConfigDict(extra="forbid")

    height: float = 0.0
    largest: float = 0.0
    since: int = 0
    onset: int = 0

    def add_term(self, term: float, now: int, step: int) -> None:
        if self.height == 0.0:
            self.since, self.onset, self.largest = now, step, 0.0
        self.height = max(0.0, self.height + term)
        self.largest = max(self.largest, term)

    @property
    def value(self) -> float:
        return max(0.0, self.height - self.largest)


class Scatter(BaseModel):
    """How much wider than white noise a series scatters over many steps, in constant memory.

    A sequential test sums residuals. If these are correlated (autocorrelation, slowly changing levels), their sum
    scatters by more than the square root of their number: by the long-run variance, the sum of all autocovariances
    (Newey and West, Econometrica 55, 1987). A residual divided by its root counts as one of white noise; Siegmund
    (Sequential Analysis, 1985, chapter 2): the logarithm of the time between false alarms of a cumulative sum with
    limit h and allowance k is 2kh / variance. The variance of an exponential average of white noise is known. The
    measured variance of the averages over that is the long-run variance up to lags of about their length.

    seen: residuals so far. average: of the newest ones. variance: of the averages.
    """

    model_config = ConfigDict(extra="forbid")

    seen: int = 0
    average: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    variance: Annotated[float, Field(allow_inf_nan=False)] = _WHITE

    def add_residual(self, residual: float, memory: int) -> None:
        """residual: in sigma. memory: number of observations to remember."""
        self.seen += 1
        self.average += _GAIN * (max(-_CLIP, min(_CLIP, residual)) - self.average)
        new_share = 1.0 / min(self.seen + _PRIOR, memory)
        self.variance += new_share * (self.average**2 - self.variance)

    def widening_factor(self, usual: float, most: float) -> float:
        """The divisor of a residual: the root of the long-run variance over the `usual` one, from 1 to `most`."""
        return min(most, math.sqrt(max(1.0, self.variance / _WHITE / usual)))
