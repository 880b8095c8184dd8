"""Engines on the ranks that a test has started."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megastable.config.tree import RunConfig


def build_engine(c: RunConfig, **zero: Any) -> Any:
    """As the recipe says, on all ranks there are. zero: more keys of DeepSpeed's `zero_optimization`."""
    import torch.distributed as dist

    from megastable.config import deepspeed_json
    from megastable.engine.engine import Engine
    from megastable.parallel.layout import Layout
    from megastable.parallel.topology import Topology
    from tests.patience import PATIENCE

    world, p = dist.get_world_size(), c.parallel
    data = deepspeed_json.size_of_data_parallel(c, world)
    layout = Layout(p.tensor, p.pipeline, data, p.context, p.replicas, p.expert)
    json = deepspeed_json.build_deepspeed_json(c, world)
    json["zero_optimization"] |= zero
    return Engine(c, json, Topology(layout, dist.get_rank(), timeout=PATIENCE))


def take_batch(engine: Any, batch: Any) -> list[Any]:
    """This rank's micro-batches of a global one."""
    from tests.parallel.test_layouts import mine

    p = engine.config.parallel
    return mine(batch, engine.topology, engine.config.train.micro_batch, p.is_ring)


def copy_state(engine: Any) -> dict[str, Tensor]:
    """Weights and moments over the data ranks, this rank's compute copies, and the optimizer's own state."""
    from megastable.engine.flatstate import KINDS

    flat = engine.flat_state()
    engine.zero.wait_for_weights()
    found = {f"{kind}/{name}": t for kind in KINDS for name, t in flat.gather_shards(kind).items()}
    for index, parameter in enumerate(engine.ds.module.parameters()):
        found[f"low/{index}"] = getattr(parameter, "ds_tensor", parameter).detach().float().clone()
    return found | {f"inner/{name}": t.detach().cpu().clone() for name, t in engine.optimizer_state().items()}


def are_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())
