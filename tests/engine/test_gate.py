"""The gate before the optimizer: a non-finite step leaves weights, moments, schedule and loss scale as they were."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.config.tree import RunConfig
from megastable.run import records
from tests.conftest import tiny
from tests.distributed import run_ranks

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
    with start.from_the_first(start.order.source, start.config.train.global_batch) as loader:
        return next(loader).micro_batches


def trainer_of(config: RunConfig) -> Any:
    """What `train` builds, to be looked into."""
    from megastable.train import Trainer

    start = start_of(config)
    return Trainer(start, start.heart.stop, start.heart)


def train_poisoned(config: RunConfig, bad: list[int], where: str) -> dict[str, Any]:
    """Train with NaN in one rank's gradient, or in the loss, at the steps `bad`; bytes of the state around them."""
    import torch.distributed as dist

    from megastable.engine.flatstate import KINDS

    trainer = trainer_of(config)
    engine = trainer.engine
    last = dist.get_rank() == dist.get_world_size() - 1
    kept: dict[str, Any] = {}

    def state() -> dict[str, torch.Tensor]:
        flat = engine.flat_state()
        found = {f"{kind}/{name}": t for kind in KINDS for name, t in flat.shards(kind).items()}
        for index, parameter in enumerate(engine.ds.module.parameters()):
            found[f"low/{index}"] = getattr(parameter, "ds_tensor", parameter).detach().float().clone()
        for group, master in enumerate(flat.masters):
            for key, value in flat.optimizer.state.get(master, {}).items():
                found[f"inner/{group}/{key}"] = value.detach().clone().cpu()
        return found

    real = engine.train_step

    def train_step(micro_batches: Any, lr: float, judge: Any, ballot: Any = dict) -> Any:
        step = trainer.state.step + 1
        handle = None
        if step in bad:
            kept[f"before-{step}"] = state()
            # The last rank's own block: a real gradient of the real backward pass, spoilt on its way.
            weight = next(p for n, p in engine.ds.module.named_parameters() if n.endswith("mlp.down.weight"))
            if where == "gradient" and last:
                handle = weight.register_hook(lambda g: torch.full_like(g, math.nan))
            elif where == "loss":
                original = type(engine.loss).__call__
                type(engine.loss).__call__ = lambda self, *a: original(self, *a) * math.nan  # type: ignore[method-assign]
        try:
            result = real(micro_batches, lr, judge, ballot)
        finally:
            if handle is not None:
                handle.remove()
            if step in bad and where == "loss":
                type(engine.loss).__call__ = original  # type: ignore[method-assign]
        if step in bad:
            kept[f"after-{step}"] = state()
        return result

    engine.train_step = train_step  # type: ignore[method-assign]
    code = trainer.train()
    return {
        "code": code,
        "wrapper": type(engine.optimizer).__name__,
        "kept": kept,
        "updates": trainer.state.updates,
    }


# A loss that is not finite is seen above the wrapper: two of them are enough.
CASES = [*((name, "gradient") for name in WRAPPERS), ("bf16-zero1", "loss"), ("bf16-pp2", "loss")]


@pytest.mark.quick("bf16-zero1-gradient")
@pytest.mark.parametrize(("name", "where"), CASES)
def test_a_non_finite_step_changes_nothing(name: str, where: str, corpus: Path, tmp_path: Path) -> None:
    world, parts, wrapper = WRAPPERS[name]
    bad, steps = [2, 5], 6
    train = {"steps": steps, "global_batch": 8, "micro_batch": 2 if world > 1 else 4, "eval_samples": 0}
    schedule = {"warmup_steps": 5, "total_steps": 20}
    config = tiny(corpus, tmp_path / "run", **parts, train=train, schedule=schedule)
    ranks = run_ranks(world, train_poisoned, config, bad, where)
    for rank in ranks:
        assert rank["code"] == 0 and rank["wrapper"] == wrapper and rank["updates"] == steps - len(bad)
        for step in bad:
            before, after = rank["kept"][f"before-{step}"], rank["kept"][f"after-{step}"]
            assert before.keys() == after.keys() and len(before) > 20
            for key, value in before.items():
                assert torch.equal(value, after[key]), key
    events = [json.loads(line) for line in (tmp_path / "run/journal.jsonl").read_text().splitlines()]
    discarded = [e for e in events if e["event"] == "discarded"]
    assert [e["step"] for e in discarded] == bad
    assert all(e["verdict"] == "non_finite" for e in discarded)
    table = records.read(tmp_path / "run/steps").to_pylist()
    assert [row["applied"] for row in table] == [step not in bad for step in range(1, steps + 1)]
    assert [row["first_position"] for row in table] == [8 * i for i in range(steps)]  # the data moves on
    assert table[1]["lr"] == table[2]["lr"] and table[2]["lr"] < table[3]["lr"]  # the schedule does not
    finite = [row["loss"] for row in table if row["applied"]]
    assert all(math.isfinite(loss) for loss in finite)


