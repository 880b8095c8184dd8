"""Under sequence parallelism a layer keeps its shard and gathers again: the same numbers, and the bytes of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megastable.config.tree import RunConfig
from megastable.engine.flatstate import KINDS
from megastable.model.gpt import Block
from megastable.model.kernels import Kernels
from megastable.parallel.topology import TensorParallel
from megastable_tools.plan.activations import PlannedKernels, count_kept_bytes, list_block_operations
from tests.distributed import run_ranks
from tests.engine.engines import build_engine, take_batch
from tests.parallel.compiling import without_kernels
from tests.parallel.test_layouts import batches
from tests.parallel.test_layouts import config as layout_config

LENGTH, MICRO_BATCH, HIDDEN = 64, 2, 64


def config(norms: str, precision: str, **parallel: Any) -> RunConfig:
    model = dict(
        layers=1, hidden=HIDDEN, heads=4, kv_heads=2, ffn=128, sequence_length=LENGTH, vocab_size=500, norms=norms,
    )  # fmt: skip
    return RunConfig.model_validate(
        {
            "model": model,
            "parallel": {"tensor": 2, "sequence": True} | parallel,
            "train": {"micro_batch": MICRO_BATCH, "global_batch": MICRO_BATCH},
            "precision": {"kind": precision},
        }
    )


def run_block(c: RunConfig, compiled: bool) -> tuple[int, list[Tensor]]:
    """Of a rank: bytes saved for the backward pass, every storage once, without weights and tables; output and
    gradients."""
    import torch.distributed as dist

    p = c.parallel
    tp = TensorParallel(dist.group.WORLD, dist.get_rank(), 2, True, p.gathers_again, p.tensor_overlap)
    torch.manual_seed(dist.get_rank())
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[c.precision.kind]
    block = Block(c.model, tp, 0, p.recompute, Kernels("sdpa", "chunked", compiled))
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0.5)
    block.to(dtype)
    shape = LENGTH // 2, MICRO_BATCH, HIDDEN
    x, upstream = (torch.randn(shape).to(dtype) for _ in range(2))
    x.requires_grad_()
    places = block.attention.find_places(LENGTH, None, x.device)
    others = {t.untyped_storage().data_ptr() for t in [*block.parameters(), places.cos, places.sin]}
    kept: dict[int, Tensor] = {}

    def pack(saved: Tensor) -> Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved  # alive: no other tensor gets its address
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = block(x)
    # Of one dimension: weights of norms in fp32.
    counted = [saved for address, saved in kept.items() if address not in others and saved.dim() > 1]
    y.backward(upstream)
    return (
        sum(saved.untyped_storage().nbytes() for saved in counted),
        [y.detach(), x.grad, *(parameter.grad for parameter in block.parameters())],  # type: ignore[list-item]
    )


CASES = [
    (norms, precision, recompute)
    for norms, precision in (("before", "bf16"), ("after", "fp32"))
    for recompute in ("none", "selective", "full")
]


def run_both_ways(compiled: bool) -> dict[tuple[str, str, str], list[tuple[int, int, list[Tensor]]]]:
    """Of a rank, by case, keeping what was gathered and gathering again, whole and in chunks: bytes saved and planned,
    and the tensors."""
    found = {}
    with without_kernels():
        for norms, precision, recompute in CASES:
            ways = found[norms, precision, recompute] = []
            for is_kept, chunks in ((True, 1), (False, 1), (True, 4), (False, 4)):
                ways_asked = {"recompute": recompute, "keep_gathered": is_kept, "tensor_overlap": chunks}
                c = config(norms, precision, **ways_asked)
                saved, tensors = run_block(c, compiled)
                planned = list_block_operations(c, PlannedKernels("sdpa", "chunked", compiled, gpu=False))
                ways.append((saved, count_kept_bytes(planned), tensors))
    return found


@pytest.mark.quick("False")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_keeps_its_shards_and_gives_the_same_bytes(compiled: bool) -> None:
    for rank in run_ranks(2, run_both_ways, compiled):
        for (norms, precision, recompute), (kept, again, *in_chunks) in rank.items():
            for way in (again, *in_chunks):
                assert all(a.equal(b) for a, b in zip(kept[2], way[2], strict=True)), (norms, recompute)
            assert [way[:2] for way in in_chunks] == [kept[:2], again[:2]]
            shard = LENGTH // 2 * MICRO_BATCH * HIDDEN * (4 if precision == "fp32" else 2)
            assert kept[0] - again[0] == kept[1] - again[1] == (recompute != "full") * 2 * shard
            if not compiled:
                assert (kept[0], again[0]) == (kept[1], again[1]), (norms, precision, recompute)


STEPS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "selective": {"recompute": "selective"},
    "zero3": {"zero": 3, "precision": "bf16"},
    "current": {"fp8": "current"},
    "delayed": {"fp8": {"recipe": "delayed", "history": 2}},
    "block": {"fp8": "block"},
    "pp2": {"pipeline": 2, "precision": "bf16"},
    "dp2-zero2": {"zero": 2, "precision": "bf16"},
}


def train_both_ways(names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Of a rank: losses, norms, weights and moments of three steps, keeping what was gathered and gathering again."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        for is_kept in (True, False):
            options = dict(STEPS[name])
            fp8 = options.pop("fp8", None)
            c = layout_config(tensor=2, sequence=True, keep_gathered=is_kept, **options)
            if fp8 is not None:
                sizes = {"hidden": 128, "ffn": 256}  # whole blocks
                c = layout_config(
                    tensor=2, sequence=True, keep_gathered=is_kept, precision="bf16", model=sizes
                )
                tree = c.model_dump(exclude_unset=True)
                c = RunConfig.model_validate(tree | {"precision": {"kind": "bf16", "fp8": fp8}})
            engine = build_engine(c)
            numbers: list[float] = []
            for batch in batches()[:3]:
                measured, applied = engine.train_step(take_batch(engine, batch), 1e-3, lambda m: m.finite)
                assert applied
                numbers += [measured.loss, measured.grad_norm, *measured.losses.tolist()]
            flat = engine.flat_state()
            state = {f"{kind}/{n}": t.clone() for kind in KINDS for n, t in flat.gather_shards(kind).items()}
            found.setdefault(name, []).append({"numbers": numbers, "state": state})
    return found


@pytest.mark.quick("2")
@pytest.mark.parametrize("world", [2, 4])
def test_steps_that_gather_again_are_the_same_bytes(world: int) -> None:
    names = [name for name in STEPS if (name in ("pp2", "dp2-zero2")) == (world == 4)]
    for rank in run_ranks(world, train_both_ways, names):
        for name in names:
            kept, again = rank[name]
            assert kept["numbers"] == again["numbers"], name
            assert kept["state"].keys() == again["state"].keys()
            assert all(kept["state"][key].equal(again["state"][key]) for key in kept["state"]), name
