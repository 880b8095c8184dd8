"""What building a model takes of memory on every rank, and that every rank gets its part of the same weights."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megastable.config.tree import RunConfig
from megastable.model.init import whole_weight
from megastable.parallel.sharding import Placement, cut_shard, placement_of, shape_of
from tests.distributed import run_ranks
from tests.engine.engines import build_engine

LAYERS = 12
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def config(
    world: int, tied: bool = False, fp8: str | None = None, kind: str = "bf16", **parallel: Any
) -> RunConfig:
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
    """On one rank. module: most bytes of tensors at once until DeepSpeed gets the module; the chunks in which threads
    draw are not among them (see tests/model/test_init.py). whole, largest: elements of this tensor rank's model, of its
    largest layer; parts: that this rank keeps."""

    module: int
    whole: int
    largest: int
    parts: int
    weights: dict[str, torch.Tensor]
    placements: dict[str, Placement]
    tensor_rank: int


def build(c: RunConfig) -> Built:
    import deepspeed

    initialize = deepspeed.initialize

    def marked(**given: Any) -> Any:
        with torch.profiler.record_function("initialize"):
            return initialize(**given)

    deepspeed.initialize = marked
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        engine = build_engine(c)
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.events()
    (begun,) = [e.start_ns() for e in events if e.name() == "initialize"]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    most = max(itertools.accumulate(size for at, size in changes if at < begun))
    flat = engine.flat_state()
    of = {name: math.prod(shape_of(q)) for name, q in engine.ds.module.named_parameters()}
    by_layer: dict[str, int] = {}
    for name, size in of.items():
        by_layer[name.partition(".")[0]] = by_layer.get(name.partition(".")[0], 0) + size
    return Built(
        most, sum(of.values()), max(by_layer.values()),
        sum(fragment.numel for fragment in flat.fragments),
        flat.gather_shards("weight"),
        {placement_of(q).name: placement_of(q) for q in engine.ds.module.parameters()},
        engine.topology.tensor_rank,
    )  # fmt: skip


def check_weights(c: RunConfig, built: Built) -> None:
    """fp32 master weights are those of the parameters that compute, which are rounded from fp32."""
    assert built.weights
    for name, found in built.weights.items():
        placement, shape = built.placements[name], list(found.shape)
        if placement.dim is not None:
            shape[placement.dim] = sum(placement.sections)
        whole = whole_weight(placement, tuple(shape), c.model, c.run.seed)
        wanted = cut_shard(whole, placement, built.tensor_rank, c.parallel.tensor)
        assert torch.equal(found, wanted.to(DTYPES[c.precision.kind]).float()), name


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2-zero2-fp32": (2, {"zero": 2, "kind": "fp32"}),
    "pp2-tied": (2, {"pipeline": 2, "tied": True}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}),
    "zero3-dp3-tied": (3, {"zero": 3, "tied": True}),
    "zero3-dp2-fp16": (2, {"zero": 3, "kind": "fp16"}),
    "zero3-tp2-dp3-fp8": (6, {"zero": 3, "tensor": 2, "fp8": "current"}),
}


@pytest.mark.quick("one", "pp2-tied")
@pytest.mark.parametrize("name", CASES)
def test_engine_builds_one_copy_of_the_weights(name: str) -> None:
    """In the dtype that they compute in: there is no fp32 copy that DeepSpeed would convert. Under ZeRO 3 the parts,
    and a layer. On a CPU host and device are one memory."""
    world, options = CASES[name]
    c = config(world, **options)
    for built in run_ranks(world, build, c):
        most = built.whole + 500
        if c.parallel.zero == 3:  # a part of each of 11 parameters a block, and of some more
            most = built.parts + 13 * LAYERS + built.largest
        assert built.module <= DTYPES[c.precision.kind].itemsize * most, (
            f"{built.module:,} bytes of {built.whole:,}"
        )
        check_weights(c, built)
