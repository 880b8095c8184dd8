"""What a probe finds equals a plain calculation on one process, and the same under every layout and wrapper."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.config.tree import RunConfig
from megastable.engine.layer_stats import LayerStatistics, attention_chunks
from megastable.model.gpt import GPT, Block
from megastable.model.kernels import AttentionScores
from megastable.model.sizes import space_evenly
from megastable.parallel.sharding import placement_of
from megastable.parallel.topology import TensorParallel
from tests.distributed import run_ranks
from tests.engine.engines import are_same, build_engine, copy_state, take_batch
from tests.engine.test_gate import spoil_gradient
from tests.parallel.test_layouts import EXPERTS, OLMO2, batches, config

STEPS, RATE = 3, 3e-3
CLIP = 0.1  # far below the norms: what is measured is what the gradients were before

LAYOUTS: dict[str, dict[str, Any]] = {
    "accumulation-2": {"micro_batch": 2},
    "pp2-tied-full": {"pipeline": 2, "tied": True, "recompute": "full"},
    "zero2": {"zero": 2},
    "zero3-selective-small-buffers": {"zero": 3, "recompute": "selective", "buffer": 5000},
    "documents-tp2": {"tensor": 2, "apart": True},
    "context2-documents": {"context": 2, "apart": True},
    "ring2-documents": {"context": 2, "context_by": "ring", "apart": True},
    "olmo2-tp2-sequence-full": {"tensor": 2, "sequence": True, "recompute": "full", "model": OLMO2},
}
FOUR = {
    "tp2-pp2-full": {"tensor": 2, "pipeline": 2, "recompute": "full"},
    "context2-tp2-sequence": {"context": 2, "tensor": 2, "sequence": True},  # k and v of a head on two ranks
}
WRAPPERS: dict[str, tuple[dict[str, Any], str]] = {
    "bf16": ({"precision": "bf16"}, "BF16_Optimizer"),
    "bf16-pp2": ({"precision": "bf16", "pipeline": 2}, "BF16_Optimizer"),
    "bf16-zero2": ({"precision": "bf16", "zero": 2}, "DeepSpeedZeroOptimizer"),
    "bf16-zero3": ({"precision": "bf16", "zero": 3}, "DeepSpeedZeroOptimizer_Stage3"),
    "fp16-tp2": ({"precision": "fp16", "tensor": 2}, "DeepSpeedZeroOptimizer"),
}


def recipe(**parts: Any) -> RunConfig:
    c = config(**{"micro_batch": 4, **parts})
    return c.model_copy(update={"optimizer": c.optimizer.model_copy(update={"clip": CLIP})})


def engine_of(parts: dict[str, Any]) -> tuple[Any, list[list[Any]]]:
    """An engine, and this rank's micro-batches of every step."""
    buffer = {"sub_group_size": parts["buffer"]} if "buffer" in parts else {}
    c = recipe(**{key: value for key, value in parts.items() if key not in ("apart", "buffer")})
    engine = build_engine(c, **buffer)
    return engine, [take_batch(engine, batch) for batch in batches(parts.get("apart", False))[:STEPS]]


