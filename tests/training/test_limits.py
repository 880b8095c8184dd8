"""A learning rate that jumps, in a real run: capped at once, without a sample left out; lifted when it may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drills.scenario import Fault, Plan
from megastable.config.tree import RunConfig
from megastable.run import records
from tests.distributed import run_ranks
from tests.journal import events
from tests.recovery.test_recovery import LAYOUTS, STEPS, easy, incidents, recipe, train
from tests.training.test_resume import identical

__all__ = ["easy"]

FIRST, FACTOR = 32, 100.0


def mistaken(config: RunConfig, steps: int, factor: float = FACTOR) -> tuple[int, str]:
    """Train with a rate that is too high from step `FIRST` on, for `steps` updates."""
    from drills import faults

    assert config.run.dir is not None
    fault = Fault(kind="high_rate", step=FIRST, steps=steps, factor=factor)
    faults.install_fault(Plan(run=config.run.dir, fault=fault))
    return train(config)


def by_hand(config: RunConfig, steps: int, since: int, cap: float, at: float) -> tuple[int, str]:
    """The same, but from `since` updates on not above `cap`, which goes down with the schedule from the rate `at` on,
    but for jumps."""
    from drills import faults
    from megastable.recovery.recovery import Recovery

    assert config.run.dir is not None
    fault = Fault(kind="high_rate", step=FIRST, steps=steps, factor=FACTOR)
    faults.install_fault(Plan(run=config.run.dir, fault=fault))
    latest = at

    def held(self: Recovery, updates: int, scheduled: float) -> float:
        nonlocal cap, at, latest
        self._scheduled = scheduled
        if updates < since:
            return scheduled
        if scheduled > 2 * latest or latest > 2 * scheduled:
            cap, at = cap * min(1.0, latest / at), scheduled
        latest = scheduled
        return min(scheduled, cap * min(1.0, scheduled / at))

    Recovery.limit_rate = held  # type: ignore[method-assign]
    return train(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "zero3-dp2"])
def test_a_rate_that_jumped_is_capped_without_leaving_out_a_sample(
    name: str, easy: Path, tmp_path: Path
) -> None:
    """The run ends with the bytes of one whose rate was held at that of the good state by hand."""
    world, parts = LAYOUTS[name]
    hit, same = tmp_path / "hit", tmp_path / "same"
    assert run_ranks(world, mistaken, recipe(easy, hit, **parts), 1000) == [(0, "")] * world
    (incident,) = incidents(hit)
    assert (incident["cause"], incident["actions"]) == ("learning_rate", ["cap_lr"])
    assert incident["outcome"] == "healed" and incident["kind"] == "recoverable"
    assert incident["positions"] == [] and not (hit / "skips.jsonl").exists()
    (cut,) = events(hit, "rate_cut")
    (back,) = incidents(hit, "rewound")
    (limit,) = cut["limits"]
    assert back["to_step"] < FIRST and (limit["kind"], limit["updates"]) == ("cap", back["to_step"])
    cap = limit["value"], limit["scheduled"]
    given = run_ranks(world, by_hand, recipe(easy, same, **parts), 1000, back["to_step"], *cap)
    assert given == [(0, "")] * world and incidents(same) == []
    assert identical(hit / f"checkpoints/step-{STEPS}", same / f"checkpoints/step-{STEPS}") >= 3
    one, other = (records.read_newest_records(run / "steps") for run in (hit, same))
    for column in ("step", "first_position", "loss", "grad_norm", "lr", "applied"):
        assert one.column(column).equals(other.column(column)), column


def longer(easy: Path, run: Path, steps: int, **policy: Any) -> RunConfig:
    train = {"steps": steps, "eval_samples": 0}
    return recipe(
        easy, run, train=train, stability={"policy": {"verify_steps": 10, "rewarm_steps": 10} | policy}
    )


@pytest.mark.slow
def test_a_cap_ends_when_the_schedule_comes_back_below_it(easy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_ranks(1, mistaken, longer(easy, run, 70), 20) == [(0, "")]
    assert [i["actions"] for i in incidents(run)] == [["cap_lr"]]
    (lifted,) = events(run, "rate_lifted")
    assert "the schedule is at" in lifted["reason"] and FIRST + 28 <= lifted["step"] <= FIRST + 32
    rates = {row["step"]: row["lr"] for row in records.read_newest_records(run / "steps").to_pylist()}
    assert max(rates.values()) <= 1e-2  # nothing of the a hundred times too high is left
