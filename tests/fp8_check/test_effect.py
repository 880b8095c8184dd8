"""What FP8 does to a model: measured as it computes, planted trouble found, and mended by keeping what is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.checkpoint.plain import PlainModel
from megastable.config.training import Fp8Config
from megastable.config.tree import RunConfig
from megastable.fp8.apply import emulate_fp8, find_linears
from megastable.fp8.emulated import Product
from megastable.fp8.scale_factors import SLOTS
from megastable.model.gpt import GPT
from megastable.model.kernels import Kernels
from megastable.model.loss import LossFunction
from megastable.parallel.topology import TensorParallel
from megastable_tools.fp8_check.advice import (
    LIMITS,
    LayerLoss,
    ModelLoss,
    RecipeOutcome,
    TensorLoss,
    best_outcome,
    choose_kept_layers,
    find_instabilities,
)
from megastable_tools.fp8_check.effect import (
    PRODUCTS,
    EffectReport,
    EvaluationBatch,
    _compare,
    _quantizers,
    _Sums,
    check_effect,
    count_passes_of,
)

RECIPES = ("current", "delayed", "block")
VOCABULARY, LENGTH, FFN = 120, 32, 128
FAR = 2.0**18  # in bf16, and in what it computes, a factor of two is exact


def model(**parts: Any) -> PlainModel:
    shape = {
        "layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": FFN, "sequence_length": LENGTH,
        "vocab_size": VOCABULARY, "vocab_multiple": 64, "init_std": 0.1,
    }  # fmt: skip
    run = RunConfig.model_validate({"model": shape | parts, "data": {"corpora": [{"path": "data/none"}]}})
    kernels = Kernels("reference" if run.model.attention_softcap else "sdpa")
    gpt = GPT(run.model, TensorParallel(), "none", 1, kernels=kernels).to(torch.bfloat16)
    return PlainModel(gpt, run, Path("none"), 1, "")


def batches(count: int, seed: int = 0) -> list[EvaluationBatch]:
    random = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCABULARY, (2, LENGTH + 1), generator=random) for _ in range(count)]
    return [EvaluationBatch(each) for each in tokens]


def checked(of: PlainModel, recipes: tuple[str, ...] = RECIPES) -> tuple[EffectReport, int, int]:
    """And how many passes were announced, and were made."""
    configs = {recipe: Fp8Config(recipe=recipe) for recipe in recipes}  # type: ignore[arg-type]
    some = batches(5)
    announced, made = [count_passes_of(2, 3, configs)], []
    found = check_effect(
        of, some[3:], some[:3], configs, advance=lambda: made.append(1), more=announced.append
    )
    return found, sum(announced), len(made)


def planted(of: PlainModel) -> str:
    """One hidden unit of an MLP given FAR less, and its output taken as many times: the same function, and a column of
    the weights that makes all the others vanish in FP8."""
    layers = find_linears(of.gpt)
    with torch.no_grad():
        layers["blocks.1.mlp.gate_up"].weight[FFN + 5] /= FAR
        layers["blocks.1.mlp.down"].weight[:, 5] *= FAR
    return "blocks.1.mlp.down"


@pytest.mark.quick("current")
@pytest.mark.parametrize("recipe", RECIPES)
def test_check_names_an_outlier_channel_and_keeping_its_layer_helps(recipe: str) -> None:
    sound, broken = model(), model()
    name = planted(broken)
    with torch.no_grad():
        tokens = batches(1)[0].tokens[:, :-1]
        assert torch.equal(sound(tokens), broken(tokens)), "in bf16 it is the same function"
    found, announced, made = checked(broken, (recipe,))
    assert announced == made
    (outcome,) = found.outcomes
    assert name in outcome.keep and len(outcome.keep) <= 2
    assert any("weight become zero" in reason for reason in outcome.keep[name])
    assert outcome.kept is not None
    assert outcome.kept.kl < outcome.everything.kl / 5
    assert outcome.kept.cosine > outcome.everything.cosine
    # Nothing of what was measured with is left behind.
    assert all(linear.product is torch.nn.functional.linear for linear in find_linears(broken.gpt).values())
    assert all(p.grad is None for p in broken.parameters())


def test_check_measures_the_gradient_that_the_model_has() -> None:
    """The whole model's gradient by `check` against one by hand, and delayed scales made of other samples."""
    of = model(tied=True)
    found, _, _ = checked(of, ("current",))
    objective = LossFunction(VOCABULARY, of.config.z_loss, TensorParallel())
    of.gpt.loss = objective
    sums = {"loss": 0.0, "dot": 0.0, "own": 0.0, "right": 0.0}
    for batch in batches(5)[3:]:
        gradients = []
        for on in (False, True):
            fp8 = emulate_fp8(of.gpt, Fp8Config(), frozenset(find_linears(of.gpt)))
            fp8.on = on
            of.zero_grad()
            of.gpt(batch.tokens[:, :-1], batch.tokens[:, 1:]).backward()
            gradients.append(
                torch.cat([p.grad.double().flatten() for p in of.parameters() if p.grad is not None])
            )
        sums["loss"] += float(objective.samples[-1][0].mean()) / 2
        right, own = gradients
        sums["dot"] += float(own @ right)
        sums["own"] += float(own @ own)
        sums["right"] += float(right @ right)
    everything = found.outcomes[0].everything
    assert everything.loss == pytest.approx(sums["loss"], rel=1e-6)
    assert everything.cosine == pytest.approx(sums["dot"] / math.sqrt(sums["own"] * sums["right"]), rel=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_compare_measures_the_products_that_train(recipe: str) -> None:
    """Sizes that are no multiples of a block; numbers that do not matter to a product, and spoil it all the same where
    they share a block with others: of inputs along columns, of gradients along rows."""
    random = torch.Generator().manual_seed(1)
    x, w, g = (
        torch.randn(shape, generator=random).to(torch.bfloat16)
        for shape in ((150, 140), (170, 140), (150, 170))
    )
    x[:75] *= 2.0**24
    g[:75] = 0
    g[:, :60] *= 2.0**24
    w[:60] = 0
    of, history = Fp8Config(recipe=recipe), {"it": [[float(t.abs().max())] for t in (x, w, g)]}  # type: ignore[arg-type]
    quantize = _quantizers(of, ["it"], history, x.device)(0)
    sums = {name: _Sums() for name in (*SLOTS, *PRODUCTS)}
    _compare(quantize, sums, x, w, g)
    found = []
    for on in (False, True):
        a, b = (t.clone().requires_grad_() for t in (x, w))
        y = Product("it", quantize, lambda on=on: on)(a, b)  # type: ignore[misc]
        y.backward(g)
        found.append((y.detach(), a.grad, b.grad))
    for name, right, own in zip(PRODUCTS, *found, strict=True):
        assert right is not None and own is not None
        wanted = (own.double() - right.double()).norm() / right.double().norm()
        assert sums[name].relative == pytest.approx(float(wanted), rel=1e-4)
        assert recipe != "block" or name == "y" or wanted > 0.5, "it tells rows from columns"


def test_check_refuses_what_is_broken_without_fp8() -> None:
    of = model()
    with torch.no_grad():
        find_linears(of.gpt)["blocks.0.mlp.down"].weight[0, 0] = torch.nan
    with pytest.raises(DataError, match="not finite without FP8"):
        checked(of, ("current",))


# The rule, on tables


def layer(name: str, y: float = 0.03, saturation: float = 0.0, underflow: float = 0.0) -> LayerLoss:
    tensors = {
        slot: TensorLoss(0.026, saturation, underflow, 1.0, "E4M3")
        for slot in ("input", "weight", "gradient")
    }
    return LayerLoss(name, tensors, {"y": y, "dx": 0.04, "dw": 0.04})


CASES: list[tuple[list[dict[str, float]], list[int]]] = [
    # errors and shares of the layers, and which are to be kept
    ([{}] * 6, []),
    ([{}] * 5 + [{"y": 0.11}], []),  # far above the others, and small
    ([{}] * 5 + [{"y": 0.2}], [5]),
    ([{"y": 0.2}] * 6, []),  # all alike, and none useless
    ([{"y": 0.6}] * 6, [0, 1, 2, 3, 4, 5]),
    ([{"y": y} for y in (0.05, 0.1, 0.2, 0.05, 0.1, 0.25)], []),  # a wide spread is ordinary
    ([{"y": math.nan}] + [{}] * 5, [0]),
    ([{"y": math.inf}] + [{}] * 5, [0]),
    ([{}] * 3 + [{"saturation": 5e-3}] * 3, [3, 4, 5]),
    ([{"saturation": 1e-4}] * 6, []),
    ([{"underflow": 0.08}] * 6, []),
    ([{"underflow": 0.2}] * 6, []),  # the numbers are like that everywhere, and the products are right
    ([{"underflow": 0.01}] * 5 + [{"underflow": 0.9}], [5]),
    ([{"y": 0.04}], []),
    ([{"y": 0.9}], [0]),
]


@pytest.mark.parametrize(("rows", "wanted"), CASES)
def test_advise(rows: list[dict[str, float]], wanted: list[int]) -> None:
    kept = choose_kept_layers([layer(str(number), **row) for number, row in enumerate(rows)])
    assert list(kept) == [str(number) for number in wanted]
    assert all(reasons and all(reasons) for reasons in kept.values())


errors = st.floats(0, 10) | st.sampled_from([math.nan, math.inf])
layers = st.lists(st.tuples(errors, st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12)


@given(layers)
def test_advise_answers_whatever_is_measured_in_any_order(
    rows: list[tuple[float, float, float]],
) -> None:
    measured = [layer(str(number), *row) for number, row in enumerate(rows)]
    kept = choose_kept_layers(measured)
    assert set(kept) == set(choose_kept_layers(measured[::-1]))
    for one in measured:
        if one.worst > LIMITS.useless or one.tensors["weight"].saturation > LIMITS.saturation:
            assert one.name in kept
        elif one.worst <= LIMITS.product and one.tensors["weight"].underflow <= LIMITS.underflow:
            assert one.name not in kept


def of_model(loss: float = 3.0, cosine: float = 0.999, error: float = 0.05) -> ModelLoss:
    return ModelLoss(loss, 1e-3, cosine, error)


def test_unstable() -> None:
    assert find_instabilities(3.0, of_model(3.02)) == ()
    assert "+2.00%" in find_instabilities(3.0, of_model(3.06))[0]
    assert "cosine 0.800" in find_instabilities(3.0, of_model(cosine=0.8))[0]
    for broken in (of_model(math.nan), of_model(cosine=math.nan), of_model(error=math.inf)):
        assert find_instabilities(3.0, broken) == ("loss or gradient is not finite",)
    assert find_instabilities(3.0, of_model(), kept=4, layers=8) == ()
    assert "5 of 8" in find_instabilities(3.0, of_model(), kept=5, layers=8)[0]


def test_best_keeps_few_and_is_near() -> None:
    def outcome(
        recipe: str, keep: int = 0, error: float = 0.05, problems: tuple[str, ...] = ()
    ) -> RecipeOutcome:
        kept = of_model(error=error) if keep else None
        reasons = {str(number): ("why",) for number in range(keep)}
        return RecipeOutcome(recipe, [], reasons, of_model(error=0.9 if keep else error), kept, problems)

    assert best_outcome([outcome("a", 2, 0.01), outcome("b", 1, 0.2), outcome("c", 1, 0.1)]).recipe == "c"  # type: ignore[union-attr]
    assert best_outcome([outcome("a", problems=("no",)), outcome("b", 3)]).recipe == "b"  # type: ignore[union-attr]
    assert best_outcome([outcome("a", problems=("no",))]) is None
