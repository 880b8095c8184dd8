"""Each fault does what it says, once in the life of a run, on one rank, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drills.plan import Fault, Plan, Policy
from megastable.config.tree import RunConfig
from tests.conftest import tiny
from tests.distributed import run_ranks

STEP = 4
RATES = [1.0, 10.0, 10.0, 1.0]


def struck(config: RunConfig, kind: str) -> dict[str, Any]:
    """A few steps with a fault before or in step 4; then the same step again, as after a rewind."""
    import torch
    import torch.distributed as dist

    from drills import faults
    from megastable.engine.engine import Engine
    from megastable.model.loss import LossFunction
    from megastable.optim import schedule as optim_schedule
    from tests.engine.test_gate import first_batch, start_of

    assert config.run.dir is not None
    before = Engine.train_step, LossFunction.__call__, optim_schedule.rate
    plan = Plan(
        policy=Policy.OURS,
        run=config.run.dir,
        fault=Fault.model_validate({"kind": kind, "step": STEP, "steps": 2}),
    )
    start = start_of(config)
    faults.install(plan)
    engine, rank = start.engine, dist.get_rank()
    batch = first_batch(start)

    def state() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in engine.optimizer_state().items()}

    def step(judge: Any = lambda m: m.finite) -> dict[str, Any]:
        held = state()
        seen: dict[str, Any] = {}

        def look(measured: Any) -> bool:
            now = engine.optimizer_state()
            seen["changed"] = {
                k: int((held[k] != now[k]).sum()) for k in held if not torch.equal(held[k], now[k])
            }
            seen["bits"] = {
                bin(int(a) ^ int(b))
                for k in seen["changed"]
                for a, b in zip(held[k].view(torch.int32), now[k].view(torch.int32), strict=True)
                if k.endswith("weight") and a != b
            }
            return bool(judge(measured))

        measured, applied = engine.train_step(batch, 1e-3, look)
        return seen | {"loss": measured.loss, "norm": measured.grad_norm, "applied": applied}

    schedule, found = config.schedule, {"rank": rank}
    if kind == "high_rate":
        real = before[2]
        rates = [
            optim_schedule.rate(schedule, 1.0, 20, u) / real(schedule, 1.0, 20, u)
            for u in range(STEP - 2, STEP + 2)
        ]
        return {**found, "rates": rates}
    try:
        for _ in range(STEP - 1):
            calm = step()
        kept, counters = state(), engine.counters()
        found["measured"] = engine.measure(batch).finite  # no step: nothing happens
        found["hit"] = step(lambda measured: False)
        engine.restore_optimizer_state(kept)
        engine.restore_counters(counters)
        engine.refresh_weights()
        found["again"] = step()
        found["calm"] = calm
    finally:
        Engine.train_step, LossFunction.__call__, optim_schedule.rate = before  # type: ignore[method-assign]
    return found


def run(corpus: Path, folder: Path, kind: str) -> list[dict[str, Any]]:
    return run_ranks(2, struck, tiny(corpus, folder / "run"), kind)


@pytest.mark.quick("nan_gradient")
@pytest.mark.parametrize("kind", ["nan_gradient", "inf_loss"])
def test_a_number_that_is_not_finite_once(corpus: Path, tmp_path: Path, kind: str) -> None:
    for found in run(corpus, tmp_path, kind):
        assert found["measured"]
        hit, again = found["hit"], found["again"]
        assert hit["norm"] == float("inf") and (hit["loss"] == float("inf")) == (kind == "inf_loss")
        assert hit["changed"] == again["changed"] == {}
        assert again["applied"] and again["loss"] < found["calm"]["loss"]


@pytest.mark.quick("moments-exp_avg")
@pytest.mark.parametrize(("kind", "where"), [("moments", "exp_avg"), ("bit_flip", "weight")])
def test_a_state_that_is_changed_in_place(corpus: Path, tmp_path: Path, kind: str, where: str) -> None:
    for found in run(corpus, tmp_path, kind):
        hit, again = found["hit"], found["again"]
        assert found["measured"] and again["applied"] and again["changed"] == {}
        if found["rank"] == 0:
            assert hit["changed"] == {}
            continue
        ((name, count),) = hit["changed"].items()
        assert name.split("/")[1] == where
        assert hit["bits"] == ({bin(1 << 30)} if kind == "bit_flip" else set())
        assert count == 1 if kind == "bit_flip" else count > 1000
        assert (hit["loss"] == again["loss"]) == (kind == "moments")  # moments tell in the next step


def through_a_broken_kernel(config: RunConfig) -> dict[str, Any]:
    """Losses of the same batch in steps 3 to 6, of which 4 and 5 are hit, none of them applied; in FP8 and without."""
    from drills import faults
    from megastable.engine.engine import Engine
    from megastable.fp8 import emulated
    from tests.engine.test_gate import first_batch, start_of

    assert config.run.dir is not None
    before = Engine.train_step, emulated.multiply
    fault = Fault(kind="fp8", step=STEP, steps=2, factor=5.0)
    start = start_of(config)
    faults.install(Plan(policy=Policy.OURS, run=config.run.dir, fault=fault))
    engine = start.engine
    batch = first_batch(start)
    try:
        for _ in range(STEP - 2):
            engine.train_step(batch, 1e-3, lambda m: False)
        found: dict[str, Any] = {"steps": [], "again": [], "without": []}
        for _ in range(4):
            found["steps"].append(engine.train_step(batch, 1e-3, lambda m: False)[0].loss)
            found["again"].append(engine.measure(batch).loss)
            engine.fp8.on = False
            found["without"].append(engine.measure(batch).loss)
            engine.fp8.on = True
        found["evaluated"] = float(engine.evaluate(batch).mean())
    finally:
        Engine.train_step, emulated.multiply = before  # type: ignore[method-assign]
    return found


@pytest.mark.slow
def test_fp8_products_that_are_wrong_for_some_steps(corpus: Path, tmp_path: Path) -> None:
    """As often as such a step is done, and nothing else is."""
    precision = {"fp8": {"backend": "emulated"}}
    for found in run_ranks(2, through_a_broken_kernel, tiny(corpus, tmp_path / "run", precision=precision)):
        right, *wrong, last = found["steps"]
        assert right == last == found["evaluated"] and wrong[0] == wrong[1] != right
        assert found["again"] == found["steps"]
        assert len(set(found["without"])) == 1 and found["without"][0] == pytest.approx(right, rel=1e-3)


def test_a_rate_that_is_too_high_for_some_updates(corpus: Path, tmp_path: Path) -> None:
    for found in run(corpus, tmp_path, "high_rate"):
        assert found["rates"] == pytest.approx(RATES)
