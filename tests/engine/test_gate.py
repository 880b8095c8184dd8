"""The gate before the optimizer: a non-finite step leaves weights, moments, schedule and loss scale as they were."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.config.tree import RunConfig
from megastable.run import records
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.engine.engines import are_same, copy_state
from tests.journal import events

WRAPPERS: dict[str, tuple[int, dict[str, Any], str]] = {
    "bf16-zero1": (2, {}, "BF16_Optimizer"),
    "bf16-zero2": (2, {"parallel": {"zero": 2}}, "DeepSpeedZeroOptimizer"),
    "bf16-zero3": (2, {"parallel": {"zero": 3}}, "DeepSpeedZeroOptimizer_Stage3"),
    "bf16-pp2": (2, {"parallel": {"pipeline": 2}}, "BF16_Optimizer"),
    "bf16-tp2": (2, {"parallel": {"tensor": 2}}, "BF16_Optimizer"),
    "fp32-pp2": (2, {"parallel": {"pipeline": 2}, "precision": {"kind": "fp32"}}, "DeepSpeedZeroOptimizer"),
    "fp32-zero1": (1, {"precision": {"kind": "fp32"}}, "DeepSpeedZeroOptimizer"),
}


def start_of(config: RunConfig) -> Any:
    """What `train` goes on from, to be looked into."""
    import torch.distributed as dist

    from megastable.training.heartbeat import Heartbeat
    from megastable.training.resume import Start
    from megastable.training.startup import StopRequest, open_data, open_run

    stop = StopRequest()
    config, run = open_run(config, Path("recipe.yaml"))
    config, corpora = open_data(config)
    heart = Heartbeat(run, dist.get_rank(), dist.get_world_size(), config.train.steps, stop, None)
    return Start(config, run, corpora, heart)


def first_batch(start: Any) -> Any:
    """This rank's part of the first global batch."""
    with start.make_whole_loader(start.order.source, start.config.train.global_batch) as loader:
        return next(loader).micro_batches


def trainer_of(config: RunConfig) -> Any:
    """What `train` builds, to be looked into."""
    from megastable.train import Trainer

    start = start_of(config)
    return Trainer(start, start.heart.stop, start.heart)


def spoil_gradient(engine: Any, value: float = math.nan) -> Any:
    """A real gradient of the real backward pass, spoilt on its way; returns the hook."""
    weight = next(p for n, p in engine.ds.module.named_parameters() if n.endswith("mlp.down.weight"))
    return weight.register_hook(lambda g: torch.full_like(g, value))


def train_poisoned(config: RunConfig, bad: list[int], where: str) -> dict[str, Any]:
    """Train with NaN in the last rank's gradient, or in the loss, at the steps `bad`; whether they changed a byte."""
    import torch.distributed as dist

    trainer = trainer_of(config)
    engine, unchanged = trainer.engine, []
    last = dist.get_rank() == dist.get_world_size() - 1
    real, loss_of = engine.train_step, type(engine.loss).__call__

    def train_step(*args: Any) -> Any:
        if trainer.state.step + 1 not in bad:
            return real(*args)
        before = copy_state(engine)
        handle = spoil_gradient(engine) if where == "gradient" and last else None
        if where == "loss":
            type(engine.loss).__call__ = lambda self, *a: loss_of(self, *a) * math.nan  # type: ignore[method-assign]
        try:
            return real(*args)
        finally:
            if handle is not None:
                handle.remove()
            type(engine.loss).__call__ = loss_of  # type: ignore[method-assign]
            unchanged.append(are_same(before, copy_state(engine)) and len(before) > 20)

    engine.train_step = train_step  # type: ignore[method-assign]
    code = trainer.train()
    wrapper = type(engine.optimizer).__name__
    return {"code": code, "wrapper": wrapper, "unchanged": unchanged, "updates": trainer.state.updates}


# A loss that is not finite is seen above the wrapper: two of them are enough.
CASES = [*((name, "gradient") for name in WRAPPERS), ("bf16-zero1", "loss"), ("bf16-pp2", "loss")]


