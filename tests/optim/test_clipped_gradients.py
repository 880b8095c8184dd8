"""In every precision and wrapper: the optimizer gets what the formula makes of the gradients that the gate saw."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.optim import clip_rules, clipped, rules
from tests.parallel.test_layouts import relative

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16-tp2-dp2": (4, {"precision": "bf16", "tensor": 2}),
    "bf16-zero2-dp2": (2, {"precision": "bf16", "zero": 2}),
    "fp16-pp3": (3, {"precision": "fp16", "pipeline": 3, "model": {"layers": 3}}),
    "fp16-zero3-dp2": (2, {"precision": "fp16", "zero": 3}),
}
CLIPPINGS: dict[str, tuple[Any, Any]] = {
    "value": ({"kind": "value", "threshold": 0.003}, lambda: clip_rules.Value(0.003)),
    "adagc": ({"kind": "adagc", "warmup": 1}, lambda: clip_rules.AdaGC(1)),
    "zclip": ({"kind": "zclip", "warmup": 2}, lambda: clip_rules.ZClip(2)),
    "agc": ("agc", lambda: clip_rules.AGC(0.01, "head.weight")),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_precisions(layout: str) -> None:
    world, options = LAYOUTS[layout]
    recipes = {name: clipped.plain_sgd(section, **options) for name, (section, _) in CLIPPINGS.items()}
    ranks = run_ranks(world, clipped.clip_rank, recipes, world)
    for name, (_, rule) in CLIPPINGS.items():
        clip = rule()
        before, after = clipped.whole(ranks, name, "before"), clipped.whole(ranks, name, "after")
        weights = clipped.whole(ranks, name, "weight")
        for step in range(clipped.STEPS):
            assert ranks[0][name]["norms"][step] == pytest.approx(rules.norm_of(before[step]), rel=1e-6)
            wanted = clip(before[step], weights[step])
            for parameter, g in wanted.items():
                assert relative(after[step][parameter], g) < 1e-5, f"{name}: {parameter} in step {step}"
            assert ranks[0][name]["kept"][step] == pytest.approx(clip.kept[step], abs=1e-4)
        assert name == "zclip" or min(clip.kept) < 0.95, f"{name} clipped nothing"
        assert all(rank[name]["norms"][0] == ranks[0]["value"]["norms"][0] for rank in ranks)


WORKERS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp3": (3, {}),
    "tp2-dp2": (4, {"tensor": 2}),
    "pp2-dp2": (4, {"pipeline": 2}),
    "context2-dp2": (4, {"context": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", WORKERS)
def test_workers(layout: str) -> None:
    """Each data-parallel rank's own gradient is clipped, then averaged; the gate sees the average of unclipped ones."""
    world, options = WORKERS[layout]
    c = clipped.plain_sgd("worker", 5.0, precision="bf16", **options)
    never = clipped.plain_sgd("worker", 1e6, precision="bf16", **options)
    ranks = run_ranks(world, clipped.clip_rank, {"worker": c, "never": never}, world)
    local = clipped.workers(ranks, "worker", c.parallel.context)
    before, after = clipped.whole(ranks, "worker", "before"), clipped.whole(ranks, "worker", "after")
    for step, gradients in enumerate(local):
        norms = [rules.norm_of(g) for g in gradients]
        scales = [min(1.0, 5.0 / (norm + 1e-6)) for norm in norms]
        assert (min(norms) < 5 < max(norms)) == (step > 0), norms
        for parameter in before[step]:
            mean = sum(g[parameter] for g in gradients) / len(gradients)
            assert relative(before[step][parameter], mean) < 1e-5, parameter
            wanted = sum(g[parameter] * s for g, s in zip(gradients, scales, strict=True)) / len(gradients)
            assert relative(after[step][parameter], wanted) < 1e-5, parameter
        kept = rules.norm_of(after[step]) / rules.norm_of(before[step])
        for rank in ranks:
            assert rank["worker"]["norms"][step] == pytest.approx(rules.norm_of(before[step]), rel=1e-6)
            assert rank["worker"]["kept"][step] == pytest.approx(kept, rel=1e-5)
    assert ranks[0]["never"]["kept"] == [1.0] * clipped.STEPS
    assert ranks[0]["never"]["norms"][:2] == ranks[0]["worker"]["norms"][:2]
    untouched = clipped.whole(ranks, "never", "before"), clipped.whole(ranks, "never", "after")
    for was, is_now in zip(*untouched, strict=True):
        assert all(was[parameter].equal(is_now[parameter]) for parameter in was)
