"""Each fault does what it says, once in the life of a run, on one rank, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drills.scenario import Fault, Plan
from megastable.config.tree import RunConfig
from tests.conftest import tiny
from tests.distributed import run_ranks

STEP = 4


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
    before = Engine.train_step, LossFunction.__call__, optim_schedule.rate_at
    plan = Plan(
        run=config.run.dir,
        fault=Fault.model_validate({"kind": kind, "step": STEP, "steps": 2}),
    )
    start = start_of(config)
    faults.install_fault(plan)
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
            optim_schedule.rate_at(schedule, 1.0, 20, u) / real(schedule, 1.0, 20, u)
            for u in range(STEP - 2, STEP + 2)
        ]
        return {**found, "rates": rates}
    try:
        for _ in range(STEP - 1):
            calm = step()
        kept, counters = state(), engine.read_counters()
        found["measured"] = engine.measure_step(batch).finite  # no step: nothing happens
        found["hit"] = step(lambda measured: False)
        engine.restore_optimizer_state(kept)
        engine.restore_counters(counters)
        engine.refresh_weights()
        found["again"] = step()
        found["calm"] = calm
    finally:
        Engine.train_step, LossFunction.__call__, optim_schedule.rate_at = before  # type: ignore[method-assign]
    return found


def run(corpus: Path, folder: Path, kind: str) -> list[dict[str, Any]]:
    return run_ranks(2, struck, tiny(corpus, folder / "run"), kind)


@pytest.mark.quick("nan_gradient")
@pytest.mark.parametrize("kind", ["nan_gradient", "inf_loss"])
def test_fault_makes_a_number_infinite_once(corpus: Path, tmp_path: Path, kind: str) -> None:
    for found in run(corpus, tmp_path, kind):
        assert found["measured"]
        hit, again = found["hit"], found["again"]
        assert hit["norm"] == float("inf") and (hit["loss"] == float("inf")) == (kind == "inf_loss")
        assert hit["changed"] == again["changed"] == {}
        assert again["applied"] and again["loss"] < found["calm"]["loss"]


@pytest.mark.quick("moments-exp_avg")
@pytest.mark.parametrize(("kind", "where"), [("moments", "exp_avg"), ("bit_flip", "weight")])
def test_fault_changes_a_state_in_place(corpus: Path, tmp_path: Path, kind: str, where: str) -> None:
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


AT, EXPERTS = 2, {"count": 8, "top_k": 2, "ffn": 24, "gate": "sigmoid", "balance_loss": 0.1, "bias_rate": 0}


def strike_experts(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    """Three steps, of which the second has the fault, refused and done again; what the gate sees of each."""
    from drills import faults
    from megastable.model import experts
    from tests.engine.test_gate import first_batch, start_of

    assert config.run.dir is not None
    fault = Fault.model_validate({"kind": kind, "step": AT, "steps": 1, "rank": 0, "factor": 3.0})
    start, real_choice = start_of(config), experts.choose_experts
    faults.install_fault(Plan(run=config.run.dir, fault=fault))
    engine, batch, seen = start.engine, first_batch(start), list[dict[str, Any]]()
    assert engine.routing is not None
    for allowed in (True, False, True):
        measured, _ = engine.train_step(batch, 1e-3, lambda m, allowed=allowed: allowed and m.finite)
        counters = engine.read_counters()
        if not allowed:  # the same step once more
            counters["engine"]["global_steps"] = AT - 1
            engine.restore_counters(counters)
        router = sum(float(piece.square().sum()) for _, piece in faults._weights(engine, faults.ROUTERS))
        seen.append(
            {
                "finite": measured.finite, "bias": engine.routing.bias.tolist(), "router": router**0.5,
                "norm": measured.grad_norm,
            }
        )  # fmt: skip
    assert (experts.choose_experts is real_choice) == (kind != "gamed_balance")
    return seen


@pytest.mark.parametrize(
    "kind", ["heavy_expert", "dead_expert", "scaled_router", "growing_router", "nan_expert", "gamed_balance"]
)
def test_fault_strikes_experts(corpus: Path, tmp_path: Path, kind: str) -> None:
    model = dict(tiny(corpus, tmp_path).model) | {"experts": EXPERTS}
    ((before, hit, again),) = run_ranks(1, strike_experts, tiny(corpus, tmp_path / "run", model=model), kind)
    amount = {"heavy_expert": 1.0, "dead_expert": -5.0}.get(kind, 0.0)
    assert [row[3] for row in hit["bias"]] == [0.0, amount] == [row[3] for row in again["bias"]]
    assert sum(map(sum, hit["bias"])) == amount and not any(map(any, before["bias"]))
    factor = {"scaled_router": 30.0, "growing_router": 3.0}.get(kind, 1.0)
    assert hit["router"] == pytest.approx(factor * before["router"], rel=1e-3)
    assert [seen["finite"] for seen in (before, hit, again)] == [True, *[kind != "nan_expert"] * 2]
    lasts = kind == "growing_router"
    assert again["router"] == pytest.approx((factor if lasts else 1.0) * hit["router"], rel=0.1)
    if kind == "gamed_balance":
        assert hit["norm"] == again["norm"] != before["norm"]
