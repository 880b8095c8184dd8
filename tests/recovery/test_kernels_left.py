"""A kernel that computes wrong numbers in a real run: told from bad data, and left for the rest of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from megastable.run import records
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import KernelsLeft
from tests.distributed import run_ranks
from tests.recovery.test_recovery import LAYOUTS, easy, incidents, recipe, train
from tests.training.test_failures import terminate
from tests.training.test_failures import train as train_with
from tests.training.test_resume import identical

__all__ = ["easy"]

STEPS, FIRST, NAN = 40, 28, float("nan")
POLICY = {"verify_steps": 8}


def run_of(corpus: Path, run: Path, **parts: Any) -> RunConfig:
    return recipe(
        corpus,
        run,
        **{"train": {"steps": STEPS}, "stability": {"policy": POLICY}, "model": {"layers": 2}} | parts,
    )


def broken(config: RunConfig, factor: float, end: int = 0) -> tuple[int, str]:
    """Train while attention kernels are wrong from step `FIRST` on; end: step at which it is asked to."""
    from drills import faults
    from drills.plan import Fault, Plan, Policy

    assert config.run.dir is not None
    fault = Fault(kind="attention", step=FIRST, steps=1000, factor=factor)
    faults.install(Plan(policy=Policy.OURS, run=config.run.dir, fault=fault))
    return train_with(config, terminate, end) if end else train(config)


def by_hand(config: RunConfig, left: int) -> tuple[int, str]:
    """Train without a fault, and by plain attention after step `left`."""
    from megastable.engine.numerics import Numerics
    from megastable.recovery.numerics_choice import NumericsChoice

    def choose(self: NumericsChoice, state: Any) -> None:
        self.engine.numerics.switch(Numerics(False, frozenset({"attention"} if state.step >= left else ())))

    NumericsChoice.choose = choose  # type: ignore[method-assign]
    return train(config)


@pytest.mark.parametrize(("name", "factor"), [("one", NAN), ("one", 300.0), ("pp2", NAN), ("tp2", NAN)])
def test_a_wrong_kernel_is_left_and_no_step_is_lost(
    name: str, factor: float, easy: Path, tmp_path: Path
) -> None:
    """The run ends with the bytes of one without the fault that computed by plain attention from that step on."""
    world, parts = LAYOUTS[name]
    hit, same = tmp_path / "hit", tmp_path / "same"
    assert run_ranks(world, broken, run_of(easy, hit, **parts), factor) == [(0, "")] * world
    (incident,) = incidents(hit)
    print(json.dumps(incident, indent=1))
    assert (incident["cause"], incident["actions"], incident["outcome"]) == (
        "numerics",
        ["fall_back"],
        "healed",
    )
    assert incident["positions"] == incident["deferred"] == [] and not (hit / "skips.jsonl").exists()
    assert incident["step"] == FIRST and incident["steps_lost"] == 1
    (left,) = RunDirectory(hit).events(KernelsLeft)
    assert left["step"] == FIRST - 1 and left["kernels"] == incident["kernels"]
    assert (
        "attention blocked of torch" in incident["kernels"][0]
        and "is harmless: a loss of" in incident["reasons"][0]
    )
    assert run_ranks(world, by_hand, run_of(easy, same, **parts), FIRST - 1) == [(0, "")] * world
    assert identical(hit / f"checkpoints/step-{STEPS}", same / f"checkpoints/step-{STEPS}") >= 3
    one, other = (records.read(run / "steps") for run in (hit, same))
    for column in ("step", "first_position", "loss", "grad_norm", "applied"):
        assert one.column(column).equals(other.column(column)), column
