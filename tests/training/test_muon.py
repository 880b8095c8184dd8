"""A run with Muon and QK-clip goes on from its checkpoint bit for bit, and in another layout from the same state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.checkpoint.whole import WholeState
from megastable.config.tree import RunConfig
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.training.test_reshape_matrix import losses
from tests.training.test_resume import identical, resave, train

STOP, END = 10, 20
HERE: tuple[int, dict[str, Any]] = (4, {"tensor": 2, "pipeline": 2})
THERE: tuple[int, dict[str, Any]] = (3, {"zero": 3})


def at(corpus: Path, run: Path, parallel: dict[str, Any]) -> RunConfig:
    batch = {"steps": END, "global_batch": 12, "micro_batch": 2, "eval_samples": 0, "eval_interval": 0}
    optimizer = {"name": "muon", "momentum": 0.95, "qk_clip": 0.06, "lr": 3e-3}
    return tiny(
        corpus, run, parallel=parallel, train=batch, precision={"kind": "fp32"}, checkpoint={"interval": STOP},
        schedule={"warmup_steps": 2, "total_steps": END}, optimizer=optimizer,
        model=dict(tiny(corpus, run).model) | {"qk_norm": False},
    )  # fmt: skip


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("muon") / "straight"
    run_ranks(HERE[0], train, at(corpus, folder, HERE[1]))
    return folder


@pytest.mark.slow
def test_it_goes_on_bit_for_bit(straight: Path, corpus: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    shutil.copytree(straight, stopped)
    shutil.rmtree(stopped / f"checkpoints/step-{END}")
    run_ranks(HERE[0], train, at(corpus, stopped, HERE[1]))
    assert identical(*(run / f"checkpoints/step-{END}" for run in (straight, stopped))) == 3 * HERE[0]


@pytest.mark.slow
def test_another_layout_goes_on(straight: Path, corpus: Path, tmp_path: Path) -> None:
    moved, name = tmp_path / "moved", f"step-{STOP}"
    (moved / "checkpoints").mkdir(parents=True)
    (moved / "checkpoints" / name).symlink_to(straight / "checkpoints" / name)
    run_ranks(THERE[0], resave, at(corpus, moved, THERE[1]), tmp_path / "there")
    before, there = WholeState(straight / "checkpoints" / name), WholeState(tmp_path / "there" / name)
    for parameter in before.names:
        matrix = parameter.startswith("blocks.") and len(before.shape(parameter)) > 1
        kinds = ("weight", "exp_avg") if matrix else ("weight", "exp_avg", "exp_avg_sq")
        assert before.kinds_of(parameter) == there.kinds_of(parameter) == kinds
        for kind in kinds:
            assert torch.equal(before.tensor(parameter, kind), there.tensor(parameter, kind))
    run_ranks(THERE[0], train, at(corpus, moved, THERE[1]))
    after = losses(moved)
    assert len(after) == END - STOP
    # Orthogonalization amplifies what gradients differ by in their last bits.
    assert after == pytest.approx(losses(straight)[STOP:], rel=1e-5)
