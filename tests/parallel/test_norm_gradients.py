"""The gradients of norms are summed over the tensor group in one message per micro-batch: the bytes of one each."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from benchmarks.scaling import Count
from megastable.engine.flatstate import KINDS
from megastable.model.block_parts import RMSNorm
from tests.distributed import run_ranks
from tests.engine.engines import build_engine, take_batch
from tests.parallel.compiling import without_kernels
from tests.parallel.test_compiled import with_compile
from tests.parallel.test_layouts import batches, config

CASES: dict[str, dict[str, Any]] = {
    "sequence": {"sequence": True},
    "bf16": {"sequence": True, "precision": "bf16"},
    "heads alone, full": {"recompute": "full", "precision": "bf16"},
    "zero2": {"sequence": True, "zero": 2, "precision": "bf16", "recompute": "selective"},
    "zero3": {"sequence": True, "zero": 3, "precision": "bf16"},
    "compiled": {"sequence": True, "recompute": "full"},
    "pp2": {"sequence": True, "pipeline": 2, "precision": "bf16", "recompute": "full"},
    "dp2": {"sequence": True, "precision": "bf16"},
}
WORLD = {"pp2": 4, "dp2": 4}


def train_alone_and_together(names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Of a rank, with a message for each norm and with one for all: losses, norms, weights and moments of three steps;
    and the fp32 all-reduces of the tensor group in the last of them, with the sizes of norms or all of them. [bytes]"""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        for is_alone in (True, False):
            c = config(tensor=2, micro_batch=2, **CASES[name])
            with without_kernels(), pytest.MonkeyPatch.context() as patch:
                if is_alone:
                    patch.setattr("megastable.engine.engine.share_norm_weights", lambda module: None)
                engine = build_engine(with_compile(c, name == "compiled"))
                modules = engine.ds.module.modules()
                norms = [part for part in modules if isinstance(part, RMSNorm) and part.tp.size > 1]
                numbers: list[float] = []
                for batch in batches()[:3]:
                    count = Count()
                    with (
                        nullcontext() if name == "compiled" else count
                    ):  # which compiled code does not run under
                        measured, _ = engine.train_step(take_batch(engine, batch), 1e-3, lambda m: m.finite)
                    numbers += [measured.loss, measured.grad_norm, *measured.losses.tolist()]
                numbers += engine.evaluate_samples(take_batch(engine, batch)).tolist()
            group = engine.topology.tensor_group.group_name
            sizes = [
                4 * (norm.weight.ds_numel if c.parallel.zero == 3 else norm.weight.numel()) for norm in norms
            ]
            calls = {size: count.calls[group, "all-reduce", size] for size in {*sizes, sum(sizes)}}
            flat = engine.flat_state()
            state = {f"{kind}/{n}": t.clone() for kind in KINDS for n, t in flat.gather_shards(kind).items()}
            steps = c.train.global_batch // c.train.micro_batch // engine.topology.layout.data
            seen = {
                "numbers": numbers,
                "state": state,
                "sizes": sizes,
                "calls": calls,
                "micro_batches": steps,
            }
            found.setdefault(name, []).append(seen)
    return found


@pytest.mark.quick("2")
@pytest.mark.parametrize("world", [2, 4])
def test_one_message_for_all_norms_gives_the_bytes_of_one_each(world: int) -> None:
    names = [name for name in CASES if WORLD.get(name, 2) == world]
    for rank in run_ranks(world, train_alone_and_together, names):
        for name in names:
            alone, together = rank[name]
            assert alone["numbers"] == together["numbers"], name
            assert alone["state"].keys() == together["state"].keys()
            assert all(torch.equal(alone["state"][key], together["state"][key]) for key in alone["state"]), (
                name
            )
            if name == "compiled":
                continue
            sizes, steps = together["sizes"], together["micro_batches"]
            each = {size: sizes.count(size) * steps for size in sizes} | {sum(sizes): 0}
            assert len(sizes) > 1 and alone["calls"] == each, name
            in_one = dict.fromkeys(sizes, 0) | {sum(sizes): steps}
            assert together["calls"] == (each if name == "zero3" else in_one), name
