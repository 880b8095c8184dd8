"""Every layout against a plain single-process reference: losses, gradient norms, final weights and moments."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.data.loader import MicroBatch, segments_of
from megastable.engine.flatstate import KINDS
from megastable.model.gpt import GPT
from megastable.parallel.layout import find_own_tokens
from megastable.parallel.sharding import Placement, join_shards, placement_of
from megastable.parallel.topology import TensorParallel, Topology
from tests import reference
from tests.distributed import run_ranks
from tests.engine.engines import build_engine, take_batch
from tests.shapes import shape_of

# A step on first weights, one on moments of a single step, and two more: a fault shows in its step or in the next.
VOCABULARY, LENGTH, BATCH, STEPS = 250, 32, 8, 4
SEED = RunConfig().run.seed
RATES = [3e-3 * (i + 1) / 5 for i in range(STEPS)]


def config(tied: bool = False, batch: int = BATCH, **parts: Any) -> RunConfig:
    model = dict(
        layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, sequence_length=LENGTH, vocab_size=VOCABULARY, tied=tied,
        vocab_multiple=64, init_std=0.1,
    )  # fmt: skip
    tree: dict[str, Any] = {
        "model": model | parts.pop("model", {}),
        "precision": {"kind": parts.pop("precision", "fp32")},
        "kernels": parts.pop("kernels", {}),
        "train": {"global_batch": batch, "micro_batch": parts.pop("micro_batch", 2), "steps": STEPS},
        "parallel": parts,
    }
    return RunConfig.model_validate(tree)


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # tokens, labels, segments


def batches(apart: bool = False, batch: int = BATCH) -> list[Batch]:
    """Global batches of random tokens; with `apart`, documents of random lengths in them."""
    g = torch.Generator().manual_seed(7)
    made = []
    for _ in range(STEPS):
        t = torch.randint(0, VOCABULARY, (batch, LENGTH + 1), generator=g)
        starts = (torch.rand(batch, LENGTH, generator=g) < 0.1).int()
        made.append(
            (t[:, :-1].contiguous(), t[:, 1:].contiguous(), starts.cumsum(1).int() if apart else None)
        )
    return made


def growing_batches() -> list[Batch]:
    """Of other sizes, of which the fullest grows and, as after a rewind, falls; their samples are whole, or cut."""
    g = torch.Generator().manual_seed(5)
    made: list[Batch] = []
    for size, lengths in ((4, (8,)), (12, (16, 32)), (8, None), (12, (8, 16))):
        t = torch.randint(0, VOCABULARY, (size, LENGTH + 1), generator=g)
        cut = None
        if lengths is not None:
            of = np.array([lengths[i * len(lengths) // size] for i in range(size)])
            cut = torch.from_numpy(segments_of(t[:, :-1].numpy(), None, of))
        made.append((t[:, :-1].contiguous(), t[:, 1:].contiguous(), cut))
    return made


def mine(batch: Batch, topology: Topology, micro_batch: int, ring: bool = False) -> list[MicroBatch]:
    """This rank's part of a global batch: of the samples, and with context parallelism of their tokens."""
    tokens, labels, segments = batch
    layout = topology.layout
    own_tokens = find_own_tokens(LENGTH, layout.context, topology.context_rank, ring)
    part = torch.tensor([token for tokens in own_tokens for token in tokens])
    index = torch.arange(len(tokens)).view(-1, layout.samples, micro_batch)[:, topology.sample_rank]
    return [
        MicroBatch(tokens[i][:, part], labels[i][:, part], i, None if segments is None else segments[i])
        for i in index
    ]


def state_of(engine: Any) -> dict[str, Any]:
    """This rank's part of weights and moments, and where it belongs; `merge` takes those of all ranks."""
    flat, topology = engine.flat_state(), engine.topology
    return {
        "state": {kind: flat.gather_shards(kind) for kind in KINDS},
        "placements": {placement_of(p).name: placement_of(p) for p in engine.ds.module.parameters()},
        "coordinates": topology.layout.coordinates_of(topology.rank),
    }


