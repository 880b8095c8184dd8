"""Means with confidence intervals, and paired differences. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

SHARE = 0.95  # of the confidence intervals


@dataclass(frozen=True)
class Interval:
    """A mean, and half the width of its confidence interval by Student's t: inf of one value. nan, if a value is no
    finite number."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def interval(values: Sequence[float]) -> Interval:
    """Of the mean of independent values."""
    if not all(map(math.isfinite, values)):
        return Interval(math.nan, math.nan)
    n = len(values)
    half = quantile(n - 1) * stdev(values) / math.sqrt(n) if n > 1 else math.inf
    return Interval(fmean(values), half)


def paired(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Of the mean of `values` less `others`, pair by pair: what a pair shares, such as a seed's data, cancels."""
    return interval([a - b for a, b in zip(values, others, strict=True)])


def quantile(freedom: int, share: float = SHARE) -> float:
    """The t below which |t| is in this share of cases; freedom: degrees of freedom, at least 1."""
    low, high = 0.0, 1.0
    while within(high, freedom) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < share else (low, middle)
    return high


def within(t: float, freedom: int) -> float:
    """The probability that |Student's t| is below `t` (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
