"""A weight is cast once a step, and no cast is older than the weights: same bytes as when every pass casts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megastable.config.tree import RunConfig
from megastable.engine.engine import Engine
from megastable.fp8.controller import Emulated
from megastable.fp8.emulated import WEIGHT
from megastable.model.gpt import GPT
from tests.distributed import run_ranks
from tests.engine.engines import build_engine, take_batch
from tests.fp8.test_apply import RECIPES, batch, config, fitted
from tests.parallel import test_layouts as layouts


def count_casts(fp8: Emulated) -> Counter[str]:
    """Casts of weights from now on, by layer."""
    counted = Counter[str]()
    for product in fp8.products:

        def quantize(
            x: Any, slot: int, *more: Any, name: str = product.name, whole: Any = product.quantize
        ) -> Any:
            counted[name] += slot == WEIGHT
            return whole(x, slot, *more)

        product.quantize = quantize
    return counted


def accumulate(model: GPT, passes: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of micro-batches, and the sums of their gradients."""
    model.zero_grad()
    tokens, labels = batch()
    losses = []
    for number in range(passes):
        loss = model(tokens.roll(number, 0), labels.roll(number, 1))
        loss.backward()
        losses.append(loss.item())
    return losses, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.quick("current-none", "delayed-full", "block-full")
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_share_the_first_ones_cast(recipe: str, recompute: str) -> None:
    (model, fp8), (plain, every) = fitted(config(recipe), recompute), fitted(config(recipe), recompute)
    casts, more = count_casts(fp8), count_casts(every)
    for step in range(3):
        if step == 1:  # updated, behind autograd's back as by DeepSpeed
            for p in (*model.parameters(), *plain.parameters()):
                p.data.mul_(1.01)
        casts.clear()
        more.clear()
        with fp8.computing():
            found = accumulate(model)
        assert same(found, accumulate(plain))
        assert casts == dict.fromkeys(fp8.layers, 1)
        assert more == dict.fromkeys(fp8.layers, 3 * (2 if recompute == "none" else 3))
        assert not any(product.cast or product.keeps_cast for product in fp8.products)
        for one in (fp8, every):
            one.settle_step(True)
        assert fp8.write_history() == every.write_history()


def test_a_pass_without_gradients_leaves_the_magnitude_to_the_first_with_them() -> None:
    """As where a probe computes queries and keys before a block."""
    (model, fp8), (plain, every) = fitted(config("delayed")), fitted(config("delayed"))
    with fp8.computing():
        with torch.no_grad():
            model(*batch())
        assert not any(product.cast for product in fp8.products)
        found = accumulate(model)
        with torch.no_grad():
            again = model(*batch()).item()
    assert same(found, accumulate(plain))
    assert again == found[0][0]
    for one in (fp8, every):
        one.settle_step(True)
    assert fp8.write_history() == every.write_history()
    assert all(slots[WEIGHT][0] > 0 for slots in fp8.write_history().values())


def test_a_step_that_breaks_off_keeps_no_cast() -> None:
    model, fp8 = fitted(config())

    def break_off() -> None:
        model(*batch())
        assert all(product.cast for product in fp8.products)
        raise RuntimeError

    with pytest.raises(RuntimeError), fp8.computing():
        break_off()
    assert not any(product.cast or product.keeps_cast for product in fp8.products)


def go_through(engine: Engine) -> list[Any]:
    """Steps, one of them refused, with measurements and evaluations between them; a rewind; other weights."""
    seen = list[Any]()
    micro = [take_batch(engine, one) for one in layouts.batches()]

    def train(number: int, applied: bool = True) -> None:
        measured, _ = engine.train_step(micro[number], 1e-2, lambda _: applied)
        seen.append((measured.loss, measured.grad_norm, engine.evaluate_samples(micro[0]).tolist()))

    train(0)
    kept, counters = {n: t.clone() for n, t in engine.optimizer_state().items()}, engine.read_counters()
    train(1, applied=False)
    seen.append(engine.measure_step(micro[2]).loss)
    train(1)
    train(2)
    engine.restore_optimizer_state(kept)
    engine.restore_counters(counters)
    engine.refresh_weights()
    train(1)
    for master in engine.masters:
        master.data.mul_(0.5)
    engine.refresh_weights()
    train(3)
    return [*seen, engine.fp8_history()]


def train_both_ways(c: RunConfig) -> tuple[list[Any], list[Any], int, int]:
    """What is seen with casts kept and without, and the number of casts."""
    told, casts = [], []
    for keeps in (True, False):
        engine = build_engine(c)
        assert isinstance(engine.fp8, Emulated) and engine.fp8._keeps_casts
        engine.fp8._keeps_casts = keeps
        counted = count_casts(engine.fp8)
        told.append(go_through(engine))
        casts.append(counted.total())
    return told[0], told[1], casts[0], casts[1]


@pytest.mark.quick("one")
@pytest.mark.parametrize(
    ("world", "parallel"),
    [(1, {}), (2, {"pipeline": 2}), (2, {"zero": 2, "recompute": "selective"})],
    ids=["one", "pp2", "dp2-zero2"],
)
def test_no_step_meets_an_older_cast(world: int, parallel: dict[str, Any]) -> None:
    c = config("delayed", precision="bf16", **parallel)
    for kept, every, casts, more in run_ranks(world, train_both_ways, c):
        assert kept == every
        assert casts * 2 < more


def see_casts(c: RunConfig) -> bool:
    engine = build_engine(c)
    assert isinstance(engine.fp8, Emulated)
    with engine.fp8.computing():
        return any(product.keeps_cast for product in engine.fp8.products)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"zero": 3}, {"recompute": "full"}], ids=str)
def test_no_cast_is_kept_to_save_memory(parallel: dict[str, Any]) -> None:
    assert run_ranks(2, see_casts, config("current", **parallel)) == [False, False]
