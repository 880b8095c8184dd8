"""Shows a comparison of candidates: a table, its numbers as a tree, and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from megastable.report.figures import save
from megastable.report.scale import drawable
from megastable.study.compare_study import Compared, CompareGrid
from megastable.study.paired import SHARE, Interval


def label(candidate: str) -> str:
    return candidate or "the recipe"


def table(found: Sequence[Compared]) -> Table:
    """A row per candidate."""
    shown = Table(
        "candidate", "final loss", "validation", "less the first", "validation, less the first", "diverged", "s a step",
        caption=f"nats per token; ±: {SHARE:.0%} confidence interval of the mean over {len(found[0].results)} seeds; "
        "differences are paired by seed",
    )  # fmt: skip
    for index, one in enumerate(found):
        steps = sum(len(result.losses) for result in one.results)
        shown.add_row(
            label(one.candidate), _said(one.training), _said(one.validation),
            *(("", "") if not index else (_said(one.training_difference, "+"), _said(one.validation_difference, "+"))),
            str(one.diverged or "-"), f"{sum(result.seconds for result in one.results) / steps:.3f}",
        )  # fmt: skip
    return shown


def _said(one: Interval, sign: str = "") -> str:
    if math.isnan(one.mean):
        return "-"
    return f"{one.mean:{sign}.3f}" + ("" if math.isinf(one.half) else f" ± {one.half:.3f}")


def in_words(found: Sequence[Compared]) -> list[str]:
    """A sentence for each candidate but the first: whether the seeds show a difference."""
    told = []
    for one in found[1:]:
        by = one.training_difference
        if math.isinf(by.half):
            shown = "one seed shows nothing: give more --seeds"
        elif not by.excludes_zero:
            shown = "no difference is shown"
        else:
            shown = "worse" if by.mean > 0 else "better"
        interval = "" if math.isinf(by.half) else f" ({SHARE:.0%}: {by.low:+.3f} to {by.high:+.3f})"
        told.append(f"{label(one.candidate)}: {by.mean:+.3f} nat{interval}: {shown}")
    return told


def tree(grid: CompareGrid, found: Sequence[Compared], about: dict[str, Any]) -> dict[str, Any]:
    """Everything as JSON; the losses of every step, too."""
    return about | {
        "confidence": SHARE, "seeds": grid.seeds, "candidates": [
            {
                "overrides": one.candidate, "diverged": one.diverged,
                **{
                    name: asdict(getattr(one, name))
                    for name in ("training", "validation", "training_difference", "validation_difference")
                },
                "trials": [
                    {"seed": seed, "final": result.final, **asdict(result)}
                    for seed, result in zip(grid.seeds, one.results, strict=True)
                ],
            }
            for one in found
        ],
    }  # fmt: skip


def picture(grid: CompareGrid, found: Sequence[Compared], title: str, path: Path) -> None:
    """Left the loss over the steps, the mean of the seeds between lowest and highest; right the differences to the
    first candidate, every seed and the interval of their mean. Raises DataError when it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for index, one in enumerate(found):
        colour, steps = f"C{index % 10}", range(1, 1 + len(one.results[0].losses))
        by_step = [
            list(map(drawable, losses)) for losses in zip(*(r.losses for r in one.results), strict=True)
        ]
        left.plot(
            steps,
            [fmean(losses) for losses in by_step],
            color=colour,
            linewidth=1,
            label=label(one.candidate),
        )
        left.fill_between(
            steps, [min(x) for x in by_step], [max(x) for x in by_step], color=colour, alpha=0.2, linewidth=0
        )
        if index:
            pairs = zip(one.results, found[0].results, strict=True)
            points = [drawable(mine.capped - first.capped) for mine, first in pairs]
            by, row = one.training_difference, len(found) - index
            right.plot(points, [row] * len(points), "o", color=colour, markersize=4, alpha=0.5)
            half = by.half if math.isfinite(by.half) else 0.0
            right.errorbar([by.mean], [row], xerr=[half], fmt="D", color=colour, capsize=5)
    last = sorted(loss for one in found for loss in one.results[0].losses if math.isfinite(loss))
    if last:
        left.set_ylim(
            last[0] - 0.1, last[int(0.9 * (len(last) - 1))] + 0.2
        )  # the start is far above the rest
    left.set_xlabel("step")
    left.set_ylabel("training loss (nats per token)")
    left.legend(fontsize="small")
    right.axvline(0, color="0.6", linewidth=1)
    right.set_yticks(
        range(1, len(found)), [label(one.candidate) for one in reversed(found[1:])], fontsize="small"
    )
    right.set_ylim(0.5, max(1, len(found) - 1) + 0.5)
    right.set_xlabel(f"final loss less that of {label(found[0].candidate)}, by seed (nats per token)")
    figure.suptitle(title, parse_math=False)
    save(figure, path)
