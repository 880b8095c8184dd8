"""Shows a learning-rate study: a table, its numbers as a tree, and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from megastable.base.text import plural
from megastable.report.figures import save
from megastable.study.lr_sensitivity import LrCurve, Trend, optimum, trends, usable
from megastable.study.lr_study import LrGrid


def table(curves: Sequence[LrCurve], margin: float) -> Table:
    """A row per curve."""
    shown = Table(
        "intervention", "width", "params", "best loss", "best rate", "LR sensitivity", "usable rates", "span",
        "highest by seed", "diverged",
        caption=f"usable: within {margin:g} nat of the best loss. LR sensitivity: mean loss over the rates, at most "
        "that at initialization, less the best. > and <: beyond the rates tried",
    )  # fmt: skip
    for curve in curves:
        losses = curve.mean
        at, rates = optimum(losses), usable(losses, margin)
        beyond = (rates.open_below, rates.open_above)
        shown.add_row(
            curve.intervention, str(curve.width), f"{curve.parameters / 1e6:.2f}M", f"{min(losses.values()):.3f}",
            ("" if at.inside else ">" if at.rate == max(losses) else "<") + f"{at.rate:.2g}",
            _spread(curve.sensitivities),
            f"{'<' if beyond[0] else ''}{rates.lowest:.2g} to {'>' if beyond[1] else ''}{rates.highest:.2g}",
            f"{'>' if any(beyond) else ''}{rates.factor:.0f}x",
            ", ".join(f"{rate:.2g}" for rate in curve.highest(margin)),
            ", ".join(f"{rate:g}" for rate in curve.diverged) or "-",
        )  # fmt: skip
    return shown


def _spread(values: Sequence[float]) -> str:
    middle = f"{fmean(values):.3f}"
    return middle if len(values) == 1 else f"{middle} ± {(max(values) - min(values)) / 2:.3f}"


def in_words(found: Sequence[Trend]) -> list[str]:
    """A sentence per intervention on what changes with the width."""
    told = []
    for trend in found:
        if math.isnan(trend.sensitivity):
            continue
        rate = (
            "the best rates lie at the ends of the grid: no trend"
            if math.isnan(trend.best_rate)
            else f"the best rate goes with width^{trend.best_rate:+.2f}, by {plural(trend.inside, 'width')}"
        )
        told.append(
            f"{trend.intervention}: LR sensitivity {trend.sensitivity:+.3f} nat per doubling of the width; {rate}"
        )
    return told


def tree(grid: LrGrid, curves: Sequence[LrCurve], about: dict[str, Any]) -> dict[str, Any]:
    """Everything as JSON. Losses in nats per token; `losses` are the mean over the whole seeds, capped."""
    rows = []
    for curve in curves:
        losses, rates = curve.mean, usable(curve.mean, grid.margin)
        rows.append({
            "intervention": curve.intervention, "width": curve.width, "parameters": curve.parameters,
            "losses": [{"rate": rate, "loss": loss} for rate, loss in losses.items()],
            "best_loss": min(losses.values()), "best_rate": asdict(optimum(losses)),
            "lr_sensitivity": curve.sensitivities, "usable": asdict(rates) | {"factor": rates.factor},
            "highest_by_seed": dict(zip(map(str, curve.results), curve.highest(grid.margin), strict=True)),
            "trials": [
                {
                    "rate": rate, "seed": seed, "final": result.final, "first": result.first,
                    "validation": result.validation, "diverged": result.diverged, "seconds": result.seconds,
                }
                for seed, runs in curve.results.items() for rate, result in runs.items()
            ],
        })  # fmt: skip
    return about | {
        "margin": grid.margin, "rates": grid.rates, "widths": grid.widths, "steps": grid.config.train.steps,
        "interventions": {name: list(overrides) for name, overrides in grid.interventions.items()},
        "curves": rows, "trends": [asdict(trend) for trend in trends(curves)],
    }  # fmt: skip


def picture(grid: LrGrid, curves: Sequence[LrCurve], title: str, path: Path) -> None:
    """Loss against rate, a panel per intervention and a curve per width; on the right LR sensitivity over widths.
    Raises DataError when it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, widths = list(grid.interventions), sorted(grid.widths)
    columns = len(names) + 1
    figure, axes = pyplot.subplots(1, columns, figsize=(3.6 * columns, 4.2), layout="constrained")
    colours = pyplot.get_cmap("viridis")([0.85 * i / max(1, len(widths) - 1) for i in range(len(widths))])
    for curve in curves:
        axis, colour = axes[names.index(curve.intervention)], colours[widths.index(curve.width)]
        losses = curve.mean
        axis.plot(
            list(losses),
            list(losses.values()),
            "o-",
            color=colour,
            markersize=4,
            label=f"width {curve.width}",
        )
        others = [
            (rate, loss) for seed in curve.results if seed not in curve.whole
            for rate, loss in curve.losses(seed).items()
        ]  # fmt: skip
        axis.plot(
            [r for r, _ in others], [loss for _, loss in others], "x", color=colour, markersize=5, alpha=0.7
        )
    first = fmean(
        result.first for curve in curves for runs in curve.results.values() for result in runs.values()
    )
    low = min(min(curve.mean.values()) for curve in curves)
    for name, axis in zip(names, axes, strict=False):
        axis.axhline(first, color="0.6", linestyle=":", linewidth=1)
        axis.set_xscale("log")
        axis.set_ylim(low - 0.05 * (first - low), first + 0.08 * (first - low))
        axis.set_title(name)
        axis.set_xlabel("learning rate")
    axes[0].set_ylabel("final training loss (nats per token)")
    axes[0].legend(
        fontsize="small", title="dotted: at initialization\nx: more seeds", title_fontsize="x-small"
    )
    for name in names:
        mine = [curve for curve in curves if curve.intervention == name]
        axes[-1].plot(
            [c.width for c in mine], [fmean(c.sensitivities) for c in mine], "o-", markersize=4, label=name
        )
    axes[-1].set_xscale("log", base=2)
    axes[-1].set_ylim(bottom=0)
    axes[-1].set_title("LR sensitivity")
    axes[-1].set_xlabel("width")
    axes[-1].set_ylabel("nats per token")
    axes[-1].legend(fontsize="small")
    figure.suptitle(title, parse_math=False)
    save(figure, path)
