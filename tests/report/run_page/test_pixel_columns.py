"""Pixel columns against a plain loop over the values."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megastable.report.run_page.plot_data import (
    average_columns,
    columns_of,
    reduce_columns,
    trailing_share,
    trend_band,
)

LOSSES = st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from([math.nan, math.inf, -math.inf]))
STEPS = st.lists(st.tuples(st.integers(0, 1000), LOSSES), min_size=1, max_size=200)


@given(STEPS, st.integers(1, 40), st.floats(-50, 500), st.floats(1, 600))
def test_columns_are_those_of_a_plain_loop(
    given_: list[tuple[int, float]], columns: int, begin: float, width: float
) -> None:
    given_.sort(key=lambda pair: pair[0])
    x, y = np.array([a for a, _ in given_], float), np.array([b for _, b in given_], np.float32)
    starts = columns_of(x, begin, begin + width, columns)
    pixels: dict[int, list[int]] = {}
    for n, value in enumerate(x):
        edges = [begin + width / columns * k for k in range(1, columns)]
        pixel = n if len(x) <= columns else sum(edge <= value for edge in edges)
        pixels.setdefault(pixel, []).append(n)
    assert starts.tolist() == [rows[0] for rows in pixels.values()]
    found = reduce_columns(y, starts)
    assert np.allclose(average_columns(x, starts), [np.mean(x[rows]) for rows in pixels.values()])
    for n, rows in enumerate(pixels.values()):
        finite = [float(y[row]) for row in rows if math.isfinite(y[row])]
        if not finite:
            assert all(math.isnan(column[n]) for column in found)
        else:
            assert found.low[n] == min(finite) and found.high[n] == max(finite)
            assert math.isclose(found.mean[n], sum(finite) / len(finite), rel_tol=1e-4, abs_tol=1e-2)


@given(
    st.lists(st.booleans(), min_size=1, max_size=120),
    st.integers(1, 20),
    st.integers(1, 30),
    st.integers(0, 40),
)
def test_the_share_reaches_back_over_the_window(
    values: list[bool], columns: int, window: int, lead: int
) -> None:
    lead = min(lead, len(values) - 1)
    x = np.arange(len(values) - lead, dtype=float)
    starts = columns_of(x, 0, len(x), columns)
    found = trailing_share(np.array(values), starts, window, lead)
    ends = [*(starts[1:] + lead).tolist(), len(values)]
    for share, start, end in zip(found, (starts + lead).tolist(), ends, strict=True):
        some = values[max(0, min(start, end - window)) : end]
        assert math.isclose(share, sum(some) / len(some), rel_tol=1e-6)


def test_the_band_follows_a_slope_and_a_spike_is_outside() -> None:
    random = np.random.default_rng(1)
    loss = (5 - 0.01 * np.arange(200) + 0.02 * random.standard_normal(200)).astype(np.float32)
    loss[150] = 9.0
    low, high = trend_band(loss, np.arange(200), 64)
    assert np.isnan(low[:63]).all() and np.isfinite(low[63:]).all()
    inside = (low[63:] < loss[63:]) & (loss[63:] < high[63:])
    assert not inside[150 - 63] and inside.mean() > 0.97
    assert (high - low)[160] < 0.3  # one spike does not widen it
    again = trend_band(loss, np.arange(100), 64, lead=100)  # the same, of a window that begins later
    assert np.array_equal(again[0], low[100:]) and np.array_equal(again[1], high[100:])
