"""Checkpoints by time: rank 0's clock decides, on all ranks alike, and begins again with every process."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from megastable.checkpoint import store
from megastable.config.tree import RunConfig
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.engine.test_gate import trainer_of


def train(config: RunConfig, tick: float) -> int:
    """A run in which every look at rank 0's clock takes `tick` seconds, and in which the others' stand still."""
    from megastable.train import train
    from megastable.training import checkpoints

    ticks = itertools.count(start=0.0, step=tick if dist.get_rank() == 0 else 0.0)
    checkpoints.time = SimpleNamespace(monotonic=lambda: next(ticks), time=time.time)  # type: ignore[attr-defined]
    return train(config, Path("recipe.yaml"))


def test_time_decides_alike_on_all_ranks_and_anew_after_a_resume(corpus: Path, tmp_path: Path) -> None:
    def until(steps: int) -> RunConfig:
        parts = {"steps": steps, "global_batch": 4, "micro_batch": 2, "eval_samples": 0}
        keep = {"interval": "2min", "keep": 9, "vitals": {"probes": 0}}
        return tiny(corpus, tmp_path / "run", train=parts, checkpoint=keep)

    def steps() -> list[int]:
        return sorted(map(store.step_of, store.newest_first(tmp_path / "run/checkpoints")))

    assert run_ranks(2, train, until(3), 60.0) == [0, 0]
    assert steps() == [2, 3]  # the last one is that of the end
    assert run_ranks(2, train, until(6), 60.0) == [0, 0]
    assert steps() == [2, 3, 5, 6]  # two minutes after the resume, not after the last save


def is_due(config: RunConfig, lasting: list[tuple[float, bool]]) -> list[bool]:
    """Whether a checkpoint is due as the run goes on from a state of so many seconds after the last one; saved."""
    trainer = trainer_of(config)
    trainer.train()
    state, checkpoints, due = trainer.state, trainer.checkpoints, list[bool]()
    for seconds, saved in lasting:
        checkpoints.begin_training(state.model_copy(update={"seconds": state.seconds + seconds}), saved)
        due.append(checkpoints.is_due(state.step, checkpoints.collect_ballot()))
    return due


def test_what_was_trained_before_a_resume_from_memory_counts(corpus: Path, tmp_path: Path) -> None:
    keep = {"interval": "2h", "vitals": {"probes": 0}}
    parts = {"steps": 1, "global_batch": 4, "micro_batch": 2, "eval_samples": 0}
    config = tiny(corpus, tmp_path / "run", train=parts, checkpoint=keep)
    (due,) = run_ranks(1, is_due, config, [(7300.0, True), (7000.0, False), (7300.0, False)])
    assert due == [False, False, True]
