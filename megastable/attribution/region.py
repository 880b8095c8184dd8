"""The extent of a bad region: samples that follow each other and are bad."""

from __future__ import annotations

import math
from dataclasses import dataclass

STRAY = 0.005  # share of harmless samples that look bad
CLEAN = 3  # batches in a row that end a region
FARTHEST = 256  # batches: what goes on for longer is a new phase
FORWARD = 3  # forward passes in the time of a step


@dataclass(frozen=True)
class Region:
    """Positions [first, end); how: a sentence on how both ends were found. measured: samples measured for it; steps:
    the cost, in steps of time. probes: examined positions, with the number measured there and the number of bad ones,
    ascending."""

    first: int
    end: int
    how: str
    measured: int = 0
    steps: float = 0.0
    probes: tuple[tuple[int, int, int], ...] = ()


def strays(size: int) -> int:
    """Most bad samples of a clean batch: one, and of a large one what harmless samples bring, two deviations added."""
    usual = STRAY * size
    return max(1, int(usual + 2 * math.sqrt(usual)))
