"""FP8 in experts that data ranks share out, against all experts on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from megastable.config.tree import RunConfig
from megastable.fp8.apply import emulate_fp8
from megastable.model.sizes import in_fp8
from tests.distributed import run_ranks
from tests.engine.engines import build_engine, take_batch
from tests.fp8.test_apply import built, config
from tests.parallel import test_layouts as layouts

EXPERTS = {
    "count": 4, "top_k": 2, "ffn": 24, "shared": 1, "bias_rate": 0.02, "balance_loss": 0.1, "balance_over": "step",
}  # fmt: skip
KEPT = "blocks.1.mlp.experts.3.down"
DELAYED = {"recipe": "delayed", "history": 2, "keep": [KEPT]}
# How far numbers of the first step may be apart: sums in another order (measured: 3e-7). Later, a last bit that differs
# may flip a rounding of FP8 (measured: losses 4e-5, norms 7e-4, a magnitude 1e-2).
FIRST, LATER = 1e-5, 1e-3


def routed(fp8: Any, **parts: Any) -> RunConfig:
    experts = EXPERTS | parts.pop("experts", {})
    return config(fp8, model={"layers": 2, "experts": experts}, **parts)


def invent_history(c: RunConfig) -> dict[str, list[list[float]]]:
    """Other magnitudes of every layer, so that the first step has scales, which no rank finds out alone."""
    return {
        layer: [[magnitude * (1 + 0.07 * number)] * 2 for magnitude in (4.0, 0.4, 0.004)]
        for number, layer in enumerate(sorted(in_fp8(c)))
    }


def train_rank(c: RunConfig, history: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Losses, norms, and after the first step the state and the watch's findings; the last history."""
    engine = build_engine(c)
    engine.restore_fp8_history(history)
    found: dict[str, Any] = {"losses": [], "norms": [], "products": [p.name for p in engine.fp8.products]}
    for one, lr in zip(layouts.batches(), layouts.RATES, strict=True):
        if not found["losses"]:
            engine.probe.watch_step()
        measured, applied = engine.train_step(take_batch(engine, one), lr, judge=lambda m: m.finite)
        assert applied and measured.fp8
        if not found["losses"]:
            found |= layouts.state_of(engine) | {"rows": engine.collect_statistics().layers}
        found["losses"].append(measured.loss)
        found["norms"].append(measured.grad_norm)
    return found | {"history": engine.fp8_history()}


def assert_close(ranks: list[dict[str, Any]], others: list[dict[str, Any]], tensor: int = 1) -> None:
    """Losses and norms of all steps, and the first gradient of every parameter."""
    for kind, near in (("losses", LATER), ("norms", 25 * LATER)):
        assert all(rank[kind] == ranks[0][kind] for rank in ranks)
        assert ranks[0][kind][0] == pytest.approx(others[0][kind][0], rel=FIRST)
        assert ranks[0][kind] == pytest.approx(others[0][kind], rel=near)
    wanted, got = (layouts.merge(each, "exp_avg", tensor) for each in (others, ranks))
    assert wanted.keys() == got.keys()
    for name, gradient in wanted.items():
        assert layouts.relative(got[name], gradient) < FIRST, name


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"expert": 2}),
    "ep4-zero2": (4, {"expert": 4, "zero": 2}),
    "ep2-dp4-full": (4, {"expert": 2, "recompute": "full", "micro_batch": 1}),
    "ep2-tp2-sequence": (4, {"expert": 2, "tensor": 2, "sequence": True}),
    "ep2-pp2-zero-bubble": (4, {"expert": 2, "pipeline": 2, "schedule": "zero_bubble"}),
}


@pytest.mark.quick("ep2")
@pytest.mark.parametrize("name", LAYOUTS)
def test_delayed_scales_are_those_without_expert_parallelism(name: str) -> None:
    """Also where one expert's layer is kept out: on all ranks that have it, and on no other."""
    world, parallel = LAYOUTS[name]
    c, whole = routed(DELAYED, **parallel), routed(DELAYED, **(parallel | {"expert": 1}))
    others, ranks = (run_ranks(world, train_rank, each, invent_history(c)) for each in (whole, c))
    assert_close(ranks, others, c.parallel.tensor)
    emulated, emulated_whole = ([set(rank["products"]) for rank in each] for each in (ranks, others))
    assert set.union(*emulated) == set.union(*emulated_whole) == in_fp8(c)
    assert all(part < all_here for part, all_here in zip(emulated, emulated_whole, strict=True))
    for rank in ranks:
        assert rank["history"] == ranks[0]["history"], "any rank may write it to a checkpoint"
        assert rank["history"].keys() == others[0]["history"].keys() == in_fp8(c)
        for layer, slots in others[0]["history"].items():
            assert all(all(slot) for slot in slots), "two steps were seen"
            for got, wanted in zip(rank["history"][layer], slots, strict=True):
                assert got == pytest.approx(wanted, rel=50 * LATER), layer
        assert rank["rows"].keys() == others[0]["rows"].keys()
        for layer in in_fp8(c):
            row, wanted_row = (each["rows"][f"{layer}.weight"] for each in (rank, others[0]))
            assert "gradient_saturation" in row and row == pytest.approx(wanted_row, rel=1e-3), layer


@pytest.mark.quick("ep2")
@pytest.mark.parametrize(("world", "parallel"), [(2, {"expert": 2}), (4, {"expert": 4})], ids=["ep2", "ep4"])
def test_current_scales_are_those_of_as_large_a_micro_batch(world: int, parallel: dict[str, int]) -> None:
    """An expert's tensor has the tokens of all ranks, like that of one rank with their samples."""
    keep = [f"blocks.{block}.attention.{part}" for block in range(2) for part in ("qkv", "out")]
    fp8, experts = {"keep": keep}, {"shared": 0}
    one = run_ranks(1, train_rank, routed(fp8, micro_batch=4, experts=experts), {})
    c = routed(fp8, micro_batch=4 // world, experts=experts, **parallel)
    assert_close(run_ranks(world, train_rank, c, {}), one)


def test_blocks_are_the_same_forward() -> None:
    whole, parts = (run_ranks(2, train_rank, routed("block", expert=expert), {}) for expert in (1, 2))
    assert parts[0]["losses"] == parts[1]["losses"] == pytest.approx(whole[0]["losses"], rel=LATER)
    assert parts[0]["losses"][0] == pytest.approx(whole[0]["losses"][0], rel=FIRST)


def test_history_has_one_order_on_all_ranks() -> None:
    """Its maxima are one message: no set, whose order is each process's own, may say where a layer lies."""
    c = routed("delayed")
    assert c.precision.fp8 is not None
    names = list(emulate_fp8(built(c), c.precision.fp8, in_fp8(c)).write_history())
    assert names == sorted(in_fp8(c))
