"""What clipping does to the gradients of one step, in any precision: before it, and as the optimizer got them.

ranks = run_ranks(world, clip_rank, {"agc": config(...), ...}, world)
before, after = whole(ranks, "agc", "before"), whole(ranks, "agc", "after")     # by step: whole tensors by name
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megastable.config.tree import RunConfig
from megastable.parallel.layout import Layout
from megastable.parallel.sharding import placement_of, unshard
from megastable.parallel.topology import Topology
from tests.optim.trained import BATCH, batches, recipe
from tests.parallel.test_layouts import mine
from tests.patience import PATIENCE

STEPS = 3


def plain_sgd(clipping: Any, clip: float = 1.0, **options: Any) -> RunConfig:
    """Its "exp_avg" is the gradient that the optimizer gets."""
    made = recipe({"name": "sgd", "momentum": 0.0, "clip": clip, "clipping": clipping}, **options)
    scale = made.precision.model_copy(update={"initial_scale_power": 8})  # no overflow in fp16
    return made.model_copy(update={"precision": scale})


def clip_rank(recipes: dict[str, RunConfig], world: int) -> dict[str, Any]:
    """What one rank sees, by recipe: `_train`."""
    return {name: _train(c, world) for name, c in recipes.items()}


def _train(c: RunConfig, world: int) -> dict[str, Any]:
    """Three steps. In the last two, one worker's samples repeat a token, so that its gradient is far larger."""
    import torch.distributed as dist

    from megastable.config import deepspeed_json
    from megastable.engine.engine import Engine

    p = c.parallel
    layout = Layout(p.tensor, p.pipeline, deepspeed_json.data_parallel(c, world), p.context)
    topology = Topology(layout, dist.get_rank(), timeout=PATIENCE)
    engine = Engine(c, deepspeed_json.build(c, world), topology)
    fragments = engine.flat_state().fragments
    seen: dict[str, list[Any]] = {key: [] for key in ("before", "after", "weight", "local", "norms", "kept")}
    names = {id(q): placement_of(q).name for q in engine.ds.module.parameters()}

    def pieces(take: Any) -> list[Any]:
        return [(f, take(f).clone()) for f in fragments]

    def judge(measured: Any) -> bool:
        found = engine.zero.gradients(fragments)
        scale = measured.loss_scale
        seen["before"].append(pieces(lambda f: found[f.group, f.offset].view(-1)[: f.numel] / scale))
        seen["weight"].append(pieces(lambda f: engine.flat_state().piece(f, "weight")))
        return True

    if c.optimizer.clipping.kind == "worker":
        average, o = engine.ds.buffered_allreduce_fallback, engine.optimizer

        def spied(*_: Any, **__: Any) -> None:
            groups = zip(o.bf16_groups, o.fp32_groups_gradients, strict=True)
            local = [(q, g) for qs, gs in groups for q, g in zip(qs, gs, strict=True)]
            seen["local"].append({names[id(q)]: g.clone().view(q.shape) for q, g in local})
            average()

        engine.ds.buffered_allreduce_fallback = spied
    for index, (tokens, labels, _) in enumerate(batches()[:STEPS]):
        if index:
            first = torch.arange(BATCH).view(-1, layout.samples, c.train.micro_batch)[:, 0].flatten()
            tokens[first], labels[first] = 3, 3
        measured, applied = engine.train_step(
            mine((tokens, labels, None), topology, c.train.micro_batch), 1e-2, judge
        )
        assert applied
        seen["norms"].append(measured.grad_norm)
        seen["kept"].append(engine.kept)
        seen["after"].append(pieces(lambda f: engine.flat_state().piece(f, "exp_avg")))
    return seen | {
        "coordinates": layout.coordinates(topology.rank),
        "placements": {placement_of(q).name: placement_of(q) for q in engine.ds.module.parameters()},
    }


def whole(ranks: list[dict[str, Any]], name: str, key: str) -> list[dict[str, Tensor]]:
    """Whole tensors of all ranks' pieces, by step."""
    made = []
    for step in range(STEPS):
        shards: dict[str, dict[int, Tensor]] = {}
        for rank in (rank[name] for rank in ranks):
            for f, piece in rank[key][step]:
                held = shards.setdefault(f.name, {})
                flat = held.setdefault(rank["coordinates"][2], torch.zeros(f.shape)).view(-1)
                flat[f.start : f.start + f.numel] = piece
        made.append(_joined(ranks, name, shards))
    return made


def workers(ranks: list[dict[str, Any]], name: str, context: int) -> list[list[dict[str, Tensor]]]:
    """Each worker's own gradient, the mean over its context ranks: by step and worker, whole tensors."""
    made = []
    for step in range(STEPS):
        shards: dict[int, dict[str, dict[int, Tensor]]] = {}
        for rank in (rank[name] for rank in ranks):
            _, data, tensor = rank["coordinates"]
            for parameter, g in rank["local"][step].items():
                held = shards.setdefault(data // context, {}).setdefault(parameter, {})
                held[tensor] = held.get(tensor, torch.zeros_like(g)) + g / context
        made.append([_joined(ranks, name, shards[worker]) for worker in sorted(shards)])
    return made


def _joined(
    ranks: list[dict[str, Any]], name: str, shards: dict[str, dict[int, Tensor]]
) -> dict[str, Tensor]:
    placements = {n: p for rank in ranks for n, p in rank[name]["placements"].items()}
    return {
        n: unshard([held[r] for r in sorted(held)], placements[n]) if placements[n].dim is not None else held[0]
        for n, held in shards.items()
    }  # fmt: skip
