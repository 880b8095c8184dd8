"""Reduces series to what a plot can show: minimum, maximum and mean per pixel column. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Indices = npt.NDArray[np.intp]


class PixelColumns(NamedTuple):
    """Of each column, over its finite values; nan without one. float32 [columns] each."""

    mean: npt.NDArray[np.float32]
    low: npt.NDArray[np.float32]
    high: npt.NDArray[np.float32]


def columns_of(x: Floats, begin: float, end: float, columns: int) -> Indices:
    """Where each pixel column that is not empty begins in ascending `x`, which are [n]; `begin` to `end` is the width
    of the plot. What lies outside falls to the first and the last column. With at most `columns` values, each is a
    column of its own."""
    if len(x) <= columns:
        return np.arange(len(x))
    edges = begin + (end - begin) / columns * np.arange(1, columns)
    starts = np.unique(np.concatenate([[0], np.searchsorted(x, edges, side="left")]))
    return starts[starts < len(x)]


def reduced(values: npt.NDArray[Any], starts: Indices) -> PixelColumns:
    """The columns of `values` [n] that begin at `starts`."""
    values = values.astype(np.float32, copy=False)
    if len(starts) == len(values):
        bare = np.where(np.isfinite(values), values, np.float32(np.nan))
        return PixelColumns(bare, bare, bare)
    finite = np.isfinite(values)
    if finite.all():
        low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        counts = np.diff(np.append(starts, len(values)))
        total = np.add.reduceat(values, starts, dtype=np.float64)
    else:
        bare = np.where(finite, values, np.float32(np.nan))
        low, high = np.fmin.reduceat(bare, starts), np.fmax.reduceat(bare, starts)
        counts = np.add.reduceat(finite, starts, dtype=np.int64)
        total = np.add.reduceat(np.where(finite, values, np.float32(0)), starts, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return PixelColumns((total / counts).astype(np.float32), low, high)


def means(values: npt.NDArray[Any], starts: Indices) -> npt.NDArray[np.float64]:
    """Means of columns of finite values."""
    if len(starts) == len(values):
        return values.astype(np.float64)
    counts = np.diff(np.append(starts, len(values)))
    return np.add.reduceat(values, starts, dtype=np.float64) / counts


def trailing_share(values: npt.NDArray[np.bool_], starts: Indices, window: int, lead: int = 0) -> Floats:
    """The share of true values in each column, or in the `window` values up to its end if these are more. lead: number
    of `values` before the first column."""
    before = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    begins = starts + lead
    ends = np.append(begins[1:], len(values))
    begins = np.maximum(0, np.minimum(begins, ends - window))
    return ((before[ends] - before[begins]) / (ends - begins)).astype(np.float32)


def trend_band(
    values: Floats, starts: Indices, window: int, width: float = 4.0, lead: int = 0
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(lower, upper) edge, at the last value of every column: what a straight line through the `window` values up to it
    says there, and `width` times the robust standard deviation of these around it. nan before there are enough. lead:
    number of `values` before the first column."""
    ends = np.append(starts[1:] + lead, len(values)) - 1
    low = np.full(len(starts), np.nan, dtype=np.float32)
    high = low.copy()
    enough = np.flatnonzero(ends >= window - 1)
    if len(enough):
        rows = values[ends[enough, None] - np.arange(window)].astype(np.float64)  # the newest first
        at = np.arange(window) - (window - 1) / 2
        with np.errstate(invalid="ignore"):
            # Between the medians of both halves: one spike must not tilt it.
            half = window // 2
            slope = (np.median(rows[:, half:], axis=1) - np.median(rows[:, :half], axis=1)) / (window - half)
            apart = rows - slope[:, None] * at
            middle = np.median(apart, axis=1)
            spread = 1.4826 * np.median(np.abs(apart - middle[:, None]), axis=1)
        level = middle + slope * at[0]
        low[enough], high[enough] = level - width * spread, level + width * spread
    return low, high
