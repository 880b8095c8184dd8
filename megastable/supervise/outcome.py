"""What follows on an attempt: the end of the run, or another attempt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunExit:
    """The run is over. code: of errors.py."""

    code: int
    reason: str


@dataclass(frozen=True)
class StartAgain:
    """Another attempt follows, in `delay` seconds. told: whether to print that."""

    reason: str
    delay: float
    told: bool
