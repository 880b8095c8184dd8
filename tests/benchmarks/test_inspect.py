"""Asking what was in a batch: of a run over 10^12 tokens, in files that are holes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.inspect import inspect_cost


@pytest.mark.slow
def test_a_step_of_a_run_over_a_trillion_tokens_takes_little_memory(tmp_path: Path) -> None:
    cost = inspect_cost(tmp_path, shards=1000, tokens=10**9, steps=3000)
    assert cost["tokens"] == 1e12 and cost["megabytes"] < 300
    assert cost["after_imports"] < 20  # a second on an idle machine: not minutes, that is all a test can say