@pytest.mark.quick("bf16-zero1-gradient")
@pytest.mark.parametrize(("name", "where"), CASES)
def test_gate_lets_a_non_finite_step_change_nothing(
    name: str, where: str, corpus: Path, tmp_path: Path
) -> None:
    world, parts, wrapper = WRAPPERS[name]
    bad, steps = [2, 5], 6
    train = {"steps": steps, "global_batch": 8, "micro_batch": 2 if world > 1 else 4, "eval_samples": 0}
    schedule = {"warmup_steps": 5, "total_steps": 20}
    config = tiny(corpus, tmp_path / "run", **parts, train=train, schedule=schedule)
    for rank in run_ranks(world, train_poisoned, config, bad, where):
        assert rank["code"] == 0 and rank["wrapper"] == wrapper and rank["updates"] == steps - len(bad)
        assert rank["unchanged"] == [True] * len(bad)
    assert [(e.step, e.verdict) for e in events(tmp_path / "run", "discarded")] == [
        (s, "non_finite") for s in bad
    ]
    table = records.read_newest_records(tmp_path / "run/steps").to_pylist()
    assert [row["applied"] for row in table] == [step not in bad for step in range(1, steps + 1)]
    assert [row["first_position"] for row in table] == [8 * i for i in range(steps)]  # the data moves on
    assert table[1]["lr"] == table[2]["lr"] and table[2]["lr"] < table[3]["lr"]  # the schedule does not
    assert all(math.isfinite(row["loss"]) for row in table if row["applied"])


def accept_all(config: RunConfig) -> tuple[float, bool, bool]:
    """A NaN in a gradient, a judge that refuses nothing: norm, whether it was applied, whether masters are finite."""
    start = start_of(config)
    engine = start.engine
    spoil_gradient(engine)
    measured, applied = engine.train_step(first_batch(start), 1e-3, lambda _: True)
    return measured.grad_norm, applied, all(bool(m.isfinite().all()) for m in engine.masters)


@pytest.mark.parametrize("zero", [1, 2])
def test_gate_lets_no_nan_through_whatever_the_judge_says(zero: int, corpus: Path, tmp_path: Path) -> None:
    config = tiny(corpus, tmp_path / "run", parallel={"zero": zero})
    assert run_ranks(1, accept_all, config) == [(math.inf, False, True)]


