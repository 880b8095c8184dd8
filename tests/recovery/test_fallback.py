"""FP8 that does harm in a real run: told from bad data, left without a restart, tried again; nothing is skipped.

MEGASTABLE_FALLBACKS=all: in every layout, and for every way in which products are wrong.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megastable.base import errors
from megastable.checkpoint import store
from megastable.config.tree import RunConfig
from megastable.data.plant import Planted
from megastable.run import records
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import FellBack, Located, Returned, Would
from tests.distributed import run_ranks
from tests.recovery.test_recovery import LAYOUTS, easy, incidents, planted, recipe, train
from tests.training.test_failures import terminate
from tests.training.test_failures import train as train_with
from tests.training.test_resume import identical

__all__ = ["easy", "planted"]

EVERY = os.environ.get("MEGASTABLE_FALLBACKS") == "all"
STEPS, FIRST, REST = 50, 32, 12
FP8 = {"fp8": {"recipe": "delayed", "backend": "emulated", "history": 4}}


def run_of(
    corpus: Path, run: Path, policy: dict[str, Any] | None = None, steps: int = STEPS, **parts: Any
) -> RunConfig:
    train = {"steps": steps} | parts.pop("train", {})
    stability = {"policy": {"fp8_rest": REST, "verify_steps": 8} | (policy or {})} | parts.pop(
        "stability", {}
    )
    defaults: dict[str, Any] = {
        "precision": FP8, "train": train, "stability": stability, "model": {"layers": 2}
    }  # fmt: skip
    return recipe(corpus, run, **defaults | parts)


def broken(config: RunConfig, steps: int, factor: float, end: int = 0) -> tuple[int, str]:
    """Train while FP8 products are wrong from step `FIRST` on for `steps` steps; end: step at which it is asked to."""
    from drills import faults
    from drills.plan import Fault, Plan, Policy

    assert config.run.dir is not None
    fault = Fault(kind="fp8", step=FIRST, steps=steps, factor=factor)
    faults.install(Plan(policy=Policy.OURS, run=config.run.dir, fault=fault))
    return train_with(config, terminate, end) if end else train(config)


def by_hand(config: RunConfig, left: int, returned: int) -> tuple[int, str]:
    """Train without a fault, and without FP8 in the steps after `left`, up to `returned`."""
    from megastable.recovery.replays import NumericsChoice

    def choose(self: NumericsChoice, state: Any) -> None:
        assert self.engine.fp8 is not None
        self.engine.fp8.on = not left <= state.step < returned

    NumericsChoice.choose = choose  # type: ignore[method-assign]
    return train(config)


def changes(run: Path) -> list[tuple[str, int]]:
    return [(e["event"], e["step"]) for e in RunDirectory(run).events(FellBack, Returned)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "pp2", "zero3-dp2"] if EVERY else ["pp2"])
def test_fp8_is_left_without_a_restart_and_returns_when_it_is_calm(
    name: str, easy: Path, tmp_path: Path
) -> None:
    """The run ends with the bytes of one without the fault that computed without FP8 in the same steps."""
    world, parts = LAYOUTS[name]
    hit, same = tmp_path / "hit", tmp_path / "same"
    assert run_ranks(world, broken, run_of(easy, hit, **parts), REST, 10.0) == [(0, "")] * world
    (incident,) = incidents(hit)
    assert (incident["cause"], incident["actions"], incident["outcome"]) == (
        "numerics",
        ["fall_back"],
        "healed",
    )
    assert incident["positions"] == [] and not (hit / "skips.jsonl").exists()
    assert "the same step without FP8 is harmless: a loss of 2." in incident["reasons"][0]
    (left, at), (returned, again) = changes(hit)
    assert (left, returned) == ("fell_back", "returned") and FIRST - 2 <= at < FIRST
    assert again == incident["step"] + REST
    told = json.loads((hit / "summary.json").read_text())
    assert told["fp8"] == {"recipe": "delayed", "fallbacks": 1, "steps_without": REST}
    assert run_ranks(world, by_hand, run_of(easy, same, **parts), at, again) == [(0, "")] * world
    assert identical(hit / f"checkpoints/step-{STEPS}", same / f"checkpoints/step-{STEPS}") >= 3
    one, other = (records.read(run / "steps") for run in (hit, same))
    for column in ("step", "first_position", "loss", "grad_norm", "applied"):
        assert one.column(column).equals(other.column(column)), column


@pytest.mark.slow
@pytest.mark.parametrize("factor", [10.0, float("inf")] if EVERY else [float("inf")])
def test_a_kernel_that_stays_broken_is_left_for_good(factor: float, easy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = run_of(easy, run, {"fallbacks": 2}, steps=60)
    assert run_ranks(1, broken, config, 1000, factor) == [(0, "")]
    assert [event for event, _ in changes(run)] == ["fell_back", "returned", "fell_back"]
    assert all(i["cause"] == "numerics" and i["positions"] == [] for i in incidents(run))
    assert [i["outcome"] for i in incidents(run)] == ["healed"] * 2
    assert ["for good" in e["reason"] for e in RunDirectory(run).events(FellBack)] == [False, True]
    assert not any(e["kind"] == "not reproduced" for e in RunDirectory(run).events(Located))
    # A process that has only the end left to do evaluates in what the last step was computed in.
    summary = run / "summary.json"
    wanted = json.loads(summary.read_text())["val_loss"]
    summary.unlink()
    assert run_ranks(1, train, config) == [(0, "")]
    assert json.loads(summary.read_text())["val_loss"] == wanted


def noisy(config: RunConfig, everywhere: bool) -> tuple[int, str]:
    """Train while FP8 products are wrong, on a GPU that sums in any order, which FP8 magnifies; everywhere: on one
    that never repeats a loss without FP8, either."""
    import torch

    from megastable.engine.engine import Engine
    from megastable.recovery import replays

    real, drawn = Engine.measure, torch.Generator().manual_seed(1)

    def measure(self: Engine, micro_batches: Any) -> Any:
        found, factor = real(self, micro_batches), 1 + 0.2 * float(torch.rand((), generator=drawn))
        return replace(found, losses=found.losses * factor) if everywhere or found.fp8 else found

    Engine.measure = measure  # type: ignore[method-assign]
    replays.exact = lambda *_: False  # type: ignore[attr-defined]
    return broken(config, REST, 10.0)


@pytest.mark.slow
@pytest.mark.parametrize(("everywhere", "cause"), [(False, "numerics"), (True, "hardware")])
def test_fp8_that_gives_other_numbers_every_time(
    everywhere: bool, cause: str, easy: Path, tmp_path: Path
) -> None:
    """It is asked whether the trouble is gone without FP8, although the step does not repeat itself."""
    run = tmp_path / "run"
    run_ranks(1, noisy, run_of(easy, run, steps=FIRST + 4), everywhere)
    told = next(iter(incidents(run, "attributed")))["summary"]
    assert told["cause"] == cause and told["positions"] == []
    assert bool(changes(run)) == (cause == "numerics") and not (run / "skips.jsonl").exists()


@pytest.mark.slow
def test_a_stop_while_fp8_rests_forgets_nothing(easy: Path, tmp_path: Path) -> None:
    run, straight = tmp_path / "run", tmp_path / "straight"
    for config, end in ((run_of(easy, run), 42), (run_of(easy, straight), 0)):
        ((code, _),) = run_ranks(1, broken, config, REST, 10.0, end)
        assert code == (errors.STOPPED if end else 0)
    assert [event for event, _ in changes(run)] == ["fell_back"]
    magnitudes = [
        store.read_state(c).fp8 for c in (store.newest_first(f / "checkpoints")[0] for f in (run, straight))
    ]
    anything = [{x for layer in found.values() for slot in layer for x in slot} for found in magnitudes]
    assert anything[0] == {0.0} and len(anything[1]) > 4 and magnitudes[0].keys() == magnitudes[1].keys()
    assert run_ranks(1, broken, run_of(easy, run), REST, 10.0) == [(0, "")]
    # The new process says what it computes in, and goes back to FP8 where the other one did.
    assert [event for event, _ in changes(run)] == ["fell_back", "fell_back", "returned"]
    assert changes(run)[-1] == changes(straight)[-1]
    assert identical(run / f"checkpoints/step-{STEPS}", straight / f"checkpoints/step-{STEPS}") >= 3


@pytest.mark.slow
def test_bad_data_in_fp8_is_data(planted: tuple[Path, Planted], tmp_path: Path) -> None:
    corpus, what = planted
    run = tmp_path / "run"
    assert run_ranks(1, train, run_of(corpus, run)) == [(0, "")]
    (incident,) = incidents(run)
    assert incident["cause"] == "data" and [tuple(r) for r in incident["positions"]] == what.positions
    assert changes(run) == []


@pytest.mark.slow
def test_a_dry_run_leaves_fp8_on(easy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = run_of(easy, run, steps=FIRST + 8, stability={"dry_run": True, "policy": {"recur_steps": 50}})
    assert run_ranks(1, broken, config, 4, 10.0) == [(0, "")]
    assert list(RunDirectory(run).events(Would)) and changes(run) == [] and incidents(run) == []
    assert set(records.read(run / "steps").column("fp8").to_pylist()) == {True}
