"""A coordinate check over widths or depths: how the scale of activations grows with the model, with and without muP.

The slope of log scale against log width is 0 for a parametrization under which models of all widths train alike
(arXiv:2203.03466, appendix D.1), and likewise against log depth (CompleteP, arXiv:2505.01618).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Table

from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.report.scale import drawable
from megastable.report.text_output import make_table
from megastable_tools.study.coordinates import OPEN, Coordinates, measure
from megastable_tools.study.lr_sensitivity import slope
from megastable_tools.study.study_directory import StudyDirectory, StudyReport
from megastable_tools.study.trial import QUIET
from megastable_tools.study.variations import at_depth, at_width
from megastable_tools.study.workers import Work, run_all

FLAT = 0.1  # the steepest slope of a scale that counts as flat
# The same of its change since initialization: narrow models still show a part that vanishes with the width.
FLAT_CHANGE = 0.25
# Small enough for a wide model on a CPU.
SMALL = ("train.global_batch=8", "train.micro_batch=8", "model.sequence_length=64",
         "train.batch_warmup=null", "train.sequence_warmup=null")  # fmt: skip
PLAIN, MUP = "standard", "muP"

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class CoordinateGrid:
    """sizes: the widths, or with `deep` the depths. ways: parametrizations, of PLAIN and MUP."""

    path: Path
    config: RunConfig
    common: tuple[str, ...]
    sizes: tuple[int, ...]
    deep: bool
    ways: tuple[str, ...]
    steps: int
    seeds: tuple[int, ...]

    @property
    def axes(self) -> dict[str, Any]:
        """For the identity of the study."""
        return {
            "sizes": self.sizes,
            "ways": self.ways,
            "seeds": self.seeds,
            "per": "depth" if self.deep else "width",
        }

    def name(self, way: str, size: int, seed: int) -> str:
        base = (
            f"-from{min(self.sizes)}" if way == MUP else ""
        )  # the same size from another base is another model
        return f"{way}{base}-{'depth' if self.deep else 'width'}{size}-s{seed}"

    def overrides(self, way: str, size: int, seed: int) -> tuple[str, ...]:
        shape = at_depth(size) if self.deep else at_width(self.config.model, size)
        scaled = self.scaled if way == MUP else ("model.mup=null",)
        return (*self.common, *shape, *scaled, f"run.seed={seed}")

    @property
    def scaled(self) -> tuple[str, ...]:
        """muP from the smallest model on. What a random output layer adds to the logits vanishes with the width
        (arXiv:2203.03466, section D.2): here it starts at zero."""
        smallest, zero = min(self.sizes), "model.mup.zero_output=true"
        if self.deep:
            return (
                f"model.mup.base_width={self.config.model.hidden}",
                f"model.mup.base_layers={smallest}",
                zero,
            )
        return f"model.mup.base_width={smallest}", zero

    @property
    def every(self) -> dict[str, tuple[str, int, int]]:
        """All models by name, the largest first, so that the last ones to end are small."""
        sizes = sorted(self.sizes, reverse=True)
        found = [(way, size, seed) for size in sizes for way in self.ways for seed in self.seeds]
        return {self.name(*one): one for one in found}

    def check(self) -> None:
        """Raises ConfigError for a model that could not be built."""
        for one in self.every.values():
            recipe.load(self.path, self.overrides(*one))


def common(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides of all models: small batches and open kernels, and then the user's."""
    return (*QUIET, *OPEN, *SMALL, *overrides)


def run_grid(
    grid: CoordinateGrid, study: StudyDirectory[Coordinates], jobs: int,
    watch: Callable[[str, Coordinates], None],
) -> None:  # fmt: skip
    """Measure the models that are missing in the study."""
    file = "coordinates.json"
    work = [
        Work(name, measure, (str(grid.path), grid.overrides(*grid.every[name]), grid.steps, study.runs / name / file))
        for name in study.missing(grid.every)
    ]  # fmt: skip

    def done(name: str, folder: Path) -> None:
        result = Coordinates.load(folder / file)
        study.keep(name, result)
        watch(name, result)

    run_all(work, study.runs, jobs, done)


