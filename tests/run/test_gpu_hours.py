"""GPU-hours of a run, against a count by hand."""

from __future__ import annotations

import pytest

from megastable.run.goodput.gpu_hours import gpu_hours
from megastable.run.goodput.time_account import TimeKind, TimeSpan

HOUR = 3600.0


def span(begin: float, end: float, kind: TimeKind, attempt: int = 1, between: float = 0.0) -> TimeSpan:
    return TimeSpan(begin * HOUR, end * HOUR, kind, "", None, "", attempt, between=between * HOUR)


def test_ranks_of_each_attempt_while_processes_existed() -> None:
    spans = [
        span(0, 1, TimeKind.START_UP), span(1, 3, TimeKind.TRAINING, between=0.5), span(3, 4, TimeKind.ENDING),
        span(4, 9, TimeKind.NOT_RUNNING, 0),
        span(9, 10, TimeKind.START_UP, 2), span(10, 12, TimeKind.TRAINING, 2),
    ]  # fmt: skip
    # Eight ranks for four hours, nobody for five, four ranks for three.
    found = gpu_hours(spans, [(1 * HOUR, 8), (10 * HOUR, 4)])
    assert found is not None
    assert found.all == pytest.approx(8 * 4 + 4 * 3) and found.training == pytest.approx(8 * 1.5 + 4 * 2)


def test_starts_of_unknown_ranks_are_those_before() -> None:
    spans = [span(0, 1, TimeKind.TRAINING), span(1, 2, TimeKind.TRAINING, 2)]
    found = gpu_hours(spans, [(0.0, 2), (1 * HOUR, None)])
    assert found is not None and found.all == pytest.approx(4)
    assert gpu_hours(spans, [(0.0, None)]) is None and gpu_hours(spans, []) is None
