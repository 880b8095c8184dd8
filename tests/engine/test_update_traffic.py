"""The bytes that a step moves a parameter after its backward pass, counted operation by operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.engine.traffic import Traffic

CACHE = 1 << 16  # bytes; chunks are made so small that one fits
CHUNK = 1 << 10  # elements


def count_step(config: RunConfig) -> tuple[float, float]:
    """Bytes a parameter of the third step, whose update is clipped: of adding up its micro-batches, and of all that
    follows (average over the data ranks, norm, update). Of what a rank holds, and of what it updates."""
    from megastable.engine import micro_batch_sums
    from megastable.optim import adamw
    from tests.engine.test_gate import first_batch, start_of

    micro_batch_sums.SMALL = 0
    adamw.CHUNKS["cpu"] = adamw.FUSED_CHUNKS["cpu"] = micro_batch_sums.CHUNKS["cpu"] = CHUNK
    start = start_of(config)
    engine, batch = start.engine, first_batch(start)
    for _ in range(2):
        engine.train_step(batch, 1e-3, lambda _: True)
    adding, following = Traffic(CACHE), Traffic(CACHE)
    add, average = engine.zero.sums.own.add_gradient, engine.zero.sums.own.average_piece
    begin = engine.zero.average_gradients  # what comes next, but for messages

    def counted_add(*args: Any) -> None:
        with adding:
            add(*args)

    def counted_average(*args: Any) -> None:
        with following:
            average(*args)

    def counted_begin() -> None:
        following.__enter__()
        begin()

    engine.zero.sums.own.add_gradient, engine.zero.sums.own.average_piece = counted_add, counted_average
    engine.zero.average_gradients = counted_begin
    measured, applied = engine.train_step(batch, 1e-3, lambda _: True)
    following.__exit__(None, None, None)
    assert applied and measured.grad_norm > config.optimizer.clip
    held = sum(p.numel() for p in engine.ds.module.parameters())
    return adding.total / held, following.total / sum(master.numel() for master in engine.masters)


# Ranks, settings of the optimizer, bytes.
CASES: dict[str, tuple[int, dict[str, Any], float]] = {
    # Weight, gradient and moments are read (16), all but the gradient written (12), and the bf16 weight (2).
    "one": (1, {}, 30),
    "bf16-moments": (1, {"moments": "bf16"}, 22),
    # The sum over the ranks is divided before it is measured: read and written, and read once more for the update.
    "data2": (2, {}, 38),
}


@pytest.mark.quick("one", "data2")
@pytest.mark.parametrize("name", CASES)
def test_an_update_is_one_pass(name: str, corpus: Path, tmp_path: Path) -> None:
    world, optimizer, wanted = CASES[name]
    model = dict(tiny(corpus, tmp_path).model) | {"hidden": 64, "ffn": 256}
    # The watch over gradients reads them, and their sum, once more.
    stability = {"hardware": {"gradients": False}}
    train = {"micro_batch": 2, "global_batch": 6 * world, "eval_samples": 0}
    parts = {"model": model, "stability": stability, "train": train, "optimizer": {"clip": 0.01} | optimizer}
    for added, followed in run_ranks(world, count_step, tiny(corpus, tmp_path / "run", **parts)):
        # The first of three micro-batches is copied (2 + 4), the others are added (2 + 4 + 4).
        assert added == pytest.approx(26, rel=0.01)
        assert followed == pytest.approx(wanted, rel=0.02)
