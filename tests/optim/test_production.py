"""The production path, bf16 with fp32 sums: every optimizer on the engine's own gradients against its plain rule."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megastable.config.tree import RunConfig
from megastable.engine.flatstate import FlatState
from megastable.parallel.layout import Layout
from megastable.parallel.sharding import Placement, placement_of, unshard
from megastable.parallel.topology import Topology
from tests.distributed import run_ranks
from tests.optim import trained
from tests.optim.test_optimizers import OPTIMIZERS
from tests.parallel.test_gradients import Pieces, joined, pieces
from tests.parallel.test_layouts import mine, relative
from tests.patience import PATIENCE

# QK-clip's rule needs the logits as well: tests/engine/test_logit_clipping.py.
NAMES = [name for name in OPTIMIZERS if name != "muon-clip"]
# Of the weights; Muon: of their change. In bf16 it orthogonalizes in bf16, its rule in fp32: 0.7 % of ten updates.
CLOSE, MUON_CLOSE = 2e-6, 0.02
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-dp2": (4, {"tensor": 2}),
    "pp2-dp2-tied": (4, {"pipeline": 2, "tied": True}),
    "zero3-dp2": (2, {"zero": 3}),
}


def train_rank(recipes: dict[str, RunConfig], world: int) -> dict[str, Any]:
    """By optimizer: masters before the steps and after them, and the gradients of every step, in pieces."""
    return {name: _train(c, world) for name, c in recipes.items()}


def _train(c: RunConfig, world: int) -> dict[str, Any]:
    import torch.distributed as dist

    from megastable.config import deepspeed_json
    from megastable.engine.engine import Engine

    p = c.parallel
    layout = Layout(p.tensor, p.pipeline, deepspeed_json.data_parallel(c, world), p.context)
    topology = Topology(layout, dist.get_rank(), timeout=PATIENCE)
    engine = Engine(c, deepspeed_json.build(c, world), topology)
    flat = engine.flat_state()
    seen: list[Pieces] = []

    def judge(measured: Any, flat: FlatState = flat) -> bool:
        held = engine.zero.gradients(flat.fragments)
        seen.append(
            {
                (f.name, f.start): held[f.group, f.offset].view(-1)[: f.numel].float().clone()
                for f in flat.fragments
            }
        )
        return bool(measured.finite)

    before = pieces(flat, "weight")
    for batch, lr in zip(trained.batches(), trained.RATES, strict=True):
        _, applied = engine.train_step(mine(batch, topology, c.train.micro_batch), lr, judge)
        assert applied
    return {
        "before": before, "after": pieces(flat, "weight"), "gradients": seen, "tensor": topology.tensor_rank,
        "shapes": {f.name: f.shape for f in flat.fragments},
        "placements": {placement_of(p).name: placement_of(p) for p in engine.ds.module.parameters()},
    }  # fmt: skip


@cache
def ran(layout: str) -> list[dict[str, Any]]:
    world, options = LAYOUTS[layout]
    recipes = {name: trained.recipe(OPTIMIZERS[name][0], precision="bf16", **options) for name in NAMES}
    return run_ranks(world, train_rank, recipes, world)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_updates_of_fp32_masters(layout: str, name: str) -> None:
    ranks = [rank[name] for rank in ran(layout)]
    placements: dict[str, Placement] = {n: p for rank in ranks for n, p in rank["placements"].items()}

    def whole(parts: list[Pieces]) -> dict[str, Tensor]:
        shards = joined(ranks, parts)
        return {
            n: unshard([shards[n, t] for t in range(LAYOUTS[layout][1].get("tensor", 1))], p)
            for n, p in placements.items()
        }

    rule = OPTIMIZERS[name][1](whole([rank["before"] for rank in ranks]))
    for step, lr in enumerate(trained.RATES):
        rule.step(whole([rank["gradients"][step] for rank in ranks]), lr)
    after = whole([rank["after"] for rank in ranks])
    for parameter, wanted in rule.master.items():
        before = whole([rank["before"] for rank in ranks])[parameter]
        assert not torch.equal(wanted, before)
        if name == "muon" and parameter.startswith("blocks.") and wanted.dim() > 1:
            assert relative(after[parameter] - before, wanted - before) < MUON_CLOSE, parameter
        else:
            assert relative(after[parameter], wanted) < CLOSE, parameter
