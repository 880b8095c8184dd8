"""The time lines of a pipeline's passes by both schedules, of real steps on two ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.pipeline import (
    PipelineCase,
    PipelineFound,
    bubble_table,
    draw_bubbles,
    gather_steps,
    record_passes,
)
from tests.distributed import run_ranks


@pytest.mark.slow
def test_bubbles_are_those_of_the_formulas(tmp_path: Path) -> None:
    case = PipelineCase(2, 4, forward=0.2, backward=0.25, weight=0.15, rounds=3)
    found = PipelineFound(case, gather_steps(run_ranks(2, record_passes, case)))
    for schedule, passes in (
        ("1f1b", ["F", "BW"]),
        ("zero_bubble", ["F", "B", "W"]),
        ("interleaved", ["F", "BW"]),
    ):
        for stage in found.find_best(schedule):
            # Each pass of each micro-batch once through every chunk, in their order, and one after the other.
            for what in passes:
                spans = [(span.chunk, span.micro_batch) for span in stage if span.what == what]
                assert sorted(spans) == [(c, m) for c in range(case.count_chunks(schedule)) for m in range(4)]
                assert all(sorted(pair) == [*pair] for pair in pairwise(spans) if pair[0][0] == pair[1][0])
            assert all(one.end <= other.begin for one, other in pairwise(stage))
        # No pass is shorter than its time; messages and a busy machine add to it.
        predicted = case.predict_bubble(schedule)
        assert predicted <= found.bubble(schedule) < 1.4 * predicted
    assert found.bubble("zero_bubble") < found.bubble("1f1b") - case.weight
    assert found.bubble("interleaved") < 0.7 * found.bubble("1f1b")
    assert "by the formula" in [column.header for column in bubble_table(found).columns]
    draw_bubbles(found, tmp_path / "pipeline.png")
    assert (tmp_path / "pipeline.png").stat().st_size > 10_000
