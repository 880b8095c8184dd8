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
from megastable.run.events.training_events import CheckpointRejected, Resumed
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
    from megastable.model.cores import CORES, Core
    from megastable.model.mlp import MLP

    at, real_step, real_evaluation = 0, Engine.train_step, Engine.evaluate

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        nonlocal at
        at = self.ds.global_steps + (not self._probing)  # a measurement repeats the last step
        return real_step(self, *args, **options)

    def evaluate(self: Engine, *args: Any) -> Tensor:
        nonlocal at
        at = self.ds.global_steps
        return real_evaluation(self, *args)

    Engine.train_step, Engine.evaluate = train_step, evaluate  # type: ignore[method-assign, assignment]

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

    def overflowing(y: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Any attention, beyond logits of 200."""
        with torch.no_grad():
            keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            largest = float((q @ keys.transpose(-2, -1)).amax()) / q.shape[-1] ** 0.5
        return garbled(y, largest, 200)

    match remedy:
        case "swiglu_clamp":
            MLP.forward = blown_up  # type: ignore[method-assign]
        case "other_kernels":
            wrap(CORES.keys() - {"reference", "plain"}, upside_down)
        case "qk_clip":
            from drills.faults import growing_logits
            from drills.plan import Fault

            growing_logits(Fault(kind="growing_logits", step=FIRST, steps=1000, factor=1.2))
            wrap(set(CORES), overflowing)
    return train(config)


def by_hand(config: RunConfig, left: int) -> tuple[int, str]:
    """Train with the wrong kernels, and by plain PyTorch after step `left`."""
    from megastable.engine.numerics import Numerics
    from megastable.recovery.replays import NumericsChoice

    def choose(self: NumericsChoice, state: Any) -> None:
        kernels = self.engine.numerics.kernels if state.step >= left else ()
        self.engine.numerics.switch(Numerics(False, frozenset(kernels)))

    NumericsChoice.choose = choose  # type: ignore[method-assign]
    return troubled(config, "other_kernels")


@pytest.mark.quick("swiglu_clamp")
@pytest.mark.parametrize("remedy", ["swiglu_clamp", "qk_clip", "other_kernels"])
def test_the_remedy_wins_and_the_run_goes_on_with_it(remedy: str, named: Path, tmp_path: Path) -> None:
    hit = tmp_path / "hit"
    assert run_ranks(1, troubled, run_of_recipe(named, hit), remedy) == [(0, "")]
    trial = next(e for e in RunDirectory(hit).events(BranchesTried) if e.get("chosen"))
    assert trial["chosen"] == remedy
    tried = [branch["name"] for branch in trial["branches"]]
    order = ["clip", "qk_clip", "z_loss", "beta2", "other_kernels", "swiglu_clamp", "cut_lr"]
    assert [name for name in tried if name in order] == order
    assert not any(incident["positions"] for incident in incidents(hit))
    last = hit / f"checkpoints/step-{STEPS}"
    kept = policy_of(store.read_state(last))
    if remedy != "other_kernels":
        assert [e["settings"] for e in RunDirectory(hit).events(SettingsAdjusted)] == [[remedy]]
        assert kept.adjusted == [remedy]
        assert run_of(last).model.swiglu_clamp == (10.0 if remedy == "swiglu_clamp" else None)
        return
    (left,) = RunDirectory(hit).events(KernelsLeft)
    (incident,) = incidents(hit)
    assert (incident["cause"], incident["actions"]) == ("numerics", ["fall_back"])
    assert incident["kernels"] == left["kernels"] == kept.kernels and len(kept.kernels) == 2
    same = tmp_path / "same"
    assert run_ranks(1, by_hand, run_of_recipe(named, same), left["step"]) == [(0, "")]
    assert identical(last, same / f"checkpoints/step-{STEPS}") >= 3


CLAMP = 0.05  # so that it matters in a run without a trouble


def clamped(config: RunConfig, by_remedy: bool) -> tuple[int, str]:
    """Train with the factors of SwiGLU clamped throughout, as a remedy does it."""
    from functools import partial

    from megastable.engine import adjustments
    from megastable.model.mlp import gated
    from megastable.recovery.replays import NumericsChoice

    adjustments.CLAMPED = partial(gated, gelu=False, clamp=CLAMP)
    real = NumericsChoice.choose

    def choose(self: NumericsChoice, state: Any) -> None:
        self.guard.policy.state.adjusted = ["swiglu_clamp"]
        real(self, state)

    if by_remedy:
        NumericsChoice.choose = choose  # type: ignore[method-assign]
    return train(config)


def test_a_clamped_run_resumes_and_is_one_with_the_key(named: Path, tmp_path: Path) -> None:
    """A start proves the checkpoint with the clamp, without which it computes other losses."""
    hit, same = tmp_path / "hit", tmp_path / "same"
    for steps in (20, 24):
        config = run_of_recipe(named, hit, train={"steps": steps})
        assert run_ranks(1, clamped, config, True) == [(0, "")]
    assert list(RunDirectory(hit).events(Resumed)) and not list(RunDirectory(hit).events(CheckpointRejected))
    model = {"layers": 1, "qk_norm": False, "swiglu_clamp": CLAMP}
    given = run_of_recipe(named, same, train={"steps": 24}, model=model)
    assert run_ranks(1, clamped, given, False) == [(0, "")]
    assert identical(hit / "checkpoints/step-24", same / "checkpoints/step-24") >= 3
