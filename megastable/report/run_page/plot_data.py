"""Makes what the page's plots draw: the columns of a step table, reduced to pixel columns. Pure.

A step is accepted, refused (its update never reached the weights) or undone (by a rewind or a restart, whatever became
of its update). Only accepted ones make lines; the others are drawn apart, where somebody would look for them.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.report.run_page.step_table import SOMETIMES, GrowingColumns, StepTable

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
    column_edges = begin + (end - begin) / columns * np.arange(1, columns)
    column_starts = np.unique(np.concatenate([[0], np.searchsorted(x, column_edges, side="left")]))
    return column_starts[column_starts < len(x)]


def reduce_columns(values: npt.NDArray[Any], starts: Indices) -> PixelColumns:
    """The columns of `values` [n] that begin at `starts`."""
    values = values.astype(np.float32, copy=False)
    if len(starts) == len(values):
        bare = np.where(np.isfinite(values), values, np.float32(np.nan))
        return PixelColumns(bare, bare, bare)
    is_finite = np.isfinite(values)
    if is_finite.all():
        lowest_values, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        column_counts = np.diff(np.append(starts, len(values)))
        column_sums = np.add.reduceat(values, starts, dtype=np.float64)
    else:
        bare = np.where(is_finite, values, np.float32(np.nan))
        lowest_values, high = np.fmin.reduceat(bare, starts), np.fmax.reduceat(bare, starts)
        column_counts = np.add.reduceat(is_finite, starts, dtype=np.int64)
        column_sums = np.add.reduceat(np.where(is_finite, values, np.float32(0)), starts, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return PixelColumns((column_sums / column_counts).astype(np.float32), lowest_values, high)


def average_columns(values: npt.NDArray[Any], starts: Indices) -> npt.NDArray[np.float64]:
    """Means of columns of finite values."""
    if len(starts) == len(values):
        return values.astype(np.float64)
    column_counts = np.diff(np.append(starts, len(values)))
    return np.add.reduceat(values, starts, dtype=np.float64) / column_counts


def trailing_share(values: npt.NDArray[np.bool_], starts: Indices, window: int, lead: int = 0) -> Floats:
    """The share of true values in each column, or in the `window` values up to its end if these are more. lead: number
    of `values` before the first column."""
    counts_before = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    begins = starts + lead
    column_ends = np.append(begins[1:], len(values))
    begins = np.maximum(0, np.minimum(begins, column_ends - window))
    return ((counts_before[column_ends] - counts_before[begins]) / (column_ends - begins)).astype(np.float32)


def trend_band(
    values: Floats, starts: Indices, window: int, width: float = 4.0, lead: int = 0
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(lower, upper) edge, at the last value of every column: what a straight line through the `window` values up to it
    says there, and `width` times the robust standard deviation of these around it. nan before there are enough. lead:
    number of `values` before the first column."""
    column_ends = np.append(starts[1:] + lead, len(values)) - 1
    band_low = np.full(len(starts), np.nan, dtype=np.float32)
    band_high = band_low.copy()
    enough = np.flatnonzero(column_ends >= window - 1)
    if len(enough):
        rows = values[column_ends[enough, None] - np.arange(window)].astype(np.float64)  # the newest first
        at = np.arange(window) - (window - 1) / 2
        with np.errstate(invalid="ignore"):
            # Between the medians of both halves: one spike must not tilt it.
            half = window // 2
            half_change = np.median(rows[:, half:], axis=1) - np.median(rows[:, :half], axis=1)
            row_slopes = half_change / (window - half)
            detrended_rows = rows - row_slopes[:, None] * at
            row_medians = np.median(detrended_rows, axis=1)
            row_spreads = 1.4826 * np.median(np.abs(detrended_rows - row_medians[:, None]), axis=1)
        trend_level = row_medians + row_slopes * at[0]
        band_low[enough] = trend_level - width * row_spreads
        band_high[enough] = trend_level + width * row_spreads
    return band_low, band_high


AXES = ("step", "tokens", "time")
LINES = (
    "loss", "grad_norm", "lr", "tokens_per_second", "mfu_full", "seconds", "data_seconds", "memory",
    "worst_loss", "token_entropy", "loss_scale", "noise_scale", "expert_violation", "expert_idle", "expert_dropped",
    "router_entropy", "router_z",
)  # fmt: skip
APART = ("loss", "grad_norm")  # drawn of refused and undone steps, too
TREND = 64  # accepted steps, of which the trend is made
CLIPPED = 50  # accepted steps, of which the share of clipped ones is told


