"""FP8 in a whole model: which layers, every layout against one process, and switched off as if it had never been."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megastable.config.tree import RunConfig
from megastable.fp8 import controller
from megastable.fp8.apply import emulate, linears
from megastable.fp8.controller import Emulated, losses
from megastable.fp8.emulated import metered, quantizers
from megastable.fp8.formats import E4M3
from megastable.fp8.scale_factors import by_tensor, magnitude, scale_of
from megastable.model.gpt import GPT
from megastable.model.loss import LossFunction
from megastable.model.sizes import in_fp8
from megastable.parallel.layout import Layout
from megastable.parallel.topology import TensorParallel, Topology
from tests.distributed import run_ranks
from tests.parallel import test_layouts as layouts
from tests.patience import PATIENCE

RECIPES = ("current", "delayed", "block")


def config(fp8: Any = "current", precision: str = "fp32", **parts: Any) -> RunConfig:
    tree = layouts.config(precision=precision, **parts).model_dump()
    tree["precision"]["fp8"] = fp8
    return RunConfig.model_validate(tree)


def built(c: RunConfig, recompute: str = "none", dtype: torch.dtype = torch.bfloat16) -> GPT:
    vocabulary = c.model.vocab_size
    assert vocabulary is not None
    tp = TensorParallel()
    return GPT(c.model, tp, recompute, 1, LossFunction(vocabulary, 1e-4, tp)).to(dtype)


def fitted(c: RunConfig, recompute: str = "none") -> tuple[GPT, Emulated]:
    model, fp8 = built(c, recompute), c.precision.fp8
    assert fp8 is not None
    return model, emulate(model, fp8, in_fp8(c))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels, _ = layouts.batches()[0]
    return tokens, labels


def gradients(model: GPT) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss = model(*batch())
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_what_is_kept_is_left_alone() -> None:
    c = config({"keep_first": 1, "keep_last": 1, "keep": ["blocks.2.mlp.down"]}, model={"layers": 4})
    wanted = {f"blocks.1.{n}" for n in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")}
    wanted |= {f"blocks.2.{n}" for n in ("attention.qkv", "attention.out", "mlp.gate_up")}
    assert in_fp8(c) == wanted
    model, fp8 = fitted(c)
    assert set(fp8.layers) == wanted
    assert set(linears(model)) == {
        f"blocks.{i}.{n}"
        for i in range(4)
        for n in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_switched_off_it_is_the_same_bytes_as_without(recipe: str) -> None:
    plain, (model, fp8) = built(config()), fitted(config(recipe))
    without = gradients(plain)
    within = gradients(model)
    assert within[0] != without[0] and abs(within[0] - without[0]) < 0.05
    fp8.on = False
    off = gradients(model)
    assert off[0] == without[0]
    assert all(torch.equal(a, b) for a, b in zip(off[1], without[1], strict=True))
    fp8.on = True
    again = gradients(model)
    assert again[0] == within[0]


@pytest.mark.parametrize(
    "model",
    [{"norms": norms} for norms in ("after", "both", "mixed", "deep", "branch")]
    + [{"activation": "gelu", "swiglu_clamp": 1.0, "norms": "both", "zero_centered_norms": True}],
    ids=str,
)
def test_every_architecture_computes_in_fp8(model: dict[str, Any]) -> None:
    """All linear layers, with a loss near that without; switched off, the same bytes."""
    plain, (within, fp8) = built(config(model=model)), fitted(config(model=model))
    without, eight = gradients(plain), gradients(within)
    assert len(fp8.layers) == len(linears(within)) > 0
    assert eight[0] != without[0] and abs(eight[0] - without[0]) < 0.05
    fp8.on = False
    off = gradients(within)
    assert off[0] == without[0]
    assert all(torch.equal(a, b) for a, b in zip(off[1], without[1], strict=True))


@pytest.mark.quick("delayed-selective", "block-full")
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_changes_nothing(recipe: str, recompute: str) -> None:
    (plain, a), (again, b) = fitted(config(recipe)), fitted(config(recipe), recompute)
    for _ in range(2):  # delayed scales are others in the second step
        one, other = gradients(plain), gradients(again)
        assert one[0] == other[0]
        assert all(torch.equal(x, y) for x, y in zip(one[1], other[1], strict=True))
        for fp8 in (a, b):
            fp8.settle(True)
    assert a.history() == b.history()


def test_gradients_are_those_of_bf16_but_for_rounding() -> None:
    without = gradients(built(config()))
    for recipe in RECIPES:
        _, found = gradients(fitted(config(recipe))[0])
        for a, b in zip(found, without[1], strict=True):
            likeness = torch.cosine_similarity(a.float().flatten(), b.float().flatten(), 0)
            assert 0.93 < likeness < 0.99999, recipe


LAYOUTS: dict[str, tuple[int, dict[str, Any], float]] = {
    # ranks, parallel, how far a loss may be from one process: a last bit that differs flips roundings of FP8 in time,
    # and scales of a shard are others than those of the whole
    "pp2": (2, {"pipeline": 2}, 2e-3),
    "dp2-zero3": (2, {"zero": 3}, 2e-3),
    "tp2-sequence-full": (2, {"tensor": 2, "sequence": True, "recompute": "full"}, 1e-2),
    "context2": (2, {"context": 2}, 1e-2),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}, 1e-2),
}
ONE: dict[str, Any] = {}


def train_rank(c: RunConfig, world: int) -> dict[str, Any]:
    """Losses and norms of every step; in the end, by how much the first batch is easier, and what delayed scales
    remember."""
    import torch.distributed as dist

    from megastable.config import deepspeed_json
    from megastable.engine.engine import Engine

    p = c.parallel
    layout = Layout(p.tensor, p.pipeline, deepspeed_json.data_parallel(c, world), p.context)
    topology = Topology(layout, dist.get_rank(), timeout=PATIENCE)
    engine = Engine(c, deepspeed_json.build(c, world), topology)
    losses, norms = [], []
    for step, (one, lr) in enumerate(zip(layouts.batches(), layouts.RATES, strict=True)):
        micro = layouts.mine(one, topology, c.train.micro_batch)
        if step == 2:
            # What is only looked at leaves no trace.
            before = engine.fp8_history()
            engine.measure(micro)
            engine.evaluate(micro)
            assert engine.fp8_history() == before
        measured, applied = engine.train_step(micro, lr, judge=lambda m: m.finite)
        assert applied and measured.fp8
        losses.append(measured.loss)
        norms.append(measured.grad_norm)
    first = layouts.mine(layouts.batches()[0], topology, c.train.micro_batch)
    learnt = losses[0] - float(engine.evaluate(first).mean())
    return {"losses": losses, "norms": norms, "learnt": learnt, "history": engine.fp8_history()}


@pytest.mark.quick("current")
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_layout_trains_as_one_process_does(recipe: str) -> None:
    if recipe not in ONE:
        (ONE[recipe],) = run_ranks(1, train_rank, config(recipe), 1)
    one = ONE[recipe]
    assert one["learnt"] > 0
    chosen = LAYOUTS if recipe == "delayed" else {n: LAYOUTS[n] for n in ("tp2-sequence-full",)}
    for name, (world, parallel, near) in chosen.items():
        ranks = run_ranks(world, train_rank, config(recipe, **parallel), world)
        assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)
        assert all(rank["history"] == ranks[0]["history"] for rank in ranks), "ranks remember alike"
        assert ranks[0]["losses"] == pytest.approx(one["losses"], rel=near), name
        if "tp2" not in name and "context2" not in name:
            # Later, weights that differ in their last bits are rounded to other numbers of FP8.
            assert ranks[0]["losses"][:2] == pytest.approx(one["losses"][:2], rel=2e-5), name
        assert ranks[0]["norms"] == pytest.approx(one["norms"], rel=30 * near), name
        assert ranks[0]["history"].keys() == one["history"].keys()


def refusing(c: RunConfig) -> None:
    """A refused update, a rewind and a switch, in delayed scaling's memory."""
    from megastable.config import deepspeed_json
    from megastable.engine.engine import Engine

    topology = Topology(Layout(), 0, timeout=PATIENCE)
    engine = Engine(c, deepspeed_json.build(c, 1), topology)
    assert isinstance(engine.fp8, Emulated)
    steps = [layouts.mine(one, topology, 2) for one in layouts.batches()]
    for micro in steps[:2]:
        engine.train_step(micro, 1e-3, lambda _: True)
    before, counters, state = engine.fp8_history(), engine.counters(), engine.optimizer_state()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    assert {len(slot) for told in before.values() for slot in told} == {16}
    assert all(slot[1] > 0 == slot[2] for told in before.values() for slot in told), "two steps were seen"
    engine.train_step(steps[2], 1e-3, lambda _: False)
    assert engine.fp8_history() == before
    ahead = [engine.train_step(micro, 1e-3, lambda _: True)[0].loss for micro in steps[2:]]
    assert engine.fp8_history() != before
    engine.restore_optimizer_state(kept)
    engine.restore_counters(counters)
    engine.refresh_weights()
    assert engine.fp8_history() == before
    assert [engine.train_step(micro, 1e-3, lambda _: True)[0].loss for micro in steps[2:]] == ahead
    # What is looked at: nothing is cut or lost, until scales are far too large.
    kinds = [
        f"{slot}_{fate}" for slot in ("input", "weight", "gradient") for fate in ("saturation", "underflow")
    ]
    for seen in (1.0, 1e-4):
        engine.restore_fp8_history(
            {n: [[m * seen for m in slot] for slot in told] for n, told in before.items()}
        )
        engine.probe.watch()
        engine.train_step(steps[3], 0.0, lambda _: False)
        found = engine.statistics()
        rows = {name: row for name, row in found.layers.items() if kinds[0] in row}
        assert set(rows) == {f"{layer}.weight" for layer in engine.fp8.layers}
        assert all(0 <= row[kind] <= 1 for row in rows.values() for kind in kinds)
        assert found.overall["fp8_saturation"] == max(row[k] for row in rows.values() for k in kinds[::2])
        assert found.overall["fp8_underflow"] == max(row[k] for row in rows.values() for k in kinds[1::2])
        told = found.overall["fp8_saturation"], found.overall["fp8_underflow"]
        assert max(told) < 0.2 if seen == 1.0 else min(told) > 0.7
    assert not any(product.observe for product in engine.fp8.products)
    # While it is off nothing is remembered, wherever the run goes back to.
    engine.fp8.on = False
    for back in (False, True):
        if back:
            engine.restore_counters(counters)
        measured, _ = engine.train_step(steps[3], 1e-3, lambda _: True)
        assert measured.fp8 is False
        assert not any(value for told in engine.fp8_history().values() for slot in told for value in slot)
    engine.fp8.on = True
    engine.restore_counters(counters)
    assert engine.fp8_history() == before


