"""Lasting changes of how a run trains do what a recipe with them does, bit for bit, and are taken back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megastable.model.mlp import gated
from megastable_guard.policy import ADJUSTED
from tests.distributed import run_ranks
from tests.optim import trained

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ZeRO 1": (2, {"zero": 1, "precision": "bf16"}),
    "ZeRO 2": (2, {"zero": 2, "precision": "bf16"}),
    "ZeRO 3": (2, {"zero": 3, "precision": "bf16"}),
    "TP 2": (2, {"tensor": 2, "precision": "bf16"}),
    "PP 2": (2, {"pipeline": 2, "precision": "bf16"}),
    "fp16": (1, {"precision": "fp16"}),
}
ALL = " ".join(ADJUSTED)


def adjusted_rank(given: dict[str, Any], world: int, names: list[str], by_recipe: bool) -> dict[str, Any]:
    """Four steps with changes of the recipe, or with adjustments that are switched, and two without them."""
    import torch.distributed as dist

    from megastable.config import deepspeed_json
    from megastable.config.tree import RunConfig
    from megastable.engine import adjustments
    from megastable.engine.adjustments import CLIP, LEAST_Z_LOSS, lower_beta2
    from megastable.engine.engine import Engine
    from megastable.optim.schedule import scheduled_rate
    from megastable.parallel.layout import Layout
    from megastable.parallel.topology import Topology
    from tests.parallel.test_layouts import mine
    from tests.patience import PATIENCE

    c = trained.recipe({}, **given)
    tree = c.model_dump(exclude_unset=True)
    tree["optimizer"] = {**tree.get("optimizer", {}), "clip": 0.5, "betas": [0.9, 0.99]}
    tree["model"] = {**tree["model"], "z_loss": 0.0, "qk_norm": False}
    adjustments.QK_CLIP, adjustments.CLAMPED = (
        0.5,
        partial(gated, gelu=False, clamp=0.1),
    )  # so that they matter here
    if by_recipe:
        wanted = {"clip": ("optimizer", "clip", 0.5 * CLIP), "z_loss": ("model", "z_loss", LEAST_Z_LOSS),
                  "beta2": ("optimizer", "betas", [0.9, lower_beta2(0.99)]), "qk_clip": ("optimizer", "qk_clip", 0.5),
                  "swiglu_clamp": ("model", "swiglu_clamp", 0.1)}  # fmt: skip
        for name in names:
            section, key, value = wanted[name]
            tree[section][key] = value
    c = RunConfig.model_validate(tree)
    p = c.parallel
    layout = Layout(p.tensor, p.pipeline, deepspeed_json.data_parallel(c, world), p.context)
    topology = Topology(layout, dist.get_rank(), timeout=PATIENCE)
    engine = Engine(c, deepspeed_json.build(c, world), topology)
    taken = {"qk_clip", "swiglu_clamp"}.intersection(names if by_recipe else ())
    assert engine.adjustments.possible == {"reset_moments", *ADJUSTED} - taken
    data, size, length = trained.batches(), trained.BATCH, c.model.sequence_length
    told = []
    for step in range(6):
        if not by_recipe:
            engine.adjustments.switch(names if step < 4 else [])
        rate = scheduled_rate(c, step, step * size * length, size * length)
        batch = mine(data[step], topology, c.train.micro_batch)
        measured, _ = engine.train_step(batch, rate, lambda m: m.finite)
        told.append((measured.loss, measured.grad_norm, engine.kept))
    return {"told": told, "state": trained._copied(engine.optimizer_state()) if by_recipe else None}


@pytest.mark.parametrize(
    ("layout", "names"), [*((layout, ALL) for layout in LAYOUTS), ("one", "qk_clip"), ("one", "swiglu_clamp")]
)
@pytest.mark.quick(f"one-{ALL}")
def test_an_adjusted_run_is_a_run_of_another_recipe(layout: str, names: str) -> None:
    world, given = LAYOUTS[layout]
    recipe, switched, plain = (
        run_ranks(world, adjusted_rank, given, world, wanted.split(), by_recipe)
        for wanted, by_recipe in ((names, True), (names, False), ("", False))
    )
    for there, here, without in zip(recipe, switched, plain, strict=True):
        assert here["told"][:4] == there["told"][:4] != without["told"][:4]
        assert here["told"][4:] != there["told"][4:]  # taken back


def followed_rank(given: dict[str, Any], world: int, live: bool) -> dict[str, Any]:
    """Six steps with settings of a recipe, or of one that the engine follows from the third on."""
    import torch.distributed as dist

    from megastable.config import deepspeed_json
    from megastable.config.tree import RunConfig
    from megastable.engine.engine import Engine
    from megastable.parallel.layout import Layout
    from megastable.parallel.topology import Topology
    from tests.parallel.test_layouts import mine
    from tests.patience import PATIENCE

    tree = trained.recipe({}, **given).model_dump(exclude_unset=True)

    def settings(**optimizer: Any) -> RunConfig:
        z_loss = optimizer.pop("z_loss")
        changed = {"optimizer": tree["optimizer"] | optimizer, "model": tree["model"] | {"z_loss": z_loss}}
        return RunConfig.model_validate(tree | changed)

    old = settings(clip=0.0, betas=[0.9, 0.95], weight_decay=0.1, z_loss=0.0)
    new = settings(clip=0.2, betas=[0.8, 0.99], weight_decay=0.5, z_loss=1e-2)
    built, first = (old, old) if live else (new, old)
    p = built.parallel
    layout = Layout(p.tensor, p.pipeline, deepspeed_json.data_parallel(built, world), p.context)
    engine = Engine(
        built, deepspeed_json.build(built, world), Topology(layout, dist.get_rank(), timeout=PATIENCE)
    )
    engine.follow(first)
    told, data = [], trained.batches()
    for step in range(6):
        if step == 2:
            engine.follow(new)
        batch = mine(data[step], engine.topology, built.train.micro_batch)
        measured, _ = engine.train_step(batch, 1e-3, lambda m: m.finite)
        told.append((measured.loss, measured.grad_norm, engine.kept))
    return {"told": told, "state": trained._copied(engine.optimizer_state())}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.quick("one")
def test_an_engine_follows_settings_as_if_it_were_built_with_them(layout: str) -> None:
    """Clipping that begins, other moments, decay and z-loss: the same bits, whichever of both it was built with."""
    world, given = LAYOUTS[layout]
    live, built = (run_ranks(world, followed_rank, given, world, live) for live in (True, False))
    for one, other in zip(live, built, strict=True):
        assert one["told"] == other["told"] and trained._same(one["state"], other["state"])
        assert [kept < 1 for _, _, kept in one["told"]] == [False] * 2 + [True] * 4


def compiled_rank(compiled: bool) -> tuple[list[float], list[int]]:
    """Losses of steps and evaluations with changes that blocks are compiled anew for, twice; graphs after each time."""
    from torch._dynamo.utils import counters

    from megastable.config import deepspeed_json
    from megastable.config.tree import RunConfig
    from megastable.engine import adjustments
    from megastable.engine.engine import Engine
    from megastable.parallel.layout import Layout
    from megastable.parallel.topology import Topology
    from tests.parallel.compiling import without_kernels
    from tests.parallel.test_layouts import mine
    from tests.patience import PATIENCE

    adjustments.QK_CLIP, adjustments.CLAMPED = 0.5, partial(gated, gelu=False, clamp=0.1)
    torch._dynamo.config.recompile_limit = 2  # beyond which torch would end the run
    tree = trained.recipe({}, model={"qk_norm": False}).model_dump(exclude_unset=True)
    c = RunConfig.model_validate(tree | {"kernels": {"compile": compiled}})
    with without_kernels():
        engine = Engine(c, deepspeed_json.build(c, 1), Topology(Layout(1, 1, 1, 1), 0, timeout=PATIENCE))
        told, graphs, batch = [], [], mine(trained.batches()[0], engine.topology, c.train.micro_batch)
        for _ in range(2):
            for names in ("qk_clip", "", "swiglu_clamp", "qk_clip swiglu_clamp"):
                engine.adjustments.switch(names.split())
                measured, _ = engine.train_step(batch, 1e-3, lambda m: m.finite)
                told += [measured.loss, measured.grad_norm, float(engine.evaluate(batch).mean())]
            graphs.append(counters["stats"]["unique_graphs"])
    return told, graphs


@pytest.mark.slow
def test_compiled_blocks_follow_and_are_not_compiled_twice() -> None:
    (written, _), (told, (first, second)) = (
        run_ranks(1, compiled_rank, compiled)[0] for compiled in (False, True)
    )
    assert told == pytest.approx(written, rel=1e-5)
    assert first == second > 2


def reset_rank() -> dict[str, Any]:
    from megastable.config import deepspeed_json
    from megastable.engine.engine import Engine
    from megastable.optim.schedule import scheduled_rate
    from megastable.parallel.layout import Layout
    from megastable.parallel.topology import Topology
    from tests.parallel.test_layouts import mine
    from tests.patience import PATIENCE

    c = trained.recipe({})
    engine = Engine(c, deepspeed_json.build(c, 1), Topology(Layout(1, 1, 1, 1), 0, timeout=PATIENCE))
    data, size = trained.batches(), trained.BATCH * c.model.sequence_length
    for step in range(3):
        batch = mine(data[step], engine.topology, c.train.micro_batch)
        engine.train_step(batch, scheduled_rate(c, step, step * size, size), lambda m: m.finite)
    weights = {n: t.clone() for n, t in engine.optimizer_state().items() if n.endswith("/weight")}
    engine.reset_moments()
    after = engine.optimizer_state()
    kept = all(torch.equal(t, after[n]) for n, t in weights.items())
    zero = all(not t.any() for n, t in after.items() if not n.endswith("/weight"))
    before = {n: t.clone() for n, t in weights.items()}
    engine.train_step(mine(data[3], engine.topology, c.train.micro_batch), 1e-3, lambda m: m.finite)
    moved = max(
        float((t - before[n]).abs().max()) for n, t in engine.optimizer_state().items() if n in before
    )
    return {"kept": kept, "zero": zero, "moved": moved}


def test_moments_begin_again_with_their_bias_correction() -> None:
    """The first update is one of the full rate in every element, as at the start of a run, and no larger."""
    (found,) = run_ranks(1, reset_rank)
    assert found["kept"] and found["zero"] and 0 < found["moved"] < 1.2e-3