class AxisOfSteps:
    """The three axes of the rows of a table. length: tokens of a sample; began: unix seconds, where time is 0."""

    def __init__(self, table: StepTable, length: int, began: float) -> None:
        self.table, self.length, self.began = table, length, began

    def read_values(self, axis: str, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        """Of some rows: steps done, tokens of the data order passed, or seconds since the run began."""
        step_columns = self.table.steps
        if axis == "time":
            return np.asarray(step_columns["time"][rows] - self.began)
        if axis == "tokens":
            return step_columns["next_position"][rows].astype(np.float64) * self.length
        return step_columns["step"][rows].astype(np.float64)

    def list_live(self) -> npt.NDArray[np.intp]:
        """The rows that were not undone; their steps ascend."""
        return np.flatnonzero(~self.table.steps["undone"])


def plot_data(
    table: StepTable,
    length: int,
    began: float,
    axis: str = "step",
    begin: float | None = None,
    end: float | None = None,
    columns: int = 1000,
) -> dict[str, Any]:
    """What is between `begin` and `end` of an axis (None = all), in at most about `columns` columns.

    accepted, refused, undone and sometimes (measured at some steps only) hold `x`, an array for each axis, and their
    series: arrays of means, or {mean, low, high} where a column has several steps."""
    axes, steps = AxisOfSteps(table, length, began), table.steps
    was_undone, was_applied = steps["undone"], steps["applied"]
    first_values, last_values = _ends(axes)
    lowest_value, highest_value = first_values[axis], last_values[axis]
    window = (lowest_value if begin is None else begin, highest_value if end is None else end)
    if not window[0] < window[1]:
        window = (window[0], window[0] + 1)

    accepted_lines = _lines(axes, axis, np.flatnonzero(was_applied & ~was_undone), window, columns)
    plot_series: dict[str, Any] = {"rows": len(steps), "ends": last_values, "accepted": accepted_lines}
    row_groups = {"refused": np.flatnonzero(~was_applied), "undone": np.flatnonzero(was_applied & was_undone)}
    for group_name, rows in row_groups.items():
        rows, inside_window = _inside(axes, axis, rows, window)
        rows = rows[inside_window]
        column_starts = columns_of(axes.read_values(axis, rows), *window, columns)
        apart_group = _group(axes, rows, column_starts, {name: _column(steps, name, rows) for name in APART})
        plot_series[group_name] = {"count": len(rows), **apart_group}
    looks = table.looks["row"]
    kept = np.flatnonzero(~was_undone[looks]) if len(looks) else np.empty(0, np.intp)
    rows, inside_window = _inside(axes, axis, looks[kept], window)
    kept = np.searchsorted(looks, rows[inside_window])
    column_starts = columns_of(axes.read_values(axis, looks[kept]), *window, columns)
    look_columns = {group_name: _column(table.looks, group_name, kept) for group_name in SOMETIMES}
    plot_series["sometimes"] = _group(axes, looks[kept], column_starts, look_columns)
    return plot_series


def _ends(axes: AxisOfSteps) -> tuple[dict[str, float], dict[str, float]]:
    """The lowest and the highest value of every axis."""
    step_columns = axes.table.steps
    if not len(step_columns):
        return dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 1.0)
    lowest_values, highest_values = dict[str, float](), dict[str, float]()
    for axis, column_name in zip(AXES, ("step", "next_position", "time"), strict=True):
        # Not the first and the last row: there are ways back, and a clock may be set back.
        end_rows = np.array([step_columns[column_name].argmin(), step_columns[column_name].argmax()], np.intp)
        lowest_values[axis], highest_values[axis] = axes.read_values(axis, end_rows).tolist()
    return lowest_values, highest_values


def _lines(
    axes: AxisOfSteps, axis: str, rows: npt.NDArray[np.intp], window: tuple[float, float], columns: int
) -> dict[str, Any]:
    steps, (rows, inside) = axes.table.steps, _inside(axes, axis, rows, window)
    # What is told of the last steps begins before the window.
    lead = min(inside.start, TREND)
    longer_rows, rows = rows[inside.start - lead : inside.stop], rows[inside]
    starts = columns_of(axes.read_values(axis, rows), *window, columns)
    line_group = _group(axes, rows, starts, {name: _column(steps, name, rows) for name in LINES})
    if len(starts):
        clipped_share = trailing_share(steps["clipped"][longer_rows], starts, CLIPPED, lead)
        if steps["next_position"].any():  # a guarded run records no positions, and not whether it clips
            line_group["series"]["clipped"] = encode_array(clipped_share)
        band_low, band_high = trend_band(steps["loss"][longer_rows], starts, TREND, lead=lead)
        line_group["trend"] = {"low": encode_array(band_low), "high": encode_array(band_high)}
    return line_group


def _column(columns: GrowingColumns, name: str, rows: npt.NDArray[np.intp]) -> Callable[[], npt.NDArray[Any]]:
    """Some rows of a column, taken when they are needed: of a long run one is 4 MB."""
    return lambda: columns[name][rows]


def _group(
    axes: AxisOfSteps,
    rows: npt.NDArray[np.intp],
    starts: npt.NDArray[np.intp],
    series: Mapping[str, Callable[[], npt.NDArray[Any]]],
) -> dict[str, Any]:
    """The columns of some rows, without series that were never measured."""
    found: dict[str, Any] = {"x": {}, "series": {}}
    for axis in AXES:
        x = axes.read_values(axis, rows)
        found["x"][axis] = encode_array(average_columns(x, starts)) if len(rows) else ""
    for sery_name, get_column in series.items():
        column_values = get_column()
        if not len(column_values) or np.isnan(column_values).all():
            continue
        columns = reduce_columns(column_values, starts)
        encoded = {key: encode_array(column) for key, column in columns._asdict().items()}
        found["series"][sery_name] = encoded["mean"] if len(starts) == len(column_values) else encoded
    return found


def _inside(
    axes: AxisOfSteps, axis: str, rows: npt.NDArray[np.intp], window: tuple[float, float]
) -> tuple[npt.NDArray[np.intp], slice]:
    """The rows, ascending by the axis, and which of them are in a window."""
    x = axes.read_values(axis, rows)
    if np.any(x[1:] < x[:-1]):  # a clock was set back, or steps were undone twice
        row_order = np.argsort(x, kind="stable")
        rows, x = rows[row_order], x[row_order]
    first_index, last_index = np.searchsorted(x, window[0], "left"), np.searchsorted(x, window[1], "right")
    # And a neighbour on each side: lines go on to the edge.
    return rows, slice(max(0, int(first_index) - 1), min(len(x), int(last_index) + 1))


def encode_array(values: npt.NDArray[Any]) -> str:
    """An array for the page: little-endian, in base64."""
    return base64.b64encode(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()).decode()