@pytest.mark.slow
def test_what_is_refused_or_undone_is_not_remembered() -> None:
    run_ranks(1, refusing, config("delayed", precision="bf16"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_parts_count_like_the_whole(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = config(recipe).precision.fp8
    assert c is not None
    torch.manual_seed(0)
    x = torch.randn(300, 200) * torch.exp(4 * torch.randn(300, 200))
    meters = metered(c, ["a"], x.device)
    (quantize,) = quantizers(c, 1, meters)
    if meters is not None:
        meters.read({"a": [[0.1], [0.1], [0.1]]})
    for slot in range(3):
        became = quantize(x, slot, False)[0]
        with monkeypatch.context() as patch:
            patch.setattr(controller, "AT_ONCE", 1)  # 128 rows
            parts = losses(x, became)
        assert parts == losses(x, became)
        assert any(parts)


def test_what_counts_as_cut_and_as_lost() -> None:
    """By hand: E4M3's largest is 448, its smallest 2^-9, and half of that rounds to zero."""
    one = torch.ones(())
    x = torch.tensor([[448.0, 463.0, 465.0, -1e4, 1.0, 0.0, 2.0**-9, 2.0**-10, 2.0**-11, -0.0]])
    cut, lost = losses(x, by_tensor(x, one, E4M3))
    assert (float(cut), float(lost)) == (2, 2)
    cut, lost = losses(x, by_tensor(x, scale_of(magnitude(x), E4M3), E4M3))
    assert (float(cut), float(lost)) == (0, 3)