def train_rank(c: RunConfig, apart: bool, growing: bool) -> dict[str, Any]:
    """What one rank sees of the steps: losses, norms, and its part of the final state. Those of growing size are
    measured before they are done, after one of another size, as a rewind does."""
    engine = build_engine(c)
    losses, norms, samples = [], [], []
    made = growing_batches() if growing else batches(apart, c.train.global_batch)
    for number, (batch, lr) in enumerate(zip(made, RATES, strict=True)):
        micro = take_batch(engine, batch)
        if growing or (c.parallel.context > 1 and not samples):
            samples.append(engine.evaluate_samples(micro).tolist())
        if growing:
            engine.measure_step(take_batch(engine, made[number - 1]))
            before = engine.measure_step(micro)
        measured, applied = engine.train_step(micro, lr, judge=lambda m: m.finite)
        assert applied and measured.losses.numel() == len(batch[0])
        assert not growing or (before.loss, before.grad_norm) == (measured.loss, measured.grad_norm)
        losses.append(measured.loss)
        norms.append(measured.grad_norm)
        samples.append(measured.losses.tolist())
    if growing and c.precision.kind == "bf16":
        wrapper = "DeepSpeedZeroOptimizer_Stage3" if c.parallel.zero == 3 else "BF16_Optimizer"
        assert type(engine.optimizer).__name__ == wrapper
    final = engine.flat_state().sum_norms()
    return state_of(engine) | {
        "losses": losses, "norms": norms, "samples": samples, "final": (final.parameters, final.second_moment),
    }  # fmt: skip