def poison_weights(config: RunConfig, at_step: int) -> tuple[int, str]:
    """A NaN in a master weight before a step (1: before the first snapshot): how the run ends."""
    from megastable.base.errors import MegastableError
    from megastable.train import Trainer

    start = start_of(config)
    engine, real, calls = start.engine, start.engine.train_step, [0]

    def poison() -> None:
        engine.masters[0].data.view(-1)[:99] = math.nan
        engine.refresh_weights()

    def train_step(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at_step:
            poison()
        return real(*args, **options)

    if at_step == 1:
        poison()
    else:
        engine.train_step = train_step  # type: ignore[method-assign]
    try:
        return Trainer(start, start.heart.stop, start.heart).train(), ""
    except MegastableError as error:
        return error.code, str(error)


@pytest.mark.quick("0-stability0-76-4 updates in a row were refused")
@pytest.mark.parametrize(
    ("interval", "stability", "code", "message"),
    [
        (0, {"enabled": False, "max_discards": 4}, 76, "4 updates in a row were refused"),
        (2, {"enabled": False, "max_discards": 9}, 76, "weights or moments are not finite"),
        (0, {}, 78, "no snapshot is good"),
    ],
)
def test_gate_ends_a_run_with_a_nan_in_its_weights(
    interval: int, stability: dict[str, Any], code: int, message: str, corpus: Path, tmp_path: Path
) -> None:
    config = tiny(corpus, tmp_path / "run", stability=stability, checkpoint={"interval": interval})
    for ended, text in run_ranks(2, poison_weights, config, 1):
        assert ended == code and message in text
    # What nobody could go on from is not kept, and so pushes nothing good out.
    assert list((tmp_path / "run/checkpoints").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_rewind_undoes_a_nan_in_the_weights(zero: int, corpus: Path, tmp_path: Path) -> None:
    """The gate lets none in, so it was the hardware: back to a snapshot, the same data again, nothing skipped."""
    run = tmp_path / "run"
    # The watch over memory would find it before the loss does.
    stability = {"snapshots": {"interval": 5}, "hardware": {"state": False}}
    config = tiny(corpus, run, parallel={"zero": zero}, stability=stability)
    assert run_ranks(2, poison_weights, config, 13) == [(0, ""), (0, "")]
    (located,) = events(run, "located")
    assert located.kind == "state" and located.fields["parameters"]
    (closed,) = [e.summary for e in events(run, "incident") if e.what == "closed"]
    assert closed["cause"] == "hardware" and closed["positions"] == [] and closed["steps_lost"] == 3
    table = records.read_newest_records(run / "steps").to_pylist()
    assert [(r["applied"], r["first_position"]) for r in table] == [(True, 8 * i) for i in range(20)]


def train_both(one: RunConfig, other: RunConfig, steps: list[int]) -> list[bool]:
    """Whether refusing finite gradients at `steps` gives the numbers, and the state, of a run without these steps."""
    refused, left_out = train_without(one, steps, []), train_without(other, [], steps)
    return [refused[0] == left_out[0], are_same(refused[1], left_out[1])]


def train_without(
    config: RunConfig, refused: list[int], left_out: list[int]
) -> tuple[list[Any], dict[str, Any]]:
    """Five steps; at `refused` the gate refuses finite gradients, `left_out` are passed over altogether."""
    start, numbers = start_of(config), []
    with start.make_whole_loader(start.order.source, config.train.global_batch) as loader:
        for step in range(5):
            batch, wanted = next(loader).micro_batches, step not in refused
            if step in left_out:
                continue
            measured, applied = start.engine.train_step(batch, 1e-3, lambda _, wanted=wanted: wanted)
            assert applied == wanted
            numbers += [(measured.loss, measured.grad_norm)] if applied else []
    return numbers, copy_state(start.engine)


FP16 = {"precision": {"kind": "fp16", "initial_scale_power": 8}}
FP32 = {"precision": {"kind": "fp32"}}
ALL = {name: (world, parts) for name, (world, parts, _) in WRAPPERS.items()} | {
    "bf16-tied-pp2": (2, {"parallel": {"pipeline": 2}, "model": {"tied": True}}),
    "fp32-zero2": (2, {"parallel": {"zero": 2}} | FP32),
    "fp32-zero3": (2, {"parallel": {"zero": 3}} | FP32),
    "fp16-zero2": (2, {"parallel": {"zero": 2}} | FP16),
    "fp16-zero3": (2, {"parallel": {"zero": 3}} | FP16),
    "fp16-pp2": (2, {"parallel": {"pipeline": 2}} | FP16),
}


@pytest.mark.quick("bf16-zero1-1", "bf16-zero2-1", "bf16-pp2-1")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", ALL)
def test_gate_refuses_a_batch_as_if_never_seen(
    name: str, accumulation: int, corpus: Path, tmp_path: Path
) -> None:
    """Finite gradients, refused: whatever a wrapper keeps between steps must not leak into the next one."""
    world, parts = ALL[name]
    shared = parts.get("parallel", {})
    data = world // (shared.get("pipeline", 1) * shared.get("tensor", 1))
    parts = {**parts, "model": dict(tiny(corpus, tmp_path).model) | parts.get("model", {})}
    train = {"steps": 5, "global_batch": 8, "micro_batch": 8 // data // accumulation, "eval_samples": 0}
    a, b = (tiny(corpus, tmp_path / run, **parts, train=train) for run in ("refused", "left-out"))
    assert run_ranks(world, train_both, a, b, [1, 3]) == [[True, True]] * world


def save_slowly(config: RunConfig) -> tuple[bool, float]:
    """Save, with a copy that ends 0.3 s after an update waits for it: is what was saved that of before the update?"""
    import threading

    from megastable.checkpoint.whole import WholeState
    from megastable.engine.flatstate import KINDS

    start = start_of(config)
    engine, saver, batch = start.engine, start.checkpoints.saver, first_batch(start)
    for _ in range(2):
        engine.train_step(batch, 1e-3, lambda _: True)
    before = {
        (name, kind): t.clone()
        for kind in KINDS
        for name, t in engine.flat_state().gather_shards(kind).items()
    }
    copied, wait = threading.Event(), engine._wait_for_copies
    saver._thread.submit(copied.wait)
    saver.begin_save(start.state)

    def wait_for_copies() -> None:
        threading.Timer(0.3, copied.set).start()
        wait()

    engine._wait_for_copies = wait_for_copies
    _, applied = engine.train_step(
        batch, 1e-3, lambda _: True, lambda: {"checkpoint": saver.collect_ballot()}
    )
    outcome = saver.finish_save()
    assert applied and outcome is not None and outcome.path is not None, outcome
    whole, name = WholeState(outcome.path), "embedding.weight"
    same = all(torch.equal(whole.read_tensor(*place), t) for place, t in before.items())
    moved = not torch.equal(engine.flat_state().gather_shards("weight")[name], before[name, "weight"])
    return same and moved, outcome.blocked


@pytest.mark.quick("1")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_update_waits_for_a_copy_that_a_save_still_makes(zero: int, corpus: Path, tmp_path: Path) -> None:
    for exact, blocked in run_ranks(2, save_slowly, tiny(corpus, tmp_path / "run", parallel={"zero": zero})):
        assert exact and blocked > 0.2  # what the update waited counts as what the steps waited