def watch_last(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some steps of each case, the last of them watched; what was found, and whether the hooks are gone."""
    found = []
    for parts in cases:
        engine, steps = engine_of(parts)
        hooks = hooks_of(engine)
        for number, micro_batches in enumerate(steps, start=1):
            if number == STEPS:
                engine.probe.watch_step()
                assert hooks_of(engine) > hooks
            measured, applied = engine.train_step(micro_batches, RATE, lambda m: m.finite)
            assert applied
        found.append({
            "statistics": engine.collect_statistics(), "again": engine.collect_statistics(), "grad_norm":
            measured.grad_norm, "wrapper": type(engine.optimizer).__name__, "hooks": hooks_of(engine) - hooks,
        })  # fmt: skip
    return found


def hooks_of(engine: Any) -> int:
    """Of the blocks; DeepSpeed has some of its own."""
    return sum(len(b._forward_hooks) + len(b._forward_pre_hooks) for b in engine.probe.blocks)


@cache
def plain(tied: bool, apart: bool, olmo2: bool = False) -> tuple[LayerStatistics, dict[str, int]]:
    """The same steps by autograd and torch's AdamW on the whole model; also the sizes of its parameters."""
    c = recipe(tied=tied, model=OLMO2 if olmo2 else {})
    model = GPT(c.model, TensorParallel(), "none", c.run.seed)
    named = {placement_of(p).name: p for p in model.parameters()}
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    o = c.optimizer
    adamw = torch.optim.AdamW(
        [
            {"params": [p], "weight_decay": o.weight_decay if p.dim() > 1 else 0.0}
            for p in named.values()
        ],
        lr=RATE, betas=o.betas, eps=o.eps,
    )  # fmt: skip
    seen: dict[str, Any] = {}
    for b in blocks:
        b.register_forward_hook(lambda m, _, y: seen.update({m.name: y}))
        b.attention.qkv.register_forward_hook(lambda m, _, y, name=b.name: seen.update({f"{name}.qkv": y}))
    layers: dict[str, dict[str, float]] = {}
    for tokens, labels, segments in batches(apart)[:STEPS]:
        adamw.zero_grad()
        x: Any = tokens if segments is None else (tokens, segments)
        logits = model(x)[..., : c.model.vocab_size]
        attention = {b.name: attention_of(b, seen[f"{b.name}.qkv"], segments) for b in blocks}
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.t().flatten())
        (losses + c.model.z_loss * logits.logsumexp(-1).square().mean()).backward()
        gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), CLIP)
        before = {name: p.detach().clone() for name, p in named.items()}
        adamw.step()
    squares = dict.fromkeys(("weight", "second", "update"), 0.0)
    highest = 0.0
    for name, p in named.items():
        second, w = adamw.state[p]["exp_avg_sq"], p.detach()
        change = (before[name] - w).double()
        layers[name] = {
            "gradient_rms": rms(gradients[name]), "gradient_max": float(gradients[name].abs().max()),
            "weight_rms": rms(w), "weight_max": float(w.abs().max()),
            "second_moment_rms": rms(second), "second_moment_max": float(second.abs().max()),
            "update_ratio": float(change.norm() / w.double().norm()),
        }  # fmt: skip
        for kind, value in (("weight", w), ("second", second), ("update", change)):
            squares[kind] += float(value.double().square().sum())
        highest = max(highest, float(second.max()))
    for b in blocks:
        y = (seen[b.name][0] if apart else seen[b.name]).detach()
        entropy, logit = attention[b.name]
        layers[b.name] = {
            "activation_rms": rms(y), "activation_max": float(y.abs().max()),
            "attention_logit": logit, "attention_entropy": entropy,
        }  # fmt: skip
    overall = {
        "parameter_norm": math.sqrt(squares["weight"]), "second_moment_norm": math.sqrt(squares["second"]),
        "second_moment_max": highest, "update_ratio": math.sqrt(squares["update"] / squares["weight"]),
        "attention_logit": max(layers[b.name]["attention_logit"] for b in blocks),
        "attention_entropy": min(layers[b.name]["attention_entropy"] for b in blocks),
        "grad_norm": float(norm),
    }  # fmt: skip
    return LayerStatistics(overall, layers), {name: p.numel() for name, p in named.items()}