@dataclass(frozen=True)
class PlaceScale:
    """One place of the model. Slopes of log scale against log size: of the activations at initialization (first) and
    after the last step (last), and of their change between (change). rms: after the last step, by size."""

    way: str
    place: str
    first: float
    last: float
    change: float
    rms: Mapping[int, float]
    changes: Mapping[int, float]

    @property
    def flat(self) -> bool:
        return abs(self.last) < FLAT and abs(self.change) < FLAT_CHANGE


def scales(grid: CoordinateGrid, results: Mapping[str, Coordinates]) -> list[PlaceScale]:
    """By parametrization, then by place."""
    found = []
    for way in grid.ways:
        models = {
            size: [named(results[grid.name(way, size, seed)], grid.deep) for seed in grid.seeds]
            for size in sorted(grid.sizes)
        }
        for place in models[min(grid.sizes)][0].rms:
            first = {size: geometric([m.rms[place][0] for m in of]) for size, of in models.items()}
            last = {size: geometric([m.rms[place][-1] for m in of]) for size, of in models.items()}
            changes = {size: geometric([m.change[place][-1] for m in of]) for size, of in models.items()}
            found.append(
                PlaceScale(way, place, exponent(first), exponent(last), exponent(changes), last, changes)
            )
    return found


def named(found: Coordinates, deep: bool) -> Coordinates:
    """Models of several depths are compared at the same share of the depth, in their middle and last blocks: under
    CompleteP a block adds to the stream by one over the depth."""
    if not deep:
        return found
    numbers = [int(place.partition(".")[0]) for place in found.rms if place[0].isdigit()]
    last = max(numbers)
    depths = (("middle", (1 + last) // 2), ("last", last))
    names: dict[str, str] = {}  # in the order of the model, a lone block as both
    for place in found.rms:
        number, _, part = place.partition(".")
        ours = [f"{which}.{part}" for which, of in depths if number == str(of)] if part else [place]
        names |= dict.fromkeys(ours, place)
    return Coordinates(
        {name: found.rms[place] for name, place in names.items()},
        {name: found.change[place] for name, place in names.items()}, found.losses,
    )  # fmt: skip


def geometric(values: Sequence[float]) -> float:
    """Mean; nan if a value is not a positive number."""
    if not all(0 < value < math.inf for value in values):
        return math.nan
    return math.exp(fmean(map(math.log, values)))


def exponent(by_size: Mapping[int, float]) -> float:
    """k of value ~ size^k; nan if a value is."""
    return slope([math.log(size) for size in by_size], [math.log(value) for value in by_size.values()])


# What it shows


def _table(grid: CoordinateGrid, found: Sequence[PlaceScale]) -> Table:
    """A row per place."""
    size = "depth" if grid.deep else "width"
    shown = make_table(
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


def make_report(
    grid: CoordinateGrid,
    results: Mapping[str, Coordinates],
    found: Sequence[PlaceScale],
    about: dict[str, Any],
) -> StudyReport:
    """Everything. models: root mean squares by place, one for each step from 0 on."""
    facts = about | {
        "per": "depth" if grid.deep else "width", "sizes": grid.sizes, "steps": grid.steps, "flat_below": FLAT,
        "flat_change_below": FLAT_CHANGE,
        "places": [asdict(one) | {"flat": one.flat} for one in found],
        "models": [
            {"way": way, "size": size, "seed": seed, **asdict(results[name])}
            for name, (way, size, seed) in grid.every.items()
        ],
    }  # fmt: skip
    places = list(dict.fromkeys(one.place for one in found))
    size = (3.2 * len({place.rpartition(".")[2] for place in places}), 3.4 * len(grid.ways))
    draw = partial(_draw, grid, results, places)
    return StudyReport(facts, _table(grid, found), verdict(grid, found), draw, size)


def _draw(
    grid: CoordinateGrid, results: Mapping[str, Coordinates], places: Sequence[str], figure: Figure
) -> None:
    """Scale over sizes, a column per kind of place and a row per parametrization: a line per place and step, from
    initialization (light) to the last step (dark)."""
    from matplotlib import colormaps

    kinds = list(dict.fromkeys(place.rpartition(".")[2] for place in places))
    axes = figure.subplots(len(grid.ways), len(kinds), squeeze=False, sharex=True, sharey="col")
    colours = colormaps["viridis_r"]([0.1 + 0.9 * t / max(1, grid.steps) for t in range(grid.steps + 1)])
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
        axis.set_xlabel("depth" if grid.deep else "width")
    axes[0][0].legend(fontsize="small")
