"""Remedies that win their trial in a real run, each against a trouble that it alone is for; and what they leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megastable.checkpoint import store
from megastable.checkpoint.whole import policy_of, run_of
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import BranchesTried, KernelsLeft, SettingsAdjusted
from tests.conftest import write_corpus
from tests.distributed import run_ranks
from tests.recovery.test_recovery import incidents, recipe, train
from tests.training.test_resume import identical

FIRST, STEPS = 32, 60


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A corpus that is learnt quickly, of a name that stays: the order of samples depends on it."""
    write_corpus(tmp_path / "easy0", ids=20)
    return tmp_path / "easy0"


def run_of_recipe(corpus: Path, run: Path, **parts: Any) -> RunConfig:
    defaults: dict[str, Any] = {
        "train": {"steps": STEPS}, "model": {"layers": 1, "qk_norm": False},
        "stability": {"policy": {"verify_steps": 8}}, "optimizer": {"lr": 3e-2},
    }  # fmt: skip
    return recipe(corpus, run, **defaults | parts)


def troubled(config: RunConfig, remedy: str) -> tuple[int, str]:
    """Train with a trouble from step `FIRST` on, in branches and measurements, too, for which there is one remedy."""
    from megastable.engine.engine import Engine
    from megastable.model.block_parts import MLP
    from megastable.model.cores import CORES, Core

    at, real_step, real_evaluation = 0, Engine.train_step, Engine.evaluate_samples

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        nonlocal at
        at = self.ds.global_steps + (not self._probing)  # a measurement repeats the last step
        return real_step(self, *args, **options)

    def evaluate(self: Engine, *args: Any) -> Tensor:
        nonlocal at
        at = self.ds.global_steps
        return real_evaluation(self, *args)

    Engine.train_step, Engine.evaluate_samples = train_step, evaluate  # type: ignore[method-assign, assignment]

    def garbled(y: Tensor, largest: float, most: float) -> Tensor:
        return y if largest < most else torch.cos(1e4 * y)

    def blown_up(self: MLP, x: Tensor) -> Tensor:
        """The factors of the products grow by half a step, 26 times in all; beyond 150, products are garbled."""
        y = self.activation(self.gate_up(x) * 1.5 ** min(8, max(0, at - FIRST + 1)))
        return self.down(garbled(y, float(y.detach().abs().max()), 150))

    def wrap(names: set[str], change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        def changed(core: Core) -> Core:
            return replace(core, run=lambda q, k, *rest, **more: change(core.run(q, k, *rest, **more), q, k))

        for name in names:
            CORES[name] = changed(CORES[name])

    def upside_down(y: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Fused kernels whose gradients have the wrong sign, and twice the size: a step alone does not stand out."""
        if at >= FIRST and y.requires_grad:
            y.register_hook(lambda gradient: -2 * gradient)
        return y

    match remedy:
        case "swiglu_clamp":
            MLP.forward = blown_up  # type: ignore[method-assign]
        case "other_kernels":
            wrap(CORES.keys() - {"reference", "plain"}, upside_down)
    return train(config)


def by_hand(config: RunConfig, left: int) -> tuple[int, str]:
    """Train with the wrong kernels, and by plain PyTorch after step `left`."""
    from megastable.engine.numerics import Numerics
    from megastable.recovery.replays import NumericsChoice

    def choose(self: NumericsChoice, state: Any) -> None:
        kernels = self.engine.numerics.kernels if state.step >= left else ()
        self.engine.numerics.switch_to(Numerics(False, frozenset(kernels)))

    NumericsChoice.choose_numerics = choose  # type: ignore[method-assign]
    return troubled(config, "other_kernels")


@pytest.mark.quick("swiglu_clamp")
@pytest.mark.parametrize("remedy", ["swiglu_clamp", "other_kernels"])
def test_the_remedy_wins_and_the_run_goes_on_with_it(remedy: str, named: Path, tmp_path: Path) -> None:
    hit = tmp_path / "hit"
    assert run_ranks(1, troubled, run_of_recipe(named, hit), remedy) == [(0, "")]
    trial = next(e for e in RunDirectory(hit).iterate_events(BranchesTried) if e.get("chosen"))
    assert trial["chosen"] == remedy
    tried = [branch["name"] for branch in trial["branches"]]
    order = ["clip", "qk_clip", "z_loss", "beta2", "other_kernels", "swiglu_clamp", "cut_lr"]
    assert [name for name in tried if name in order] == order
    assert not any(incident["positions"] for incident in incidents(hit))
    last = hit / f"checkpoints/step-{STEPS}"
    kept = policy_of(store.read_state(last))
    if remedy != "other_kernels":
        assert [e["settings"] for e in RunDirectory(hit).iterate_events(SettingsAdjusted)] == [[remedy]]
        assert kept.adjusted == [remedy]
        assert run_of(last).model.swiglu_clamp == 10.0
        return
    (left,) = RunDirectory(hit).iterate_events(KernelsLeft)
    (incident,) = incidents(hit)
    assert (incident["cause"], incident["actions"]) == ("numerics", ["fall_back"])
    assert incident["kernels"] == left["kernels"] == kept.kernels and len(kept.kernels) == 2
    same = tmp_path / "same"
    assert run_ranks(1, by_hand, run_of_recipe(named, same), left["step"]) == [(0, "")]
    assert identical(last, same / f"checkpoints/step-{STEPS}") >= 3
