"""A message between stages is changed on its way: found in that step, the receiver named, the bytes of a clean run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import GradientsDoubted, IncidentEvent, MessagesDiffer
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.training.checkpoint_bytes import bytes_of

STEP, LAST = 6, 8


def train(config: RunConfig, rank: int | None, number: int = 0) -> int:
    """A run in which the lowest bit of an element changes in a message of a step to a rank, the first one or a later
    one."""
    import torch
    import torch.distributed as dist
    from deepspeed import comm

    from megastable import train
    from megastable.engine.engine import Engine

    if dist.get_rank() != rank:
        return train.train(config, Path("recipe.yaml"))
    real, step = comm.recv, Engine.train_step
    left = -1

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        nonlocal left
        left = number if left == -1 and self.ds.global_steps + 1 == STEP else -2 if left >= 0 else left
        return step(self, *args, **options)

    def receive(tensor: Any, *args: Any, **options: Any) -> Any:
        nonlocal left
        done = real(tensor, *args, **options)
        if left >= 0 and tensor.dtype is torch.bfloat16:
            if left == 0:
                tensor.view(-1)[7:8].view(torch.int16).bitwise_xor_(1)
            left = left - 1 if left else -2
        return done

    comm.recv, Engine.train_step = receive, train_step  # type: ignore[assignment,method-assign]
    return train.train(config, Path("recipe.yaml"))


def recipe(corpus: Path, run: Path, parallel: dict[str, Any], watched: bool = True) -> RunConfig:
    return tiny(
        corpus, run, parallel=parallel, precision={"kind": "bf16"},
        train={"steps": LAST, "global_batch": 12, "micro_batch": 2, "eval_samples": 0},
        schedule={"warmup_steps": 5, "total_steps": LAST}, checkpoint={"interval": LAST},
        stability={"hardware": {"messages": watched}, "snapshots": {"interval": 5}},
    )  # fmt: skip


CLEAN: dict[int, dict[str, bytes]] = {}


def clean(world: int, corpus: Path, run: Path) -> dict[str, bytes]:
    if world not in CLEAN:
        assert run_ranks(world, train, recipe(corpus, run, {"pipeline": 2}), None) == [0] * world
        assert not list(RunDirectory(run).events(MessagesDiffer, IncidentEvent))
        CLEAN[world] = bytes_of(run, LAST)
    return CLEAN[world]


# An activation to the last stage; the last gradient of a step to the first one; one of the second replica.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "rank", "number"), [(2, 1, 0), (2, 0, 5), (4, 1, 2)], ids=["forward", "backward", "dp2"]
)
def test_it_is_found_and_undone(world: int, rank: int, number: int, corpus: Path, tmp_path: Path) -> None:
    wanted = clean(world, corpus, tmp_path / "clean")
    c = recipe(corpus, tmp_path / "run", {"pipeline": 2})
    assert run_ranks(world, train, c, rank, number) == [0] * world
    run = RunDirectory(tmp_path / "run")
    (event,) = run.events(MessagesDiffer)
    assert (event["step"], event["ranks"]) == (STEP, [rank])
    assert f"received from rank {(rank + world // 2) % world} on" in event["reason"]
    assert not list(run.events(GradientsDoubted))
    assert next(run.events(IncidentEvent))["onset"] == STEP
    assert bytes_of(tmp_path / "run", LAST) == wanted


@pytest.mark.slow
def test_without_the_watch_it_trains_on_with_it(corpus: Path, tmp_path: Path) -> None:
    wanted = clean(2, corpus, tmp_path / "clean")
    assert run_ranks(2, train, recipe(corpus, tmp_path / "run", {"pipeline": 2}, False), 1) == [0, 0]
    assert not list(RunDirectory(tmp_path / "run").events(MessagesDiffer, IncidentEvent))
    assert bytes_of(tmp_path / "run", LAST) != wanted
