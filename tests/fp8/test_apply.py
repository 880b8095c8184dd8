"""FP8 in a whole model: which layers, every layout against one process, and switched off as if it had never been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megastable.base.process import ROOT
from megastable.config.recipe import load_recipe
from megastable.config.tree import RunConfig
from megastable.fp8 import te
from megastable.fp8.apply import emulate_fp8, find_linears
from megastable.fp8.controller import Emulated, count_losses, report_quantization
from megastable.fp8.emulated import make_meters, make_quantizers
from megastable.fp8.scale_factors import E4M3, Quantized, by_tensor, largest_magnitude, scale_of
from megastable.fp8.te import Fitted, watch_module
from megastable.model.gpt import GPT
from megastable.model.loss import LossFunction
from megastable.model.sizes import fp8_linears, in_fp8
from megastable.parallel.topology import TensorParallel
from megastable.run import records
from tests.conftest import LENGTH
from tests.distributed import run_ranks, train
from tests.engine.engines import build_engine, take_batch
from tests.parallel import test_layouts as layouts

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
    return model, emulate_fp8(model, fp8, in_fp8(c))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels, _ = layouts.batches()[0]
    return tokens, labels


def gradients(model: GPT) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss = model(*batch())
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_in_fp8_leaves_alone_what_is_kept() -> None:
    c = config({"keep_first": 1, "keep_last": 1, "keep": ["blocks.2.mlp.down"]}, model={"layers": 4})
    wanted = {f"blocks.1.{n}" for n in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")}
    wanted |= {f"blocks.2.{n}" for n in ("attention.qkv", "attention.out", "mlp.gate_up")}
    assert in_fp8(c) == wanted
    model, fp8 = fitted(c)
    assert set(fp8.layers) == wanted
    assert set(find_linears(model)) == {
        f"blocks.{i}.{n}"
        for i in range(4)
        for n in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    }


@pytest.mark.parametrize(
    ("recipe", "model"),
    [(recipe, {}) for recipe in RECIPES]
    + [(recipe, {"experts": {"count": 40, "top_k": 2, "ffn": 16, "shared": 1}}) for recipe in RECIPES]
    + [("current", {"norms": norms}) for norms in ("after", "both", "mixed", "deep", "branch")]
    + [
        ("current", {"activation": "gelu", "swiglu_clamp": 1.0, "norms": "both", "zero_centered_norms": True})
    ],
    ids=str,
)
def test_emulate_computes_all_linears_and_switched_off_the_same_bytes(
    recipe: str, model: dict[str, Any]
) -> None:
    """With a loss near that without."""
    plain, (within, fp8) = built(config(model=model)), fitted(config(recipe, model=model))
    without, eight = gradients(plain), gradients(within)
    assert len(fp8.layers) == len(find_linears(within)) > 0
    assert eight[0] != without[0] and abs(eight[0] - without[0]) < 0.05
    fp8.on = False
    off = gradients(within)
    assert off[0] == without[0]
    assert all(torch.equal(a, b) for a, b in zip(off[1], without[1], strict=True))
    fp8.on = True
    assert gradients(within)[0] == eight[0]


@pytest.mark.quick("delayed-selective", "block-full")
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recompute_in_fp8_changes_nothing(recipe: str, recompute: str) -> None:
    (plain, a), (again, b) = fitted(config(recipe)), fitted(config(recipe), recompute)
    for _ in range(2):  # delayed scales are others in the second step
        one, other = gradients(plain), gradients(again)
        assert one[0] == other[0]
        assert all(torch.equal(x, y) for x, y in zip(one[1], other[1], strict=True))
        for fp8 in (a, b):
            fp8.settle_step(True)
    assert a.write_history() == b.write_history()


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


def train_rank(c: RunConfig) -> dict[str, Any]:
    """Losses and norms of every step; in the end, by how much the first batch is easier, and what delayed scales
    remember."""
    engine = build_engine(c)
    losses, norms = [], []
    for step, (one, lr) in enumerate(zip(layouts.batches(), layouts.RATES, strict=True)):
        micro = take_batch(engine, one)
        if step == 2:
            # What is only looked at leaves no trace.
            before = engine.fp8_history()
            engine.measure_step(micro)
            engine.evaluate_samples(micro)
            assert engine.fp8_history() == before
        measured, applied = engine.train_step(micro, lr, judge=lambda m: m.finite)
        assert applied and measured.fp8
        losses.append(measured.loss)
        norms.append(measured.grad_norm)
    learnt = losses[0] - float(engine.evaluate_samples(take_batch(engine, layouts.batches()[0])).mean())
    return {"losses": losses, "norms": norms, "learnt": learnt, "history": engine.fp8_history()}


@pytest.mark.quick("current")
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_layouts_train_as_one_process_does(recipe: str) -> None:
    if recipe not in ONE:
        (ONE[recipe],) = run_ranks(1, train_rank, config(recipe))
    one = ONE[recipe]
    assert one["learnt"] > 0
    chosen = LAYOUTS if recipe == "delayed" else {n: LAYOUTS[n] for n in ("tp2-sequence-full",)}
    for name, (world, parallel, near) in chosen.items():
        ranks = run_ranks(world, train_rank, config(recipe, **parallel))
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
    engine = build_engine(c)
    steps = [take_batch(engine, one) for one in layouts.batches()]
    for micro in steps[:2]:
        engine.train_step(micro, 1e-3, lambda _: True)
    before, counters, state = engine.fp8_history(), engine.read_counters(), engine.optimizer_state()
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
        engine.probe.watch_step()
        engine.train_step(steps[3], 0.0, lambda _: False)
        found = engine.collect_statistics()
        rows = {name: row for name, row in found.layers.items() if kinds[0] in row}
        assert set(rows) == {f"{layer}.weight" for layer in in_fp8(c)}
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
@pytest.mark.parametrize(
    ("world", "parts"),
    [(1, {}), (2, {"expert": 2, "model": {"experts": {"count": 4, "top_k": 2, "ffn": 24}}})],
    ids=["one", "ep2"],
)
def test_settle_remembers_nothing_refused_or_undone(world: int, parts: dict[str, Any]) -> None:
    run_ranks(world, refusing, config("delayed", precision="bf16", **parts))


def test_losses_count_what_is_cut_and_what_is_lost() -> None:
    """By hand: E4M3's largest is 448, its smallest 2^-9, and half of that rounds to zero."""
    one = torch.ones(())
    x = torch.tensor([[448.0, 463.0, 465.0, -1e4, 1.0, 0.0, 2.0**-9, 2.0**-10, 2.0**-11, -0.0]])
    cut, lost = count_losses(x, by_tensor(x, one, E4M3))
    assert (float(cut), float(lost)) == (2, 2)
    cut, lost = count_losses(x, by_tensor(x, scale_of(largest_magnitude(x), E4M3), E4M3))
    assert (float(cut), float(lost)) == (0, 3)


