"""Limits values to the range that a plot's scale can show."""

from __future__ import annotations

import math

LARGEST = 1e30  # larger values are as good as infinite, and break a plot's scale


def drawable(value: float | None, positive: bool = False) -> float:
    """`value` if it can be drawn, else nan, which draws nothing. positive: on a logarithmic scale."""
    if value is None or not -LARGEST < value < LARGEST or (positive and value <= 0):
        return math.nan
    return value
