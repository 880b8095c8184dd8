"""Silent corruption of a copy: found within an interval, the rank named, undone to the bytes of a clean run. Without
the watch over each rank's own state, which would be first (test_state_watch.py)."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import IncidentEvent, ReplicasDiffer, SnapshotRejected, WrongCopy
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.training.checkpoint_bytes import bytes_of

STEP, LAST = 24, 40


def flip_a_weight(engine: Any) -> None:
    """The lowest bit of one element in the computing copy, which the masters do not know of."""
    import torch

    parameter = [p for p in engine.ds.module.parameters() if p.dim() > 1][2]
    parameter.data.view(-1)[5:6].view(torch.int16).bitwise_xor_(1)


def scale_a_norm(engine: Any) -> None:
    """A norm's weight, on one tensor rank, masters included."""
    flat = engine.flat_state()
    piece = flat.piece(next(f for f in flat.fragments if "norm" in f.name), "weight")
    assert piece is not None
    piece.mul_(1.5)
    engine.zero.o.update_lp_params()


def flip_a_point(engine: Any) -> None:
    """One bit in the host's memory of the newest snapshot, and what makes the run go back to it."""
    import torch

    next(iter(engine.ring._kept[-1].tensors.values())).view(-1)[7:8].view(torch.int32).bitwise_xor_(1 << 30)
    flip_a_weight(engine)


FAULTS = {"weight": flip_a_weight, "norm": scale_a_norm, "point": flip_a_point}


def corrupted(config: RunConfig, fault: str | None, rank: int) -> int:
    """A run in which the state of one rank changes by itself once, before a step."""
    import torch.distributed as dist

    from megastable import train
    from megastable.checkpoint.snapshot import Ring
    from megastable.engine.engine import Engine

    take = Ring.take

    def taken(self: Any, *args: Any, **options: Any) -> None:
        self._engine.ring = self
        take(self, *args, **options)

    Ring.take = taken  # type: ignore[method-assign]
    real, done = Engine.train_step, False

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        nonlocal done
        if fault is not None and not done and self.ds.global_steps + 1 == STEP and not self._probing:
            done = True
            if fault == "norm" or dist.get_rank() == rank:
                _all_or_one(FAULTS[fault], self, dist.get_rank() == rank)
        return real(self, *args, **options)

    Engine.train_step = train_step  # type: ignore[method-assign]
    return train.train(config, Path("recipe.yaml"))


def _all_or_one(act: Any, engine: Any, here: bool) -> None:
    if here:
        act(engine)
    elif act is scale_a_norm:
        engine.zero.o.update_lp_params()  # collective


def recipe(corpus: Path, run: Path, parallel: dict[str, Any], every: int) -> RunConfig:
    return tiny(
        corpus, run, parallel=parallel, precision={"kind": "bf16"},
        train={"steps": LAST, "global_batch": 12, "micro_batch": 2, "eval_samples": 0},
        schedule={"warmup_steps": 5, "total_steps": LAST},
        checkpoint={"interval": LAST},
        stability={"hardware": {"fingerprint_interval": every, "state": False}, "snapshots": {"interval": 5}},
    )  # fmt: skip


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp3": (3, {}),
    "zero2-dp2": (2, {"zero": 2}),
    "tp2": (2, {"tensor": 2}),
    "tp2-dp2": (4, {"tensor": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "fault", "every", "named"),
    [
        ("dp3", "weight", 10, [1]),
        ("dp3", "point", 10, [1]),
        ("zero2-dp2", "weight", 10, []),
        ("tp2", "norm", 10, []),
        pytest.param("tp2-dp2", "norm", 10, [], marks=pytest.mark.slow),
    ],
)
def test_it_is_found_and_undone(
    layout: str, fault: str, every: int, named: list[int], corpus: Path, tmp_path: Path
) -> None:
    world, parallel = LAYOUTS[layout]
    runs = tmp_path / "clean", tmp_path / "corrupted"
    for run, what in zip(runs, (None, fault), strict=True):
        c = recipe(corpus, run, parallel, every)
        assert run_ranks(world, corrupted, c, what, 1) == [0] * world
    clean, other = (RunDirectory(run) for run in runs)
    assert not list(clean.events(ReplicasDiffer)) and not list(clean.events(IncidentEvent))
    (event,) = other.events(ReplicasDiffer)
    assert (event["step"], event["proven"]) == ((30, 20) if fault == "norm" else (STEP - 1, STEP - 2))
    assert event["ranks"] == named
    # Which copy was wrong is known when the step has been done again, unless all have been wrong since.
    again = [(e["step"], e["ranks"]) for e in other.events(WrongCopy)]
    assert again == ([(event["step"], [1])] if fault != "norm" else [])
    (first, *_) = other.events(IncidentEvent)
    assert first["onset"] == event["proven"] + 1
    rejected = [(e["step"], e["reason"]) for e in other.events(SnapshotRejected)]
    here = f"has other bytes than were copied into it, in the memory of rank 1 on {socket.gethostname()}"
    assert rejected == ([(20, here)] if fault == "point" else [])
    assert bytes_of(runs[0], LAST) == bytes_of(runs[1], LAST)
