"""Faults of which the first look blames the wrong rank: a consequence, a majority, a receiver, one fault twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import (
    GradientsDoubted,
    HostFaulty,
    IncidentEvent,
    MessagesDiffer,
    ReplicasDiffer,
    StateChanged,
    WrongCopy,
)
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.training.checkpoint_bytes import bytes_of


def recipe(corpus: Path, run: Path, steps: int, interval: int = 5, **stability: Any) -> RunConfig:
    return tiny(
        corpus, run, parallel={"pipeline": stability.pop("pipeline", 1)}, precision={"kind": "bf16"},
        train={"steps": steps, "global_batch": 12, "micro_batch": 2, "eval_samples": 0},
        schedule={"warmup_steps": 5, "total_steps": steps}, checkpoint={"interval": steps},
        stability={"snapshots": {"interval": interval}, "hardware": stability},
    )  # fmt: skip


def _train(config: RunConfig) -> int:
    from megastable import train

    return train.train(config, Path("recipe.yaml"))


class FirstTime:
    """now: whether an engine does a step for the first time; a repetition, or the step after a rewind, is not that."""

    def __init__(self, step: int) -> None:
        from megastable.engine.engine import Engine

        self.now, over, real = False, False, Engine.train_step

        def train_step(engine: Engine, *args: Any, **options: Any) -> Any:
            nonlocal over
            here = engine.ds.global_steps + 1 == step
            self.now, over = here and not over, here or over
            return real(engine, *args, **options)

        Engine.train_step = train_step  # type: ignore[method-assign]


def wrong_input_gradient(config: RunConfig, rank: int, step: int) -> int:
    """What a stage sends back is wrong before it is fingerprinted: its own product was."""
    import torch.distributed as dist

    from megastable.engine.zero import StageMessages

    if dist.get_rank() != rank:
        return _train(config)
    sent, first_time = StageMessages._add_sent, FirstTime(step)

    def add_sent(self: StageMessages, message: Any, stage: int) -> None:
        if first_time.now and message.is_floating_point():
            message.mul_(-1.0)
        sent(self, message, stage)

    StageMessages._add_sent = add_sent  # type: ignore[method-assign]
    return _train(config)


@pytest.mark.slow
def test_the_stage_that_sent_a_wrong_gradient_is_named_not_the_one_that_used_it(
    corpus: Path, tmp_path: Path
) -> None:
    c = recipe(corpus, tmp_path / "run", 34, pipeline=2)
    assert run_ranks(2, wrong_input_gradient, c, 1, 30) == [0, 0]
    (event,) = RunDirectory(tmp_path / "run").events(GradientsDoubted)
    assert (event["step"], event["verdict"], event["ranks"]) == (30, "transient", [1])


def wrong_messages(config: RunConfig, rank: int, steps: Sequence[int]) -> int:
    """What a rank sends changes after it was fingerprinted, every rank on a host of its own. No steps: all from the 6th
    on, up to a hundred."""
    import socket

    import torch
    import torch.distributed as dist
    from deepspeed import comm

    from megastable.engine.engine import Engine

    me = dist.get_rank()
    socket.gethostname = lambda: f"host{me}"  # type: ignore[assignment]
    if me != rank:
        return _train(config)
    real, step, left, active, done = comm.send, Engine.train_step, list(steps), False, 0

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        nonlocal active, done
        done += 1
        active = 6 <= done < 100 if not steps else bool(left) and self.ds.global_steps + 1 >= left[0]
        if active and left:
            left.pop(0)
        return step(self, *args, **options)

    def send(tensor: Any, *args: Any, **options: Any) -> Any:
        nonlocal active
        if active and tensor.dtype is torch.bfloat16:
            active = False
            tensor = tensor.detach().clone()
            tensor.view(-1)[7:8].view(torch.int16).bitwise_xor_(1)
        return real(tensor, *args, **options)

    comm.send, Engine.train_step = send, train_step  # type: ignore[assignment,method-assign]
    return _train(config)


@pytest.mark.slow
def test_a_receiver_of_wrong_messages_is_not_left_out(corpus: Path, tmp_path: Path) -> None:
    c = recipe(corpus, tmp_path / "run", 16, pipeline=2)
    assert run_ranks(2, wrong_messages, c, 0, (7, 10, 13)) == [0, 0]
    run = RunDirectory(tmp_path / "run")
    assert [e["ranks"] for e in run.events(MessagesDiffer)] == [[1]] * 3
    assert not list(run.events(HostFaulty))


@pytest.mark.slow
def test_a_link_that_is_always_wrong_does_not_repeat_a_step_for_ever(corpus: Path, tmp_path: Path) -> None:
    """Without snapshots nothing else would bound it."""
    c = recipe(corpus, tmp_path / "run", 16, interval=0, pipeline=2)
    with pytest.raises(AssertionError, match=r"HandoverError|UnstableError"):
        run_ranks(2, wrong_messages, c, 0, ())
    run = RunDirectory(tmp_path / "run")
    assert len(list(run.events(MessagesDiffer))) == 3
    assert next(run.events(IncidentEvent))["verdict"] == "corrupted"


def flipped_weights(config: RunConfig, ranks: Sequence[int], steps: Sequence[int]) -> int:
    """A bit of the computing copy flips on some ranks alike before some steps, every rank on a host of its own."""
    import socket

    import torch
    import torch.distributed as dist

    from megastable.engine.engine import Engine

    me = dist.get_rank()
    socket.gethostname = lambda: f"host{me}"  # type: ignore[assignment]
    real, left = Engine.train_step, list(steps)

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        if not self._probing and left and self.ds.global_steps + 1 >= left[0]:
            left.pop(0)
            if me in ranks:
                self.zero.flat_weights[0].view(torch.int16)[5:6].bitwise_xor_(1)
        return real(self, *args, **options)

    Engine.train_step = train_step  # type: ignore[method-assign]
    return _train(config)


def test_one_fault_counts_once(corpus: Path, tmp_path: Path) -> None:
    c = recipe(corpus, tmp_path / "run", 18)
    assert run_ranks(2, flipped_weights, c, (1,), (7, 13)) == [0, 0]
    run = RunDirectory(tmp_path / "run")
    assert [e["ranks"] for e in run.events(StateChanged)] == [[1], [1]]
    assert not list(run.events(WrongCopy, HostFaulty))


@pytest.mark.slow
def test_the_third_fault_of_a_memory_costs_its_host(corpus: Path, tmp_path: Path) -> None:
    c = recipe(corpus, tmp_path / "run", 18)
    with pytest.raises(AssertionError, match=r"HandoverError|UnstableError"):
        run_ranks(2, flipped_weights, c, (1,), (7, 11, 15))
    (event,) = RunDirectory(tmp_path / "run").events(HostFaulty)
    assert event["hosts"] == ["host1"] and event["ranks"] == [1]


@pytest.mark.slow
def test_a_majority_of_wrong_copies_does_not_leave_out_the_right_one(corpus: Path, tmp_path: Path) -> None:
    """As after a wrong first hop of a ring."""
    c = recipe(corpus, tmp_path / "run", 22, state=False)
    assert run_ranks(3, flipped_weights, c, (1, 2), (7, 12, 17)) == [0, 0, 0]
    run = RunDirectory(tmp_path / "run")
    assert [e["ranks"] for e in run.events(ReplicasDiffer)] == [[0]] * 3
    assert [e["ranks"] for e in run.events(WrongCopy)] == [[1, 2]] * 3
    assert not list(run.events(HostFaulty))


def wrong_sum(config: RunConfig, rank: int, step: int) -> int:
    """A rank receives another norm in the gate's sum, once: it clips by that, and all gather what it updates."""
    import torch.distributed as dist

    from megastable.engine.engine import Engine

    if dist.get_rank() != rank:
        return _train(config)
    measure, first_time = Engine._measure_step, FirstTime(step)

    def measured(self: Engine, *given: Any) -> Any:
        right, norm = measure(self, *given)
        return (replace(right, grad_norm=8 * norm), 8 * norm) if first_time.now else (right, norm)

    Engine._measure_step = measured  # type: ignore[method-assign]
    return _train(config)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "named"), [(2, []), (3, [1])])
def test_a_rank_that_received_another_sum_is_seen_in_the_next_step(
    world: int, named: list[int], corpus: Path, tmp_path: Path
) -> None:
    for name, step in (("clean", -1), ("run", 8)):
        assert run_ranks(world, wrong_sum, recipe(corpus, tmp_path / name, 12), 1, step) == [0] * world
    run = RunDirectory(tmp_path / "run")
    (event,) = run.events(ReplicasDiffer)
    assert (event["step"], event["ranks"]) == (8, named) and "the sum of step 8" in event["reason"]
    assert not list(run.events(HostFaulty)) and next(run.events(IncidentEvent))["onset"] == 8
    assert bytes_of(tmp_path / "run", 12) == bytes_of(tmp_path / "clean", 12)
