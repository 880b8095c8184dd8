"""Runs whose moments are bf16: what is stopped goes on with the same bits; copies stay copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.config.tree import RunConfig
from megastable.engine.flatstate import KINDS
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.engine.test_gate import start_of, trainer_of
from tests.training.test_resume import identical

LOW = torch.bfloat16
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero2-dp2": {"parallel": {"zero": 2}},
    "zero3-dp2": {"parallel": {"zero": 3}},
    "tp2": {"parallel": {"tensor": 2}},
    "pp2-tied": {"parallel": {"pipeline": 2}, "model": {"tied": True}},
}


def config_of(corpus: Path, run: Path, moments: str = "bf16", steps: int = 4, **parts: Any) -> RunConfig:
    parts["model"] = dict(tiny(corpus, run).model) | parts.get("model", {})
    train = {"steps": steps, "micro_batch": 4, "eval_samples": 0}
    optimizer = {"moments": moments, "betas": (0.9, 0.999)}
    return tiny(corpus, run, **parts, optimizer=optimizer, train=train, checkpoint={"interval": 2})


def state_of(engine: Any) -> Any:
    """Weights and moments by kind and name, with those that another rank counts; dtypes by kind."""
    flat = engine.flat_state()
    dtypes = {(name.split("/")[1], t.dtype) for name, t in engine.optimizer_state().items()}
    return {kind: flat.gather_shards(kind) for kind in KINDS}, dtypes


def train(config: RunConfig) -> Any:
    trainer = trainer_of(config)
    assert trainer.train() == 0
    return state_of(trainer.engine)


def resumed(config: RunConfig) -> Any:
    """The state as it was loaded, before a step."""
    start = start_of(config)
    assert start.state.step >= 2
    return state_of(start.engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_resume_with_bf16_moments_goes_on_bit_for_bit(name: str, corpus: Path, tmp_path: Path) -> None:
    parts = LAYOUTS[name]
    straight = run_ranks(2, train, config_of(corpus, tmp_path / "straight", **parts))
    run_ranks(2, train, config_of(corpus, tmp_path / "stopped", steps=2, **parts))
    stopped = run_ranks(2, train, config_of(corpus, tmp_path / "stopped", **parts))
    assert '"resumed"' in (tmp_path / "stopped/journal.jsonl").read_text()
    a, b = (tmp_path / run / "checkpoints/step-4" for run in ("straight", "stopped"))
    assert identical(a, b) == 6
    for (one, dtypes), (other, _) in zip(straight, stopped, strict=True):
        kinds = (("weight", torch.float32), ("step", torch.float32), ("exp_avg", LOW), ("exp_avg_sq", LOW))
        assert dtypes == set(kinds)
        for kind, held in one.items():
            assert held.keys() == other[kind].keys()
            assert all(torch.equal(t, other[kind][n]) for n, t in held.items())
    if name in ("tp2", "pp2-tied"):  # a weight that two ranks hold is rounded alike on both
        first, second = (held for held, _ in straight)
        both = first["weight"].keys() & second["weight"].keys()
        shared = [n for n in both if name == "pp2-tied" or "norm" in n]
        assert shared
        assert all(torch.equal(first[kind][n], second[kind][n]) for kind in first for n in shared)


@pytest.mark.slow
def test_resume_takes_over_fp32_moments_and_hands_them_back(corpus: Path, tmp_path: Path) -> None:
    """Rounded to nearest once on the way down; nothing is lost on the way up."""
    run_ranks(1, train, config_of(corpus, tmp_path / "run", "fp32", steps=2))
    ((low, dtypes),) = run_ranks(1, resumed, config_of(corpus, tmp_path / "run", "bf16"))
    ((full, _),) = run_ranks(1, resumed, config_of(corpus, tmp_path / "run", "fp32"))
    assert ("exp_avg_sq", LOW) in dtypes
    for kind, held in full.items():
        for name, t in held.items():
            assert torch.equal(low[kind][name], t.bfloat16().float() if kind != "weight" else t)
    run_ranks(1, train, config_of(corpus, tmp_path / "run", "bf16"))
    ((full, dtypes),) = run_ranks(1, resumed, config_of(corpus, tmp_path / "run", "fp32", steps=6))
    assert ("exp_avg_sq", torch.float32) in dtypes
    for t in (*full["exp_avg"].values(), *full["exp_avg_sq"].values()):
        assert torch.equal(t, t.bfloat16().float()) and t.any()
