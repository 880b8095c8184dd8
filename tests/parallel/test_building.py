"""What building a model takes of memory on every rank, and that every rank gets its part of the same weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megastable.config import RunConfig
from megastable.model.init import whole_weight
from megastable.parallel.layout import Layout
from megastable.parallel.sharding import Placement, placement_of, shard
from tests.distributed import run_ranks

LAYERS, SCRATCH = 12, 4096  # elements drawn at a time: of a small model the usual chunk would be all
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def config(world: int, tied: bool = False, fp8: str | None = None, kind: str = "bf16", **parallel: Any) -> RunConfig:
    data = world // (parallel.get("tensor", 1) * parallel.get("pipeline", 1))
    model = dict(
        layers=LAYERS, hidden=64, heads=4, kv_heads=2, ffn=160, sequence_length=32, vocab_size=500, vocab_multiple=4,
        tied=tied,
    )  # fmt: skip
    precision = {"kind": kind} | ({"fp8": fp8} if fp8 else {})
    train = {"global_batch": data, "micro_batch": 1}
    return RunConfig.model_validate(
        {"model": model, "precision": precision, "train": train, "parallel": parallel}
    )


@dataclass
class Built:
    """On one rank. module, engine: most bytes at once until DeepSpeed gets the module, and until the engine is there;
    whole, largest: elements of this tensor rank's model, of its largest layer; parts: that this rank keeps."""

    module: int
    engine: int
    whole: int
    largest: int
    parts: int
    weights: dict[str, torch.Tensor]
    placements: dict[str, Placement]
    tensor_rank: int


def build(c: RunConfig, world: int) -> Built:
    import deepspeed
    import torch.distributed as dist

    from megastable import deepspeed_config
    from megastable.engine import Engine
    from megastable.model import init
    from megastable.parallel.topology import Topology

    init.CHUNK = SCRATCH
    p = c.parallel
    topology = Topology(Layout(p.tensor, p.pipeline, world // (p.tensor * p.pipeline)), dist.get_rank(), 120)
    initialize, made = deepspeed.initialize, []

    def marked(**given: Any) -> Any:
        with torch.profiler.record_function("initialize"):
            return initialize(**given)

    deepspeed.initialize = marked
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        made.append(Engine(c, deepspeed_config.build(c, world), topology))
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.events()
    (begun,) = [e.start_ns() for e in events if e.name() == "initialize"]
    now, most = 0, {True: 0, False: 0}
    for at, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += size
        most[at < begun] = max(most[at < begun], now)
    flat = made[0].flat_state()
    of = {
        name: math.prod(getattr(q, "ds_shape", q.shape))
        for name, q in made[0].ds.module.named_parameters()
    }
    by_layer: dict[str, int] = {}
    for name, size in of.items():
        by_layer[name.partition(".")[0]] = by_layer.get(name.partition(".")[0], 0) + size
    return Built(
        most[True], max(most.values()), sum(of.values()), max(by_layer.values()),
        sum(fragment.numel for fragment in flat.fragments),
        flat.shards("weight"),
        {placement_of(q).name: placement_of(q) for q in made[0].ds.module.parameters()},
        topology.tensor_rank,
    )  # fmt: skip


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp3": (3, {}),
    "dp3-tied": (3, {"tied": True}),
    "tp2-dp2": (4, {"tensor": 2}),
    "tp2-dp3-fp8": (6, {"tensor": 2, "fp8": "current"}),
}


@pytest.mark.parametrize("name", CASES)
def test_zero_3_builds_the_parts_and_no_more_than_a_layer(name: str) -> None:
    """Elements, by their bytes, of host and device together: on a CPU they are one memory."""
    world, parts = CASES[name]
    c = config(world, zero=3, **parts)
    for built in run_ranks(world, build, c, world):
        element, threads = 2, 2
        # A thread draws in fp32 and has a copy of it in the parameter's dtype, of this rank's columns.
        scratch = threads * 2 * (4 + element + 4) * SCRATCH
        taken = (built.module - scratch) // element
        print(name, built.module, built.engine, built.whole, built.largest, built.parts)
        assert taken <= built.parts + built.largest + 4096, (name, built.whole)
        assert built.module < element * built.whole, name
        check_weights(c, built)


def check_weights(c: RunConfig, built: Built) -> None:
    """fp32 master weights are those of the parameters that compute, which are rounded from fp32."""
    assert built.weights
    for name, found in built.weights.items():
        placement, shape = built.placements[name], list(found.shape)
        if placement.dim is not None:
            shape[placement.dim] = sum(placement.sections)
        whole = whole_weight(placement, tuple(shape), c.model, c.run.seed)
        wanted = shard(whole, placement, built.tensor_rank, c.parallel.tensor)
        assert torch.equal(found, wanted.to(DTYPES[c.precision.kind]).float()), name


OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2-zero2-fp32": (2, {"zero": 2, "kind": "fp32"}),
    "zero3-fp16": (2, {"zero": 3, "kind": "fp16"}),
    "pp2-tied": (2, {"pipeline": 2, "tied": True}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_one_copy_of_the_weights_is_built(name: str) -> None:
    """In the dtype that they compute in: there is no fp32 copy that DeepSpeed would convert."""
    world, parts = OTHERS[name]
    c = config(world, **parts)
    for built in run_ranks(world, build, c, world):
        element = DTYPES[c.precision.kind].itemsize
        scratch = 2 * 2 * (4 + element + 4) * SCRATCH
        print(name, built.module, built.engine, built.whole)
        assert built.module <= element * (built.whole + 4096) + scratch, name
        check_weights(c, built)
