"""A step that the probe looks at: the same loss, gradients and update bit for bit, and no more memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from megastable.config.tree import RunConfig
from megastable.data.loader import MicroBatch
from megastable.parallel.layout import Layout
from megastable.parallel.topology import Topology
from tests.distributed import run_ranks
from tests.parallel.compiling import without_kernels
from tests.parallel.test_layouts import OLMO2, batches, config
from tests.patience import PATIENCE

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp3-tied": (3, {"tied": True, "precision": "bf16", "model": {"layers": 2}}),
    "context2-olmo2-full": (
        2, {"context": 2, "recompute": "full", "model": OLMO2 | {"layers": 2}, "precision": "bf16"},
    ),
    "tp2-pp2-sequence-selective": (
        4,
        {
            "tensor": 2, "pipeline": 2, "sequence": True, "recompute": "selective", "micro_batch": 2,
            "model": {"layers": 2},
        },
    ),
    "zero3-fp16": (2, {"zero": 3, "precision": "fp16", "model": {"layers": 2}}),
}  # fmt: skip


def saved_bytes(step: Callable[[], Any], parameters: Iterable[torch.Tensor]) -> int:
    """What autograd keeps for the backward passes of a step, every storage once, without the weights."""
    kept: dict[int, torch.Tensor] = {}
    weights = {p.untyped_storage().data_ptr() for p in parameters}

    def pack(x: torch.Tensor) -> torch.Tensor:
        # Held until the end of the step, so that no other tensor gets its address.
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        step()
    return sum(x.untyped_storage().nbytes() for address, x in kept.items() if address not in weights)


def shared_out(batch: Any, topology: Topology, c: RunConfig) -> list[MicroBatch]:
    """A rank's part of the first samples of a batch, as many as the global batch of `c` has."""
    tokens, labels, segments = batch
    layout, size = topology.layout, c.train.global_batch
    part = torch.arange(tokens.shape[1]).chunk(layout.context)[topology.context_rank]
    index = torch.arange(size).view(-1, layout.samples, c.train.micro_batch)[:, topology.sample_rank]
    return [MicroBatch(tokens[i][:, part], labels[i][:, part], i, segments[i]) for i in index]


def both_ways(c: RunConfig, world: int) -> list[dict[str, Any]]:
    """Of a rank: the same step from the same state, as it is and looked at."""
    import torch.distributed as dist

    from megastable.config import deepspeed_json
    from megastable.engine.engine import Engine
    from megastable.engine.flatstate import KINDS

    p = c.parallel
    layout = Layout(p.tensor, p.pipeline, deepspeed_json.data_parallel(c, world), p.context)
    topology = Topology(layout, dist.get_rank(), timeout=PATIENCE)
    with without_kernels():
        engine = Engine(c, deepspeed_json.build(c, world), topology)
        assert engine.kernels.compile is c.kernels.compile
        first, second = (shared_out(batch, topology, c) for batch in batches(apart=True)[:2])
        engine.train_step(first, 1e-3, lambda m: m.finite)
        state = {name: t.clone() for name, t in engine.optimizer_state().items()}
        found = []
        for watched in (False, True):
            engine.restore_optimizer_state(state)
            engine.refresh_weights()
            seen: dict[str, Any] = {}

            def judge(_: Any, seen: dict[str, Any] = seen) -> bool:
                pieces = engine.zero.gradients(engine.flat_state().fragments)
                seen["gradients"] = {str(key): piece.clone() for key, piece in pieces.items()}
                return True

            def step(seen: dict[str, Any] = seen, judge: Any = judge) -> None:
                seen["measured"], seen["applied"] = engine.train_step(second, 1e-3, judge)

            if watched:
                engine.probe.watch()
            random = torch.get_rng_state()
            seen["bytes"] = saved_bytes(step, engine.ds.module.parameters())
            seen["random"] = torch.equal(torch.get_rng_state(), random)
            seen["layers"] = engine.statistics().layers
            flat = engine.flat_state()
            seen["state"] = {f"{kind}/{n}": t.clone() for kind in KINDS for n, t in flat.shards(kind).items()}
            found.append(seen)
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_watched_step_is_the_step(name: str) -> None:
    """Compiled (but under ZeRO 3): what is looked at must not run in another way."""
    world, parts = LAYOUTS[name]
    c = config(**{"micro_batch": 2 if world == 3 else 4} | parts)
    train = c.train.model_copy(update={"global_batch": 6 if world == 3 else c.train.global_batch})
    kernels = c.kernels.model_copy(update={"compile": c.parallel.zero < 3})
    c = c.model_copy(update={"train": train, "kernels": kernels})
    for plain, watched in run_ranks(world, both_ways, c, world):
        assert plain["applied"] and watched["applied"]
        assert torch.equal(plain["measured"].losses, watched["measured"].losses)
        assert plain["measured"].grad_norm == watched["measured"].grad_norm
        assert same(plain["gradients"], watched["gradients"]) and same(plain["state"], watched["state"])
        assert watched["bytes"] == plain["bytes"] > 0
        assert plain["random"] and watched["random"]
        assert not plain["layers"] and watched["layers"]["blocks.0"]["attention_entropy"] > 0