def rms(x: torch.Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


@torch.no_grad()
def attention_of(block: Block, qkv: torch.Tensor, segments: torch.Tensor | None) -> tuple[float, float]:
    """Mean entropy and largest logit by the whole matrix of scores."""
    from megastable.model.attention import document_positions, rope_table, rotate_pairs

    a = block.attention
    s, b, _ = qkv.shape
    assert a.q_norm is not None and a.k_norm is not None
    q, k, _ = qkv.split([n * a.width for n in (a.q_heads, a.k_heads, a.k_heads)], -1)
    if a.q_norm.weight.numel() == a.width:
        q, k = q.unflatten(-1, (-1, a.width)), k.unflatten(-1, (-1, a.width))
    q, k = (n(x).reshape(s, b, -1, a.width) for n, x in ((a.q_norm, q), (a.k_norm, k)))
    cos, sin = rope_table(s, a.rope, qkv.device)
    position = torch.arange(s).expand(b, s) if segments is None else document_positions(segments)
    cos, sin = cos[position.t()][:, :, None], sin[position.t()][:, :, None]
    q, k = (rotate_pairs(x, cos, sin).permute(1, 2, 0, 3) for x in (q, k))
    entropy, highest = whole_attention(q, k, segments)
    return float(entropy.mean()), float(highest.max())


def whole_attention(
    q: torch.Tensor, k: torch.Tensor, segments: torch.Tensor | None, cap: float | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Entropy and largest logit before the cap, fp64 [b, q, s], straight from their definitions."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).double()
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k) / math.sqrt(q.shape[-1])
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    allowed = (allowed if window is None else allowed.triu(1 - window)).expand_as(scores)
    if segments is not None:
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None, :])
    highest = scores.masked_fill(~allowed, -math.inf).amax(-1)
    scores = scores if cap is None else cap * (scores / cap).tanh()
    p = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return -torch.xlogy(p, p).sum(-1), highest


def check(got: dict[str, Any], name: str, parts: dict[str, Any]) -> None:
    wanted, _ = plain(parts.get("tied", False), parts.get("apart", False), "model" in parts)
    overall, layers = got["statistics"].overall, got["statistics"].layers
    assert got["hooks"] == 0
    found = {**overall, "grad_norm": got["grad_norm"]}
    assert found.keys() == wanted.overall.keys()
    for key, value in wanted.overall.items():
        # A second moment is a square, so that it is off by twice as much.
        rel = 4e-5 if key.startswith("second_moment") else 2e-5
        assert found[key] == pytest.approx(value, rel=rel), f"{name}: {key}"
    assert list(layers) == list(wanted.layers)
    for row, values in wanted.layers.items():
        assert layers[row] == pytest.approx(values, rel=1e-4), f"{name}: {row}"
    # A step that was not watched has the cheap ones only.
    cheap = {k: v for k, v in overall.items() if not k.startswith("attention")}
    assert got["again"] == LayerStatistics(cheap, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (
            1,
            {
                str(c): c
                for c in ({}, {"tied": True}, {"apart": True, "recompute": "full"}, {"micro_batch": 1})
            },
        ),
        (2, LAYOUTS),
        (4, FOUR),
    ],
)
def test_statistics_of_every_layout_equal_a_plain_calculation(
    world: int, cases: dict[str, dict[str, Any]]
) -> None:
    """With parameters replicated, cut into pieces and tied, and blocks run twice for their activations."""
    ranks = run_ranks(world, watch_last, list(cases.values()))
    for index, (name, parts) in enumerate(cases.items()):
        check(ranks[0][index], name, parts)
        assert all(rank[index]["statistics"] == ranks[0][index]["statistics"] for rank in ranks), name


@pytest.mark.slow
def test_statistics_of_every_wrapper_are_of_the_gradients_that_it_reports() -> None:
    """In low precision too: unscaled, before clipping, every parameter once."""
    wanted, sizes = plain(False, False)
    ranks = run_ranks(2, watch_last, [parts for parts, _ in WRAPPERS.values()])
    for (name, (_, wrapper)), one, other in zip(WRAPPERS.items(), *ranks, strict=True):
        assert one["wrapper"] == wrapper and one["hooks"] == 0, name
        assert one["statistics"] == other["statistics"]
        rows = one["statistics"].layers
        total = math.sqrt(sum(rows[p]["gradient_rms"] ** 2 * n for p, n in sizes.items()))
        assert total == pytest.approx(one["grad_norm"], rel=1e-5), name
        for key, value in one["statistics"].overall.items():
            assert value == pytest.approx(wanted.overall[key], rel=0.05), f"{name}: {key}"


