"""What routers chose, and the state that follows from it: counted once in every layout, moved by updates alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megastable.model.experts import TOTALS
from tests.distributed import run_ranks
from tests.engine.engines import are_same, build_engine, copy_state, take_batch
from tests.parallel.test_layouts import BATCH, EXPERTS, LENGTH, batches, config

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor": 2}),
    "tp2-sequence-full": (2, {"tensor": 2, "sequence": True, "recompute": "full"}),
    "pp2": (2, {"pipeline": 2}),
    "context2": (2, {"context": 2}),
    "ep2": (2, {"expert": 2}),
    "ep2-dp4-zero2": (4, {"expert": 2, "zero": 2, "micro_batch": 1}),
    "ep2-tp2-sequence": (4, {"expert": 2, "tensor": 2, "sequence": True}),
}


def take_steps(parts: dict[str, Any], precision: str) -> dict[str, Any]:
    """Of this rank: two updates, a refusal and a measurement between them, and the first of both again from a copy."""
    engine = build_engine(config(precision=precision, **parts))
    experts = engine.config.model.experts
    first, second = (take_batch(engine, batch) for batch in batches()[:2])
    found: dict[str, Any] = {}
    measured, _ = engine.train_step(first, 1e-2, lambda _: True)
    found["counts"] = measured.choices[:, : experts.count].sum(1).tolist()
    found["scores"] = measured.choices[:, experts.count : -len(TOTALS)].sum(1).tolist()
    found["totals"] = measured.choices[:, -len(TOTALS) :].tolist()
    before = copy_state(engine)
    assert float(before["inner/shared/experts/bias"].abs().max()) == pytest.approx(experts.bias_rate)
    engine.measure_step(second)
    assert are_same(before, copy_state(engine))
    engine.train_step(second, 1e-2, lambda _: False)
    assert are_same(before, copy_state(engine))
    saved = {name: state.clone() for name, state in engine.optimizer_state().items()}
    counters = engine.read_counters()
    engine.train_step(second, 1e-2, lambda _: True)
    after = copy_state(engine)
    assert not torch.equal(before["inner/shared/experts/bias"], after["inner/shared/experts/bias"])
    engine.restore_optimizer_state(saved)
    engine.restore_counters(counters)
    engine.refresh_weights()
    assert are_same(before, copy_state(engine))
    engine.train_step(second, 1e-2, lambda _: True)
    assert are_same(after, copy_state(engine))
    return found


@pytest.mark.quick("one-bf16", "tp2-fp32", "tp2-sequence-full-bf16")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_choices_are_counted_once_and_only_updates_move_the_bias(name: str, precision: str) -> None:
    world, parts = LAYOUTS[name]
    ranks = run_ranks(world, take_steps, parts | {"model": EXPERTS}, precision)
    tokens = BATCH * LENGTH
    for found in ranks:
        assert found["counts"] == [2 * tokens, 2 * tokens]
        assert found["scores"] == pytest.approx([tokens, tokens], rel=1e-5)
        for _, entropy, dropped, counted in found["totals"]:
            assert counted == tokens and dropped == 0
            assert 0 < entropy / tokens <= torch.tensor(4.0).log()


def drop_choices(parts: dict[str, Any]) -> tuple[float, float]:
    """What the choices of a step were, and how many were dropped."""
    engine = build_engine(config(**parts))
    measured, _ = engine.train_step(take_batch(engine, batches()[0]), 1e-2, lambda _: True)
    experts = engine.config.model.experts
    return float(measured.choices[1, : experts.count].sum()), float(measured.choices[1, -2])


@pytest.mark.parametrize("parts", [{}, {"tensor": 2, "sequence": True}])
def test_a_capacity_drops_choices_and_says_how_many(parts: dict[str, Any]) -> None:
    tight = {"experts": EXPERTS["experts"] | {"capacity": 0.5}}
    ranks = run_ranks(parts.get("tensor", 1), drop_choices, parts | {"model": tight})
    choices, dropped = ranks[0]
    assert all(found == ranks[0] for found in ranks)
    assert choices == 2 * BATCH * LENGTH
    # At most half of the mean: half of the choices and more are dropped.
    assert choices / 2 <= dropped < choices


def hold_bias() -> tuple[list[float], bool]:
    """The choices of a step under a bias that no rate moves, and whether it is the same afterwards."""
    frozen = {"experts": EXPERTS["experts"] | {"bias_rate": 0.0}}
    engine = build_engine(config(model=frozen))
    biases = torch.tensor([9.0, 0.0, 0.0, 9.0]).repeat(2, 1)
    engine.restore_shared_state({"experts/bias": biases})
    measured, _ = engine.train_step(take_batch(engine, batches()[0]), 1e-2, lambda _: True)
    return measured.choices[1, :4].tolist(), torch.equal(engine.shared_state["experts/bias"], biases)


@pytest.mark.slow
def test_without_a_rate_a_bias_still_chooses_and_stays() -> None:
    ((choices, is_same),) = run_ranks(1, hold_bias)
    tokens = BATCH * LENGTH
    assert choices == [tokens, 0, 0, tokens] and is_same


def test_dense_models_have_no_state_of_experts() -> None:
    (names,) = run_ranks(1, list_state)
    assert not any("experts" in name for name in names)


def list_state() -> list[str]:
    engine = build_engine(config())
    assert engine.routing is None
    return list(engine.optimizer_state())


KINDS: dict[str, dict[str, Any]] = {
    "lamb": {"name": "lamb", "clipping": {"kind": "value", "threshold": 1e-3}},
    "stable_adamw": {"name": "stable_adamw", "clipping": {"kind": "adagc", "warmup": 1}},
    "adafactor": {"name": "adafactor", "clipping": {"kind": "zclip", "warmup": 2, "threshold": 0.1}},
    "spam": {"name": "spam", "clipping": {"kind": "agc", "threshold": 0.01}},
    "stable_spam": {"name": "stable_spam"},
    "sgd": {"name": "sgd", "clip": 0.05},
}


def update_by_all(precision: str) -> dict[str, Any]:
    """By every kind of optimizer, and of clipping: what was told of three steps, and the state after them, with experts
    on two ranks and with all on both."""
    found = {}
    for name, kind in KINDS.items():
        for expert in (1, 2):
            c = config(precision=precision, micro_batch=2, expert=expert, model=EXPERTS)
            engine = build_engine(
                type(c).model_validate(c.model_dump() | {"optimizer": {"lr": 1e-2, "clip": 0.1} | kind})
            )
            told = []
            for batch in batches()[:3]:
                measured, applied = engine.train_step(take_batch(engine, batch), 1e-2, lambda _: True)
                assert applied
                told += [measured.loss, measured.grad_norm, engine.kept]
            found[name, expert] = told, engine.flat_state().gather_shards("weight")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_optimizer_and_clipping_updates_experts_that_other_ranks_have(precision: str) -> None:
    allowed = 1e-4 if precision == "fp32" else 2e-2
    for rank in run_ranks(2, update_by_all, precision):
        for name in KINDS:
            (told, weights), (told_of_two, weights_of_two) = rank[name, 1], rank[name, 2]
            assert told_of_two == pytest.approx(told, rel=allowed), name
            assert weights.keys() == weights_of_two.keys()
            for tensor, weight in weights.items():
                distance = float((weights_of_two[tensor] - weight).norm() / weight.norm().clamp_min(1e-30))
                assert distance < 10 * allowed, (name, tensor, distance)


def compare_copies(rank: int) -> dict[str, Any]:
    """What is found unequal at first, and when a bit of an expert of `rank` is another one; by kind, with its ranks."""
    from megastable.base.collectives import gather_objects
    from megastable.engine.rank_checks import Replicas

    late = {"experts": EXPERTS["experts"] | {"first_dense": 1}}
    engine = build_engine(
        config(precision="bf16", pipeline=2, expert=2, micro_batch=1, tied=True, model=late)
    )
    replicas, found = Replicas(engine), {}
    assert engine.train_step(take_batch(engine, batches()[0]), 1e-2, lambda _: True)[1]
    for when in ("before", "after"):
        if when == "after" and engine.topology.rank == rank:
            split = [group.get("split", False) for group in engine.optimizer.param_groups].index(True)
            engine.zero.flat_weights[split][:1].view(torch.int16).bitwise_xor_(1)
        columns = torch.tensor(
            gather_objects(replicas.make_columns(replicas.kinds)), dtype=torch.float64
        ).sum(0)
        found[when] = replicas.find_unequal(replicas.kinds, columns.tolist())
    return found | {"kinds": replicas.kinds}


@pytest.mark.slow
def test_copies_of_experts_are_compared_where_they_are() -> None:
    """The first of two stages has none."""
    for found in run_ranks(8, compare_copies, 6):
        assert found["before"] == [] and found["after"] == [("copies of experts", [4, 6])]
        assert found["kinds"]["copies of experts"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
