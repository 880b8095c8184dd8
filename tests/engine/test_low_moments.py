"""Runs whose moments are bf16: what is stopped, rewound or continued goes on with the same bits; copies stay copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megastable.config.tree import RunConfig
from megastable.engine.flatstate import FlatState
from megastable.optim.adamw import AdamW
from megastable.parallel.fragments import Fragment
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.engine.test_gate import start_of, trainer_of
from tests.training.test_resume import identical

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero2-dp2": (2, {"parallel": {"zero": 2}}),
    "zero3-dp2": (2, {"parallel": {"zero": 3}}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "pp2-tied": (2, {"parallel": {"pipeline": 2}, "model": {"tied": True}}),
}


def config_of(corpus: Path, run: Path, moments: str = "bf16", steps: int = 4, **parts: Any) -> RunConfig:
    parts["model"] = dict(tiny(corpus, run).model) | parts.get("model", {})
    return tiny(
        corpus,
        run,
        **parts,
        optimizer={"moments": moments, "betas": (0.9, 0.999)},
        train={"steps": steps, "micro_batch": 4, "eval_samples": 0},
        checkpoint={"interval": 2},
    )


def train(config: RunConfig) -> tuple[dict[str, dict[str, Tensor]], set[tuple[str, torch.dtype]]]:
    """Weights and moments at the end, by kind and name, with those that another rank counts; dtypes by kind."""
    from megastable.engine.flatstate import KINDS

    trainer = trainer_of(config)
    assert trainer.train() == 0
    flat = trainer.engine.flat_state()
    dtypes = {(name.split("/")[1], t.dtype) for name, t in trainer.engine.optimizer_state().items()}
    return {kind: flat.shards(kind) for kind in KINDS}, dtypes


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_stopped_run_goes_on_bit_for_bit(name: str, corpus: Path, tmp_path: Path) -> None:
    world, parts = LAYOUTS[name]
    straight = run_ranks(world, train, config_of(corpus, tmp_path / "straight", **parts))
    run_ranks(world, train, config_of(corpus, tmp_path / "stopped", steps=2, **parts))
    stopped = run_ranks(world, train, config_of(corpus, tmp_path / "stopped", **parts))
    assert '"resumed"' in (tmp_path / "stopped/journal.jsonl").read_text()
    a, b = (tmp_path / run / "checkpoints/step-4" for run in ("straight", "stopped"))
    assert identical(a, b) == 3 * world
    low = torch.bfloat16
    for (one, dtypes), (other, _) in zip(straight, stopped, strict=True):
        assert dtypes == {
            ("weight", torch.float32), ("step", torch.float32), ("exp_avg", low), ("exp_avg_sq", low)
        }  # fmt: skip
        for kind, held in one.items():
            assert held.keys() == other[kind].keys()
            assert all(torch.equal(t, other[kind][n]) for n, t in held.items())
    if name in ("tp2", "pp2-tied"):  # a weight that two ranks hold is rounded alike on both
        first, second = (held for held, _ in straight)
        shared = [
            n for n in first["weight"].keys() & second["weight"].keys() if name == "pp2-tied" or "norm" in n
        ]
        assert shared
        for kind in first:
            for n in shared:
                assert torch.equal(first[kind][n], second[kind][n]), (kind, n)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_steps_after_a_rewind_are_the_same(zero: int, corpus: Path, tmp_path: Path) -> None:
    config = config_of(corpus, tmp_path / "run", parallel={"zero": zero})
    for once, again, later in run_ranks(2, rewound, config):
        assert all(torch.equal(once[key], again[key]) for key in once)
        assert not torch.equal(once["0/exp_avg_sq"], later["0/exp_avg_sq"])


def rewound(config: RunConfig) -> tuple[dict[str, Tensor], ...]:
    """The state after two steps from a snapshot, after the same once more, and after a third."""
    from megastable.checkpoint.snapshot import Ring

    start = start_of(config)
    engine = start.engine
    with start.from_the_first(start.order.source, config.train.global_batch) as loader:
        batches = [next(loader).micro_batches for _ in range(4)]
    ring = Ring(engine, 2, 1)

    def state_after(*indices: int) -> dict[str, Tensor]:
        for index in indices:
            engine.train_step(batches[index], 1e-2, lambda _: True)
        return {name: t.clone() for name, t in engine.optimizer_state().items()}

    state_after(0)
    ring.take(1, None)
    once = state_after(1, 2)
    snapshot = ring.before(2)
    assert snapshot is not None
    assert snapshot.tensors["0/exp_avg"].dtype == torch.bfloat16
    ring.restore(snapshot)
    engine.refresh_weights()
    return once, state_after(1, 2), state_after(3)


@pytest.mark.slow
def test_fp32_moments_are_taken_over_and_handed_back(corpus: Path, tmp_path: Path) -> None:
    """Rounded to nearest once on the way down; nothing is lost on the way up."""
    run_ranks(1, train, config_of(corpus, tmp_path / "run", "fp32", steps=2))
    ((low, dtypes),) = run_ranks(1, resumed, config_of(corpus, tmp_path / "run", "bf16"))
    ((full, _),) = run_ranks(1, resumed, config_of(corpus, tmp_path / "run", "fp32"))
    assert ("exp_avg_sq", torch.bfloat16) in dtypes
    for kind, held in full.items():
        for name, t in held.items():
            assert torch.equal(low[kind][name], t.bfloat16().float() if kind != "weight" else t)
    run_ranks(1, train, config_of(corpus, tmp_path / "run", "bf16"))
    ((full, dtypes),) = run_ranks(1, resumed, config_of(corpus, tmp_path / "run", "fp32", steps=6))
    assert ("exp_avg_sq", torch.float32) in dtypes
    for kind in ("exp_avg", "exp_avg_sq"):
        for t in full[kind].values():
            assert torch.equal(t, t.bfloat16().float()) and t.any()


def resumed(config: RunConfig) -> Any:
    """The state as it was loaded, before a step."""
    from megastable.engine.flatstate import KINDS

    start = start_of(config)
    assert start.state.step >= 2
    flat = start.engine.flat_state()
    dtypes = {(name.split("/")[1], t.dtype) for name, t in start.engine.optimizer_state().items()}
    return {kind: flat.shards(kind) for kind in KINDS}, dtypes


def test_updates_are_told_but_for_the_rounding() -> None:
    """By how much the weights moved, out of moments that were rounded since."""
    master = torch.nn.Parameter(torch.randn(10_000))
    optimizer = AdamW([master], lr=1e-3, weight_decay=0.1)
    fragment = Fragment(
        name="w",
        dim=None,
        sections=(),
        shape=(10_000,),
        group=0,
        offset=0,
        start=0,
        numel=10_000,
        counted=True,
    )
    flat = FlatState([master], optimizer, [fragment], None, optimizer.param_groups)
    assert flat.moments == torch.bfloat16 and not list(flat.changes(fragment))
    for _ in range(5):
        master.grad, before = torch.randn(10_000), master.detach().double()
        optimizer.step()
    real = before - master.detach().double()
    told = torch.cat(list(flat.changes(fragment)))
    assert told.dtype == torch.float32
    # 2^-7 of a first moment, half that of a root of a second; fp32 weights of size 4 move in steps of 2^-22.
    assert ((told - real).abs() <= 0.012 * (real.abs() + 1e-4 * before.abs()) + 2.0**-22).all()
    assert float(told.double().norm()) == pytest.approx(float(real.norm()), rel=1e-4)
