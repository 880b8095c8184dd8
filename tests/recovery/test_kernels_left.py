"""A kernel that computes wrong numbers in a real run: told from bad data, and left for the rest of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megastable.base import errors
from megastable.config.tree import RunConfig
from megastable.run import records
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import KernelsLeft, KernelsTriedAgain
from megastable.run.events.training_events import CheckpointRejected, Resumed
from tests.distributed import run_ranks
from tests.recovery.test_recovery import LAYOUTS, easy, incidents, recipe, train
from tests.training.test_failures import terminate
from tests.training.test_failures import train as train_with
from tests.training.test_resume import identical

__all__ = ["easy"]

STEPS, FIRST, NAN, ALL = 40, 28, float("nan"), 1000


def run_of(corpus: Path, run: Path, policy: dict[str, Any] | None = None, **parts: Any) -> RunConfig:
    defaults: dict[str, Any] = {
        "train": {"steps": STEPS} | parts.pop("train", {}),
        "stability": {"policy": {"verify_steps": 8} | (policy or {})},
    }
    return recipe(corpus, run, **defaults | parts)


def broken(config: RunConfig, factor: float, steps: int = ALL, end: int = 0) -> tuple[int, str]:
    """Train while attention kernels are wrong from step `FIRST` on for `steps` steps; end: step at which it is asked
    to."""
    from drills import faults
    from drills.plan import Fault, Plan, Policy

    assert config.run.dir is not None
    fault = Fault(kind="attention", step=FIRST, steps=steps, factor=factor)
    faults.install(Plan(policy=Policy.OURS, run=config.run.dir, fault=fault))
    return train_with(config, terminate, end) if end else train(config)


def by_hand(config: RunConfig, left: int) -> tuple[int, str]:
    """Train without a fault, and by plain attention after step `left`."""
    from megastable.engine.numerics import Numerics
    from megastable.recovery.replays import NumericsChoice

    def choose(self: NumericsChoice, state: Any) -> None:
        self.engine.numerics.switch(Numerics(False, frozenset(["attention"] if state.step >= left else [])))

    NumericsChoice.choose = choose  # type: ignore[method-assign]
    return train(config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "factor"), [("one", NAN), ("one", 300.0), ("pp2", NAN), ("tp2", NAN)])
def test_a_wrong_kernel_is_left_and_no_step_is_lost(
    name: str, factor: float, easy: Path, tmp_path: Path
) -> None:
    """The run ends with the bytes of one without the fault that computed by plain attention from that step on."""
    world, parts = LAYOUTS[name]
    hit, same = tmp_path / "hit", tmp_path / "same"
    assert run_ranks(world, broken, run_of(easy, hit, **parts), factor) == [(0, "")] * world
    (incident,) = incidents(hit)
    found = incident["cause"], incident["actions"], incident["outcome"]
    assert found == ("numerics", ["fall_back"], "healed")
    assert incident["positions"] == incident["deferred"] == [] and not (hit / "skips.jsonl").exists()
    assert (incident["step"], incident["steps_lost"]) == (FIRST, 1)
    (left,) = RunDirectory(hit).events(KernelsLeft)
    assert left["step"] == FIRST - 1 and left["kernels"] == incident["kernels"]
    (kernel,) = incident["kernels"]
    assert kernel.startswith("attention ") and "of torch" in kernel
    assert f"the same step without {kernel} is harmless: a loss of" in incident["reasons"][0]
    assert run_ranks(world, by_hand, run_of(easy, same, **parts), FIRST - 1) == [(0, "")] * world
    assert identical(hit / f"checkpoints/step-{STEPS}", same / f"checkpoints/step-{STEPS}") >= 3
    one, other = (records.read(run / "steps") for run in (hit, same))
    for column in ("step", "first_position", "loss", "grad_norm", "applied"):
        assert one.column(column).equals(other.column(column)), column


def useless(config: RunConfig) -> tuple[int, str]:
    """Train while fused attention gives no number at all, from before the start on."""
    from megastable.model.cores import CORES, Core

    def nothing(q: Tensor, *args: Any, **options: Any) -> Tensor:
        return q * NAN

    CORES["sdpa"] = CORES["blocked"] = Core(nothing)
    return train(config)


@pytest.mark.slow
def test_a_kernel_stays_left_until_it_is_another(easy: Path, tmp_path: Path) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    assert run_ranks(1, broken, run_of(easy, run), NAN, ALL, FIRST + 6)[0][0] == errors.STOPPED
    # Not even the proof of the checkpoint is by that kernel. The new process says what it leaves, and meets no trouble.
    assert run_ranks(1, useless, run_of(easy, run)) == [(0, "")]
    (resumed,) = RunDirectory(run).events(Resumed)
    assert FIRST <= resumed["step"] < STEPS
    assert [e["step"] for e in RunDirectory(run).events(KernelsLeft)] == [FIRST - 1, resumed["step"]]
    assert len(incidents(run)) == 1 and not list(RunDirectory(run).events(CheckpointRejected))
    assert run_ranks(1, broken, run_of(easy, straight), NAN) == [(0, "")]
    assert identical(run / f"checkpoints/step-{STEPS}", straight / f"checkpoints/step-{STEPS}") >= 3
    other = run_of(easy, run, train={"steps": STEPS + 2}, kernels={"attention": "reference"})
    assert run_ranks(1, train, other) == [(0, "")]
    (again,) = RunDirectory(run).events(KernelsTriedAgain)
    assert again["step"] == STEPS and "attention" in again["kernels"][0]
