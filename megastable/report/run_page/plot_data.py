"""Makes what the page's plots draw: the columns of a step table, reduced to pixel columns. Pure.

A step is accepted, refused (its update never reached the weights) or undone (by a rewind or a restart, whatever became
of its update). Only accepted ones make lines; the others are drawn apart, where somebody would look for them.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.report.run_page.pixel_columns import columns_of, means, reduced, trailing_share, trend_band
from megastable.report.run_page.step_table import SOMETIMES, GrowingColumns, StepTable

AXES = ("step", "tokens", "time")
LINES = (
    "loss", "grad_norm", "lr", "tokens_per_second", "mfu_full", "seconds", "data_seconds", "memory",
    "worst_loss", "token_entropy", "loss_scale", "noise_scale",
)  # fmt: skip
APART = ("loss", "grad_norm")  # drawn of refused and undone steps, too
TREND = 64  # accepted steps, of which the trend is made
CLIPPED = 50  # accepted steps, of which the share of clipped ones is told


class AxisOfSteps:
    """The three axes of the rows of a table. length: tokens of a sample; began: unix seconds, where time is 0."""

    def __init__(self, table: StepTable, length: int, began: float) -> None:
        self.table, self.length, self.began = table, length, began

    def values(self, axis: str, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        """Of some rows: steps done, tokens of the data order passed, or seconds since the run began."""
        steps = self.table.steps
        if axis == "time":
            return np.asarray(steps["time"][rows] - self.began)
        if axis == "tokens":
            return steps["next_position"][rows].astype(np.float64) * self.length
        return steps["step"][rows].astype(np.float64)

    def live(self) -> npt.NDArray[np.intp]:
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
    undone, applied = steps["undone"], steps["applied"]
    first, last = _ends(axes)
    lowest, highest = first[axis], last[axis]
    window = (lowest if begin is None else begin, highest if end is None else end)
    if not window[0] < window[1]:
        window = (window[0], window[0] + 1)

    accepted = _lines(axes, axis, np.flatnonzero(applied & ~undone), window, columns)
    found: dict[str, Any] = {"rows": len(steps), "ends": last, "accepted": accepted}
    groups = {"refused": np.flatnonzero(~applied), "undone": np.flatnonzero(applied & undone)}
    for name, rows in groups.items():
        rows, inside = _inside(axes, axis, rows, window)
        rows = rows[inside]
        starts = columns_of(axes.values(axis, rows), *window, columns)
        found[name] = {
            "count": len(rows),
            **_group(axes, rows, starts, {n: _column(steps, n, rows) for n in APART}),
        }
    looks = table.looks["row"]
    kept = np.flatnonzero(~undone[looks]) if len(looks) else np.empty(0, np.intp)
    rows, inside = _inside(axes, axis, looks[kept], window)
    kept = np.searchsorted(looks, rows[inside])
    starts = columns_of(axes.values(axis, looks[kept]), *window, columns)
    some = {name: _column(table.looks, name, kept) for name in SOMETIMES}
    found["sometimes"] = _group(axes, looks[kept], starts, some)
    return found


def _ends(axes: AxisOfSteps) -> tuple[dict[str, float], dict[str, float]]:
    """The lowest and the highest value of every axis."""
    steps = axes.table.steps
    if not len(steps):
        return dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 1.0)
    first, last = dict[str, float](), dict[str, float]()
    for axis, name in zip(AXES, ("step", "next_position", "time"), strict=True):
        # Not the first and the last row: there are ways back, and a clock may be set back.
        rows = np.array([steps[name].argmin(), steps[name].argmax()], np.intp)
        first[axis], last[axis] = axes.values(axis, rows).tolist()
    return first, last


def _lines(
    axes: AxisOfSteps, axis: str, rows: npt.NDArray[np.intp], window: tuple[float, float], columns: int
) -> dict[str, Any]:
    steps, (rows, inside) = axes.table.steps, _inside(axes, axis, rows, window)
    # What is told of the last steps begins before the window.
    lead = min(inside.start, TREND)
    longer, rows = rows[inside.start - lead : inside.stop], rows[inside]
    starts = columns_of(axes.values(axis, rows), *window, columns)
    found = _group(axes, rows, starts, {name: _column(steps, name, rows) for name in LINES})
    if len(starts):
        found["series"]["clipped"] = encoded(trailing_share(steps["clipped"][longer], starts, CLIPPED, lead))
        low, high = trend_band(steps["loss"][longer], starts, TREND, lead=lead)
        found["trend"] = {"low": encoded(low), "high": encoded(high)}
    return found


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
        found["x"][axis] = encoded(means(axes.values(axis, rows), starts)) if len(rows) else ""
    for name, get in series.items():
        values = get()
        if not len(values) or np.isnan(values).all():
            continue
        columns = reduced(values, starts)
        if len(starts) == len(values):
            found["series"][name] = encoded(columns.mean)
        else:
            found["series"][name] = {key: encoded(value) for key, value in columns._asdict().items()}
    return found


def _inside(
    axes: AxisOfSteps, axis: str, rows: npt.NDArray[np.intp], window: tuple[float, float]
) -> tuple[npt.NDArray[np.intp], slice]:
    """The rows, ascending by the axis, and which of them are in a window."""
    x = axes.values(axis, rows)
    if np.any(x[1:] < x[:-1]):  # a clock was set back, or steps were undone twice
        order = np.argsort(x, kind="stable")
        rows, x = rows[order], x[order]
    return rows, _slice(x, window)


def _slice(x: npt.NDArray[np.float64], window: tuple[float, float]) -> slice:
    """What of ascending `x` is in a window, and a neighbour on each side: lines go on to the edge."""
    first, last = np.searchsorted(x, window[0], "left"), np.searchsorted(x, window[1], "right")
    return slice(max(0, int(first) - 1), min(len(x), int(last) + 1))


def encoded(values: npt.NDArray[Any]) -> str:
    """An array for the page: little-endian float64 or float32, in base64."""
    return base64.b64encode(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()).decode()
