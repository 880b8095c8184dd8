"""The time lines of messages beside products, of a real step on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.overlap import OverlapFound
from benchmarks.overlap_tensor import (
    MICRO_BATCH,
    MODEL,
    TensorCase,
    draw_tensor_overlap,
    record_tensor_steps,
    tensor_table,
)
from tests.distributed import run_ranks


@pytest.mark.slow
def test_messages_are_hidden_behind_products(tmp_path: Path) -> None:
    case = TensorCase(2, rounds=1, layers=1)
    found = OverlapFound(case, run_ranks(2, record_tensor_steps, case))
    sent = MICRO_BATCH * MODEL["sequence_length"] * MODEL["hidden"] * 4 / 2
    message = case.latency + sent / case.rate
    for steps in found.ranks:
        forward, backward, *rest = steps.spans
        assert forward.end == backward.begin == 0.0
        # A block's 4 and 6, those of the embedding and of the head, both ways.
        assert min(steps.whole) == pytest.approx((10 + 4) * message, rel=0.02)
        waits, messages = ([span for span in rest if span.what == what] for what in ("wait", "message"))
        # A gather and a scatter for both, and a gather: in chunks; the others and the ends: whole.
        assert len(waits) == len(messages) == 6 * case.chunks + 4 + 4
        assert sum(span.end - span.begin for span in waits) == pytest.approx(min(steps.exposed))
        # A slice of each that is sent in chunks has nothing beside it, nor have those of the ends.
        assert min(steps.exposed) > 6 * (case.latency + sent / case.chunks / case.rate) + 4 * message
    assert 0.3 < found.hidden < 0.7
    assert f"{found.hidden:.1%}" in str(tensor_table(found).caption)
    draw_tensor_overlap(found, tmp_path / "overlap.png")
    assert (tmp_path / "overlap.png").stat().st_size > 10_000