def merge(ranks: list[dict[str, Any]], kind: str, tensor: int) -> dict[str, torch.Tensor]:
    """The whole model of all ranks' parts; copies on other data ranks and stages must be the same bytes."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    placements: dict[str, Placement] = {}
    for rank in ranks:
        placements |= rank["placements"]
        for name, value in rank["state"][kind].items():
            held = parts.setdefault(name, {}).setdefault(rank["coordinates"][2], value)
            assert torch.equal(held, value), f"{name}: copies differ"
    for name, by_rank in parts.items():
        if placements[name].dim is None:
            assert all(torch.equal(v, by_rank[0]) for v in by_rank.values()), f"{name}: replicas differ"
    return {name: join_shards([v[r] for r in range(tensor)], placements[name]) for name, v in parts.items()}


def plain(model: ModelConfig, precision: str = "fp32") -> tuple[dict[str, torch.Tensor], reference.Shape]:
    """The first weights, in the dtype to compute in, and what the reference must know of the model."""
    gpt = GPT(model, TensorParallel(), "none", SEED)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    weights = {placement_of(p).name: p.detach().to(dtype) for p in gpt.parameters()}
    return weights, shape_of(model, SEED)


@cache
def expected(
    model: ModelConfig, precision: str, apart: bool, batch: int, micro_batches: int, growing: bool
) -> Any:
    made = growing_batches() if growing else batches(apart, batch)
    return reference.train(*plain(model, precision), made, RATES, micro_batches)


@cache
def first_losses(model: ModelConfig, apart: bool, batch: int) -> list[float]:
    """Of every sample of the first batch, under the first weights."""
    weights, shape = plain(model)
    tokens, labels, segments = batches(apart, batch)[0]
    shape.samples = torch.arange(len(tokens))
    out = reference.logits(weights, shape, tokens, segments)
    return [float(reference.losses(one, label, 0.0)[1]) for one, label in zip(out, labels, strict=True)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


OLMO2 = {"qk_norm": "full", "norms": "after"}
QWEN2 = {"qk_norm": False, "qkv_bias": True}
LLAMA3 = {"rope_scaling": {"kind": "llama3", "factor": 8.0, "original_length": 16}}
THREE = {"heads": 3, "kv_heads": 1, "head_dim": 8}
# Losses and bias that matter in four steps.
EXPERTS = {
    "experts": {
        "count": 4, "top_k": 2, "ffn": 24, "shared": 1, "bias_rate": 0.02, "balance_loss": 0.1, "router_z_loss": 0.1,
    },
}  # fmt: skip
SIGMOID = {
    "experts": {
        "count": 6, "top_k": 3, "ffn": 16, "first_dense": 1, "gate": "sigmoid", "scale": 2.5, "bias_rate": 0.02,
        "balance_loss": 0.1, "balance_over": "step", "router_z_loss": 0.0,
    },
}  # fmt: skip
RING2 = {"context": 2, "context_by": "ring"}
# What only one of these has; every two parts of a layout meet in pairs.py, with every choice of the model.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulation-4": (1, {"micro_batch": 2}),
    "tp2": (2, {"tensor": 2}),
    "pp2-dp2": (4, {"pipeline": 2}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}),
    "zero2-dp2": (2, {"zero": 2}),
    "zero3-dp2": (2, {"zero": 3}),
    "zero2-dp3": (3, {"zero": 2, "batch": 6, "micro_batch": 1}),
    "zero3-tp2-dp2": (4, {"zero": 3, "tensor": 2}),
    "tied-pp2": (2, {"tied": True, "pipeline": 2}),
    # Five blocks: one stage has more weights than the other, and ZeRO cuts its embedding elsewhere.
    "tied-pp2-dp3": (6, {"tied": True, "pipeline": 2, "batch": 6, "micro_batch": 1, "model": {"layers": 5, "ffn": 32}}),
    "documents-tp2-sequence": (2, {"tensor": 2, "sequence": True, "apart": True, "recompute": "full"}),
    "documents-dropout-pp2": (2, {"pipeline": 2, "apart": True, "model": {"dropout": 0.2}}),
    "olmo2-sequence-tp2-pp2": (
        4, {"tensor": 2, "pipeline": 2, "sequence": True, "recompute": "full", "model": OLMO2},
    ),
    "context2-olmo2": (2, {"context": 2, "model": OLMO2}),
    "context2-tp2": (4, {"context": 2, "tensor": 2}),
    "context2-pp2": (4, {"context": 2, "pipeline": 2, "apart": True}),
    "context4": (4, {"context": 4}),
    "context2-zero2-qwen2-llama3-documents": (2, {"context": 2, "zero": 2, "apart": True, "model": QWEN2 | LLAMA3}),
    "ring2-olmo2": (2, RING2 | {"model": OLMO2}),
    "ring2-tp2-sequence-dropout": (4, RING2 | {"tensor": 2, "sequence": True, "model": {"dropout": 0.2}}),
    "ring2-pp2-documents-window": (4, RING2 | {"pipeline": 2, "apart": True, "model": {"window": 11}}),
    "ring4-3-heads-full": (4, {"context": 4, "context_by": "ring", "recompute": "full", "model": THREE}),
    "ring2-dp2-zero2-softcap-selective": (
        4, RING2 | {"zero": 2, "recompute": "selective", "model": {"attention_softcap": 5.0}},
    ),
    "experts": (1, {"model": EXPERTS}),
    "experts-dp2": (2, {"model": EXPERTS | {"layers": 3}}),
    "experts-tp2": (2, {"tensor": 2, "model": EXPERTS}),
    "experts-grouped-tp2-dp2-selective": (
        4, {"tensor": 2, "recompute": "selective", "model": EXPERTS, "kernels": {"experts": "grouped"}},
    ),
    "experts-sigmoid-tp2-sequence-full": (2, {"tensor": 2, "sequence": True, "recompute": "full", "model": SIGMOID}),
    "experts-sigmoid-pp2": (2, {"pipeline": 2, "model": SIGMOID | {"layers": 3}}),
    "experts-sigmoid-pp2-chunks": (2, {"pipeline": 2, "model_chunks": 2, "model": SIGMOID | {"layers": 4}}),
    "experts-pp2-zero-bubble": (2, {"pipeline": 2, "schedule": "zero_bubble", "model": EXPERTS}),
    "experts-context2-zero2": (2, {"context": 2, "zero": 2, "model": EXPERTS}),
    "experts-zero3-dp2-selective": (2, {"zero": 3, "recompute": "selective", "model": SIGMOID}),
    "experts-tied-tp2-pp2": (4, {"tensor": 2, "pipeline": 2, "tied": True, "model": EXPERTS}),
    "experts-ep2": (2, {"expert": 2, "model": EXPERTS | {"layers": 3}}),
    "experts-ep2-dp4-zero2": (4, {"expert": 2, "zero": 2, "micro_batch": 1, "model": EXPERTS}),
    "experts-sigmoid-ep2-dp4": (4, {"expert": 2, "micro_batch": 1, "model": SIGMOID | {"layers": 3}}),
    "experts-ep4-grouped": (4, {"expert": 4, "model": EXPERTS, "kernels": {"experts": "grouped"}}),
    "experts-ep2-tp2": (4, {"expert": 2, "tensor": 2, "model": EXPERTS}),
    "experts-sigmoid-ep2-tp2-sequence-full": (
        4, {"expert": 2, "tensor": 2, "sequence": True, "recompute": "full", "model": SIGMOID},
    ),
    "experts-sigmoid-ep2-pp2-chunks": (
        4, {"expert": 2, "pipeline": 2, "model_chunks": 2, "model": SIGMOID | {"layers": 4}},
    ),
    "experts-ep2-pp2-zero-bubble": (4, {"expert": 2, "pipeline": 2, "schedule": "zero_bubble", "model": EXPERTS}),
    "experts-ep2-tied-pp2": (4, {"expert": 2, "pipeline": 2, "tied": True, "model": EXPERTS}),
    "experts-ep2-context2-selective": (4, {"expert": 2, "context": 2, "recompute": "selective", "model": EXPERTS}),
    "growing": (1, {"growing": True}),
    "growing-zero2-dp2": (2, {"growing": True, "zero": 2}),
    "growing-zero3-dp2": (2, {"growing": True, "zero": 3}),
    "growing-pp2-dp2": (4, {"growing": True, "pipeline": 2}),
    "growing-tp2-pp2": (4, {"growing": True, "tensor": 2, "pipeline": 2}),
    "growing-tp2-sequence": (2, {"growing": True, "tensor": 2, "sequence": True}),
    "growing-ring2": (2, RING2 | {"growing": True}),
    "growing-context2": (2, {"growing": True, "context": 2}),
}  # fmt: skip


def compare(world: int, options: dict[str, Any], precision: str) -> None:
    options = dict(options)
    apart, growing = options.pop("apart", False), options.pop("growing", False)
    if growing:
        options |= {"batch": 12, "micro_batch": 1}
    if world == options.get("tensor", 1) * options.get("context", 1):
        options.setdefault("micro_batch", BATCH // 2)  # two of them, as with two data ranks; stages want more
    c = config(precision=precision, **options)
    ranks = run_ranks(world, train_rank, c, apart, growing)
    data = world // (c.parallel.tensor * c.parallel.pipeline * c.parallel.context)
    batch = c.train.global_batch
    parts = 4 if growing else batch // c.train.micro_batch
    assert parts % data == 0
    losses, norms, optimizer = expected(c.model, precision, apart, batch, parts, growing)
    exact_losses, exact_norms, exact = expected(c.model, "fp32", apart, batch, parts, growing)
    for rank in ranks:
        assert rank["losses"] == ranks[0]["losses"] and rank["norms"] == ranks[0]["norms"]
        assert rank["samples"] == ranks[0]["samples"]
        assert rank["final"] == ranks[0]["final"]
    if precision == "fp32" and not growing:
        # Of the first batch sample by sample, also as an evaluation, which drops nothing, tells them if it was asked.
        was_asked = c.parallel.context > 1
        for samples in ranks[0]["samples"][was_asked and c.model.dropout > 0 : 1 + was_asked]:
            assert samples == pytest.approx(first_losses(c.model, apart, batch), rel=1e-5)

    def close(
        got: torch.Tensor, wanted: torch.Tensor, unrounded: torch.Tensor, tolerance: float, what: str
    ) -> None:
        allowed = tolerance if precision == "fp32" else 3 * relative(wanted, unrounded)
        assert relative(got, wanted) <= allowed, f"{what}: {relative(got, wanted):.2e} > {allowed:.2e}"

    for what, got, wanted, unrounded in (
        ("loss", "losses", losses, exact_losses),
        ("norm", "norms", norms, exact_norms),
    ):
        close(torch.tensor(ranks[0][got]), torch.tensor(wanted), torch.tensor(unrounded), 1e-5, what)
        if precision == "fp32":
            assert ranks[0][got] == pytest.approx(wanted, rel=1e-5)
    for kind, values, unrounded_values in (
        ("weight", optimizer.master, exact.master),
        ("exp_avg", optimizer.m, exact.m),
        ("exp_avg_sq", optimizer.v, exact.v),
    ):
        whole = merge(ranks, kind, c.parallel.tensor)
        assert whole.keys() == values.keys()
        if precision == "fp32":
            if kind == "weight" and growing:
                joined = (torch.cat([d[name].flatten() for name in values]) for d in (whole, values))
                assert relative(*joined) <= 1e-5
            for name in values:
                allowed = BIAS if kind == "weight" and name.endswith(".bias") else FP32[kind]
                close(whole[name], values[name], unrounded_values[name], allowed, f"{kind} of {name}")
        else:
            joined = (
                torch.cat([d[name].flatten() for name in values]) for d in (whole, values, unrounded_values)
            )
            close(*joined, 0.0, kind)
        total = sum(float(t.double().square().sum()) for t in whole.values()) ** 0.5
        if kind != "exp_avg":
            assert ranks[0]["final"][kind == "exp_avg_sq"] == pytest.approx(total, rel=1e-6)


# Sums in another order, by layout and by the kind of CPU, after ten steps: measured up to 1.2e-5.
ROUNDING = 5e-5
# The moments are sums of gradients that nearly cancel: measured up to 9.3e-6, with room for other machines.
FP32 = {"weight": ROUNDING, "exp_avg": ROUNDING, "exp_avg_sq": ROUNDING}
# Biases begin at zero, so they are nothing but updates; and as softmax takes no notice of what all keys have in common,
# a key's bias has next to no gradient, of which Adam makes a full update: measured up to 2.8e-4.
BIAS = 1e-3


@pytest.mark.quick(
    "accumulation-4", "tp2", "pp2-dp2", "zero2-dp3", "zero3-dp2", "tied-pp2", "context2-tp2", "documents-*sequence",
)  # fmt: skip
@pytest.mark.parametrize("name", LAYOUTS)
def test_train_step_in_fp32_equals_the_reference(name: str) -> None:
    compare(*LAYOUTS[name], "fp32")


# A layout rounds at other places than one process does: partial sums of a tensor group, activations between stages.
# That must not cost more than the low precision itself: every deviation from the reference of the same precision is
# held against that reference's own deviation from fp32, over all elements. Two such roundings are independent, so they
# differ by up to twice either; and where a first gradient is close to zero, Adam's update is the rate times its sign,
# so a few flipped elements weigh much (measured: up to 2.5 times, in the embedding under fp16). Hence three times.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [("zero3-tp2-dp2", "bf16"), ("tied-pp2-dp3", "bf16"), ("olmo2-sequence-tp2-pp2", "bf16"),
     ("context2-olmo2", "bf16"), ("tp2-pp2", "fp16"), ("zero2-dp2", "fp16"), ("tied-pp2-dp3", "fp16"),
     ("growing-pp2-dp2", "bf16"), ("growing-zero3-dp2", "bf16"), ("growing-zero2-dp2", "fp16"),
     ("growing-pp2-dp2", "fp16"), ("experts-ep2", "bf16"), ("experts-sigmoid-ep2-dp4", "bf16")],
)  # fmt: skip
def test_train_step_in_low_precision_costs_no_more_than_the_precision(name: str, precision: str) -> None:
    compare(*LAYOUTS[name], precision)
