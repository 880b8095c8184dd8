"""The measurement of a scan's cost runs, on sizes that are too small to mean anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.data import Run, ScanCost, scan_cost


@pytest.mark.slow
def test_a_scan_is_measured_in_processes_of_its_own(corpus: Path) -> None:
    said: list[str] = []
    cost = scan_cost(corpus, sizes=(30_000,), say=said.append)
    assert said == ["30,000 tokens"]
    (learning,), (scanning,) = cost.learning, cost.scanning
    assert learning.tokens == scanning.tokens and 30_000 <= scanning.tokens < 31_000
    assert learning.cpu_seconds > scanning.cpu_seconds > 0 and scanning.peak_mib > 10
    assert (cost.growth, cost.memory) == (1.0, 1.0)


def test_growth_and_memory_compare_the_largest_with_the_smallest() -> None:
    small, large = Run(100, 1, 1.0, 2.0, 50.0), Run(400, 4, 9.0, 16.0, 55.0)
    told = ScanCost([small], [small, large]).as_dict()
    assert told["tokens_per_second"] == 25.0
    assert told["growth"] == 2.0  # four times the tokens took eight times as long
    assert told["memory"] == 1.1
    assert [run["tokens"] for run in told["scanning"]] == [100, 400]