Seen = dict[tuple[str, str], tuple[float, float, int]]


def recorder(seen: Seen) -> Any:
    def record(layer: str, slot: str, cut: Tensor, lost: Tensor, count: int) -> None:
        before = seen.get((layer, slot), (0.0, 0.0, 0))
        seen[layer, slot] = before[0] + float(cut), before[1] + float(lost), before[2] + count

    return record


@pytest.mark.parametrize("recipe", RECIPES)
def test_watch_counts_as_the_emulation(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the matrices, here of 256 tokens, are looked at in parts."""
    monkeypatch.setattr(te, "AT_ONCE", 1)
    c = config(recipe)
    model, fp8 = fitted(c)
    assert c.precision.fp8 is not None
    gradients(model)
    fp8.settle_step(True)  # delayed scales are known now
    within: Seen = {}
    beside: Seen = {}
    fp8.watch_quantization(recorder(within))
    meters = make_meters(c.precision.fp8, fp8.layers, torch.device("cpu"))
    if meters is not None:
        meters.read_history(fp8.write_history())
    how = dict(zip(fp8.layers, make_quantizers(c.precision.fp8, fp8.layers, meters), strict=True))
    handles = []
    for name, linear in find_linears(model).items():

        def show(_: int, slot: int, x: Tensor, became: Quantized, name: str = name) -> None:
            report_quantization(recorder(beside), name, slot, x, became)

        watched = Fitted(linear, (name,), (linear.weight,))
        handles.append(watch_module(watched, lambda x: x, [how[name]], show))
    gradients(model)
    assert len(within) == 3 * len(fp8.layers) and beside == within
    assert any(lost for _, lost, _ in within.values())
    for handle in handles:
        handle.remove()
    beside.clear()
    gradients(model)
    assert not beside


STEPS = 4
SMALL = (
    "model.layers=3 model.hidden=32 model.heads=4 model.kv_heads=2 model.ffn=64 model.vocab_multiple=64 "
    f"model.sequence_length={LENGTH} parallel.tensor=1 parallel.sequence=false train.global_batch=4 "
    f"train.micro_batch=2 train.steps={STEPS} train.eval_samples=0 schedule.warmup_steps=1 checkpoint.at_end=false "
    "logging.trackers=[] logging.peak_tflops=1.0 precision.fp8.backend=emulated"
).split()


@pytest.mark.parametrize("name", ["1.3b-fp8", "7b-fp8"])
def test_fp8_recipe_trains(name: str, corpus: Path, tmp_path: Path) -> None:
    made = load_recipe(ROOT / f"launch/recipes/{name}.yaml", [
        *SMALL, f"data.corpora.0.path={corpus}", f"run.dir={tmp_path / 'run'}",
    ])  # fmt: skip
    assert [bool(fp8_linears(made, block)) for block in range(3)] == [False, True, False]
    assert run_ranks(1, train, made) == [0]
    table = records.read_newest_records(tmp_path / "run/steps")
    assert table.column("fp8").to_pylist() == [1] * STEPS
    losses = table.column("loss").to_pylist()
    assert losses[-1] < losses[0] and table.column("applied").to_pylist() == [True] * STEPS
