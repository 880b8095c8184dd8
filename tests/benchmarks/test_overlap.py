"""The time lines of sums during a backward pass, of a real step on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.overlap import OverlapCase, OverlapFound, draw_overlap, overlap_table, record_steps
from tests.distributed import run_ranks

RANKS = 2


@pytest.mark.slow
def test_sums_are_hidden_behind_the_backward_pass(tmp_path: Path) -> None:
    case = OverlapCase(RANKS, rate=100e6, rounds=2)
    found = OverlapFound(case, run_ranks(RANKS, record_steps, case))
    elements = 8 * (4 * 256**2 + 3 * 256 * 768) + 2 * 1024 * 256
    for steps in found.ranks:
        backward, wait, *sums = steps.spans
        assert sum(one_sum.begin < backward.end for one_sum in sums) == len(sums) > 8
        assert wait.begin == backward.end and wait.end >= max(one_sum.end for one_sum in sums)
        # Without overlap all bytes are waited for.
        assert min(steps.whole) > elements * 4 / RANKS / case.rate
    assert 0.4 < found.hidden < 1
    assert f"{found.hidden:.1%}" in str(overlap_table(found).caption)
    draw_overlap(found, tmp_path / "overlap.png")
    assert (tmp_path / "overlap.png").stat().st_size > 10_000
