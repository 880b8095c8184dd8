"""A branch does what the run did, bit for bit, and leaves nothing behind."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import run_ranks
from tests.optim import trained

SAVED, REACHED = 3, 7  # steps: of the snapshot, and of the trial
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, {"clipping": {"kind": "norm"}}),
    "ZeRO 1": (2, {"zero": 1, "precision": "bf16"}, {}),
    "ZeRO 2": (2, {"zero": 2, "precision": "bf16"}, {}),
    "ZeRO 3": (2, {"zero": 3, "precision": "bf16"}, {}),
    "TP 2": (2, {"tensor": 2, "precision": "bf16"}, {}),
    "PP 2": (2, {"pipeline": 2, "precision": "bf16"}, {}),
    "FP8": (1, {"precision": "bf16", "fp8": "delayed"}, {}),
    "fp16": (1, {"precision": "fp16"}, {}),
    "Muon": (1, {}, {"name": "muon"}),
    "AdaGC": (1, {}, {"clipping": {"kind": "adagc"}}),
}


def branch_rank(given: dict[str, Any], optimizer: dict[str, Any], world: int, tried: bool) -> dict[str, Any]:
    """Trains ten steps; after the seventh it goes back to the third, trains a branch of those up to the seventh, and
    returns; or not, unless `tried`. What the run and the branch measured, and whether their states are the same."""
    import torch.distributed as dist

    from megastable.attribution.sample_replay import BranchStart, train_branch
    from megastable.checkpoint.snapshot import Ring
    from megastable.config import deepspeed_json
    from megastable.config.tree import RunConfig
    from megastable.engine import adjustments
    from megastable.engine.engine import Engine
    from megastable.engine.numerics import Numerics
    from megastable.model.block_parts import gated
    from megastable.optim.schedule import scheduled_rate
    from megastable.parallel.layout import Layout
    from megastable.parallel.topology import Topology
    from tests.parallel.test_layouts import mine
    from tests.patience import PATIENCE

    given = dict(given)
    fp8 = given.pop("fp8", None)
    adjustments.QK_CLIP, adjustments.CLAMPED = (
        0.5,
        partial(gated, gelu=False, clamp=0.1),
    )  # so that they matter here
    c = trained.recipe(optimizer, **given, model={"qk_norm": False})
    if fp8:
        tree = c.model_dump(exclude_unset=True)
        c = RunConfig.model_validate(tree | {"precision": {"kind": "bf16", "fp8": fp8}})
    p = c.parallel
    layout = Layout(p.tensor, p.pipeline, deepspeed_json.size_of_data_parallel(c, world), p.context)
    topology = Topology(layout, dist.get_rank(), timeout=PATIENCE)
    engine = Engine(c, deepspeed_json.build_deepspeed_json(c, world), topology)
    data, size, length = trained.batches(), trained.BATCH, c.model.sequence_length
    loader: Any = SimpleNamespace(
        read_micro_batches=lambda positions: mine(data[positions[0] // size], topology, c.train.micro_batch)
    )
    steps = list(np.arange(trained.STEPS * size).reshape(trained.STEPS, size))
    ring, told = Ring(engine, 4, 1), list[tuple[float, float]]()
    at, trial = {}, {}
    updates = tokens = 0
    for step, positions in enumerate(steps, 1):
        rate = 0.5 * scheduled_rate(c, updates, tokens, size * length)
        measured, applied = engine.train_step(loader.read_micro_batches(positions), rate, lambda m: m.finite)
        updates, tokens = updates + applied, tokens + applied * size * length
        told.append((measured.loss, measured.grad_norm))
        at[step] = updates, tokens
        if step == SAVED:
            ring.take_snapshot(step, None)
        if step == REACHED and tried:
            before = trained.copied(engine.optimizer_state()), engine.read_counters(), engine.measured
            present, saved = ring.copy_aside(step), ring.find_before(step)
            assert saved is not None
            ring.restore_snapshot(saved)
            engine.refresh_weights()
            start, half = BranchStart(*at[SAVED]), lambda _, rate: 0.5 * rate
            branch = train_branch(c, engine, loader, start, steps[SAVED:REACHED], half)
            trial = {
                "branch": list(zip(branch.losses.tolist(), branch.norms.tolist(), strict=True)),
                "reached": trained.are_same(before[0], engine.optimizer_state()),
            }
            ring.restore_snapshot(saved)
            engine.refresh_weights()
            numerics = engine.numerics.now  # and one with every remedy
            engine.numerics.switch_to(Numerics(False, frozenset(engine.numerics.kernels)))
            engine.adjustments.switch_to(engine.adjustments.possible)
            engine.reset_moments()
            other = train_branch(c, engine, loader, start, steps[SAVED:REACHED], half)
            trial["other"] = list(zip(other.losses.tolist(), other.norms.tolist(), strict=True))
            engine.adjustments.switch_to(())
            engine.numerics.switch_to(numerics)
            ring.restore_snapshot(present)
            engine.refresh_weights()
            trial["present"] = trained.are_same(before[0], engine.optimizer_state())
            trial["counters"] = str(before[1]) == str(engine.read_counters()) and engine.measured is before[2]
    return trial | {"told": told, "state": trained.copied(engine.optimizer_state())}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.quick("one", "ZeRO 2")
def test_a_branch_repeats_the_run_and_leaves_nothing_behind(name: str) -> None:
    world, given, optimizer = LAYOUTS[name]
    with_trial, without = (
        run_ranks(world, branch_rank, given, optimizer, world, tried) for tried in (True, False)
    )
    for ours, theirs in zip(with_trial, without, strict=True):
        assert ours["branch"] == ours["told"][SAVED:REACHED]
        assert ours["other"] != ours["branch"]
        assert ours["reached"] and ours["present"] and ours["counters"]
        assert ours["told"] == theirs["told"]
        assert ours["state"].keys() == theirs["state"].keys()
        assert all(torch.equal(value, theirs["state"][key]) for key, value in ours["state"].items())
