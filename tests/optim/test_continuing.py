"""The state of optimizers and of clipping goes on in other layouts (resumes: tests/training/test_resume.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.checkpoint.whole import WholeState
from megastable.config.tree import RunConfig
from megastable_tools.convert.derived_runs import Sizes, reshape_checkpoint
from tests.conftest import tiny
from tests.distributed import run_ranks, train
from tests.training.test_resume import resave

STOP = 10
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {}, "lamb": {}, "spam": {"spam": {"interval": 7, "warmup": 3, "density": 0.4}},
    "stable_spam": {"stable_spam": {"interval": 7, "max_decay": 0.8}}, "muon": {},
    "adafactor": {"adafactor": {"momentum": 0.9}},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_moves_to_other_layouts_bit_for_bit(name: str, corpus: Path, tmp_path: Path) -> None:
    """By the tool to two tensor ranks, by the engine to ZeRO 3, and back."""
    optimizer = {"name": name, "lr": 3e-3} | OPTIMIZERS[name]

    def at(run: str, **parallel: Any) -> RunConfig:
        batch = {"steps": STOP, "global_batch": 8, "micro_batch": 2, "eval_samples": 0}
        return tiny(corpus, tmp_path / run, train=batch, optimizer=optimizer, parallel=parallel)

    run_ranks(2, train, at("run"))
    half = tmp_path / f"run/checkpoints/step-{STOP}"
    before = WholeState(half)
    moved = reshape_checkpoint(half, tmp_path / "moved", Sizes(tensor=2, data=1)).checkpoint
    run_ranks(2, resave, at("moved", tensor=2), tmp_path / "there/checkpoints")
    shutil.copytree(tmp_path / "moved", tmp_path / "zero3", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(tmp_path / "there/checkpoints", tmp_path / "zero3/checkpoints")
    run_ranks(2, resave, at("zero3", zero=3), tmp_path / "back")
    for folder in (moved, tmp_path / "there/checkpoints" / half.name, tmp_path / "back" / half.name):
        after = WholeState(folder)
        assert after.names == before.names and after.adam_step == STOP and after.kinds == before.kinds
        for parameter in before.names:
            assert after.kinds_of(parameter) == before.kinds_of(parameter)
            for kind in before.kinds_of(parameter):
                assert torch.equal(after.read_tensor(parameter, kind), before.read_tensor(parameter, kind))
        assert after.shared.keys() == before.shared.keys()
        for key, tensor in before.shared.items():
            assert torch.equal(after.shared[key], tensor), key


ADAGC, ZCLIP = {"kind": "adagc", "warmup": 2}, {"kind": "zclip", "warmup": 2, "threshold": 0.5}


@pytest.mark.slow
def test_clipping_state_goes_on_in_other_layouts_and_not_for_another_kind(
    corpus: Path, tmp_path: Path
) -> None:
    """The averages go on under another layout; another kind begins its own, and says so; without any they are gone."""

    def at(steps: int, clipping: Any, **parts: Any) -> RunConfig:
        batch = {"steps": steps, "global_batch": 8, "micro_batch": 2, "eval_samples": 8, "eval_interval": 0}
        rate, optimizer = {"warmup_steps": 2, "total_steps": 20}, {"clipping": clipping}
        return tiny(corpus, tmp_path / "run", train=batch, schedule=rate, optimizer=optimizer, parallel=parts)

    def count() -> int:
        lines = (tmp_path / "run/journal.jsonl").read_text().splitlines()
        return [json.loads(line)["event"] for line in lines].count("clipping_reset")

    def state(step: int) -> dict[str, Any]:
        held = WholeState(tmp_path / f"run/checkpoints/step-{step}").shared
        return {name: value.tolist() for name, value in held.items()}

    run_ranks(2, train, at(2, "norm", tensor=2))
    run_ranks(2, train, at(4, ADAGC, tensor=2))
    assert count() == 1
    assert state(2) == {} and state(4)["clipping/adagc/updates"] == [2]
    run_ranks(2, train, at(5, ADAGC, pipeline=2))
    assert count() == 1
    assert state(5)["clipping/adagc/updates"] == [3]
    for before, after in zip(*(state(step)["clipping/adagc/norms"] for step in (4, 5)), strict=True):
        assert 0 < after <= before * 1.05 and after > 0.9 * before
    run_ranks(1, train, at(6, ZCLIP))
    run_ranks(1, train, at(7, "norm"))
    assert count() == 2
    assert (
        state(6)["clipping/zclip/updates"] == [1]
        and "clipping/adagc/norms" not in state(6)
        and state(7) == {}
    )
