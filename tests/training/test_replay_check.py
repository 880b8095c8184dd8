"""A micro-batch computed again: a chip that lies by chance is named, one that always lies must leave, sound ones are
never blamed."""

from __future__ import annotations

import socket
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import HostFaulty, IncidentEvent, ReplayDiffers
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.training.checkpoint_bytes import bytes_of

EVERY, LAST = 10, 32
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}), "dp2": (2, {}), "dp3": (3, {}), "zero2": (2, {"zero": 2}), "zero3": (2, {"zero": 3}),
    "tp2": (2, {"tensor": 2}), "pp2": (2, {"pipeline": 2}), "cp2": (2, {"context": 2}),
    "tp2-dp2": (4, {"tensor": 2}),
}  # fmt: skip


def wrong_column(config: RunConfig, rank: int) -> int:
    """From the first step on, every product of a rank has zeros in its second column."""
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from megastable import train

    class Faulty(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and out.shape[1] > 1:
                out[:, 1] = 0
            return out

    if dist.get_rank() != rank:
        return train.train(config, Path("recipe.yaml"))
    with Faulty():
        return train.train(config, Path("recipe.yaml"))


def wrong_gradient(config: RunConfig, rank: int, times: int, first: int) -> int:
    """As `wrong_at`, from number `first` on."""
    return wrong_at(config, rank, range(first, first + times))


def wrong_at(config: RunConfig, rank: int, numbers: Container[int]) -> int:
    """In its replays alone, a rank's gradient of one matrix is doubled: in these of all results that it computes there,
    counted from 1."""
    import torch.distributed as dist

    from megastable import train
    from megastable.engine import gradient_digest as module
    from megastable.hardware import recomputation

    real, computed = module.gradient_digest, 0

    def digest(engine: Any, micro_batches: Any) -> Any:
        nonlocal computed
        computed += 1
        parameter = list(engine.ds.module.parameters())[3]
        wrong = dist.get_rank() == rank and computed in numbers
        hook = parameter.register_hook((lambda g: 2 * g) if wrong else (lambda g: g))
        try:
            return real(engine, micro_batches)
        finally:
            hook.remove()

    recomputation.gradient_digest = digest  # type: ignore[attr-defined]
    return train.train(config, Path("recipe.yaml"))


def recipe(corpus: Path, run: Path, parallel: dict[str, Any], every: int = EVERY) -> RunConfig:
    return tiny(
        corpus, run, parallel=parallel, precision={"kind": "bf16"},
        train={"steps": LAST, "global_batch": 12, "micro_batch": 2, "eval_samples": 0},
        schedule={"warmup_steps": 5, "total_steps": LAST},
        checkpoint={"interval": LAST},
        stability={"hardware": {"replay_interval": every, "gradients": False}, "snapshots": {"interval": 5}},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sound_chips_are_not_blamed_and_no_byte_changes(layout: str, corpus: Path, tmp_path: Path) -> None:
    world, parallel = LAYOUTS[layout]
    for name, every in (("on", EVERY), ("off", 0)):
        c = recipe(corpus, tmp_path / name, parallel, every)
        assert run_ranks(world, wrong_gradient, c, 0, 0, 0) == [0] * world
    run = RunDirectory(tmp_path / "on")
    assert not list(run.events(ReplayDiffers)) and not list(run.events(IncidentEvent))
    assert bytes_of(tmp_path / "on", LAST) == bytes_of(tmp_path / "off", LAST)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "dp2", "zero3", "tp2", "pp2"])
def test_a_wrong_column_is_found_and_its_host_must_leave(layout: str, corpus: Path, tmp_path: Path) -> None:
    world, parallel = LAYOUTS[layout]
    with pytest.raises(AssertionError, match=r"HandoverError|UnstableError"):
        run_ranks(world, wrong_column, recipe(corpus, tmp_path / "run", parallel), world - 1)
    run = RunDirectory(tmp_path / "run")
    (event,) = run.events(ReplayDiffers)
    assert (event["step"], event["verdict"], event["ranks"]) == (EVERY, "persistent", [world - 1])
    assert "product with a known answer" in event["reason"] and "column 1" in event["reason"]
    (faulty,) = run.events(HostFaulty)
    assert faulty["hosts"] == [socket.gethostname()] and faulty["ranks"] == [world - 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "first", "rank"),
    # Its own samples; those of the other rank.
    [("dp2", 1, 1), ("dp2", 2, 1), ("dp3", 2, 1), ("one", 2, 0), ("zero2", 1, 1), ("tp2-dp2", 1, 1)],
)
def test_another_gradient_by_chance(layout: str, first: int, rank: int, corpus: Path, tmp_path: Path) -> None:
    """first: of its results in the second check, after two in the first one. The state is not touched."""
    world, parallel = LAYOUTS[layout]
    for name, times in (("run", 1), ("clean", 0)):
        c = recipe(corpus, tmp_path / name, parallel)
        assert run_ranks(world, wrong_gradient, c, rank, times, 2 + first) == [0] * world
    run = RunDirectory(tmp_path / "run")
    (event,) = run.events(ReplayDiffers)
    named = [0, 1] if layout == "tp2-dp2" else [rank]  # who of a replica was wrong is not known
    assert (event["step"], event["verdict"], event["ranks"]) == (2 * EVERY, "transient", named)
    assert not list(run.events(IncidentEvent))
    assert bytes_of(tmp_path / "run", LAST) == bytes_of(tmp_path / "clean", LAST)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ranks"), [("dp3", [1]), ("dp2", [])])
def test_another_gradient_always(layout: str, ranks: list[int], corpus: Path, tmp_path: Path) -> None:
    """With a third result it is known whose; of two it is one, and which is not known."""
    world, parallel = LAYOUTS[layout]
    with pytest.raises(AssertionError, match=r"HandoverError|UnstableError"):
        run_ranks(world, wrong_gradient, recipe(corpus, tmp_path / "run", parallel), 1, 999, 3)
    run = RunDirectory(tmp_path / "run")
    events = list(run.events(ReplayDiffers))
    assert events[0]["step"] == 2 * EVERY and {e["verdict"] for e in events} == {"persistent"}
    assert all(e["ranks"] == ranks for e in events)
    assert [e["ranks"] for e in run.events(HostFaulty)] == ([[1]] if ranks else [])


@pytest.mark.slow
def test_three_chances_of_one_rank_are_none(corpus: Path, tmp_path: Path) -> None:
    """Every step after a wrong result is checked; a rank that is wrong by chance again and again must leave."""
    with pytest.raises(AssertionError, match=r"HandoverError|UnstableError"):
        run_ranks(2, wrong_at, recipe(corpus, tmp_path / "run", {}), 1, (1, 7, 15))
    run = RunDirectory(tmp_path / "run")
    found = [(e["step"], e["verdict"], e["ranks"]) for e in run.events(ReplayDiffers)]
    assert [what for _, *what in found] == [["transient", [1]]] * 2 + [["persistent", [1]]]
    assert found[0][0] == EVERY < found[1][0] < found[2][0] <= EVERY + 5
    assert [e["ranks"] for e in run.events(HostFaulty)] == [[1]]
