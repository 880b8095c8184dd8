"""The gradient noise scale: of known gradients, against a plain reference in every layout, in runs, and as a hint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config.tree import RunConfig
from megastable.engine.local_gradients import RankGradient, read_columns
from megastable.warnings import noise_scale
from megastable.warnings.noise_scale import NoiseScale, estimate_noise
from tests import reference
from tests.distributed import run_ranks
from tests.parallel.test_layouts import batches, config, mine, plain
from tests.patience import PATIENCE

BATCH = 16
# World, and the layout: how its gradients are summed.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1-bf16-dp2": (2, {"zero": 1, "precision": "bf16"}),
    "zero1-dp2": (2, {"zero": 1}),
    "zero2-dp2": (2, {"zero": 2}),
    "zero3-dp2": (2, {"zero": 3}),
    "zero1-dp4": (4, {"zero": 1}),
    "zero2-dp4": (4, {"zero": 2}),
    "zero3-dp4": (4, {"zero": 3}),
    "zero1-bf16-pp2-dp2": (4, {"zero": 1, "precision": "bf16", "pipeline": 2}),
    "zero1-dp2-unaccumulated": (2, {"zero": 1, "micro_batch": 8}),
}


def rows(gradients: Any) -> list[RankGradient]:
    """What is measured of the gradients of D ranks: [D, parameters]."""
    whole = gradients.sum(0)
    return [
        RankGradient(0, 0, float(g @ g), 0, 0, 0, 0, 0, float(part @ part))
        for g, part in zip(gradients, np.array_split(whole, len(gradients)), strict=True)
    ]


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_it_finds_the_scale_that_gradients_were_made_with(ranks: int) -> None:
    random = np.random.default_rng(ranks)
    true, spread, samples = random.normal(size=4000), random.uniform(1, 30, 4000), 8
    wanted = float((spread**2).sum() / (true @ true))
    found = NoiseScale()
    for _ in range(400):
        noise = random.normal(size=(ranks, 4000)) * spread / np.sqrt(samples)
        pair = estimate_noise(rows(true + noise), samples)
        assert pair is not None
        found.add_estimates(*pair)
    assert found.samples == pytest.approx(wanted, rel=0.1)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 8), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_one_update_against_the_formulas_of_the_paper(
    ranks: int, apart: int, samples: int, seed: int
) -> None:
    """Appendix A.1: |G|^2 = (B G_B^2 - b G_b^2) / (B - b), S = (G_b^2 - G_B^2) / (1 / b - 1 / B)."""
    gradients = np.random.default_rng(seed).normal(size=(apart, ranks, 12)) + 1
    measured = [rows(group / apart) for group in gradients]
    added = [RankGradient(*np.sum(of_rank, 0)) for of_rank in zip(*measured, strict=True)]
    b, large_b = samples, samples * ranks
    small = np.mean([g @ g for group in gradients for g in group])
    large = np.mean([group.mean(0) @ group.mean(0) for group in gradients])
    wanted = (small - large) / (1 / b - 1 / large_b), (large_b * large - b * small) / (large_b - b)
    assert estimate_noise(added, samples, apart) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_nothing_measured_is_no_estimate() -> None:
    row = RankGradient(0, 1, 4.0, 0, 0, 0, 0, 0, 2.0)
    assert estimate_noise([], 1) is None and estimate_noise([row], 1) is None  # no second size
    assert estimate_noise([row._replace(square=float("inf")), row], 1) is None
    assert estimate_noise([row._replace(summed=0.0)] * 2, 1) is None  # sums in 16 bits are not measured
    assert estimate_noise([row, row], 1) is not None


def measured_rank(c: RunConfig, world: int) -> list[tuple[float, float]]:
    """On the first weights, the estimates of every batch."""
    import torch.distributed as dist

    from megastable.config import deepspeed_json
    from megastable.engine.engine import Engine
    from megastable.parallel.layout import Layout
    from megastable.parallel.topology import Topology
    from megastable.run.directory import RunDirectory
    from megastable.run.log import RunLog
    from megastable.warnings.noise_scale import NoiseScaleWatch

    layout = Layout(c.parallel.tensor, c.parallel.pipeline, deepspeed_json.size_of_data_parallel(c, world), 1)
    topology = Topology(layout, dist.get_rank(), timeout=PATIENCE)
    engine = Engine(c, deepspeed_json.build_deepspeed_json(c, world), topology)
    watch = NoiseScaleWatch(c, engine, RunLog(RunDirectory(Path()), print, active=False))
    found = []
    for step, batch in enumerate(batches(batch=c.train.global_batch)):
        measured = engine.measure_step(mine(batch, topology, c.train.micro_batch))
        watch.state = NoiseScale()
        watch.observe_step(measured, step + 1, True)
        assert read_columns(measured.gradients)
        share = 1 - noise_scale.DECAY
        found.append((watch.state.noise / share, watch.state.signal / share))
    return found


@pytest.mark.quick("zero2-dp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_against_plain_gradients(layout: str) -> None:
    world, options = LAYOUTS[layout]
    c = config(batch=BATCH, **options)
    ranks = run_ranks(world, measured_rank, c, world)
    assert all(found == ranks[0] for found in ranks)
    data = world // c.parallel.pipeline
    apart = c.parallel.zero > 1  # every micro-batch is summed by itself
    for (tokens, labels, _), (noise, signal) in zip(batches(batch=BATCH), ranks[0], strict=True):
        # [accumulation, data, micro-batch] of samples
        index = torch.arange(BATCH).view(-1, data, c.train.micro_batch)
        groups = index if apart else index.transpose(0, 1).reshape(1, data, -1)
        gradients = [
            np.stack([plain_gradient(c, tokens[unit], labels[unit]) for unit in group]) for group in groups
        ]
        b, large_b = groups.shape[2], groups.shape[2] * data
        small = np.mean([g @ g for group in gradients for g in group])
        large = np.mean([group.mean(0) @ group.mean(0) for group in gradients])
        allowed = 2e-2 if c.precision.kind == "bf16" else 1e-4
        assert noise == pytest.approx((small - large) / (1 / b - 1 / large_b), rel=allowed)
        wanted = (large_b * large - b * small) / (large_b - b)
        assert signal == pytest.approx(wanted, rel=allowed, abs=allowed * large)


def plain_gradient(c: RunConfig, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
    """Of the mean loss of some samples, by plain PyTorch: fp64 [parameters]."""
    weights, shape = plain(c.model, c.precision.kind)
    for weight in weights.values():
        weight.requires_grad_()
    total = reference.losses(reference.logits(weights, shape, tokens, None), labels, shape.z)[0]
    total.backward()  # type: ignore[no-untyped-call]
    return torch.cat([w.grad.double().flatten() for w in weights.values() if w.grad is not None]).numpy()


# The hint


def far_off(batch: int, scales: list[float]) -> list[int]:
    """The updates after which it was told, with these scales of single updates."""
    state, told = NoiseScale(), []
    for update, scale in enumerate(scales, 1):
        state.add_estimates(scale, 1.0)
        if state.is_far_off(batch):
            told.append(update)
    return told


@pytest.mark.parametrize(("batch", "told"), [(64, [500]), (16 * 5, [500]), (30, []), (8, []), (3, [500])])
def test_a_batch_far_off_is_told_once_and_late(batch: int, told: list[int]) -> None:
    assert far_off(batch, [14.0] * 2000) == told


def test_a_rewind_brings_the_averages_back_but_not_what_was_told() -> None:
    watch = object.__new__(noise_scale.NoiseScaleWatch)
    watch.state = NoiseScale(updates=7, noise=2.0, signal=1.0)
    saved = watch.state_dict()
    watch.state = NoiseScale(updates=9, noise=3.0, signal=1.0, told=True)
    watch.rewound(9, None)  # the same step again
    assert watch.state.updates == 9
    watch.rewound(7, saved)
    assert watch.state == NoiseScale(updates=7, noise=2.0, signal=1.0, told=True)
    watch.rewound(7, {})  # a point of an older version
    assert watch.state.updates == 7
