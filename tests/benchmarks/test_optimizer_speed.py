"""Times of optimizers in turns: shares of the first candidate's step, and one real measurement of a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.optimizer_speed import OptimizerTime, measure
from tests.conftest import tiny
from tests.distributed import run_ranks


def test_shares_are_taken_within_a_round() -> None:
    first = OptimizerTime("a", [1.0, 2.0, 4.0], [0.1, 0.2, 0.4])
    other = OptimizerTime("b", [1.5, 3.0, 4.0], [0.3, 0.6, 0.4])
    assert other.extra(first) == (pytest.approx(0.5), pytest.approx(0.2))
    assert first.extra(first) == (0.0, 0.0)


def times(corpus: Path, folder: Path) -> list[OptimizerTime]:
    c = tiny(corpus, folder, optimizer={"name": "adamw"})
    model = c.model.model_copy(update={"vocab_size": 250})
    configs = [(n, tiny(corpus, folder, optimizer={"name": n}, model=dict(model))) for n in ("adamw", "muon")]
    return measure(configs, rounds=2).times


def test_a_real_measurement(corpus: Path, tmp_path: Path) -> None:
    (found,) = run_ranks(1, times, corpus, tmp_path)
    assert [one.name for one in found] == ["adamw", "muon"]
    for one in found:
        assert len(one.steps) == len(one.updates) == 2
        assert all(0 < update < step for update, step in zip(one.updates, one.steps, strict=True))
