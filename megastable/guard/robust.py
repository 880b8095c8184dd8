"""Robust statistics of short windows: a trend insensitive to outliers, a sequential sum that one step cannot raise.

Plain Python on purpose: sorting 100 floats takes less than one call into numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import sub

from pydantic import BaseModel, ConfigDict

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_NEWEST = 15  # values for the latest level


def median(values: Iterable[float]) -> float:
    return _middle(sorted(values))


def _middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


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


def trend(times: Sequence[int], values: Sequence[float], now: int, *, floor: float, full: int) -> Trend:
    """Tukey's resistant line (Exploratory Data Analysis, 1977, chapter 5), extrapolated to `now`.

    The slope is the shallower of the two between the medians of the outer thirds and of the last two, and never rises:
    a curve that flattens out is not extrapolated below itself, and a rising loss is never expected. The scale
    is the median absolute deviation, at least `floor`. A window with fewer than `full` values is a start: its first
    third, with the steep initial fall, is left out.
    """
    if len(values) < full:
        start = len(values) // 3
        times, values = times[start:], values[start:]
    third = len(values) // 3
    parts = (slice(0, third), slice(third, -third), slice(-third, None))
    x0, x1, x2 = [_middle(times[part]) for part in parts]
    y0, y1, y2 = [median(values[part]) for part in parts]
    slopes = [min(0.0, (y2 - y0) / (x2 - x0)), min(0.0, (y2 - y1) / (x2 - x1))]
    slope = max(slopes)
    level_now = [value - slope * (time - now) for time, value in zip(times, values)] if slope else values
    level = median(level_now)
    scale = _MAD_TO_SIGMA * median(map(abs, map(sub, level_now, repeat(level))))
    noise = _MAD_TO_SIGMA * median(map(abs, map(sub, values[1:], values))) / math.sqrt(2.0)
    low = level + (min(slopes) - slope) * (now - x1)
    return Trend(level, low, max(scale, floor), max(noise, floor), median(values[-_NEWEST:]))


class Sum(BaseModel):
    """A one-sided cumulative sum (Page, Biometrika 41, 1954) of which the largest term does not count.

    So a single step of any size raises no alarm. since, onset: the observation and the step at which it last left zero.
    """

    model_config = ConfigDict(extra="forbid")

    height: float = 0.0
    largest: float = 0.0
    since: int = 0
    onset: int = 0

    def add(self, term: float, now: int, step: int) -> None:
        if self.height == 0.0:
            self.since, self.onset, self.largest = now, step, 0.0
        self.height = max(0.0, self.height + term)
        self.largest = max(self.largest, term)

    @property
    def value(self) -> float:
        return max(0.0, self.height - self.largest)
