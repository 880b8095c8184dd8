"""What a picture's scale can show."""

from __future__ import annotations

import math

LARGEST = 1e30  # what is beyond is as good as infinite, and breaks the scales of a picture


def drawable(value: float | None, positive: bool = False) -> float:
    """`value` where it can be drawn, else nan, which draws nothing. positive: on a logarithmic scale."""
    if value is None or not -LARGEST < value < LARGEST or (positive and value <= 0):
        return math.nan
    return value
