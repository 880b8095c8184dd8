"""What is counted beside a module is what the emulation counts within it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megastable.fp8 import te
from megastable.fp8.apply import linears
from megastable.fp8.controller import tell
from megastable.fp8.emulated import GRADIENT, INPUT, WEIGHT, metered, quantizers
from megastable.fp8.scale_factors import Quantized
from megastable.fp8.te import Watched, watch
from megastable.model.mlp import MLP, swiglu
from megastable.parallel.layout import Layout
from megastable.parallel.topology import Topology
from tests.distributed import run_ranks
from tests.fp8.test_apply import RECIPES, batch, built, config, fitted, gradients
from tests.parallel import test_layouts as layouts
from tests.patience import PATIENCE

Seen = dict[tuple[str, str], tuple[float, float, int]]


def recorder(seen: Seen) -> Any:
    def record(layer: str, slot: str, cut: Tensor, lost: Tensor, count: int) -> None:
        before = seen.get((layer, slot), (0.0, 0.0, 0))
        seen[layer, slot] = before[0] + float(cut), before[1] + float(lost), before[2] + count

    return record


@pytest.mark.parametrize("recipe", RECIPES)
def test_as_the_emulation_counts(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the matrices, here of 256 tokens, are looked at in parts."""
    monkeypatch.setattr(te, "AT_ONCE", 1)
    c = config(recipe)
    model, fp8 = fitted(c)
    assert c.precision.fp8 is not None
    gradients(model)
    fp8.settle(True)  # delayed scales are known now
    within: Seen = {}
    beside: Seen = {}
    fp8.watch(recorder(within))
    meters = metered(c.precision.fp8, fp8.layers, torch.device("cpu"))
    if meters is not None:
        meters.read(fp8.history())
    how = dict(zip(fp8.layers, quantizers(c.precision.fp8, len(fp8.layers), meters), strict=True))
    handles = []
    for name, linear in linears(model).items():

        def show(_: int, slot: int, x: Tensor, became: Quantized, name: str = name) -> None:
            tell(recorder(beside), name, slot, x, became)

        handles.append(
            watch(Watched(linear, (name,), (linear.weight,), lambda x: x, swiglu), [how[name]], show)
        )
    gradients(model)
    assert len(within) == 3 * len(fp8.layers) and beside == within
    assert any(lost for _, lost, _ in within.values())
    for handle in handles:
        handle.remove()
    beside.clear()
    gradients(model)
    assert not beside


def test_of_two_layers_in_one_module() -> None:
    """An MLP as a whole: what goes into its second layer is worked out of the first."""
    c = config("current")
    assert c.precision.fp8 is not None
    model = built(c)
    mlp = next(part for part in model.modules() if isinstance(part, MLP))
    both = (mlp.gate_up, mlp.down)
    inputs: list[Tensor] = []
    for linear in both:
        linear.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach().flatten(0, 1)))
    shown: dict[tuple[int, int], Tensor] = {}

    def show(number: int, slot: int, x: Tensor, _: Quantized) -> None:
        assert (number, slot) not in shown
        shown[number, slot] = x

    weights = [linear.weight for linear in both]
    watched = Watched(mlp, ("gate_up", "down"), weights, lambda x: x, swiglu)
    watch(watched, quantizers(c.precision.fp8, 2, None), show)
    with torch.no_grad():
        model(*batch())
    assert not shown  # an evaluation is no training pass
    inputs.clear()
    gradients(model)
    assert set(shown) == {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)}
    for number in (0, 1):
        assert torch.equal(shown[number, 0], inputs[number]) and torch.equal(
            shown[number, 1], weights[number]
        )
    assert shown[1, 2].shape == shown[0, 0].shape and bool(shown[1, 2].any())


def beside_zero3(c: Any) -> list[tuple[int, tuple[int, ...]]]:
    """What is shown of a layer whose weight ZeRO 3 takes away after its forward pass: slots and shapes."""
    from megastable.config import deepspeed_json
    from megastable.engine.engine import Engine

    topology = Topology(Layout(), 0, timeout=PATIENCE)
    engine = Engine(c, deepspeed_json.build(c, 1), topology)
    linear = linears(engine.ds.module)["blocks.1.mlp.down"]
    shown: list[tuple[int, tuple[int, ...]]] = []
    watched = Watched(linear, ("down",), (linear.weight,), lambda x: x, swiglu)
    watch(
        watched,
        quantizers(c.precision.fp8, 1, None),
        lambda _, slot, x, __: shown.append((slot, tuple(x.shape))),
    )
    engine.train_step(layouts.mine(layouts.batches()[0], topology, 2), 1e-3, lambda _: True)
    assert not linear.weight.numel()
    return sorted(set(shown))


@pytest.mark.slow
def test_weights_are_looked_at_before_zero_3_takes_them_away() -> None:
    (shown,) = run_ranks(1, beside_zero3, config("current", precision="bf16", zero=3))
    model = config().model
    hidden, width = model.hidden, model.ffn_width
    tokens = shown[0][1][0]
    assert shown == [(INPUT, (tokens, width)), (WEIGHT, (hidden, width)), (GRADIENT, (tokens, hidden))]