def accept_all(config: RunConfig) -> tuple[float, bool, bool]:
    """A NaN in a gradient, a judge that refuses nothing: norm, whether it was applied, whether masters are finite."""
    start = start_of(config)
    engine = start.engine
    weight = next(p for n, p in engine.ds.module.named_parameters() if n.endswith("mlp.down.weight"))
    weight.register_hook(lambda g: torch.full_like(g, math.nan))
    measured, applied = engine.train_step(first_batch(start), 1e-3, lambda _: True)
    return measured.grad_norm, applied, all(bool(m.isfinite().all()) for m in engine.masters)


@pytest.mark.parametrize("zero", [1, 2])
def test_no_judge_can_let_a_nan_through(zero: int, corpus: Path, tmp_path: Path) -> None:
    config = tiny(corpus, tmp_path / "run", parallel={"zero": zero})
    assert run_ranks(1, accept_all, config) == [(math.inf, False, True)]


def poison_weights(config: RunConfig, at_step: int) -> tuple[int, str]:
    """A NaN in a master weight before a step (1: before the first snapshot): how the run ends."""
    from megastable.base.errors import MegastableError
    from megastable.train import Trainer

    start = start_of(config)
    engine, real, calls = start.engine, start.engine.train_step, 0

    def poison() -> None:
        engine.masters[0].data.view(-1)[:99] = math.nan
        engine.refresh_weights()

    def train_step(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_step:
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
def test_a_nan_in_the_weights_ends_the_run(
    interval: int, stability: dict[str, Any], code: int, message: str, corpus: Path, tmp_path: Path
) -> None:
    config = tiny(corpus, tmp_path / "run", stability=stability, checkpoint={"interval": interval})
    for ended, text in run_ranks(2, poison_weights, config, 1):
        assert ended == code and message in text
    # What nobody could go on from is not kept, and so pushes nothing good out.
    assert list((tmp_path / "run/checkpoints").iterdir()) == []


def spoil_moments(config: RunConfig) -> tuple[int, str]:
    """Infinities in a second moment before step 13: that weight stands still, no loss and no gradient shows it."""
    trainer = trainer_of(config)
    engine, real = trainer.engine, trainer.engine.train_step
    spoilt = []

    def train_step(*args: Any, **options: Any) -> Any:
        if trainer.state.step == 12 and not spoilt and not engine._probing:
            spoilt.append(True)
            engine.optimizer_state()["0/exp_avg_sq"][:9] = math.inf
        return real(*args, **options)

    engine.train_step = train_step  # type: ignore[method-assign]
    return trainer.train(), ""


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [True, False])
def test_moments_that_are_found_ill_in_a_save_are_undone(
    asynchronous: bool, corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = tiny(
        corpus, run, stability={"snapshots": {"interval": 5}, "hardware": {"state": False}},
        checkpoint={"interval": 14, "asynchronous": asynchronous},
    )  # fmt: skip
    assert run_ranks(1, spoil_moments, config) == [(0, "")]
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    (failed,) = [e for e in events if e["event"] == "checkpoint_failed"]
    assert failed["step"] == 14 and "not finite" in failed["problem"]
    assert [e["step"] for e in events if e["event"] == "checkpoint"] == [14, 20]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_a_nan_that_gets_into_the_weights_is_undone(zero: int, corpus: Path, tmp_path: Path) -> None:
    """The gate lets none in, so it was the hardware: back to a snapshot, the same data again, nothing skipped."""
    run = tmp_path / "run"
    # The watch over memory would find it before the loss does.
    stability = {"snapshots": {"interval": 5}, "hardware": {"state": False}}
    config = tiny(corpus, run, parallel={"zero": zero}, stability=stability)
    assert run_ranks(2, poison_weights, config, 13) == [(0, ""), (0, "")]
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    (located,) = [e for e in events if e["event"] == "located"]
    assert located["kind"] == "state" and located["parameters"]
    (closed,) = [e["summary"] for e in events if e["event"] == "incident" and e["what"] == "closed"]
    assert closed["cause"] == "hardware" and closed["positions"] == [] and closed["steps_lost"] == 3
    table = records.read(run / "steps").to_pylist()
    assert all(row["applied"] for row in table) and [r["first_position"] for r in table] == [
        8 * i for i in range(20)
    ]


def overflow(config: RunConfig) -> dict[str, Any]:
    """fp16 from a loss scale that must overflow: DeepSpeed lowers it, the run goes on."""
    from megastable.train import train

    return {"code": train(config, Path("recipe.yaml"))}


@pytest.mark.slow
def test_fp16_overflow_lowers_the_loss_scale(corpus: Path, tmp_path: Path) -> None:
    config = tiny(
        corpus, tmp_path / "run", precision={"kind": "fp16", "initial_scale_power": 24}, parallel={"zero": 2},
        train={"steps": 20, "global_batch": 8, "micro_batch": 2, "eval_samples": 0},
    )  # fmt: skip
    run_ranks(2, overflow, config)
    table = records.read(tmp_path / "run/steps").to_pylist()
    refused = [row for row in table if not row["applied"]]
    assert refused and table[-1]["applied"]
    assert table[-1]["loss_scale"] < table[0]["loss_scale"] == 2.0**24
    assert all(math.isfinite(row["loss"]) for row in table)


def train_both(one: RunConfig, other: RunConfig, steps: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    return train_without(one, steps, []), train_without(other, [], steps)


def train_without(config: RunConfig, refused: list[int], left_out: list[int]) -> dict[str, Any]:
    """Five steps; at `refused` the gate refuses finite gradients, `left_out` are passed over altogether."""
    from megastable.engine.flatstate import KINDS

    start = start_of(config)
    loader = start.from_the_first(start.order.source, config.train.global_batch)
    numbers = []
    for step in range(5):
        batch = next(loader)
        if step in left_out:
            continue
        wanted = step not in refused
        measured, applied = start.engine.train_step(
            batch.micro_batches, 1e-3, lambda _, wanted=wanted: wanted
        )
        assert applied == wanted
        if applied:
            numbers.append((measured.loss, measured.grad_norm))
    loader.close()
    flat = start.engine.flat_state()
    state = {f"{kind}/{name}": t for kind in KINDS for name, t in flat.shards(kind).items()}
    for index, parameter in enumerate(start.engine.ds.module.parameters()):
        state[f"low/{index}"] = getattr(parameter, "ds_tensor", parameter).detach().float().clone()
    return {"numbers": numbers, "state": state}


ALL = WRAPPERS | {
    "bf16-tied-pp2": (2, {"parallel": {"pipeline": 2}, "model": {"tied": True}}, ""),
    "fp32-zero2": (2, {"parallel": {"zero": 2}, "precision": {"kind": "fp32"}}, ""),
    "fp32-zero3": (2, {"parallel": {"zero": 3}, "precision": {"kind": "fp32"}}, ""),
    "fp16-zero2": (2, {"parallel": {"zero": 2}, "precision": {"kind": "fp16", "initial_scale_power": 8}}, ""),
    "fp16-zero3": (2, {"parallel": {"zero": 3}, "precision": {"kind": "fp16", "initial_scale_power": 8}}, ""),
    "fp16-pp2": (
        2,
        {"parallel": {"pipeline": 2}, "precision": {"kind": "fp16", "initial_scale_power": 8}},
        "",
    ),
}


@pytest.mark.quick("bf16-zero1-1", "bf16-zero2-1", "bf16-pp2-1")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", ALL)
def test_a_refused_batch_is_as_one_never_seen(
    name: str, accumulation: int, corpus: Path, tmp_path: Path
) -> None:
    """Finite gradients, refused: whatever a wrapper keeps between steps must not leak into the next one."""
    world, parts, _ = ALL[name]
    data = world // max(
        1, parts.get("parallel", {}).get("pipeline", 1) * parts.get("parallel", {}).get("tensor", 1)
    )
    parts = {**parts, "model": dict(tiny(corpus, tmp_path).model) | parts.get("model", {})}
    train = {"steps": 5, "global_batch": 8, "micro_batch": 8 // data // accumulation, "eval_samples": 0}
    a, b = (tiny(corpus, tmp_path / run, **parts, train=train) for run in ("refused", "left-out"))
    for one, other in run_ranks(world, train_both, a, b, [1, 3]):
        assert one["numbers"] == other["numbers"]
        assert one["state"].keys() == other["state"].keys()
        for key, value in one["state"].items():
            assert torch.equal(value, other["state"][key]), key


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
        kind: {name: t.clone() for name, t in engine.flat_state().shards(kind).items()} for kind in KINDS
    }
    copied, wait = threading.Event(), engine._wait_for_copies
    saver._thread.submit(copied.wait)
    saver.begin(start.state)

    def wait_for_copies() -> None:
        threading.Timer(0.3, copied.set).start()
        wait()

    engine._wait_for_copies = wait_for_copies
    _, applied = engine.train_step(batch, 1e-3, lambda _: True, lambda: {"checkpoint": saver.ballot()})
    assert applied
    outcome = saver.finish()
    assert outcome is not None and outcome.path is not None, outcome
    whole = WholeState(outcome.path)
    after = engine.flat_state().shards("weight")
    same = all(torch.equal(whole.tensor(n, k), t) for k, held in before.items() for n, t in held.items())
    return same and not torch.equal(
        after["embedding.weight"], before["weight"]["embedding.weight"]
    ), outcome.blocked


@pytest.mark.quick("1")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_update_waits_for_a_copy_that_a_save_still_makes(zero: int, corpus: Path, tmp_path: Path) -> None:
    for exact, blocked in run_ranks(2, save_slowly, tiny(corpus, tmp_path / "run", parallel={"zero": zero})):
        assert exact and blocked > 0.2  # what the update waited counts as what the steps waited
