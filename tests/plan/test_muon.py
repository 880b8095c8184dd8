"""The planner's groups for Muon are those of the optimizer, with the state that each keeps."""

from __future__ import annotations

import pytest

from megastable.config.model import ModelConfig
from megastable.config.optimizers import OptimizerConfig
from megastable.config.tree import RunConfig
from megastable.plan.volume import Stage, parameter_groups


@pytest.mark.parametrize("tied", [False, True])
def test_groups_and_state(tied: bool) -> None:
    from megastable.model.gpt import GPT
    from megastable.optim.build import build
    from megastable.optim.muon import Muon
    from megastable.parallel.topology import TensorParallel

    model = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocab_size=250, tied=tied)
    settings = OptimizerConfig(name="muon")
    optimizer = build(GPT(model, TensorParallel(), "none", 1), settings, model, compiled=False)
    assert isinstance(optimizer, Muon)
    kept = [
        (sorted(p.numel() for p in group["params"]), len(optimizer.kinds_of(group)))
        for group in optimizer.param_groups
    ]
    planned = parameter_groups(RunConfig(model=model, optimizer=settings), Stage(2, first=True, last=True))
    assert [(sorted(group.sizes), group.moments) for group in planned] == kept
    assert [moments for _, moments in kept] == [1, 2, 2]
