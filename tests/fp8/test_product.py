"""The emulated product, forward and backward, against the numpy model's in float64.

y, dx and dw must lie within half a step of the output's dtype, rounded once, and what summing up in fp32 may cost. What
was quantized by other blocks, in another format or twice is a hundred times as far away.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from megastable.config.training import Fp8Config
from megastable.fp8.emulated import Blocks, Current, Delayed, Product, Quantizer, choose_formats
from megastable.fp8.scale_factors import E4M3, E5M2, FP8Format, Meters, Quantized
from tests.fp8 import model

MODELS = {E4M3: model.E4M3, E5M2: model.E5M2}
HYBRID, NARROW = (E4M3, E4M3, E5M2), (E4M3, E4M3, E4M3)
FORMATS = {"hybrid": HYBRID, "e4m3": NARROW}
RECIPES = ("current", "delayed", "block")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
# Of x but for its last dimension, inputs, outputs: within one block, over its ends, and [s, b, h].
SHAPES = [((5,), 16, 24), ((128,), 128, 128), ((130,), 257, 129), ((33, 5), 200, 300), ((256, 2), 130, 64)]
REMEMBERED = (3.1, 0.4, 0.013)  # delayed scaling: largest magnitudes of x, w and gradient in steps before


def drawn(
    shape: tuple[int, ...], inputs: int, outputs: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """x, w, gradient of y: rows and columns of different magnitudes, a few outliers."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    x = normal(*shape, inputs) * normal(*shape, 1).exp() * normal(inputs).exp()
    w = normal(outputs, inputs) * 0.1 * normal(outputs, 1).exp()
    g = normal(*shape, outputs) * 0.001 * (2 * normal(*shape, 1)).exp() * normal(outputs).exp()
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), g.to(dtype)


def remembering(to: tuple[FP8Format, FP8Format, FP8Format]) -> Meters:
    meters = Meters(["blocks.0.mlp.down"], to, 4, 0, torch.device("cpu"))
    for slot, amax in enumerate(REMEMBERED):
        meters.note_magnitude(0, slot, torch.tensor(amax))
    meters.settle_step(True)
    return meters


def quantizer(recipe: str, to: tuple[FP8Format, FP8Format, FP8Format]) -> Quantizer:
    if recipe == "delayed":
        return Delayed(to, remembering(to), 0)
    return Blocks(to) if recipe == "block" else Current(to)


def product(recipe: str, to: tuple[FP8Format, FP8Format, FP8Format] = HYBRID) -> Product:
    return Product("blocks.0.mlp.down", quantizer(recipe, to), lambda: True)


def flat(x: Tensor) -> np.ndarray:
    return x.detach().float().reshape(-1, x.shape[-1]).numpy()


def expected(
    recipe: str, to: tuple[FP8Format, FP8Format, FP8Format], x: Tensor, w: Tensor, g: Tensor
) -> model.Products:
    forward, backward = MODELS[to[0]], MODELS[to[2]]
    given = flat(x), flat(w), flat(g)
    if recipe == "delayed":
        scales = [
            float(model.scale_of(np.float32(amax), MODELS[f])) for amax, f in zip(REMEMBERED, to, strict=True)
        ]
        return model.delayed(*given, forward, backward, (scales[0], scales[1], scales[2]))
    return (model.block if recipe == "block" else model.current)(*given, forward, backward)


def close(found: Tensor, exact: np.ndarray, magnitudes: np.ndarray, terms: int, name: str) -> None:
    """Rounded once: half a step of the dtype, and `terms` roundings of fp32 on the way."""
    bits = {torch.bfloat16: 8, torch.float32: 24}[found.dtype]
    half = np.ldexp(1.0, np.frexp(exact)[1] - 1 - bits)
    error = np.abs(flat(found).astype(np.float64) - exact)
    assert error.shape == exact.shape
    excess = error - half - (terms + 4) * 2.0**-24 * magnitudes
    assert (excess <= 0).all(), f"{name}: {(excess > 0).mean():.1%} are off, by {excess.max():.3g} at most"


def check(found: tuple[Tensor, Tensor, Tensor], theirs: model.Products) -> None:
    exact = (theirs.y, theirs.dx, theirs.dw)
    terms = (theirs.dx.shape[1], theirs.y.shape[1], theirs.y.shape[0])
    for name, mine, one, magnitudes, count in zip(("y", "dx", "dw"), found, exact, theirs.sums, terms):
        close(mine, one, magnitudes, count, name)


