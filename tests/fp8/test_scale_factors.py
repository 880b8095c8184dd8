"""Rounding to FP8, scales, and what is quantized by them, against the numpy model, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megastable.fp8 import scale_factors
from megastable.fp8.scale_factors import (
    E4M3,
    E5M2,
    FP8Format,
    by_tensor,
    cast_to_fp8,
    decode_fp8,
    largest_magnitude,
    scale_of,
)
from tests.fp8 import model
from tests.fp8.model import Model

PAIRS = pytest.mark.parametrize(
    ("mine", "theirs"), [(E4M3, model.E4M3), (E5M2, model.E5M2)], ids=["e4m3", "e5m2"]
)
MODELS = {E4M3: model.E4M3, E5M2: model.E5M2}


def codes(x: np.ndarray | torch.Tensor, to: FP8Format, scale: float = 1.0) -> np.ndarray:
    """What the emulation makes of x: uint8."""
    given = torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x
    return cast_to_fp8(given, torch.tensor(scale), to).view(torch.uint8).numpy()


def agree(found: np.ndarray, expected: np.ndarray, of: Model) -> None:
    """Equal codes; NaNs have several."""
    nan = np.isnan(of.values)
    differ = (found != expected) & ~(nan[found] & nan[expected])
    assert not differ.any(), f"{differ.sum()} differ, the first at {np.flatnonzero(differ)[0]}"


# The model itself, against what the papers state.


def test_the_models_numbers_are_those_of_the_papers() -> None:
    # arXiv:2209.05433, table 1; OFP8, tables 1 and 2.
    assert (model.E4M3.max, model.E5M2.max) == (448.0, 57344.0)
    assert (model.E4M3.smallest_normal, model.E5M2.smallest_normal) == (2.0**-6, 2.0**-14)
    assert (model.E4M3.numbers[7], model.E5M2.numbers[3]) == (0.875 * 2.0**-6, 0.75 * 2.0**-14)
    assert (model.E4M3.numbers[1], model.E5M2.numbers[1]) == (2.0**-9, 2.0**-16)
    assert np.flatnonzero(np.isnan(model.E4M3.values)).tolist() == [0x7F, 0xFF]
    assert not np.isinf(model.E4M3.values).any()
    assert np.flatnonzero(np.isnan(model.E5M2.values)).tolist() == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    assert model.E5M2.values[[0x7C, 0xFC]].tolist() == [np.inf, -np.inf]


def test_the_model_agrees_with_ieee_where_e5m2_is_a_shorter_fp16() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    exact = halves[np.isfinite(halves) & (halves.view(np.uint16) & 0xFF == 0)]
    found = model.E5M2.encode(exact.astype(np.float32))
    assert (found == exact.view(np.uint16) >> 8).all()


# The emulation against the model.


@PAIRS
def test_cast_of_a_million_random_patterns(mine: FP8Format, theirs: Model) -> None:
    random = np.random.default_rng(1)
    x = random.integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    assert np.isnan(x).any()
    agree(codes(x, mine), theirs.encode(x), theirs)
    # As many whose exponents are the format's own, and a few beyond either end.
    lowest, highest = int(np.log2(mine.least)) - 3, int(np.log2(mine.max)) + 2
    exponents = random.integers(127 + lowest, 127 + highest + 1, 1_000_000, dtype=np.uint32)
    rest = random.integers(0, 2**24, 1_000_000, dtype=np.uint32)
    x = (exponents << 23 | rest & 0x7FFFFF | rest >> 23 << 31).view(np.float32)
    agree(codes(x, mine), theirs.encode(x), theirs)


@PAIRS
def test_cast_of_specials(mine: FP8Format, theirs: Model) -> None:
    tiny = np.finfo(np.float32).smallest_subnormal
    x = np.array([0.0, -0.0, tiny, -tiny, np.inf, -np.inf, model.FP32_MAX, -model.FP32_MAX], np.float32)
    found = codes(x, mine)
    agree(found, theirs.encode(x), theirs)
    assert found.tolist() == [0, 0x80, 0, 0x80] + [theirs.finite - 1, theirs.finite - 1 + 0x80] * 2
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(theirs.values[codes(nans, mine)]).all()


@PAIRS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_decode_gives_the_models_numbers(mine: FP8Format, theirs: Model, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    found = decode_fp8(every.view(mine.dtype), mine, dtype).double().numpy()
    numbers = np.isfinite(theirs.values)
    assert (found[numbers] == theirs.values[numbers]).all()
    assert (np.signbit(found[numbers]) == np.signbit(theirs.values[numbers])).all()
    assert not np.isfinite(found[~numbers]).any()
    # Only numbers, which may take another way; in a shape of more dimensions, not contiguous; nothing at all.
    kept = every[torch.from_numpy(numbers)][:240].reshape(2, 10, 12).transpose(0, 2)
    found = decode_fp8(kept.view(mine.dtype), mine, dtype).double().numpy()
    assert (found == theirs.values[kept.numpy()]).all()
    assert decode_fp8(every[:0].view(mine.dtype), mine, dtype).numel() == 0


@PAIRS
@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 3.3e-5, 1.7, 977.3, 2.0**127, float(model.FP32_MAX)])
def test_cast_of_all_numbers_of_bf16_by_scales(mine: FP8Format, theirs: Model, scale: float) -> None:
    bits = np.arange(2**16, dtype=np.uint32) << 16
    x = bits.view(np.float32)
    given = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)
    expected = theirs.cast(x, np.float32(scale))
    agree(codes(given, mine, scale), expected, theirs)
    agree(codes(x, mine, scale), expected, theirs)


# Properties.

FORMATS = st.sampled_from([E4M3, E5M2])
NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False),
    st.floats(-600, 600, width=32),
    st.floats(-(2.0**-5), 2.0**-5, width=32),
)


@given(FORMATS, st.lists(NUMBERS, min_size=1, max_size=50), st.floats(2.0**-100, 2.0**100, width=32))
def test_cast_of_any_numbers_and_scale_is_the_models(
    to: FP8Format, given_numbers: list[float], scale: float
) -> None:
    x = np.array(given_numbers, np.float32)
    agree(codes(x, to, scale), MODELS[to].cast(x, scale), MODELS[to])


SHAPES = [(1, 1), (1, 128), (128, 128), (7, 129), (129, 7), (256, 384), (300, 257), (3, 1000)]


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def tensor(x: np.ndarray, dtype: torch.dtype) -> tuple[Tensor, np.ndarray]:
    """x in a dtype, and in fp32 what that is."""
    given = torch.from_numpy(x).to(dtype)
    return given, given.float().numpy()


def draw_numbers(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Rows and columns of very different magnitudes, exact zeros among them."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * np.exp(3 * random.standard_normal((shape[0], 1)))
    x *= np.exp(2 * random.standard_normal((1, shape[1]))) * (random.random(shape) > 0.1)
    return x.astype(np.float32)


def check_quantized(found: scale_factors.Quantized, expected: model.Quantized) -> None:
    """Codes, inverses, and the draw_numbers both stand for."""
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


@given(st.sampled_from([E4M3, E5M2]), st.floats(2.0**-100, 2.0**127, width=32), st.booleans())
def test_scale_takes_the_largest_to_the_largest(to: FP8Format, amax: float, power_of_two: bool) -> None:
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
    given, x = tensor(draw_numbers(shape, 4), dtype)
    check_quantized(
        by_tensor(given, scale_of(largest_magnitude(given), mine), mine), model.quantize(x, theirs)
    )
    check_quantized(by_tensor(given, torch.tensor(3.3), mine), model.with_scale(x, theirs, 3.3))


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(list(BLOCKS)), st.integers(0, 100))
def test_blocks_of_any_shape(rows: int, columns: int, blocks: str, seed: int) -> None:
    by, block = BLOCKS[blocks]
    x = draw_numbers((rows, columns), seed)
    found = by(torch.from_numpy(x), E4M3)
    check_quantized(found, model.quantize(x, model.E4M3, block, power_of_two=True))
    # Half a step of a normal number: no block's largest magnitude is lost.
    error = np.abs(found.dequantized(torch.float32).numpy() - x)
    largest = model.spread(found.inverse.numpy() * E4M3.max, block, x.shape)
    assert (error <= np.maximum(2.0**-4 * np.abs(x), largest / E4M3.max * E4M3.least / 2)).all()
