"""From bf16 gradients to the update, tensor by tensor: as exact as fp32 sums allow.

The input of the reference are the bf16 gradients of every micro-batch and rank, as autograd gives them. Their mean over
the data-parallel ranks, norm, clipping and AdamW are written out here in fp64. What goes in is held against
the gradient of a plain fp32 model at the same weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.engine.flatstate import KINDS, FlatState
from megastable.parallel.sharding import join_shards, placement_of
from tests import reference
from tests.distributed import run_ranks
from tests.engine.engines import build_engine, take_batch
from tests.parallel.test_layouts import RATES, batches, config, plain, relative

STEPS = 2
# How far bf16's gradients may be from fp32's: of each tensor in all (measured up to 0.031, in QK-norms), and of all
# tensors in their length along fp32's (6e-4).
BF16, SCALE = 0.06, 3e-3
Pieces = dict[tuple[str, int], Tensor]  # by name and first element, flat


def pieces(flat: FlatState, kind: str) -> Pieces:
    found = {}
    for f in flat.fragments:
        piece = flat.view_piece(f, kind)
        found[f.name, f.start] = torch.zeros(f.numel) if piece is None else piece.float().clone()
    return found


def steps_of_rank(c: RunConfig, apart: bool) -> dict[str, Any]:
    """What goes into the sums of one rank, and which part of their result it has."""
    engine = build_engine(c)
    parameters = {placement_of(p).name: p for p in engine.ds.module.parameters()}
    seen: dict[str, list[Tensor]] = defaultdict(list)
    for name, parameter in parameters.items():
        parameter.register_hook(lambda g, name=name: seen[name].append(g.detach().clone()))
    steps = []
    for batch, lr in list(zip(batches(apart, c.train.global_batch), RATES, strict=True))[:STEPS]:
        seen.clear()
        flat, summed = engine.flat_state(), {}

        def judge(measured: Any, flat: FlatState = flat, summed: Pieces = summed) -> bool:
            gradients = engine.zero.view_gradients(flat.fragments)
            for f in flat.fragments:
                summed[f.name, f.start] = gradients[f.group, f.offset].view(-1)[: f.numel].clone()
            return bool(measured.finite)

        before = {kind: pieces(flat, kind) for kind in KINDS}
        measured, applied = engine.train_step(take_batch(engine, batch), lr, judge)
        assert applied
        after = {kind: pieces(flat, kind) for kind in KINDS}
        found = {"seen": dict(seen), "summed": summed, "norm": measured.grad_norm}
        steps.append(found | {"before": before, "after": after})
    engine.zero.wait_for_weights()
    return {
        "steps": steps,
        "tensor": engine.topology.tensor_rank,
        "shapes": {f.name: f.shape for f in flat.fragments},
        "placements": {name: placement_of(p) for name, p in parameters.items()},
        "weights": {name: p.detach() for name, p in parameters.items()} if c.parallel.zero < 3 else {},
    }


Whole = dict[tuple[str, int], Tensor]  # by name and tensor rank


def joined(ranks: list[dict[str, Any]], parts: list[Pieces]) -> Whole:
    """The shards that the pieces of all ranks make; several copies of a piece must be the same bytes."""
    shapes = {name: shape for rank in ranks for name, shape in rank["shapes"].items()}
    found: Whole = {}
    for rank, held in zip(ranks, parts, strict=True):
        for (name, start), piece in held.items():
            key = name, rank["tensor"]
            flat = found.setdefault(key, torch.full((math.prod(shapes[name]),), math.nan))
            there = flat[start : start + len(piece)]
            assert (there.isnan() | (there == piece)).all(), f"{name}: copies differ"
            there.copy_(piece)
    assert not any(flat.isnan().any() for flat in found.values())
    return {(name, tensor): flat.view(shapes[name]) for (name, tensor), flat in found.items()}


def joined_whole(ranks: list[dict[str, Any]], parts: list[Pieces]) -> dict[str, Tensor]:
    """Whole tensors of the pieces of all ranks."""
    shards, tensor = joined(ranks, parts), 1 + max(rank["tensor"] for rank in ranks)
    placements = {name: placement for rank in ranks for name, placement in rank["placements"].items()}
    return {name: join_shards([shards[name, t] for t in range(tensor)], p) for name, p in placements.items()}


def adamw(c: RunConfig, state: list[Tensor], g: Tensor, lr: float, step: int) -> list[Tensor]:
    """Weight and moments after an update, fp64."""
    o, (w, m, v) = c.optimizer, (x.double() for x in state)
    beta1, beta2 = o.betas
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g.square()
    decay = o.weight_decay if w.dim() > 1 else 0.0
    away = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + o.eps)
    return [w * (1 - lr * decay) - lr * away, m, v]


@cache
def exact(model: ModelConfig, apart: bool, batch: int) -> dict[str, Tensor]:
    """Gradients of the first global batch at weights of bf16, in fp32."""
    weights, shape = plain(model, "bf16")
    leaves = {name: w.float().requires_grad_() for name, w in weights.items()}
    tokens, labels, segments = batches(apart, batch)[0]
    objective, _ = reference.losses(reference.logits(leaves, shape, tokens, segments), labels, model.z_loss)
    return dict(zip(leaves, torch.autograd.grad(objective, list(leaves.values())), strict=True))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulation-3": (1, {"batch": 6}),
    "dp2-full": (2, {"recompute": "full"}),
    "dp3": (3, {"batch": 6}),
    "tp2": (2, {"tensor": 2}),
    "tp2-sequence-dp2": (4, {"tensor": 2, "sequence": True}),
    "pp2-dp2-tied": (4, {"pipeline": 2, "tied": True}),
    "context2": (2, {"context": 2, "apart": True}),
    "zero2-dp3": (3, {"zero": 2, "batch": 6, "micro_batch": 1}),
    "zero3-dp3": (3, {"zero": 3, "batch": 6}),
}


@pytest.mark.quick("tp2", "dp3", "accumulation-3")
@pytest.mark.parametrize("name", LAYOUTS)
def test_train_step_sums_and_applies_bf16_gradients_in_fp32(name: str) -> None:
    world, options = LAYOUTS[name]
    options = {"model": {"layers": 2, "z_loss": 0.1}} | options  # a z-loss that tells in bf16
    apart = options.pop("apart", False)
    c = config(precision="bf16", **options)
    ranks = run_ranks(world, steps_of_rank, c, apart)
    p = c.parallel
    data = world // (p.tensor * p.pipeline)
    micro_batches = c.train.global_batch // c.train.micro_batch * p.context // data
    placements = {name: held for rank in ranks for name, held in rank["placements"].items()}
    for step, lr in zip(range(STEPS), RATES, strict=False):
        of = [rank["steps"][step] for rank in ranks]
        summed = joined(ranks, [s["summed"] for s in of])
        before, after = (
            {kind: joined(ranks, [s[when][kind] for s in of]) for kind in KINDS}
            for when in ("before", "after")
        )
        wanted: Whole = {}
        for rank, s in zip(ranks, of, strict=True):
            for parameter, gradients in s["seen"].items():
                assert len(gradients) == micro_batches
                assert {g.dtype for g in gradients} == {torch.bfloat16}
                key = parameter, rank["tensor"]
                wanted[key] = wanted.get(key, 0) + torch.stack(gradients).double().sum(0) / data
        assert summed.keys() == wanted.keys()
        for key, g in wanted.items():
            assert relative(summed[key], g) < 1e-6, (step, key)
        if step == 0:
            along = [0.0, 0.0]
            for parameter, g in exact(c.model, apart, c.train.global_batch).items():
                shards = [wanted[parameter, t] for t in range(p.tensor)]
                whole = join_shards(shards, placements[parameter]).double()
                assert relative(whole, g) < BF16, parameter
                along[0] += float((whole * g).sum())
                along[1] += float(g.double().square().sum())
            # Of all tensors together: a wrong factor shows, where roundings cancel.
            assert along[0] / along[1] == pytest.approx(1, abs=SCALE)
        counted = [g for (name, t), g in wanted.items() if t == 0 or placements[name].dim is not None]
        norm = math.sqrt(sum(float(g.square().sum()) for g in counted))
        assert norm > c.optimizer.clip  # else nothing is clipped
        for s in of:
            assert s["norm"] == pytest.approx(norm, rel=1e-6)
        for key, total in summed.items():
            # Of the sums in fp32: where they cancel, Adam makes much of their last bit.
            g = total.double() * (c.optimizer.clip / (norm + 1e-6))
            expected = adamw(c, [before[kind][key] for kind in KINDS], g, lr, step + 1)
            w, m, v = (after[kind][key].double() for kind in KINDS)
            old = before["weight"][key].double()
            assert relative(w - old, expected[0] - old) < 1e-4, (step, key)
            assert relative(m, expected[1]) < 1e-6 and relative(v, expected[2]) < 1e-6, (step, key)
    for rank in ranks:
        for parameter, w in rank["weights"].items():
            assert torch.equal(w, after["weight"][parameter, rank["tensor"]].to(torch.bfloat16)), parameter
