"""Train a tiny model with several optimizers under one layout, in one group of ranks, and the same in one process.

ranks = run_ranks(world, train_rank, {"sgd": config(...), ...}, world)
weights = whole(ranks, "sgd", "weight", tensor)
expected("sgd", model) -> a plain rule after the same steps, see rules.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.engine.flatstate import KINDS
from megastable.parallel.layout import Layout
from megastable.parallel.sharding import placement_of
from megastable.parallel.topology import Topology
from tests import reference
from tests.parallel.test_layouts import LENGTH, VOCABULARY, config, merge, mine, plain
from tests.patience import PATIENCE

STEPS, HALF, BATCH = 10, 5, 12
RATES = [3e-3 * min(i + 1, 4) / 4 for i in range(STEPS)]


def recipe(optimizer: dict[str, Any], **options: Any) -> RunConfig:
    """The tiny model under a layout with an optimizer's settings; a global batch of 12, for 1, 2, 3 data ranks."""
    made = config(batch=BATCH, **{"micro_batch": 2} | options)
    tree = made.model_dump(exclude_unset=True)
    return RunConfig.model_validate(tree | {"optimizer": optimizer})


def batches(spike: int | None = None) -> list[tuple[Tensor, Tensor, None]]:
    """spike: a step whose batch repeats one token, with a gradient far larger than usual."""
    g = torch.Generator().manual_seed(11)
    made = []
    for _ in range(STEPS):
        t = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=g)
        if len(made) == spike:
            t.fill_(3)
        made.append((t[:, :-1].contiguous(), t[:, 1:].contiguous(), None))
    return made


def train_rank(recipes: dict[str, RunConfig], world: int, spike: int | None = None) -> dict[str, Any]:
    """What one rank sees, by optimizer: `_train`."""
    return {name: _train(c, world, spike) for name, c in recipes.items()}


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in state.items()}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _train(c: RunConfig, world: int, spike: int | None) -> dict[str, Any]:
    """Ten steps, with a refused one and a rewind in the middle that must leave no trace: the final state of this
    rank, norms, the shares of them that clipping left, sizes of updates, and whether the two left none."""
    import torch.distributed as dist

    from megastable.config import deepspeed_json
    from megastable.engine.engine import Engine

    p = c.parallel
    layout = Layout(p.tensor, p.pipeline, deepspeed_json.data_parallel(c, world), p.context)
    topology = Topology(layout, dist.get_rank(), timeout=PATIENCE)
    engine = Engine(c, deepspeed_json.build(c, world), topology)
    norms, kept, unchanged, point = [], [], True, None
    data = list(zip(batches(spike), RATES, strict=True))

    def step(index: int, accept: bool = True) -> float:
        batch, lr = data[index]
        measured, applied = engine.train_step(
            mine(batch, topology, c.train.micro_batch), lr, judge=lambda m: accept and m.finite
        )
        assert applied == accept
        return measured.grad_norm

    for index in range(STEPS):
        if index == HALF:
            point = _copied(engine.optimizer_state()), engine.counters()
            step(index, accept=False)
            unchanged = _same(point[0], engine.optimizer_state())
        engine.measures_update = index == STEPS - 1
        norms.append(step(index))
        kept.append(engine.kept)
    final = _copied(engine.optimizer_state())
    ratio = engine.statistics().overall.get("update_ratio")
    assert point is not None
    engine.restore_optimizer_state(point[0])
    engine.restore_counters(point[1])
    engine.refresh_weights()
    for index in range(HALF, STEPS):
        step(index)
    flat = engine.flat_state()
    return {
        "norms": norms, "kept": kept, "unchanged": unchanged, "rewound": _same(final, engine.optimizer_state()),
        "state": {kind: flat.shards(kind) for kind in KINDS}, "coordinates": layout.coordinates(topology.rank),
        "placements": {placement_of(p).name: placement_of(p) for p in engine.ds.module.parameters()},
        "shared": {name: t.clone() for name, t in engine.shared_state.items()}, "update_ratio": ratio,
    }  # fmt: skip


def whole(ranks: list[dict[str, Any]], name: str, kind: str, tensor: int) -> dict[str, Tensor]:
    """Whole tensors of the final state under optimizer `name`; copies must be the same bytes."""
    return merge([rank[name] for rank in ranks], kind, tensor)


def expected(
    model: ModelConfig, rule: Any, micro_batches: int = BATCH // 2, spike: int | None = None
) -> tuple[list[float], Any]:
    """Gradient norms and the rule after the same ten steps in one process."""
    _, norms, optimizer = reference.train(*plain(model), batches(spike), RATES, micro_batches, rule)
    return norms, optimizer
