"""The time lines of sums during a backward pass, and of gathers during the next forward pass, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.overlap import OverlapCase, draw_overlap, join_ranks, overlap_table, record_steps
from tests.distributed import run_ranks

RANKS = 2


@pytest.mark.slow
def test_messages_are_hidden_behind_passes(tmp_path: Path) -> None:
    case = OverlapCase(RANKS, rate=100e6, rounds=3)
    found = join_ranks(case, run_ranks(RANKS, record_steps, case))
    elements = 8 * (4 * 256**2 + 3 * 256 * 768) + 2 * 1024 * 256
    for steps, next_steps in zip(found.sums.ranks, found.gathers.ranks, strict=True):
        backward, wait, *sums = steps.spans
        assert sum(one_sum.begin < backward.end for one_sum in sums) == len(sums) > 8
        assert wait.begin == backward.end and wait.end >= max(one_sum.end for one_sum in sums)
        forward, *rest = next_steps.spans
        waits, gathers = ([span for span in rest if span.what == what] for what in ("wait", "gather"))
        # Each is waited for once, in the pass, the last one after others have been used.
        assert len(waits) == len(gathers) > 8
        assert all(one_gather.begin < forward.begin for one_gather in gathers)
        assert all(forward.begin < one_wait.begin < one_wait.end < forward.end for one_wait in waits)
        assert all(w.end >= g.end for w, g in zip(waits, gathers, strict=True))
        # Without overlap all bytes are waited for; half of those of a bucket of weights are exchanged before.
        assert min(steps.whole) > elements * 4 / RANKS / case.rate
        assert min(next_steps.whole) > 1.4 * elements * 2 / RANKS / case.rate
    assert 0.2 < found.sums.hidden < 1 and 0.2 < found.gathers.hidden < 1
    assert f"{found.hidden:.1%}" in str(overlap_table(found).caption)
    draw_overlap(found, tmp_path / "overlap.png")
    assert (tmp_path / "overlap.png").stat().st_size > 10_000
