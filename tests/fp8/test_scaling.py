"""Scales, and what is quantized by them, against the numpy model, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megastable.fp8 import scale_factors
from megastable.fp8.formats import E4M3, E5M2, FP8Format
from megastable.fp8.scale_factors import by_tensor, magnitude, scale_of
from tests.fp8 import model
from tests.fp8.model import Model
from tests.fp8.test_formats import PAIRS, agree

MODELS = {E4M3: model.E4M3, E5M2: model.E5M2}
SHAPES = [(1, 1), (1, 128), (128, 128), (7, 129), (129, 7), (256, 384), (300, 257), (3, 1000)]


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def tensor(x: np.ndarray, dtype: torch.dtype) -> tuple[Tensor, np.ndarray]:
    """x in a dtype, and in fp32 what that is."""
    given = torch.from_numpy(x).to(dtype)
    return given, given.float().numpy()


def numbers(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Rows and columns of very different magnitudes, exact zeros among them."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * np.exp(3 * random.standard_normal((shape[0], 1)))
    x *= np.exp(2 * random.standard_normal((1, shape[1]))) * (random.random(shape) > 0.1)
    return x.astype(np.float32)


def check(found: scale_factors.Quantized, expected: model.Quantized) -> None:
    """Codes, inverses, and the numbers both stand for."""
    agree(found.values.view(torch.uint8).numpy(), expected.codes, expected.model)
    assert found.values.shape == expected.codes.shape
    inverse = found.inverse.reshape(expected.inverse.shape)
    assert inverse.dtype == torch.float32
    assert (bits(inverse.numpy()) == bits(expected.inverse)).all()
    dequantized = found.dequantized(torch.float32).numpy()
    with np.errstate(over="ignore"):
        assert np.array_equal(dequantized, expected.dequantized.astype(np.float32), equal_nan=True)
    bare = found.decoded(torch.bfloat16).float().numpy()
    assert np.array_equal(bare, expected.values.astype(np.float32), equal_nan=True)


# Scales.


@PAIRS
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_of_all_kinds_of_magnitudes(mine: FP8Format, theirs: Model, power_of_two: bool) -> None:
    random = np.random.default_rng(3)
    amax = random.integers(0, 2**31, 300_000, dtype=np.uint32).view(np.float32)  # infinite and NaN, too
    usual = np.exp(random.uniform(-25, 12, 300_000)).astype(np.float32)
    powers = np.exp2(np.arange(-149, 128)).astype(np.float32)
    edges = np.array([0.0, np.inf, np.nan, model.FP32_MAX, theirs.max / model.FP32_MAX], np.float32)
    amax = np.concatenate([amax, usual, powers, edges, np.nextafter(edges, np.float32(1))])
    found = scale_of(torch.from_numpy(amax), mine, power_of_two).numpy()
    expected = model.scale_of(amax, theirs, power_of_two=power_of_two)
    differ = np.flatnonzero(bits(found) != bits(expected))
    assert not len(differ), f"{len(differ)} differ: {[(amax[i], found[i], expected[i]) for i in differ[:3]]}"


@PAIRS
def test_scales_of_magnitudes_that_are_none(mine: FP8Format, theirs: Model) -> None:
    for power_of_two in (False, True):
        found = scale_of(torch.tensor([0.0, torch.inf, torch.nan]), mine, power_of_two)
        assert found.tolist() == [1.0, 1.0, 1.0]
    tiniest = torch.tensor(2.0**-149)
    assert scale_of(tiniest, mine) == torch.finfo(torch.float32).max
    assert scale_of(tiniest, mine, True) == 2.0**127
    one = scale_of(torch.tensor(1.0), mine)
    assert one.shape == () and one.dtype == torch.float32 and one == theirs.max


@given(st.sampled_from([E4M3, E5M2]), st.floats(2.0**-100, 2.0**127, width=32), st.booleans())
def test_a_scale_takes_the_largest_to_the_largest(to: FP8Format, amax: float, power_of_two: bool) -> None:
    scale = scale_of(torch.tensor(amax), to, power_of_two)
    product = float(scale) * amax  # exact in float64
    if power_of_two:
        assert np.frexp(float(scale))[0] == 0.5
        assert to.max / 2 < product <= to.max
    else:
        assert abs(product / to.max - 1) <= 2.0**-24
    found = by_tensor(torch.tensor([[amax, -amax]]), scale, to).values.float()
    assert (found.abs() <= to.max).all()
    if not power_of_two:
        assert found.tolist() == [[to.max, -to.max]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_magnitudes(dtype: torch.dtype) -> None:
    def of(*x: float) -> float:
        found = magnitude(torch.tensor(x, dtype=dtype))
        assert found.dtype == torch.float32 and found.shape == ()
        return float(found)

    assert of(1.0, -3.0, 2.0) == 3.0
    assert of(5.0, -3.0) == 5.0
    assert of(-7.0) == 7.0
    assert of(0.0, -0.0) == 0.0 and of() == 0.0
    assert of(1.0, -np.inf) == np.inf
    assert np.isnan(of(1.0, np.nan, np.inf))


# Quantized tensors.

BLOCKS: dict[str, tuple[Callable[[Tensor, FP8Format], scale_factors.Quantized], tuple[int, int]]] = {
    "rows": (scale_factors.by_rows, model.ROW),
    "columns": (scale_factors.by_columns, model.COLUMN),
    "tiles": (scale_factors.by_tiles, model.TILE),
}


@PAIRS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor(mine: FP8Format, theirs: Model, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    given, x = tensor(numbers(shape, 4), dtype)
    check(by_tensor(given, scale_of(magnitude(given), mine), mine), model.quantize(x, theirs))
    check(by_tensor(given, torch.tensor(3.3), mine), model.with_scale(x, theirs, 3.3))


@PAIRS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("blocks", list(BLOCKS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks(
    mine: FP8Format, theirs: Model, dtype: torch.dtype, blocks: str, shape: tuple[int, int]
) -> None:
    by, block = BLOCKS[blocks]
    given, x = tensor(numbers(shape, 5), dtype)
    check(by(given, mine), model.quantize(x, theirs, block, power_of_two=True))


@pytest.mark.parametrize("blocks", list(BLOCKS))
def test_a_tensor_that_is_not_contiguous(blocks: str) -> None:
    by, block = BLOCKS[blocks]
    x = numbers((150, 260), 6)
    check(by(torch.from_numpy(x).T, E4M3), model.quantize(x.T.copy(), model.E4M3, block, power_of_two=True))
    scale = scale_of(magnitude(torch.from_numpy(x)), E4M3)
    check(by_tensor(torch.from_numpy(x).T, scale, E4M3), model.quantize(x.T.copy(), model.E4M3))


def test_columns_are_the_rows_of_the_transpose() -> None:
    x = torch.from_numpy(numbers((150, 260), 7))
    down, across = scale_factors.by_columns(x, E4M3), scale_factors.by_rows(x.T.contiguous(), E4M3)
    assert torch.equal(down.values.view(torch.uint8), across.values.view(torch.uint8).T)
    assert torch.equal(down.inverse, across.inverse.T)


@PAIRS
@pytest.mark.parametrize("blocks", list(BLOCKS))
def test_a_bad_number_spoils_only_its_block(mine: FP8Format, theirs: Model, blocks: str) -> None:
    by, block = BLOCKS[blocks]
    x = numbers((260, 300), 8)
    x[0, :130] = 0
    x[5, 200], x[140, 3], x[259, 299] = np.nan, np.inf, 2.0**-149
    check(by(torch.from_numpy(x), mine), model.quantize(x, theirs, block, power_of_two=True))
    healthy = by(torch.from_numpy(np.where(np.isfinite(x), x, 0).astype(np.float32)), mine)
    found = by(torch.from_numpy(x), mine).values.float()
    changed = ((found != healthy.values.float()) | found.isnan()).nonzero().tolist()
    near = [[5 // block[0], 200 // block[1]], [140 // block[0], 3 // block[1]]]
    assert [5, 200] in changed
    assert all([row // block[0], column // block[1]] in near for row, column in changed)


@PAIRS
def test_a_bad_number_in_a_tensor(mine: FP8Format, theirs: Model) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        x = numbers((20, 30), 9)
        x[3, 4] = bad
        given = torch.from_numpy(x)
        check(by_tensor(given, scale_of(magnitude(given), mine), mine), model.quantize(x, theirs))


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(list(BLOCKS)), st.integers(0, 100))
def test_blocks_of_any_shape(rows: int, columns: int, blocks: str, seed: int) -> None:
    by, block = BLOCKS[blocks]
    x = numbers((rows, columns), seed)
    found = by(torch.from_numpy(x), E4M3)
    check(found, model.quantize(x, model.E4M3, block, power_of_two=True))
    # Half a step of a normal number: no block's largest magnitude is lost.
    error = np.abs(found.dequantized(torch.float32).numpy() - x)
    largest = model.spread(found.inverse.numpy() * E4M3.max, block, x.shape)
    assert (error <= np.maximum(2.0**-4 * np.abs(x), largest / E4M3.max * E4M3.least / 2)).all()
