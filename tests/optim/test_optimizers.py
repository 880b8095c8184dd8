"""Every optimizer against its plain rule on whole tensors, where DeepSpeed calls it once for each of its groups of
parameters, and in bf16 with fp32 sums. Under every layout, with every clipping: tests/parallel/test_pairs.py."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.config.tree import RunConfig
from megastable.engine.flatstate import FlatState
from megastable.parallel.sharding import placement_of
from tests.distributed import run_ranks
from tests.engine.engines import build_engine, take_batch
from tests.optim import trained
from tests.optim.trained import OPTIMIZERS
from tests.parallel.test_gradients import Pieces, joined_whole, pieces
from tests.parallel.test_layouts import QWEN2, ROUNDING, relative


@pytest.mark.slow
def test_optimizers_update_some_parameters_at_a_time_under_zero_3(tmp_path: Path) -> None:
    given = json.loads(Path("ds_configs/zero3.json").read_text())
    given["zero_optimization"]["sub_group_size"] = 5000
    (tmp_path / "groups.json").write_text(json.dumps(given))
    recipes = {
        name: trained.recipe(section, zero=3, model=QWEN2 if name == "muon-clip" else {}).model_copy(
            update={"deepspeed": str(tmp_path / "groups.json")}
        )
        for name, (section, *_) in OPTIMIZERS.items()
    }
    ranks = run_ranks(2, trained.train_rank, recipes)
    for name, c in recipes.items():
        plainly = trained.plainly(c, name)
        trained.check(ranks, name, c, name, plainly, ROUNDING)
        # Otherwise nothing but AdamW was tested.
        assert plainly[1].acted >= 10 or name in ("adamw", "sgd")
        assert name != "muon-clip" or 0 < len(plainly[1].clipped[0]) < 4 * c.model.layers


# Of the weights; Muon: of their change. In bf16 it orthogonalizes in bf16, its rule in fp32: 0.7 % of ten updates.
CLOSE, MUON_CLOSE = 2e-6, 0.02
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-dp2": (4, {"tensor": 2}),
    "pp2-dp2-tied": (4, {"pipeline": 2, "tied": True}),
    "zero3-dp2": (2, {"zero": 3}),
}
# QK-clip's rule needs the logits as well: tests/parallel/test_pairs.py.
NAMES = [name for name in OPTIMIZERS if name != "muon-clip"]


def train_bf16(recipes: dict[str, RunConfig]) -> dict[str, Any]:
    """By optimizer: masters before the steps and after them, and the gradients of every step, in pieces."""
    return {name: _train(c) for name, c in recipes.items()}


def _train(c: RunConfig) -> dict[str, Any]:
    engine = build_engine(c)
    flat = engine.flat_state()
    seen: list[Pieces] = []

    def judge(measured: Any, flat: FlatState = flat) -> bool:
        held = engine.zero.view_gradients(flat.fragments)
        seen.append({
            (f.name, f.start): held[f.group, f.offset].view(-1)[: f.numel].float().clone()
            for f in flat.fragments
        })  # fmt: skip
        return bool(measured.finite)

    before = pieces(flat, "weight")
    for batch, lr in zip(trained.batches(), trained.RATES, strict=True):
        engine.train_step(take_batch(engine, batch), lr, judge)
    return {
        "before": before, "after": pieces(flat, "weight"), "gradients": seen, "tensor": engine.topology.tensor_rank,
        "shapes": {f.name: f.shape for f in flat.fragments},
        "placements": {placement_of(p).name: placement_of(p) for p in engine.ds.module.parameters()},
    }  # fmt: skip


@cache
def ran(layout: str) -> list[dict[str, Any]]:
    world, options = LAYOUTS[layout]
    recipes = {name: trained.recipe(OPTIMIZERS[name][0], precision="bf16", **options) for name in NAMES}
    return run_ranks(world, train_bf16, recipes)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_optimizer_updates_fp32_masters_by_the_engines_bf16_gradients(layout: str, name: str) -> None:
    ranks = [rank[name] for rank in ran(layout)]
    before = joined_whole(ranks, [rank["before"] for rank in ranks])
    rule = OPTIMIZERS[name][1](dict(before))  # which a rule replaces
    if isinstance(rule, trained.AdamW):
        rule.scales = {n: (1.0, float(w.dim() > 1), 1.0) for n, w in before.items()}
    for step, lr in enumerate(trained.RATES):
        rule.step(joined_whole(ranks, [rank["gradients"][step] for rank in ranks]), lr)
    after = joined_whole(ranks, [rank["after"] for rank in ranks])
    for parameter, wanted in rule.master.items():
        old = before[parameter]
        assert not torch.equal(wanted, old)
        if name == "muon" and parameter.startswith("blocks.") and wanted.dim() > 1:
            assert relative(after[parameter] - old, wanted - old) < MUON_CLOSE, parameter
        else:
            assert relative(after[parameter], wanted) < CLOSE, parameter
