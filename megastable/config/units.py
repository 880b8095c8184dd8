"""Defines types of keys that have a unit: times, steps or a time, numbers of samples."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, NonNegativeInt
from pydantic_core import PydanticCustomError

LONGEST = 10**9  # seconds, 31 years: timers and timeouts of Python and torch overflow beyond a few billion
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}  # of a time in words
Seconds = Annotated[float, Field(ge=0.0, le=LONGEST)]
PositiveSeconds = Annotated[float, Field(gt=0.0, le=LONGEST)]
WholeSeconds = Annotated[int, Field(ge=1, le=LONGEST)]
SampleCount = Annotated[int, Field(ge=0, le=10**6)]  # read at once, whole


@dataclass(frozen=True)
class InWords:
    """What a key accepts, where its type does not say it."""

    words: str


def seconds_of(text: str) -> float | None:
    """Seconds of a time such as `90s`, `30min` or `1.5h`; None if it is none, or not above 0."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h)\s*", text)
    seconds = float(found[1]) * UNITS[found[2]] if found else 0.0
    return seconds if 0 < seconds <= LONGEST else None


def _steps_or_time(given: Any) -> Any:
    if isinstance(given, str) and seconds_of(given) is not None:
        return given.strip()
    try:
        steps = int(given)
    except (TypeError, ValueError, OverflowError):
        steps = -1
    if steps < 0 or (isinstance(given, float) and given != steps):
        raise PydanticCustomError("steps_or_time", "expected steps or a time")
    return steps


StepsOrTime = Annotated[
    NonNegativeInt | str,
    BeforeValidator(_steps_or_time),
    InWords("whole number at least 0, or a time above 0 in s, min or h"),
]
