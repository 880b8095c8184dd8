"""Rounding to FP8 against the numpy model, bit by bit, and the properties that it must have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.fp8.formats import E4M3, E5M2, FP8Format, cast, decode
from tests.fp8 import model
from tests.fp8.model import Model

PAIRS = pytest.mark.parametrize(
    ("mine", "theirs"), [(E4M3, model.E4M3), (E5M2, model.E5M2)], ids=["e4m3", "e5m2"]
)
MODELS = {E4M3: model.E4M3, E5M2: model.E5M2}


def codes(x: np.ndarray | torch.Tensor, to: FP8Format, scale: float = 1.0) -> np.ndarray:
    """What the emulation makes of x: uint8."""
    given = torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x
    return cast(given, torch.tensor(scale), to).view(torch.uint8).numpy()


def agree(found: np.ndarray, expected: np.ndarray, of: Model) -> None:
    """Equal codes; NaNs have several."""
    nan = np.isnan(of.values)
    differ = (found != expected) & ~(nan[found] & nan[expected])
    assert not differ.any(), f"{differ.sum()} differ, the first at {np.flatnonzero(differ)[0]}"


def beside(x: np.ndarray) -> np.ndarray:
    """x and its two neighbours in fp32, of either sign."""
    x = x.astype(np.float32)
    up, down = np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))
    near = np.concatenate([x, up, down])
    return np.concatenate([near, -near])


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


@pytest.mark.parametrize("of", [model.E4M3, model.E5M2], ids=["e4m3", "e5m2"])
def test_the_models_rounding_is_nearest_and_even(of: Model) -> None:
    assert (np.diff(of.numbers) > 0).all()
    assert of.encode(of.numbers.astype(np.float32)).tolist() == list(range(of.finite))
    tied = of.encode(of.midpoints.astype(np.float32))
    assert (of.midpoints.astype(np.float32) == of.midpoints).all()
    assert (tied % 2 == 0).all() and (np.abs(tied - np.arange(of.finite - 1)) <= 1).all()
    # By brute force, all distances in float64.
    x = (np.random.default_rng(0).standard_normal(2000) * of.max / 8).astype(np.float32)
    distances = np.abs(np.abs(x.astype(np.float64))[:, None] - of.numbers)
    assert (np.abs(of.decode(of.encode(x))) == of.numbers[distances.argmin(1)]).all()


def test_the_model_agrees_with_ieee_where_e5m2_is_a_shorter_fp16() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    exact = halves[np.isfinite(halves) & (halves.view(np.uint16) & 0xFF == 0)]
    found = model.E5M2.encode(exact.astype(np.float32))
    assert (found == exact.view(np.uint16) >> 8).all()


# The emulation against the model.


@PAIRS
def test_what_a_format_says_of_itself(mine: FP8Format, theirs: Model) -> None:
    assert (mine.max, mine.mantissa, mine.bias) == (theirs.max, theirs.mantissa, theirs.bias)
    assert (mine.normal, mine.least) == (theirs.smallest_normal, theirs.numbers[1])
    assert torch.finfo(mine.dtype).max == mine.max


@PAIRS
def test_a_million_random_patterns_of_fp32(mine: FP8Format, theirs: Model) -> None:
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
def test_numbers_midpoints_and_their_neighbours(mine: FP8Format, theirs: Model) -> None:
    bounds = [
        theirs.smallest_normal,
        theirs.numbers[1] / 2,
        theirs.numbers[1] / 4,
        464,
        480,
        512,
        61440,
        65536,
    ]
    x = beside(np.concatenate([theirs.numbers, theirs.midpoints, bounds]))
    agree(codes(x, mine), theirs.encode(x), theirs)


@PAIRS
def test_specials(mine: FP8Format, theirs: Model) -> None:
    tiny = np.finfo(np.float32).smallest_subnormal
    x = np.array([0.0, -0.0, tiny, -tiny, np.inf, -np.inf, model.FP32_MAX, -model.FP32_MAX], np.float32)
    found = codes(x, mine)
    agree(found, theirs.encode(x), theirs)
    assert found.tolist() == [0, 0x80, 0, 0x80] + [theirs.finite - 1, theirs.finite - 1 + 0x80] * 2
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(theirs.values[codes(nans, mine)]).all()


@PAIRS
def test_all_codes_come_back(mine: FP8Format, theirs: Model) -> None:
    numbers = ~(np.isnan(theirs.values) | np.isinf(theirs.values))
    every = np.arange(256, dtype=np.uint8)
    found = codes(theirs.values.astype(np.float32), mine)
    assert (found[numbers] == every[numbers]).all()
    assert np.isnan(theirs.values[found[np.isnan(theirs.values)]]).all()


@PAIRS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_codes_stand_for_the_models_numbers(mine: FP8Format, theirs: Model, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    found = decode(every.view(mine.dtype), mine, dtype).double().numpy()
    numbers = np.isfinite(theirs.values)
    assert (found[numbers] == theirs.values[numbers]).all()
    assert (np.signbit(found[numbers]) == np.signbit(theirs.values[numbers])).all()
    assert not np.isfinite(found[~numbers]).any()
    # Only numbers, which may take another way; in a shape of more dimensions, not contiguous; nothing at all.
    kept = every[torch.from_numpy(numbers)][:240].reshape(2, 10, 12).transpose(0, 2)
    found = decode(kept.view(mine.dtype), mine, dtype).double().numpy()
    assert (found == theirs.values[kept.numpy()]).all()
    assert decode(every[:0].view(mine.dtype), mine, dtype).numel() == 0


@PAIRS
def test_reading_codes_leaves_them_as_they_are(mine: FP8Format, theirs: Model) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        decode(every.view(mine.dtype), mine, dtype)
    assert (every == torch.arange(256, dtype=torch.uint8)).all()


@PAIRS
@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 3.3e-5, 1.7, 977.3, 2.0**127, float(model.FP32_MAX)])
def test_all_numbers_of_bf16_and_scales(mine: FP8Format, theirs: Model, scale: float) -> None:
    bits = np.arange(2**16, dtype=np.uint32) << 16
    x = bits.view(np.float32)
    given = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)
    expected = theirs.cast(x, np.float32(scale))
    agree(codes(given, mine, scale), expected, theirs)
    agree(codes(x, mine, scale), expected, theirs)


@PAIRS
def test_a_scale_rounds_in_fp32_first(mine: FP8Format, theirs: Model) -> None:
    random = np.random.default_rng(2)
    x = random.standard_normal((64, 1000)).astype(np.float32)
    scale = np.exp(random.uniform(-4, np.log(2 * mine.max), (64, 1))).astype(np.float32)
    found = cast(torch.from_numpy(x), torch.from_numpy(scale), mine)
    agree(found.view(torch.uint8).numpy(), theirs.cast(x, scale), theirs)
    # Where fp32 rounds up to a midpoint, whose even neighbour is above; in float64 the product lies below it.
    odd = 2**theirs.mantissa + 1
    scales = np.arange(3, 400, dtype=np.float32)
    x = np.float32(odd + 0.5) / scales
    x, scales = (
        a[(x * scales == odd + 0.5) & (x.astype(np.float64) * scales < odd + 0.5)] for a in (x, scales)
    )
    assert len(x) > 10
    found = cast(torch.from_numpy(x), torch.from_numpy(scales), mine)
    assert (found.float() == odd + 1).all()


@PAIRS
def test_the_tensor_given_is_left_as_it_is(mine: FP8Format, theirs: Model) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor([1e5, -1e5, 0.3, 1e-9], dtype=dtype)
        before = x.clone()
        cast(x, torch.tensor(3.0), mine)
        assert torch.equal(x, before)


# Properties.

FORMATS = st.sampled_from([E4M3, E5M2])
NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False),
    st.floats(-600, 600, width=32),
    st.floats(-(2.0**-5), 2.0**-5, width=32),
)


@given(FORMATS, st.lists(NUMBERS, min_size=1, max_size=50), st.floats(2.0**-100, 2.0**100, width=32))
def test_any_numbers_and_scale_as_the_model_says(
    to: FP8Format, given_numbers: list[float], scale: float
) -> None:
    x = np.array(given_numbers, np.float32)
    agree(codes(x, to, scale), MODELS[to].cast(x, scale), MODELS[to])
