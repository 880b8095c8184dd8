"""The rule of the skipping baseline, on numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drills.worker import SIGMA, WINDOW, SkipStep


def fed(values: list[float], norm: float | None = None) -> SkipStep:
    rule = SkipStep()
    for value in values:
        rule.applies(value, value if norm is None else norm)
    return rule


@given(st.lists(st.floats(-10, 10), min_size=0, max_size=300), st.floats(-100, 100))
def test_a_value_is_out_when_it_is_six_deviations_above_the_mean_of_the_last_128(
    seen: list[float], value: float
) -> None:
    rule = fed(seen)
    last = np.array(seen[-WINDOW:])
    if len(last) < WINDOW // 2 - 1:
        assert rule.applies(value, value)
        return
    limit = last.mean() + SIGMA * last.std(ddof=1)
    if abs(value - limit) > 1e-9:
        assert rule.applies(value, value) == (value < limit)


@pytest.mark.parametrize("values", [(9.0, 1.0), (1.0, 9.0), (9.0, 9.0)])
def test_loss_and_norm_are_both_looked_at(values: tuple[float, float]) -> None:
    rule = fed([1.0, 1.1] * 50)
    assert rule.applies(1.05, 1.05)
    assert not rule.applies(*values)


def test_what_was_skipped_becomes_usual() -> None:
    """As in OLMo-core: a jump that lasts is accepted after a few steps."""
    rule = fed([1.0, 1.1] * 64)
    skipped = [rule.applies(2.0, 2.0) for _ in range(10)].index(True)
    assert 1 <= skipped < 10


def test_what_is_not_finite_is_skipped_and_forgotten() -> None:
    rule = fed([1.0, 1.1] * 50)
    for value in (math.nan, math.inf):
        assert not rule.applies(value, 1.0)
        assert not rule.applies(1.0, value)
    assert rule.applies(1.05, 1.05)