def passes(
    f: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dw."""
    y = f(x, w)
    dx, dw = torch.autograd.grad(y, (x, w), g)
    return y.detach(), dx, dw


@DTYPES
@pytest.mark.parametrize("to", list(FORMATS))
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_forward_and_backward_is_the_models(
    dtype: torch.dtype, to: str, recipe: str, shape: tuple[tuple[int, ...], int, int]
) -> None:
    x, w, g = drawn(*shape, dtype)
    y, dx, dw = passes(product(recipe, FORMATS[to]), x, w, g)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype,) * 3
    assert (y.shape, dx.shape, dw.shape) == (g.shape, x.shape, w.shape)
    check((y, dx, dw), expected(recipe, FORMATS[to], x, w, g))


@pytest.mark.parametrize("recipe", RECIPES)
def test_check_tells_recipes_and_formats_apart(recipe: str) -> None:
    x, w, g = drawn((130,), 257, 129, torch.float32)
    found = passes(product(recipe), x, w, g)
    for other in RECIPES:
        for to in FORMATS.values():
            if (other, to) == (recipe, HYBRID):
                continue
            with pytest.raises(AssertionError, match="are off"):
                check(found, expected(other, to, x, w, g))


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
@pytest.mark.parametrize("given", ["auto", "hybrid", "e4m3"])
def test_formats_of_a_configuration(recipe: str, given: str) -> None:
    found = choose_formats(Fp8Config.model_validate({"recipe": recipe, "formats": given}))
    assert found == (HYBRID if given == "hybrid" or (given == "auto" and recipe != "block") else NARROW)


@DTYPES
@pytest.mark.parametrize("recipe", RECIPES)
def test_product_takes_gradients_that_are_views(dtype: torch.dtype, recipe: str) -> None:
    """Of a sum, one number in all places; of a transpose, in another order."""
    x, w, g = drawn((17, 3), 130, 140, dtype)
    f = product(recipe)
    one = torch.tensor(0.01, dtype=dtype).expand(g.shape)
    check(passes(f, x, w, one), expected(recipe, HYBRID, x, w, one))
    turned = g.transpose(0, 1).contiguous().transpose(0, 1)
    check(passes(f, x, w, turned), expected(recipe, HYBRID, x, w, g))
    # And an x that is one: attention's output.
    held = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    check(passes(f, held, w, g), expected(recipe, HYBRID, x, w, g))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("where", ["x", "w", "g"])
def test_product_shows_a_nan_in_all_that_it_enters(recipe: str, where: str) -> None:
    x, w, g = (t.detach() for t in drawn((140,), 130, 135, torch.bfloat16))
    {"x": x, "w": w, "g": g}[where][3, 5] = torch.nan
    y, dx, dw = passes(product(recipe), x.requires_grad_(), w.requires_grad_(), g)
    spoilt = {"x": (y[3], dw[:, 5]), "w": (y[:, 3], dx[:, 5]), "g": (dx[3], dw[5])}[where]
    assert all(t.isnan().all() for t in spoilt)
    assert {"x": dx, "w": dw, "g": y}[where].isfinite().all()


# Around the product.


@pytest.mark.parametrize("recipe", RECIPES)
def test_observe_is_shown_what_is_multiplied(recipe: str) -> None:
    x, w, g = drawn((7, 2), 140, 30, torch.bfloat16)
    seen: dict[int, tuple[Tensor, Quantized]] = {}
    f = product(recipe)
    f.observe = lambda slot, tensor, became: seen.update({slot: (tensor.detach().clone(), became)})
    with torch.no_grad():
        f(x, w)
    assert not seen, "no training step's"
    found = passes(f, x, w, g)
    f.observe = None
    assert sorted(seen) == [0, 1, 2]
    theirs = expected(recipe, HYBRID, x, w, g)
    for slot, of in enumerate((*theirs.y_of, theirs.dx_of[0])):
        tensor, became = seen[slot]
        assert np.array_equal(flat(tensor), flat((x, w, g)[slot]))
        assert (became.values.view(torch.uint8).numpy() == of.codes).all()
        assert np.array_equal(became.dequantized(torch.float32).numpy(), of.dequantized.astype(np.float32))
    for mine, usual in zip(found, passes(f, x, w, g), strict=True):
        assert torch.equal(mine, usual)
