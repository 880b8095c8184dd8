"""The warm-up after a rewind in real runs: the rates that were trained at, and a restart in the middle of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastable.base import errors
from megastable.data.plant import Planted
from megastable.optim.schedule import rate
from megastable.run import records
from tests.distributed import run_ranks
from tests.recovery.test_recovery import STEPS, incidents, planted, recipe, train
from tests.training.test_failures import terminate
from tests.training.test_failures import train as train_with
from tests.training.test_live_skips import events
from tests.training.test_resume import identical

__all__ = ["planted"]  # a fixture
LENGTH, BEGIN = 8, 0.25
POLICY = {"policy": {"rewind_warmup": LENGTH, "rewind_warmup_from": BEGIN}}


@pytest.mark.slow
def test_the_rate_ramps_back_after_a_rewind_and_over_a_restart(
    planted: tuple[Path, Planted],
    tmp_path: Path,
) -> None:
    corpus, what = planted
    straight, halted = tmp_path / "straight", tmp_path / "halted"
    config = recipe(corpus, straight, stability=POLICY)
    assert run_ranks(1, train, config) == [(0, "")]
    (incident,), (told,) = incidents(straight), events(straight, "rate_warmup")
    assert incident["cause"] == "data" and incident["outcome"] == "healed"
    assert [tuple(r) for r in incident["positions"]] == what.positions
    back = told["step"]
    assert (told["begin"], told["updates"]) == (BEGIN, LENGTH)

    updates, begun = 0, None
    for row in records.read(straight / "steps").to_pylist():
        if row["step"] == back + 1:
            begun = updates
        share = 1.0 if begun is None else min(1.0, BEGIN + (1 - BEGIN) * (updates - begun) / LENGTH)
        scheduled = rate(config.schedule, config.optimizer.lr, STEPS, updates)
        assert row["lr"] == pytest.approx(scheduled * share, rel=1e-6), row["step"]
        updates += row["applied"]
    assert begun is not None and updates > begun + LENGTH

    # In steps that are computed, those that are undone included: the process ends in the middle of the warm-up.
    stop = incident["step"] + 4
    ((code, _),) = run_ranks(1, train_with, recipe(corpus, halted, stability=POLICY), terminate, stop)
    assert code == errors.STOPPED
    (saved,) = (halted / "checkpoints").glob("step-*")
    assert back < int(saved.name.removeprefix("step-")) < back + LENGTH
    assert run_ranks(1, train, recipe(corpus, halted, stability=POLICY)) == [(0, "")]
    assert identical(straight / f"checkpoints/step-{STEPS}", halted / f"checkpoints/step-{STEPS}") >= 3
    assert len(events(halted, "rate_warmup")) == 1
    rates = [records.read(run / "steps").column("lr") for run in (straight, halted)]
    assert rates[0].equals(rates[1])
