"""Statistics of what a rank writes: right in ordinary numbers, and nothing that is not finite escapes them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.checkpoint import pieces
from megastable.checkpoint.pieces import PieceStatistics, statistics_of

FLOATS = st.lists(st.floats(-(2.0**59), 2.0**59, width=32), max_size=40)


@given(FLOATS, st.integers(1, 7))
def test_statistics_of_ordinary_numbers(values: list[float], chunk: int) -> None:
    flat = torch.tensor(values, dtype=torch.float32)
    before, pieces.CHUNK = pieces.CHUNK, chunk
    try:
        found = statistics_of(flat)
    finally:
        pieces.CHUNK = before
    wide = flat.double()
    assert found.nonfinite == 0
    assert found.absmax == (float(wide.abs().max()) if values else 0.0)
    assert found.norm == pytest.approx(float(wide.norm()), rel=1e-5, abs=1e-20)
    assert found.mean == pytest.approx(float(wide.mean()) if values else 0.0, abs=1e-5 * found.absmax + 1e-30)


@given(FLOATS, st.integers(0, 40), st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(1, 7))
def test_one_bad_number_is_counted_wherever_it_is(
    values: list[float], place: int, bad: float, chunk: int
) -> None:
    values.insert(place, bad)
    before, pieces.CHUNK = pieces.CHUNK, chunk
    try:
        found = statistics_of(torch.tensor(values, dtype=torch.float32))
    finally:
        pieces.CHUNK = before
    assert found.nonfinite == 1 and not math.isfinite(found.norm) and not math.isfinite(found.absmax)
    assert PieceStatistics.model_validate_json(found.model_dump_json()).nonfinite == 1


def test_numbers_whose_squares_are_beyond_fp32_are_finite() -> None:
    found = statistics_of(torch.tensor([3e30, 4e30]))
    assert found.nonfinite == 0 and found.norm == pytest.approx(5e30) and found.absmax == pytest.approx(4e30)
