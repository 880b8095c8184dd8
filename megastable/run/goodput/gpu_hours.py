"""Counts the GPU-hours of a run: every second in which its processes existed, times the ranks of that time. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megastable.run.goodput.time_account import TimeKind, TimeSpan


class GpuHours(NamedTuple):
    """all: of all ranks while processes of the run existed; training: of which were goodput."""

    all: float
    training: float


def gpu_hours(spans: Iterable[TimeSpan], starts: Iterable[tuple[float, int | None]]) -> GpuHours | None:
    """spans: of a `TimeAccount`; starts: of training processes, in order, as (Unix seconds, ranks); those without ranks
    are left out. None if nobody knows the ranks."""
    known = [(at, ranks) for at, ranks in starts if ranks]
    if not known:
        return None
    hours, training = 0.0, 0.0
    for span in spans:
        if span.kind is not TimeKind.NOT_RUNNING:
            # Before the first step of an attempt its ranks are there already.
            ranks = next((n for at, n in reversed(known) if at <= span.end), known[0][1])
            hours += (span.end - span.begin) * ranks / 3600
            training += span.seconds * ranks / 3600 if span.kind is TimeKind.TRAINING else 0.0
    return GpuHours(hours, training)
