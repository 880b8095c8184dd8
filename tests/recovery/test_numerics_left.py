"""FP8, or a kernel, that does harm in a real run: told from bad data, and left without a restart; FP8 is tried again,
a kernel is not. Nothing is skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megastable.base import errors
from megastable.checkpoint import store
from megastable.config.tree import RunConfig
from megastable.run import records
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import (
    FellBack,
    KernelsLeft,
    KernelsTriedAgain,
    Returned,
    Would,
)
from megastable.run.events.training_events import CheckpointRejected, Resumed
from tests.distributed import run_ranks
from tests.recovery.test_recovery import LAYOUTS, easy, incidents, recipe, train
from tests.training.test_failures import terminate
from tests.training.test_failures import train as train_with
from tests.training.test_resume import identical

__all__ = ["easy"]

FIRST, REST, NAN, ALL = 32, 12, float("nan"), 1000
FP8 = {"precision": {"fp8": {"recipe": "delayed", "backend": "emulated", "history": 4}}}
COLUMNS = "step", "first_position", "loss", "grad_norm", "applied"


def run_of(corpus: Path, run: Path, steps: int = 50, dry_run: bool = False, **parts: Any) -> RunConfig:
    train = {"steps": steps} | parts.pop("train", {})
    policy = {"fp8_rest": REST, "verify_steps": 8, "fallbacks": 2}
    stability = {"policy": policy, "dry_run": dry_run}
    return recipe(corpus, run, **{"train": train, "stability": stability, "model": {"layers": 2}, **parts})


def broken(config: RunConfig, kind: str, factor: float, steps: int = ALL, end: int = 0) -> tuple[int, str]:
    """Train while products of FP8, or attention kernels, are wrong from step `FIRST` on for `steps` steps; end: step at
    which it is asked to."""
    from drills import faults
    from drills.scenario import Fault, Plan

    assert config.run.dir is not None
    fault = Fault(kind=kind, step=FIRST, steps=steps, factor=factor)
    faults.install_fault(Plan(run=config.run.dir, fault=fault))
    return train_with(config, terminate, end) if end else train(config)


def by_hand(config: RunConfig, left: int, returned: int = ALL) -> tuple[int, str]:
    """Train without a fault, and without FP8, or by plain attention, in the steps after `left`, up to `returned`."""
    from megastable.engine.numerics import Numerics
    from megastable.recovery.replays import NumericsChoice

    def choose(self: NumericsChoice, state: Any) -> None:
        inside = left <= state.step < returned
        if self.engine.fp8 is not None:
            self.engine.fp8.on = not inside
        else:
            self.engine.numerics.switch_to(Numerics(False, frozenset(["attention"] if inside else [])))

    NumericsChoice.choose_numerics = choose  # type: ignore[method-assign]
    return train(config)


def changes(run: Path) -> list[tuple[str, int]]:
    return [(e["event"], e["step"]) for e in RunDirectory(run).iterate_events(FellBack, Returned)]


def are_alike(one: Path, other: Path, steps: int = 50) -> bool:
    """Checkpoints and records, to the byte."""
    rows = (records.read_newest_records(run / "steps") for run in (one, other))
    first, second = ([table.column(name) for name in COLUMNS] for table in rows)
    ends = (run / f"checkpoints/step-{steps}" for run in (one, other))
    return identical(*ends) >= 3 and all(a.equals(b) for a, b in zip(first, second, strict=True))


EP2: dict[str, Any] = {
    "model": {"layers": 2, "experts": {"count": 4, "top_k": 2, "ffn": 24}}, "parallel": {"expert": 2},
    "train": {"micro_batch": 4},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("world", "parts"), [LAYOUTS["pp2"], (2, EP2)], ids=["pp2", "ep2"])
def test_fp8_is_left_without_a_restart_and_returns_when_it_is_quiet(
    world: int, parts: dict[str, Any], easy: Path, tmp_path: Path
) -> None:
    """The run ends with the bytes of one without the fault that computed without FP8 in the same steps."""
    hit, same, parts = tmp_path / "hit", tmp_path / "same", {**parts, **FP8}
    assert run_ranks(world, broken, run_of(easy, hit, **parts), "fp8", 10.0, REST) == [(0, "")] * world
    (incident,) = incidents(hit)
    found = incident["cause"], incident["actions"], incident["outcome"]
    assert found == ("numerics", ["fall_back"], "healed")
    assert incident["positions"] == [] and not (hit / "skips.jsonl").exists()
    assert "the same step without FP8 is harmless: a loss of" in incident["reasons"][0]
    (left, at), (returned, again) = changes(hit)
    assert (left, returned) == ("fell_back", "returned") and FIRST - 2 <= at < FIRST
    assert again == incident["step"] + REST
    told = json.loads((hit / "summary.json").read_text())
    assert told["fp8"] == {"recipe": "delayed", "fallbacks": 1, "steps_without": REST}
    assert run_ranks(world, by_hand, run_of(easy, same, **parts), at, again) == [(0, "")] * world
    assert are_alike(hit, same)


@pytest.mark.slow
def test_fp8_that_rests_is_remembered_over_a_stop(easy: Path, tmp_path: Path) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    for folder, end in ((run, FIRST + 10), (straight, 0)):
        ((code, _),) = run_ranks(1, broken, run_of(easy, folder, **FP8), "fp8", 10.0, REST, end)
        assert code == (errors.STOPPED if end else 0)
    assert [event for event, _ in changes(run)] == ["fell_back"]
    ends = (store.newest_first(f / "checkpoints")[0] for f in (run, straight))
    resting, again = (
        {x for layer in store.read_state(c).fp8.values() for s in layer for x in s} for c in ends
    )
    assert resting == {0.0} and len(again) > 4
    assert run_ranks(1, broken, run_of(easy, run, **FP8), "fp8", 10.0, REST) == [(0, "")]
    # The new process says what it computes in, and goes back to FP8 where the other one did.
    assert [event for event, _ in changes(run)] == ["fell_back", "fell_back", "returned"]
    assert changes(run)[-1] == changes(straight)[-1]
    assert identical(run / "checkpoints/step-50", straight / "checkpoints/step-50") >= 3
    dry = tmp_path / "dry"
    assert run_ranks(1, broken, run_of(easy, dry, 40, True, **FP8), "fp8", 10.0, 4) == [(0, "")]
    assert list(RunDirectory(dry).iterate_events(Would)) and changes(dry) == [] and incidents(dry) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "factor"), [("one", 300.0), ("pp2", NAN), ("tp2", NAN)])
def test_wrong_kernel_is_left_and_no_step_is_lost(
    name: str, factor: float, easy: Path, tmp_path: Path
) -> None:
    """The run ends with the bytes of one without the fault that computed by plain attention from that step on."""
    world, parts = LAYOUTS[name]
    hit, same = tmp_path / "hit", tmp_path / "same"
    assert run_ranks(world, broken, run_of(easy, hit, **parts), "attention", factor) == [(0, "")] * world
    (incident,) = incidents(hit)
    found = incident["cause"], incident["actions"], incident["outcome"]
    assert found == ("numerics", ["fall_back"], "healed")
    assert incident["positions"] == incident["deferred"] == [] and not (hit / "skips.jsonl").exists()
    assert (incident["step"], incident["steps_lost"]) == (FIRST, 1)
    (left,) = RunDirectory(hit).iterate_events(KernelsLeft)
    assert left["step"] == FIRST - 1 and left["kernels"] == incident["kernels"]
    (kernel,) = incident["kernels"]
    assert kernel.startswith("attention ") and "of torch" in kernel
    assert f"the same step without {kernel} is harmless: a loss of" in incident["reasons"][0]
    assert run_ranks(world, by_hand, run_of(easy, same, **parts), FIRST - 1) == [(0, "")] * world
    assert are_alike(hit, same)


def useless(config: RunConfig) -> tuple[int, str]:
    """Train while fused attention gives no number at all, from before the start on."""
    from megastable.model.cores import CORES, Core

    def nothing(q: Tensor, *args: Any, **options: Any) -> Tensor:
        return q * NAN

    CORES["sdpa"] = CORES["blocked"] = Core(nothing)
    return train(config)


@pytest.mark.slow
def test_wrong_kernel_stays_left_until_it_is_another(easy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ((code, _),) = run_ranks(1, broken, run_of(easy, run), "attention", NAN, ALL, FIRST + 6)
    assert code == errors.STOPPED
    # Not even the proof of the checkpoint is by that kernel. The new process says what it leaves, and meets no trouble.
    assert run_ranks(1, useless, run_of(easy, run)) == [(0, "")]
    (resumed,) = RunDirectory(run).iterate_events(Resumed)
    assert FIRST <= resumed["step"] < 50
    assert [e["step"] for e in RunDirectory(run).iterate_events(KernelsLeft)] == [FIRST - 1, resumed["step"]]
    assert len(incidents(run)) == 1 and not list(RunDirectory(run).iterate_events(CheckpointRejected))
    other = run_of(easy, run, 52, kernels={"attention": "reference"})
    assert run_ranks(1, train, other) == [(0, "")]
    (again,) = RunDirectory(run).iterate_events(KernelsTriedAgain)
    assert again["step"] == 50 and "attention" in again["kernels"][0]
