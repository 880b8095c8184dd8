"""Draws a whole run for its record: the loss with its incidents, as far as it was kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.report.figures import save

BINS = 3000  # of the width: of more steps the mean, lowest and highest of each are drawn
ACCEPTED, FAINT, MARK, VALID = "#1f6fb2", "#b9d3ea", "#d1495b", "#1f2933"

Columns = Mapping[str, npt.NDArray[Any]]


def loss_picture(
    steps: Columns, incidents: Sequence[tuple[int, int]], evaluations: Sequence[tuple[int, float]], path: Path
) -> bool:
    """Write the picture, unless there is nothing to draw. steps: columns step, loss, applied and lr, in order, of those
    that were not undone. incidents: number and step of their onset; evaluations: step and loss. Raises DataError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = steps["applied"].astype(bool) & np.isfinite(steps["loss"])
    if not good.any():
        return False
    figure, (axis, rate) = pyplot.subplots(
        2, 1, sharex=True, figsize=(12, 6), layout="constrained", height_ratios=[4, 1]
    )
    x, mean, low, high = binned(steps["step"][good], steps["loss"][good])
    axis.fill_between(x, low, high, color=FAINT, linewidth=0)
    axis.plot(x, mean, color=ACCEPTED, linewidth=1.2, label="training, accepted steps")
    if evaluations:
        axis.plot(*zip(*evaluations), "o--", color=VALID, markersize=4, linewidth=0.9, label="validation")
    # The first steps of a run are far above all others.
    bottom, top = float(np.min(low)), float(np.quantile(high, 0.98))
    axis.set_ylim(bottom - 0.06 * (top - bottom) - 1e-6, top + 0.3 * (top - bottom) + 1e-6)
    for number, step in incidents:
        axis.axvline(step, color=MARK, linewidth=0.8, alpha=0.7)
        place = {"xycoords": axis.get_xaxis_transform(), "ha": "center", "va": "top", "fontsize": 8}
        axis.annotate(
            str(number), (step, 0.98), color="white", bbox={"boxstyle": "round", "color": MARK}, **place
        )
    axis.set_ylabel("loss (nats per token)")
    axis.legend(loc="upper right", frameon=False)
    rate.plot(*binned(steps["step"], steps["lr"])[:2], color=ACCEPTED, linewidth=1)
    rate.set_ylabel("learning rate")
    rate.set_xlabel("step")
    for one in (axis, rate):
        one.grid(color="#e6e9ed")
        one.spines[["top", "right"]].set_visible(False)
    save(figure, path)
    return True


def binned(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], ...]:
    """x, and the mean, lowest and highest y, of at most `BINS` bins of equal numbers of steps: [bins] each."""
    edges = np.unique(np.linspace(0, len(x), min(BINS, len(x)) + 1).astype(int))
    first, counts = edges[:-1], np.diff(edges)
    y = np.asarray(y, np.float64)
    return (
        np.add.reduceat(x, first) / counts, np.add.reduceat(y, first) / counts, np.minimum.reduceat(y, first),
        np.maximum.reduceat(y, first),
    )  # fmt: skip
