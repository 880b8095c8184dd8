"""A trial in a real run: a death in the middle of it leaves nothing, and the next process comes to the same end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from megastable.config.tree import RunConfig
from megastable.data.plant import Planted
from megastable.data.skip_ledger import read_ledger
from megastable.recovery.replay_trials import Trials
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import BranchesTried, Located
from megastable_guard.guard_config import PolicyConfig
from megastable_guard.policy import Policy
from tests.distributed import run_ranks
from tests.recovery.test_recovery import LAYOUTS, STEPS, easy, incidents, planted, recipe, train, train_spoilt
from tests.training.test_resume import identical

__all__ = ["planted"]


def killed(config: RunConfig, rank: int | None, at: int) -> Any:
    """Train, and SIGKILL this rank, or all (None), before step `at` of a branch."""
    import torch.distributed as dist

    real = Trials._tell_progress

    def tell(self: Trials, step: int) -> None:
        real(self, step)
        if step == at and (rank is None or dist.get_rank() == rank):
            os.kill(os.getpid(), signal.SIGKILL)

    Trials._tell_progress = tell  # type: ignore[method-assign]
    return train(config)


@pytest.mark.quick("one-None")
@pytest.mark.parametrize(("name", "rank"), [("one", None), ("zero2-dp2", 1), ("zero2-dp2", None), ("pp2", 0)])
def test_a_death_in_a_trial_leaves_the_run_as_it_was(
    name: str, rank: int | None, planted: tuple[Path, Planted], tmp_path: Path
) -> None:
    world, parts = LAYOUTS[name]
    parts = {**parts, "checkpoint": {"interval": 10, "keep": 9}}
    hit, straight = tmp_path / "hit", tmp_path / "straight"
    config = recipe(planted[0], hit, **parts)
    with pytest.raises(AssertionError, match=r"-9|closed|reset|refused"):  # of the harness: a rank is dead
        run_ranks(world, killed, config, rank, 3)
    assert not (hit / "skips.jsonl").exists() and not list(RunDirectory(hit).iterate_events(BranchesTried))
    assert run_ranks(world, train, config) == [(0, "")] * world
    assert run_ranks(world, train, recipe(planted[0], straight, **parts)) == [(0, "")] * world
    assert list(RunDirectory(hit).iterate_events(BranchesTried))
    one, other = ([(e.corpus, e.tokens) for e in read_ledger(run / "skips.jsonl")] for run in (hit, straight))
    assert one == other
    (healed,) = incidents(hit)
    assert healed["outcome"] == "healed" and [tuple(r) for r in healed["positions"]] == planted[1].positions
    assert identical(hit / f"checkpoints/step-{STEPS}", straight / f"checkpoints/step-{STEPS}") >= 3


@pytest.mark.parametrize(
    ("tried", "named"),
    [(0, ["rewarm", "reset_moments", "clip", "cut_lr"]), (900, ["rewarm", "reset_moments"]), (980, [])],
)
def test_the_least_intrusive_remedies_are_tried_if_not_all_may_be(tried: int, named: list[str]) -> None:
    """And of those alone that the run can make: this one neither has a z-loss nor kernels to leave."""
    policy = Policy(PolicyConfig(remedies=("rewarm", "reset_moments", "clip", "z_loss", "cut_lr")))
    policy.state.tried = tried
    trials = Trials(MagicMock(), MagicMock(policy=policy), MagicMock())
    trials.config.train.steps, trials.engine.adjustments.possible = 60, {"clip", "reset_moments"}  # type: ignore[misc, assignment]
    trials._try_remedies = MagicMock()  # type: ignore[method-assign]
    start = MagicMock(step=38, snapshot=MagicMock(step=30), outlook=MagicMock(steps=16))
    trials.try_remedies(policy.offer_remedies(30, None, None), start)
    calls = [[offer.name for offer in call.args[0]] for call in trials._try_remedies.call_args_list]
    assert calls == ([named] if named else [])


__all__ = ["easy"]


CASES = {
    "norm": ("blocks.1.attention_norm.weight", 100.0, "output of blocks.1.attention_norm"),
    "logits": ("blocks.1.attention.qkv.weight", 300.0, "output of blocks.1.attention.qkv"),
}


@pytest.mark.quick("norm-one")
@pytest.mark.parametrize("layout", ["one", "pp2", "tp2", "zero3-dp2"])
@pytest.mark.parametrize("case", CASES)
def test_the_layer_that_grew_first_is_named(case: str, layout: str, easy: Path, tmp_path: Path) -> None:
    world, parts = LAYOUTS[layout]
    model = {**parts.get("model", {}), "qk_norm": False}
    name, factor, place = CASES[case]
    config = recipe(easy, tmp_path / "run", **{**parts, "model": model})
    assert run_ranks(world, train_spoilt, config, 36, name, factor) == [(0, 1)] * world
    incident = incidents(tmp_path / "run")[0]
    assert any(f"the {place} is the first to grow" in reason for reason in incident["reasons"])
    assert incident["cause"] == "state" and not incident["positions"]
    located = [e for e in RunDirectory(tmp_path / "run").iterate_events(Located) if e["kind"] == "growth"]
    assert located and f"the {located[0]['tensor']} of {located[0]['layer']}" == f"the {place}"
