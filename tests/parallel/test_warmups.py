"""Steps of growing batches and lengths in every layout, against one process in plain torch: losses, norms, weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megastable.config.tree import RunConfig
from megastable.data.loader import segments_of
from megastable.engine.flatstate import KINDS
from megastable.parallel.sharding import placement_of
from tests import reference
from tests.distributed import run_ranks
from tests.parallel.test_layouts import (
    LENGTH,
    RATES,
    VOCABULARY,
    config,
    merge,
    mine,
    plain,
    relative,
    start_engine,
)

# Batch of each step, and lengths of the pieces of its samples; None: whole. It grows and, after a rewind, falls.
SIZES = [4, 12, 8, 12]
PIECES = [(8,), (16, 32), None, (8, 16)]
Batch = tuple[Tensor, Tensor, Tensor | None]


def batches() -> list[Batch]:
    g = torch.Generator().manual_seed(5)
    made: list[Batch] = []
    for size, lengths in zip(SIZES, PIECES, strict=True):
        t = torch.randint(0, VOCABULARY, (size, LENGTH + 1), generator=g)
        cut = None
        if lengths is not None:
            of = np.array([lengths[i * len(lengths) // size] for i in range(size)])
            cut = torch.from_numpy(segments_of(t[:, :-1].numpy(), None, of))
        made.append((t[:, :-1].contiguous(), t[:, 1:].contiguous(), cut))
    return made


def train_rank(c: RunConfig, world: int) -> dict[str, Any]:
    """Each step is measured before it is done, and measured again as a whole one: as a rewind and an evaluation do."""
    engine, topology = start_engine(c, world)
    found: dict[str, Any] = {"losses": [], "norms": [], "measured": [], "evaluated": [], "samples": []}
    made = batches()
    for number, (batch, lr) in enumerate(zip(made, RATES, strict=True)):
        micro = mine(batch, topology, c.train.micro_batch)
        found["evaluated"].append(engine.evaluate_samples(micro).tolist())
        other = engine.measure_step(mine(made[number - 1], topology, c.train.micro_batch))
        assert other.losses.numel() == SIZES[number - 1]
        again = engine.measure_step(micro)
        measured, applied = engine.train_step(micro, lr, judge=lambda m: m.finite)
        assert applied and measured.losses.numel() == SIZES[number]
        found["measured"].append((again.loss, again.grad_norm))
        found["losses"].append(measured.loss)
        found["norms"].append(measured.grad_norm)
        found["samples"].append(measured.losses.tolist())
    flat = engine.flat_state()
    placements = {placement_of(p).name: placement_of(p) for p in engine.ds.module.parameters()}
    return found | {
        "state": {kind: flat.gather_shards(kind) for kind in KINDS}, "placements": placements,
        "coordinates": topology.layout.coordinates_of(topology.rank), "wrapper": type(engine.optimizer).__name__,
    }  # fmt: skip


@cache
def expected(precision: str) -> Any:
    model = config(batch=12, micro_batch=1).model
    return reference.train(*plain(model, precision), batches(), RATES, 4)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero2-dp2": (2, {"zero": 2}),
    "zero3-dp2": (2, {"zero": 3}),
    "pp2-dp2": (4, {"pipeline": 2}),
    "tp2-sequence": (2, {"tensor": 2, "sequence": True}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}),
    "context2": (2, {"context": 2}),
}


LOW = [("pp2-dp2", "bf16"), ("zero3-dp2", "bf16"), ("zero2-dp2", "fp16"), ("pp2-dp2", "fp16")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [*((name, "fp32") for name in LAYOUTS), *LOW])
def test_train_step_of_growing_size_equals_the_reference(name: str, precision: str) -> None:
    world, options = LAYOUTS[name]
    c = config(batch=12, micro_batch=1, precision=precision, **options)
    ranks = run_ranks(world, train_rank, c, world)
    losses, norms, optimizer = expected(precision)
    exact_losses, exact_norms, exact = expected("fp32")
    for rank in ranks:
        for key in ("losses", "norms", "measured", "evaluated", "samples"):
            assert rank[key] == ranks[0][key], key
        assert rank["measured"] == list(zip(rank["losses"], rank["norms"], strict=True))
    if precision == "bf16":
        assert ranks[0]["wrapper"] == (
            "DeepSpeedZeroOptimizer_Stage3" if "zero3" in name else "BF16_Optimizer"
        )
    for got, wanted, unrounded in (
        (ranks[0]["losses"], losses, exact_losses),
        (ranks[0]["norms"], norms, exact_norms),
    ):
        if precision == "fp32":
            assert got == pytest.approx(wanted, rel=1e-5)
        else:
            off = max(abs(a - b) / b for a, b in zip(wanted, unrounded, strict=True))
            assert got == pytest.approx(unrounded, rel=4 * off)
    whole = merge(ranks, "weight", c.parallel.tensor)
    ours, theirs, true = (
        torch.cat([d[name].flatten() for name in optimizer.master])
        for d in (whole, optimizer.master, exact.master)
    )
    assert relative(ours, theirs) <= (1e-5 if precision == "fp32" else 3 * relative(theirs, true))