def train_watched() -> dict[str, Any]:
    """The same run, watched at every step or never; then a step whose gradients are not finite."""
    numbers, states = list[Any](), []
    for watched in (False, True):
        engine, steps = engine_of({"recompute": "full"})
        for micro_batches in steps:
            if watched:
                engine.probe.watch_step()
            measured, _ = engine.train_step(micro_batches, RATE, lambda m: m.finite)
            numbers.append((measured.loss, measured.grad_norm))
            if watched:
                engine.collect_statistics()
        states.append(copy_state(engine))
    engine.probe.watch_step()
    handle = spoil_gradient(engine)
    _, applied = engine.train_step(steps[0], RATE, lambda m: m.finite)
    handle.remove()
    same = numbers[:STEPS] == numbers[STEPS:] and are_same(*states)
    return {"same": same, "refused": engine.collect_statistics(), "applied": applied}


def test_watch_changes_nothing_and_a_refused_step_has_no_update() -> None:
    (found,) = run_ranks(1, train_watched)
    assert found["same"] and not found["applied"]
    statistics = found["refused"]
    assert "update_ratio" not in statistics.overall
    assert math.isfinite(statistics.overall["second_moment_max"])
    broken = [name for name, row in statistics.layers.items() if row.get("gradient_max") == math.inf]
    assert broken == ["blocks.0.mlp.down.weight"]
    assert math.isnan(statistics.layers[broken[0]]["gradient_rms"])
    assert all("update_ratio" not in row for row in statistics.layers.values())


@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 2, 3, 17, 5))), apart=st.booleans(), scores=st.integers(1, 2000),
    spread=st.sampled_from([0.0, 1.0, 100.0]), seed=st.integers(0, 99), cap=st.sampled_from([None, 0.5, 20.0]),
    window=st.sampled_from([None, 1, 4]), most=st.integers(1, 17),
)  # fmt: skip
def test_attention_chunks_are_those_of_the_whole(
    sizes: tuple[int, ...], apart: bool, scores: int, spread: float, seed: int, cap: float | None,
    window: int | None, most: int,
) -> None:  # fmt: skip
    """Of all queries, and of some that are evenly spaced."""
    b, kv, groups, s, d = sizes
    g = torch.Generator().manual_seed(seed)
    q = spread * torch.randn(b, kv * groups, s, d, generator=g)
    k = torch.randn(b, kv, s, d, generator=g)
    segments = (torch.rand(b, s, generator=g) < 0.3).cumsum(1).int() if apart else None
    of = AttentionScores(cap=cap, window=window)
    wanted, logits = whole_attention(q, k, segments, cap, window)
    for at in (None, space_evenly(s, most)):
        here = list(range(s)) if at is None else at
        parts = list(attention_chunks(q[:, :, here], k, segments, of, scores, at))
        entropy, highest = (
            torch.cat(x, -1).flatten(1, 2).double() for x in list(zip(*parts, strict=True))[:2]
        )
        assert torch.allclose(entropy, wanted[..., here], rtol=1e-4, atol=1e-4)
        assert torch.allclose(highest, logits[..., here], rtol=1e-4, atol=1e-5)
        assert max(x.numel() for x, *_ in parts) * s <= max(scores, b * kv * groups * s)


@pytest.mark.slow
def test_experts_that_other_ranks_have_have_rows_of_their_own() -> None:
    for rank in run_ranks(2, watch_last, [{"model": EXPERTS}, {"model": EXPERTS, "expert": 2}]):
        of_all, of_two = (each["statistics"].layers for each in rank)
        assert of_all.keys() == of_two.keys() and "blocks.1.mlp.experts.3.down.weight" in of_two
        for name, row in of_all.items():
            assert of_two[name] == pytest.approx(row, rel=1e-3), name
