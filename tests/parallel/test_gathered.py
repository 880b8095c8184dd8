"""ZeRO 3 gives back what it gathered: no layer keeps a whole weight from the forward to the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megastable.base.products import is_cast, linear, linear_of_parameter
from megastable.config.tree import RunConfig
from megastable.data.loader import MicroBatch
from tests.distributed import run_ranks
from tests.engine.engines import build_engine

LENGTH, BLOCKS = 8, 6
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "plain": {},  # the same, by F.linear
    "full": {"parallel": {"recompute": "full"}},
    "FP8, off": {"precision": {"fp8": "current"}},
}


def config(parallel: dict[str, Any] | None = None, **parts: Any) -> RunConfig:
    model = dict(
        layers=BLOCKS, hidden=128, heads=4, kv_heads=2, ffn=256, sequence_length=LENGTH, vocab_size=500,
        vocab_multiple=4,
    )  # fmt: skip
    tree = {"model": model, "train": {"global_batch": 2, "micro_batch": 1}}
    return RunConfig.model_validate(tree | {"parallel": {"zero": 3} | (parallel or {})} | parts)


def by_torch(x: Tensor, w: Tensor) -> Tensor:
    """`linear` with what autograd saves by itself."""
    return F.linear(x.float(), w.float()).to(x.dtype) if is_cast(x) else F.linear(x, w)


def kept(case: str) -> tuple[int, int, list[float]]:
    """Of a rank of two: bytes that a forward pass leaves behind, those of the gathered model, and losses and gradient
    norms of two steps before it."""
    import torch.distributed as dist

    keys = "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold"
    engine = build_engine(config(**CASES[case]), **{f"stage3_{key}": 1000 for key in keys})
    if case == "FP8, off":
        assert engine.fp8 is not None
        engine.fp8.on = False
    for part in engine.ds.module.modules() if case == "plain" else ():
        if hasattr(part, "product"):
            part.product = by_torch
    g = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, 500, (1, LENGTH + 1), generator=g)
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:], torch.tensor([dist.get_rank()]), None)
    numbers = []
    for _ in range(2):
        measured, _ = engine.train_step([batch], 1e-3, lambda m: m.finite)
        numbers += [measured.loss, measured.grad_norm]
    # The least of some: gloo's threads let go of what they have sent when they come to it.
    left = min(net_of(engine, batch) for _ in range(3))
    whole = sum(p.ds_numel for p in engine.ds.module.parameters()) * 2
    return left, whole, numbers


def net_of(engine: Any, batch: MicroBatch) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        loss = engine.ds(*engine._inputs(batch))
    events = profile.profiler.kineto_results.events()
    net = sum(e.nbytes() for e in events if e.name() == "[memory]")
    engine.ds.backward(loss)
    engine._refuse_update()
    return net


def all_kept() -> dict[str, tuple[int, int, list[float]]]:
    return {case: kept(case) for case in CASES}


@pytest.mark.slow
def test_a_forward_pass_keeps_no_weights_and_has_the_same_numbers() -> None:
    """Activations of 8 tokens are little beside weights of 128 x 128."""
    for rank in run_ranks(2, all_kept):
        assert rank["none"][2] == rank["plain"][2] == rank["full"][2] == rank["FP8, off"][2]
        for case, (left, whole, _) in rank.items():
            assert (left > whole) if case == "plain" else (left < 0.4 * whole), (
                f"{case}: {left:,} of {whole:,}"
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 3, 40), (21, 40)])
def test_the_product_is_the_plain_one_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(1)
    x, w, upstream = (torch.randn(*s, generator=g).to(dtype) for s in (shape, (24, 40), (*shape[:-1], 24)))
    found = []
    for product in (linear, linear_of_parameter):
        leaves = x.clone().requires_grad_(), torch.nn.Parameter(w.clone())
        y = product(*leaves)
        y.backward(upstream)
        found.append((y, leaves[0].grad, leaves[1].grad))
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None and a.dtype == b.dtype == dtype and torch.equal(a, b)
