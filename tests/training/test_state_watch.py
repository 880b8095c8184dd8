"""Memory of one rank changes between two updates: found before the next one, the rank named, undone to the bytes of a
clean run; also with two copies, where nobody else could say who is wrong, and right before a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import IncidentEvent, SnapshotRejected, StateChanged
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.training.checkpoint_bytes import bytes_of

STEP, LAST = 24, 32
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "zero2": (2, {"zero": 2}),
    "zero3": (2, {"zero": 3}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
}
PLACES = {"master": "weight", "moment": "exp_avg", "second": "exp_avg_sq"}


def flip(engine: Any, place: str) -> None:
    """The lowest bit of one element."""
    import torch

    if place == "weight":
        flat = engine.zero.flat_weights[0].view(-1)
    else:
        flat = engine.optimizer_state()[f"0/{PLACES[place]}"].view(-1)
    words = torch.int16 if flat.element_size() == 2 else torch.int32
    flat[7:8].view(words).bitwise_xor_(1)


def corrupted(config: RunConfig, place: str | None, rank: int, at_rest: bool) -> int:
    """A run in which a rank's memory changes once: before a step, or between the last one and its checkpoint."""
    import torch.distributed as dist

    from megastable import train
    from megastable.engine.engine import Engine
    from megastable.recovery.recovery import Recovery

    done = False

    def due(step: int) -> bool:
        nonlocal done
        if place is None or done or dist.get_rank() != rank or step != (LAST if at_rest else STEP):
            return False
        done = True
        return True

    step, inspect = Engine.train_step, Recovery.inspect

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        if not self._probing and not at_rest and due(self.ds.global_steps + 1):
            flip(self, str(place))
        return step(self, *args, **options)

    def inspected(self: Recovery, *args: Any, **options: Any) -> Any:
        if at_rest and due(args[0].state.step):
            flip(self.engine, str(place))
        return inspect(self, *args, **options)

    Engine.train_step, Recovery.inspect = train_step, inspected  # type: ignore[method-assign,assignment]
    return train.train(config, Path("recipe.yaml"))


def recipe(corpus: Path, run: Path, parallel: dict[str, Any], watched: bool = True) -> RunConfig:
    return tiny(
        corpus, run, parallel=parallel, precision={"kind": "bf16"},
        train={"steps": LAST, "global_batch": 8, "micro_batch": 2, "eval_samples": 0},
        schedule={"warmup_steps": 5, "total_steps": LAST},
        checkpoint={"interval": LAST},
        stability={"hardware": {"state": watched, "gradients": False}, "snapshots": {"interval": 5}},
    )  # fmt: skip


CLEAN: dict[str, dict[str, bytes]] = {}


def clean(layout: str, corpus: Path, tmp_path: Path) -> dict[str, bytes]:
    """The bytes of a run without a fault, in which nothing was found."""
    if layout not in CLEAN:
        world, parallel = LAYOUTS[layout]
        c = recipe(corpus, tmp_path / "clean", parallel)
        assert run_ranks(world, corrupted, c, None, 0, False) == [0] * world
        run = RunDirectory(tmp_path / "clean")
        assert not list(run.events(StateChanged)) and not list(run.events(IncidentEvent))
        CLEAN[layout] = bytes_of(tmp_path / "clean", LAST)
    return CLEAN[layout]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "place", "at_rest"),
    [
        ("one", "weight", False), ("one", "second", False),
        ("dp2", "weight", False), ("dp2", "master", False), ("dp2", "moment", True),
        ("zero2", "moment", False), ("zero3", "master", False), ("zero3", "weight", False),
        ("tp2", "moment", False), ("tp2", "weight", True), ("pp2", "second", False), ("pp2", "weight", False),
    ],
)  # fmt: skip
def test_it_is_found_and_undone(layout: str, place: str, at_rest: bool, corpus: Path, tmp_path: Path) -> None:
    world, parallel = LAYOUTS[layout]
    rank, c = world - 1, recipe(corpus, tmp_path / "run", parallel)
    assert run_ranks(world, corrupted, c, place, rank, at_rest) == [0] * world
    run = RunDirectory(tmp_path / "run")
    (event,) = run.events(StateChanged)
    assert (event["step"], event["ranks"]) == (LAST if at_rest else STEP - 1, [rank])
    words = {"weight": "weights in compute precision", "master": "fp32 masters", "moment": "first moments"}
    assert f"{words.get(place, 'second moments')} of rank {rank} on " in event["reason"]
    (first, *_) = run.events(IncidentEvent)
    assert first["onset"] == event["step"] + 1
    assert bytes_of(tmp_path / "run", LAST) == clean(layout, corpus, tmp_path)


@pytest.mark.slow
def test_a_point_that_was_copied_from_changed_memory_is_rejected(corpus: Path, tmp_path: Path) -> None:
    """A moment changes after the update and before the snapshot is taken: the copy is equal to what it was copied
    from, and yet it is not what the update left."""
    assert run_ranks(2, changed_before_a_point, recipe(corpus, tmp_path / "run", {})) == [0, 0]
    run = RunDirectory(tmp_path / "run")
    (event,) = run.events(StateChanged)
    assert (event["step"], event["ranks"]) == (20, [1])
    (rejected,) = run.events(SnapshotRejected)
    assert rejected["step"] == 20 and "other bytes" in rejected["reason"]
    assert bytes_of(tmp_path / "run", LAST) == clean("dp2", corpus, tmp_path)


def changed_before_a_point(config: RunConfig) -> int:
    import torch.distributed as dist

    from megastable import train
    from megastable.checkpoint.snapshot import Ring

    take, done = Ring.take, False

    def taken(self: Any, step: int, *args: Any, **options: Any) -> None:
        nonlocal done
        if step == 20 and not done and dist.get_rank() == 1:
            done = True
            flip(self._engine, "moment")
        take(self, step, *args, **options)

    Ring.take = taken  # type: ignore[method-assign]
    return train.train(config, Path("recipe.yaml"))


@pytest.mark.slow
def test_watching_changes_no_byte(corpus: Path, tmp_path: Path) -> None:
    c = recipe(corpus, tmp_path / "off", {}, watched=False)
    assert run_ranks(2, corrupted, c, None, 0, False) == [0, 0]
    assert bytes_of(tmp_path / "off", LAST) == clean("dp2", corpus, tmp_path)
