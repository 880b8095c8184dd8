"""FP8 in numpy, from the papers: what megastable.fp8 must agree with bit by bit. No torch in it.

Formats: Micikevicius et al., arXiv:2209.05433, table 1, and the OCP 8-bit floating point specification (OFP8, 2023-12),
conversions in its saturating mode. E4M3 gives up the infinities: exponent 15 is ordinary but for mantissa 7, NaN.
E5M2 is what IEEE 754 would do with 5 bits of exponent and 2 of mantissa.

Rounding is a search among exact numbers: fp8 values, and the midpoints between neighbours, are exact in float64, and so
is every fp32. Everything that must round in fp32, as on the device, is an operation of np.float32.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np

FP32_MAX = np.finfo(np.float32).max


@dataclass(frozen=True)
class Model:
    """exponent, mantissa: bits. bias: of the exponent. finite: codes from 0 up that are non-negative numbers."""

    name: str
    exponent: int
    mantissa: int
    bias: int
    finite: int
    infinities: bool

    @cached_property
    def values(self) -> np.ndarray:
        """What each of the 256 codes stands for, float64."""
        return np.array([self.value(code) for code in range(256)])

    def value(self, code: int) -> float:
        sign = -1.0 if code & 0x80 else 1.0
        high, low = (code & 0x7F) >> self.mantissa, code & (2**self.mantissa - 1)
        if (code & 0x7F) >= self.finite:
            return sign * np.inf if self.infinities and low == 0 else np.nan
        if high == 0:
            return sign * low * 2.0 ** (1 - self.bias - self.mantissa)
        return sign * (1 + low / 2**self.mantissa) * 2.0 ** (high - self.bias)

    @property
    def numbers(self) -> np.ndarray:
        """The finite values >= 0, ascending; a number's index is its code."""
        return self.values[: self.finite]

    @property
    def max(self) -> float:
        return float(self.numbers[-1])

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @cached_property
    def midpoints(self) -> np.ndarray:
        """Between neighbours of `numbers`: midpoint i lies between the codes i and i + 1."""
        return (self.numbers[:-1] + self.numbers[1:]) / 2

    def encode(self, x: np.ndarray) -> np.ndarray:
        """uint8 codes of fp32 numbers: nearest, ties to the even code; beyond max, infinities too, max; NaN 0x7f."""
        assert x.dtype == np.float32
        with np.errstate(invalid="ignore"):  # signalling NaNs
            magnitude = np.abs(x.astype(np.float64))
        codes = np.searchsorted(self.midpoints, magnitude, side="left")  # as many midpoints lie below it
        tied = np.append(self.midpoints, np.nan)[codes] == magnitude
        codes += tied & (codes % 2 == 1)
        codes |= np.where(np.signbit(x), 0x80, 0)
        return np.where(np.isnan(x), 0x7F, codes).astype(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        return self.values[codes]

    def cast(self, x: np.ndarray, scale: np.ndarray | np.float32 | float = 1.0) -> np.ndarray:
        """Codes of x * scale, which fp32 rounds first; an overflow of fp32 is one of FP8 as well."""
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            return self.encode(x.astype(np.float32) * np.asarray(scale, np.float32))


E4M3 = Model("e4m3", exponent=4, mantissa=3, bias=7, finite=0x7F, infinities=False)
E5M2 = Model("e5m2", exponent=5, mantissa=2, bias=15, finite=0x7C, infinities=True)


def scale_of(
    amax: np.ndarray | np.float32, model: Model, margin: int = 0, *, power_of_two: bool = False
) -> np.ndarray:
    """The fp32 that takes amax (fp32) to max / 2^margin: 1 where amax is 0 or not finite, FP32_MAX for one too tiny.

    power_of_two: the largest power of two that is not above it.
    """
    amax = np.asarray(amax, np.float32)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = np.float32(model.max * 2.0**-margin) / amax
    scale = np.where(np.isinf(scale), FP32_MAX, scale)
    if power_of_two:
        scale = np.ldexp(np.float32(1), np.frexp(scale)[1] - 1)  # frexp's mantissas lie in [0.5, 1)
    usable = np.isfinite(amax) & (amax > 0)
    return np.where(usable, scale, np.float32(1)).astype(np.float32)


@dataclass(frozen=True)
class Quantized:
    """codes: uint8 of x's shape. scale: fp32, one per block, [down, across]. shape: rows and columns of a block."""

    model: Model
    codes: np.ndarray
    scale: np.ndarray
    shape: tuple[int, int]

    @property
    def inverse(self) -> np.ndarray:
        """fp32 of shape (blocks down, blocks across)."""
        return np.float32(1) / self.scale

    @property
    def values(self) -> np.ndarray:
        """What the codes stand for, without scales, float64."""
        return self.model.decode(self.codes)

    @property
    def dequantized(self) -> np.ndarray:
        """float64; the product with the fp32 inverse is exact."""
        return self.values * spread(self.inverse.astype(np.float64), self.shape, self.codes.shape)


def spread(of_blocks: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """One number per block -> one per element."""
    rows, columns = (np.arange(n) // b for n, b in zip(shape, block, strict=True))
    return of_blocks[np.ix_(rows, columns)]


def quantize(
    x: np.ndarray, model: Model, block: tuple[int, int] | None = None, *, power_of_two: bool = False
) -> Quantized:
    """x: fp32 of shape (rows, columns). block: rows and columns of one, None for all of x; ends may be smaller."""
    assert x.ndim == 2 and x.dtype == np.float32
    down, across = block = block or (max(x.shape[0], 1), max(x.shape[1], 1))
    amax = np.array(
        [
            [np.abs(x[i : i + down, j : j + across]).max() for j in range(0, x.shape[1], across)]
            for i in range(0, x.shape[0], down)
        ],
        np.float32,
    )
    scale = scale_of(amax, model, power_of_two=power_of_two)
    return Quantized(model, model.cast(x, spread(scale, block, x.shape)), scale, block)


def with_scale(x: np.ndarray, model: Model, scale: float) -> Quantized:
    """Delayed scaling: a scale that comes from elsewhere."""
    scales = np.full((1, 1), scale, np.float32)
    return Quantized(model, model.cast(x, scales), scales, (x.shape[0], x.shape[1]))


class Delayed:
    """The scale of one tensor under delayed scaling: from the largest of its last `length` magnitudes.

    Magnitudes that are 0 or not finite say nothing and do not enter. None before the first one that does.
    """

    def __init__(self, model: Model, length: int, margin: int = 0) -> None:
        self.model, self.margin = model, margin
        self.history: deque[np.float32] = deque(maxlen=length)
        self.scale: np.float32 | None = None

    def update(self, amax: float) -> np.float32 | None:
        if np.isfinite(np.float32(amax)) and np.float32(amax) > 0:
            self.history.appendleft(np.float32(amax))
            self.scale = np.float32(scale_of(np.max(self.history), self.model, self.margin))
        return self.scale


# Rows of x are tokens, its columns inputs; w is (outputs, inputs); g is (tokens, outputs). A product sums over ...
ROW, COLUMN, TILE = (1, 128), (128, 1), (128, 128)  # ... columns, rows, either


@dataclass(frozen=True)
class Products:
    """y: (tokens, outputs), dx: (tokens, inputs), dw: (outputs, inputs), float64; and what each is a product of."""

    y: np.ndarray
    dx: np.ndarray
    dw: np.ndarray
    y_of: tuple[Quantized, Quantized]
    dx_of: tuple[Quantized, Quantized]
    dw_of: tuple[Quantized, Quantized]

    @property
    def sums(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the magnitudes of every sum's terms: what the error of an accumulation is relative to."""
        (x, w), (g, v), (h, z) = (
            [np.abs(q.dequantized) for q in pair] for pair in (self.y_of, self.dx_of, self.dw_of)
        )
        return x @ w.T, g @ v, h.T @ z


def products(x: Quantized, w: Quantized, g: Quantized, x_down: Quantized, g_down: Quantized) -> Products:
    """x_down, g_down: as dw takes them, quantized along tokens where that differs."""
    return Products(
        x.dequantized @ w.dequantized.T,
        g.dequantized @ w.dequantized,
        g_down.dequantized.T @ x_down.dequantized,
        (x, w),
        (g, w),
        (g_down, x_down),
    )


def current(x: np.ndarray, w: np.ndarray, g: np.ndarray, forward: Model, backward: Model) -> Products:
    of_x, of_w, of_g = quantize(x, forward), quantize(w, forward), quantize(g, backward)
    return products(of_x, of_w, of_g, of_x, of_g)


def delayed(
    x: np.ndarray,
    w: np.ndarray,
    g: np.ndarray,
    forward: Model,
    backward: Model,
    scales: tuple[float, float, float],
) -> Products:
    """scales: of x, w and g."""
    of_x, of_w = with_scale(x, forward, scales[0]), with_scale(w, forward, scales[1])
    of_g = with_scale(g, backward, scales[2])
    return products(of_x, of_w, of_g, of_x, of_g)


def block(x: np.ndarray, w: np.ndarray, g: np.ndarray, forward: Model, backward: Model) -> Products:
    """DeepSeek-V3, arXiv:2412.19437, section 3.3.2, with scales of powers of two."""
    of_w = quantize(w, forward, TILE, power_of_two=True)
    return products(
        quantize(x, forward, ROW, power_of_two=True),
        of_w,
        quantize(g, backward, ROW, power_of_two=True),
        quantize(x, forward, COLUMN, power_of_two=True),
        quantize(g, backward, COLUMN, power_of_two=True),
    )
