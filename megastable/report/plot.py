"""Plots a run's backtest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from megastable.report.figures import draw_figure
from megastable.report.scale import drawable
from megastable_guard.actions import Action
from megastable_guard.guard import BacktestDecision, Recorded
from megastable_guard.signals import Verdict

COLOURS = {
    Action.DISCARD: "tab:orange", Action.REWIND: "tab:red", Action.FALL_BACK: "tab:blue", Action.CAP_LR: "tab:purple",
    Action.CUT_LR: "tab:purple", Action.SWAP_CORPUS: "tab:brown", Action.HANDOVER: "black", Action.ALERT: "tab:pink",
    Action.STOP: "black", Action.ADJUST: "tab:purple", Action.WAIT: "tab:olive",
}  # fmt: skip


def backtest_plot(
    rows: Sequence[Recorded], judged: Sequence[BacktestDecision], title: str, path: Path
) -> None:
    """Loss and gradient norm over the steps; grey where a step stood out, a coloured line at each action.

    The file format follows from the name (.png, .svg, .pdf). Raises DataError when it cannot be written.
    """
    steps = [row.step for row in rows]
    with draw_figure(path, 14, 7) as figure:
        loss, norm = figure.subplots(2, 1, sharex=True)
        loss.plot(steps, [drawable(row.loss) for row in rows], linewidth=0.6)
        norm.plot(steps, [drawable(row.grad_norm, positive=True) for row in rows], linewidth=0.6)
        norm.set_yscale("log")
        ordinary = sorted(row.loss for row in rows if math.isfinite(drawable(row.loss)))
        if ordinary:
            # The start of a run is far above the rest: clipped, so that spikes are visible.
            low, high = ordinary[0], ordinary[int(0.99 * (len(ordinary) - 1))]
            loss.set_ylim(low - 0.1 * (high - low) - 1e-6, high + 0.4 * (high - low) + 1e-6)
        runs = groupby(judged, key=lambda step: step.verdict is Verdict.HEALTHY)
        marked = [list(steps) for healthy, steps in runs if not healthy]
        for axis in (loss, norm):
            for run in marked:
                label = "stands out" if run is marked[0] else None
                axis.axvspan(run[0].step - 0.5, run[-1].step + 0.5, color="0.85", zorder=0, label=label)
            for action, colour in COLOURS.items():
                if at := [step.step for step in judged if step.action is action]:
                    lines = {"transform": axis.get_xaxis_transform(), "linewidth": 1, "alpha": 0.8}
                    axis.vlines(at, 0, 1, colors=colour, label=action.value, **lines)
        if marked:
            loss.legend(loc="upper right")
        loss.set_ylabel("loss (nats per token)")
        norm.set_ylabel("gradient norm")
        norm.set_xlabel("step")
        figure.suptitle(title, parse_math=False)
