"""Shows a coordinate check: a table of slopes, its numbers as a tree, and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from megastable.report.figures import save
from megastable.report.scale import drawable
from megastable.study.coordinate_study import FLAT, FLAT_CHANGE, CoordinateGrid, PlaceScale, geometric, named
from megastable.study.coordinates import Coordinates


def table(grid: CoordinateGrid, found: Sequence[PlaceScale]) -> Table:
    """A row per place."""
    size = "depth" if grid.deep else "width"
    shown = Table(
        "parametrization", "place", "at initialization", f"after {grid.steps} steps", "change since", "flat",
        *(f"RMS at {n}" for n in sorted(grid.sizes)),
        caption=f"slopes of log scale against log {size}; flat: after the last step within {FLAT:g} of 0, the change "
        f"within {FLAT_CHANGE:g}",
    )  # fmt: skip
    for one in found:
        shown.add_row(
            one.way, one.place, *map(_said, (one.first, one.last, one.change)),
            "yes" if one.flat else "NO", *(f"{one.rms[n]:.3g}" for n in sorted(grid.sizes)),
        )  # fmt: skip
    return shown


def _said(slope: float) -> str:
    return f"{slope:+.2f}" if math.isfinite(slope) else "-"  # of logits that begin at zero, for one


def verdict(grid: CoordinateGrid, found: Sequence[PlaceScale]) -> list[str]:
    """A sentence per parametrization."""
    told = []
    for way in grid.ways:
        steep = [one for one in found if one.way == way and not one.flat]
        if not steep:
            told.append(f"{way}: flat, the scale of all activations stays within size^±{FLAT:g}")
            continue
        worst = max(steep, key=lambda one: max(abs(one.last), abs(one.change)))
        told.append(
            f"{way}: not flat at {', '.join(one.place for one in steep)}; most at {worst.place}: "
            f"size^{worst.last:+.2f}, its change size^{worst.change:+.2f}"
        )
    return told


def tree(
    grid: CoordinateGrid,
    results: Mapping[str, Coordinates],
    found: Sequence[PlaceScale],
    about: dict[str, Any],
) -> dict[str, Any]:
    """Everything as JSON. models: root mean squares by place, one for each step from 0 on."""
    return about | {
        "per": "depth" if grid.deep else "width", "sizes": grid.sizes, "steps": grid.steps, "flat_below": FLAT,
        "flat_change_below": FLAT_CHANGE,
        "places": [asdict(one) | {"flat": one.flat} for one in found],
        "models": [
            {"way": way, "size": size, "seed": seed, **asdict(results[name])}
            for name, (way, size, seed) in grid.every.items()
        ],
    }  # fmt: skip


def picture(
    grid: CoordinateGrid, results: Mapping[str, Coordinates], places: Sequence[str], title: str, path: Path
) -> None:
    """Scale over sizes, a column per kind of place and a row per parametrization: a line per place and step, from
    initialization (light) to the last step (dark). Raises DataError when it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(place.rpartition(".")[2] for place in places))
    size = "depth" if grid.deep else "width"
    figure, axes = pyplot.subplots(
        len(grid.ways), len(kinds), figsize=(3.2 * len(kinds), 3.4 * len(grid.ways)), squeeze=False, sharex=True,
        sharey="col", layout="constrained",
    )  # fmt: skip
    colours = pyplot.get_cmap("viridis_r")(
        [0.1 + 0.9 * t / max(1, grid.steps) for t in range(grid.steps + 1)]
    )
    sizes = sorted(grid.sizes)
    for row, way in zip(axes, grid.ways, strict=True):
        models = {
            n: [named(results[grid.name(way, n, seed)], grid.deep) for seed in grid.seeds] for n in sizes
        }
        for axis, kind in zip(row, kinds, strict=True):
            for place in (place for place in places if place.rpartition(".")[2] == kind):
                for step in range(grid.steps + 1):
                    ys = [
                        drawable(geometric([m.rms[place][step] for m in models[n]]), positive=True)
                        for n in sizes
                    ]
                    label = f"step {step}" if step in (0, grid.steps) and place == places[0] else None
                    axis.plot(sizes, ys, ".-", color=colours[step], linewidth=0.9, label=label)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            low, high = axis.get_ylim()
            middle, span = (low * high) ** 0.5, max(10.0, high / low) ** 0.5
            axis.set_ylim(middle / span, middle * span)  # what is flat is to look flat
            axis.set_title(f"{kind}, {way}")
        row[0].set_ylabel("root mean square")
    for axis in axes[-1]:
        axis.set_xlabel(size)
    axes[0][0].legend(fontsize="small")
    figure.suptitle(title, parse_math=False)
    save(figure, path)
