"""Comparing tuned recipes: which rate is chosen, when a loss is reached, and one real comparison of tiny runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from benchmarks.tuned import Tuned, TunedRun, best, compare, steps_to, target_of
from megastable.base.errors import DataError
from megastable.study.trial import WINDOW, TrialResult
from tests.conftest import tiny


def run(rate: float, losses: tuple[float, ...], seed: int = 1) -> TunedRun:
    return TunedRun(rate, seed, TrialResult(losses, losses[0], losses[-1], 1.0, 1))


def test_the_best_rate_and_the_steps_to_a_loss() -> None:
    falling = tuple(10.0 - i for i in range(20))
    diverged = (*falling[:5], *[math.inf] * 15)
    chosen = (run(1e-3, falling), run(2e-3, tuple(x - 1 for x in falling)), run(4e-3, diverged))
    assert best(chosen).rate == 2e-3
    # A loss before a whole window is noise.
    assert (
        steps_to(falling, 9.5) == WINDOW
        and steps_to(falling, -5.0) == 16
        and steps_to(falling, -50.0) is None
    )
    one = Tuned("", chosen, (run(2e-3, falling, 2), run(2e-3, tuple(x + 2 for x in falling), 3)))
    assert target_of(one) == -8.0 and one.steps_to(-8.0) == [19, None]


@pytest.mark.slow
def test_real_runs(tmp_path: Path, corpus: Path) -> None:
    tiny_recipe = tmp_path / "tiny.yaml"
    tiny_recipe.write_text(yaml.safe_dump(tiny(corpus, tmp_path / "run").model_dump(mode="json")))
    names = ["optimizer.name=adamw", "optimizer.name=sgd"]
    calls: list[int] = []
    found = compare(
        tiny_recipe, names, [1e-4, 3e-3], [1, 2], ["train.steps=12"], tmp_path, 2, lambda: calls.append(1)
    )
    assert len(calls) == 6 and [len(one.tuning) for one in found] == [2, 2]
    assert all(
        len(r.result.losses) == 12 and math.isfinite(r.result.validation)
        for one in found
        for r in one.measured
    )
    assert found[0].rate == 3e-3 and found[0].measured[0].seed == 2
    with pytest.raises(DataError, match="unknown key"):
        compare(tiny_recipe, ["optimizer.nonsense=1"], [1e-3], [1], [], tmp_path / "b", 1, lambda: None)
