"""A coordinate check over widths or depths: how the scale of activations grows with the model, with and without muP.

Measured are root mean squares on one fixed batch, before each step and after the last, of what every part of the model
gives, and of its change since initialization; with an optimizer's groups and rates as in a run, without warm-up. The
slope of log scale against log width is 0 for a parametrization under which models of all widths train alike
(arXiv:2203.03466, appendix D.1), and likewise against log depth (CompleteP, arXiv:2505.01618).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Table

from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.report.figures import limit_value
from megastable.report.text_output import make_table
from megastable_tools.study.lr_study import fit_slope
from megastable_tools.study.study_directory import StudyDirectory, StudyReport
from megastable_tools.study.trial import QUIET, SavedResult, Work, run_pieces
from megastable_tools.study.variations import at_depth, at_width

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from megastable.config.tree import RunConfig
    from megastable.engine.engine import Engine

# A run of its own kind: no kernels that hide what is measured, and nothing that is recomputed.
OPEN = ("kernels.compile=false", "kernels.loss=reference", "parallel.recompute=none")


@dataclass(frozen=True)
class Coordinates(SavedResult):
    """Of one model. rms, change: by place, one number for each step from 0 (initialization) on. losses: of the training
    steps, nats per token."""

    rms: dict[str, list[float]]
    change: dict[str, list[float]]
    losses: list[float]


def measure_coordinates(recipe: str, overrides: tuple[str, ...], steps: int, output: Path) -> None:
    """Train `steps` steps in this process, its own process group, and write the `Coordinates`. Raises ConfigError and
    DataError."""
    from megastable.config import deepspeed_json
    from megastable.config import recipe as recipes
    from megastable.data.corpora import open_corpora
    from megastable.data.loader import Loader, RankPart
    from megastable.data.skips import Skips
    from megastable.engine.distributed import start_distributed, stop_distributed
    from megastable.engine.engine import Engine
    from megastable.parallel.layout import Layout
    from megastable.parallel.topology import Topology

    config = recipes.load_recipe(recipe, overrides)
    corpora = open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed, [])
    size = config.model.vocab_size or corpora.vocab_size
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})
    start_distributed(config.run.timeout)
    engine = Engine(
        config, deepspeed_json.build_deepspeed_json(config, 1), Topology(Layout(), 0, config.run.timeout)
    )
    train_config = config.train
    part, data_config = RankPart(train_config.micro_batch), config.data.model_copy(update={"prefetch": 1})
    with Loader(
        corpora.train, Skips.from_ranges([]), 0, train_config.global_batch, part, data_config
    ) as loader:
        batches = [next(loader).micro_batches for _ in range(steps)]
    probe_batch = batches[0]
    first_activations, step_losses = record_activations(engine, config, probe_batch), list[float]()
    rms_by_place = {place: [_rms(x)] for place, x in first_activations.items()}
    change_by_place = {first_activation: [0.0] for first_activation in first_activations}
    for batch in batches:
        measured, _ = engine.train_step(batch, config.optimizer.lr, lambda measured: measured.finite)
        step_losses.append(measured.loss)
        for place, x in record_activations(engine, config, probe_batch).items():
            rms_by_place[place].append(_rms(x))
            change_by_place[place].append(_rms(x - first_activations[place]))
    Coordinates(rms_by_place, change_by_place, step_losses).save_file(output)
    stop_distributed()


def record_activations(engine: Engine, config: RunConfig, probe: Any) -> dict[str, Tensor]:
    """What the parts of the model give on a batch, without an update: fp32 on the CPU, micro-batches one after the
    other. Places: embedding, N.attention, N.mlp, N.stream for block N from 1 on, logits."""
    with _recording(engine, config) as found:
        engine.evaluate_samples(probe)
    return found


@contextmanager
def _recording(engine: Engine, config: RunConfig) -> Iterator[dict[str, Tensor]]:
    """Fills a dictionary while the model computes. With `OPEN` kernels only."""
    import torch

    from megastable.model.gpt import Block, Embedding, open_stream

    parts: dict[str, list[Tensor]] = {}
    found: dict[str, Tensor] = {}

    def keep(place: str) -> Any:
        def hook(module: Any, given: Any, output: Any) -> None:
            x, *_ = open_stream(output)
            parts.setdefault(place, []).append(x.detach().float().flatten().cpu())

        return hook

    module, handles = engine.ds.module, []
    for part in module.modules():
        if isinstance(part, Embedding):
            handles.append(part.register_forward_hook(keep("embedding")))
        elif isinstance(part, Block):
            number = int(part.name.rpartition(".")[2]) + 1
            for inner, of in ((part.attention, "attention"), (part.mlp, "mlp"), (part, "stream")):
                handles.append(inner.register_forward_hook(keep(f"{number}.{of}")))
    loss, vocabulary = module.loss, config.model.vocab_size
    see = keep("logits")

    def watched(given: Any, labels: Tensor) -> Any:
        see(None, None, given[..., :vocabulary])
        return loss(given, labels)

    module.loss = watched
    try:
        yield found
    finally:
        module.loss = loss
        for handle in handles:
            handle.remove()
    found.update({place: torch.cat(pieces) for place, pieces in parts.items()})


def _rms(x: Tensor) -> float:
    return math.sqrt(float(x.double().square().mean()))


FLAT = 0.1  # the steepest slope of a scale that counts as flat
# The same of its change since initialization: narrow models still show a part that vanishes with the width.
FLAT_CHANGE = 0.25
# Small enough for a wide model on a CPU.
SMALL = ("train.global_batch=8", "train.micro_batch=8", "model.sequence_length=64",
         "train.batch_warmup=null", "train.sequence_warmup=null")  # fmt: skip
PLAIN, MUP = "standard", "muP"


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

    def model_name(self, way: str, size: int, seed: int) -> str:
        base_suffix = (
            f"-from{min(self.sizes)}" if way == MUP else ""
        )  # the same size from another base is another model
        return f"{way}{base_suffix}-{'depth' if self.deep else 'width'}{size}-s{seed}"

    def overrides_of(self, way: str, size: int, seed: int) -> tuple[str, ...]:
        shape_overrides = at_depth(size) if self.deep else at_width(self.config.model, size)
        scale_overrides = self.scaled if way == MUP else ("model.mup=null",)
        return (*self.common, *shape_overrides, *scale_overrides, f"run.seed={seed}")

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
        models_found = [
            (way, model_size, seed) for model_size in sizes for way in self.ways for seed in self.seeds
        ]
        return {self.model_name(*model_key): model_key for model_key in models_found}

    def check_models(self) -> None:
        """Raises ConfigError for a model that could not be built."""
        for one in self.every.values():
            recipe.load_recipe(self.path, self.overrides_of(*one))


def common_overrides(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides of all models: small batches and open kernels, and then the user's."""
    return (*QUIET, *OPEN, *SMALL, *overrides)


def run_grid(
    grid: CoordinateGrid, study: StudyDirectory[Coordinates], jobs: int,
    watch: Callable[[str, Coordinates], None],
) -> None:  # fmt: skip
    """Measure the models that are missing in the study."""
    file = "coordinates.json"
    model_work = [
        Work(name, measure_coordinates, (str(grid.path), grid.overrides_of(*grid.every[name]), grid.steps,
        study.runs / name / file))
        for name in study.list_missing(grid.every)
    ]  # fmt: skip

    def done(name: str, folder: Path) -> None:
        result = Coordinates.load_file(folder / file)
        study.keep_result(name, result)
        watch(name, result)

    run_pieces(model_work, study.runs, jobs, done)


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


def find_scales(grid: CoordinateGrid, results: Mapping[str, Coordinates]) -> list[PlaceScale]:
    """By parametrization, then by place."""
    scales_found = []
    for way in grid.ways:
        models = {
            size: [name_depths(results[grid.model_name(way, size, seed)], grid.deep) for seed in grid.seeds]
            for size in sorted(grid.sizes)
        }
        for place in models[min(grid.sizes)][0].rms:
            first = {size: geometric_mean([m.rms[place][0] for m in of]) for size, of in models.items()}
            last = {size: geometric_mean([m.rms[place][-1] for m in of]) for size, of in models.items()}
            changes = {size: geometric_mean([m.change[place][-1] for m in of]) for size, of in models.items()}
            scales_found.append(
                PlaceScale(
                    way, place, fit_exponent(first), fit_exponent(last), fit_exponent(changes), last, changes
                )
            )
    return scales_found


def name_depths(found: Coordinates, deep: bool) -> Coordinates:
    """Models of several depths are compared at the same share of the depth, in their middle and last blocks: under
    CompleteP a block adds to the stream by one over the depth."""
    if not deep:
        return found
    block_numbers = [int(place.partition(".")[0]) for place in found.rms if place[0].isdigit()]
    last = max(block_numbers)
    depths = (("middle", (1 + last) // 2), ("last", last))
    names_by_place: dict[str, str] = {}  # in the order of the model, a lone block as both
    for place in found.rms:
        number, _, part = place.partition(".")
        own_names = [f"{which}.{part}" for which, of in depths if number == str(of)] if part else [place]
        names_by_place |= dict.fromkeys(own_names, place)
    return Coordinates(
        {new_name: found.rms[place] for new_name, place in names_by_place.items()},
        {new_name: found.change[place] for new_name, place in names_by_place.items()}, found.losses,
    )  # fmt: skip


def geometric_mean(values: Sequence[float]) -> float:
    """Mean; nan if a value is not a positive number."""
    if not all(0 < value < math.inf for value in values):
        return math.nan
    return math.exp(fmean(map(math.log, values)))


def fit_exponent(by_size: Mapping[int, float]) -> float:
    """k of value ~ size^k; nan if a value is."""
    return fit_slope([math.log(size) for size in by_size], [math.log(value) for value in by_size.values()])


# What it shows


def _table(grid: CoordinateGrid, found: Sequence[PlaceScale]) -> Table:
    """A row per place."""
    size = "depth" if grid.deep else "width"
    scale_table = make_table(
        "parametrization", "place", "at initialization", f"after {grid.steps} steps", "change since", "flat",
        *(f"RMS at {model_size}" for model_size in sorted(grid.sizes)),
        caption=f"slopes of log scale against log {size}; flat: after the last step within {FLAT:g} of 0, the change "
        f"within {FLAT_CHANGE:g}",
    )  # fmt: skip
    for place_scale in found:
        scale_table.add_row(
            place_scale.way, place_scale.place, *map(_said, (place_scale.first, place_scale.last, place_scale.change)),
            "yes" if place_scale.flat else "NO",
            *(f"{place_scale.rms[model_size]:.3g}" for model_size in sorted(grid.sizes)),
        )  # fmt: skip
    return scale_table


def _said(slope: float) -> str:
    return f"{slope:+.2f}" if math.isfinite(slope) else "-"  # of logits that begin at zero, for one


def describe_verdict(grid: CoordinateGrid, found: Sequence[PlaceScale]) -> list[str]:
    """A sentence per parametrization."""
    sentences_told = []
    for way in grid.ways:
        steep_places = [one for one in found if one.way == way and not one.flat]
        if not steep_places:
            sentences_told.append(f"{way}: flat, the scale of all activations stays within size^±{FLAT:g}")
            continue
        worst_place = max(steep_places, key=lambda one: max(abs(one.last), abs(one.change)))
        sentences_told.append(
            f"{way}: not flat at {', '.join(one.place for one in steep_places)}; most at {worst_place.place}: "
            f"size^{worst_place.last:+.2f}, its change size^{worst_place.change:+.2f}"
        )
    return sentences_told


def make_report(
    grid: CoordinateGrid,
    results: Mapping[str, Coordinates],
    found: Sequence[PlaceScale],
    about: dict[str, Any],
) -> StudyReport:
    """Everything. models: root mean squares by place, one for each step from 0 on."""
    report_facts = about | {
        "per": "depth" if grid.deep else "width", "sizes": grid.sizes, "steps": grid.steps, "flat_below": FLAT,
        "flat_change_below": FLAT_CHANGE,
        "places": [asdict(place_scale) | {"flat": place_scale.flat} for place_scale in found],
        "models": [
            {"way": way, "size": figure_size, "seed": seed, **asdict(results[model_name])}
            for model_name, (way, figure_size, seed) in grid.every.items()
        ],
    }  # fmt: skip
    all_places = list(dict.fromkeys(place_scale.place for place_scale in found))
    figure_size = (3.2 * len({place.rpartition(".")[2] for place in all_places}), 3.4 * len(grid.ways))
    draw_picture = partial(_draw, grid, results, all_places)
    return StudyReport(
        report_facts, _table(grid, found), describe_verdict(grid, found), draw_picture, figure_size
    )


def _draw(
    grid: CoordinateGrid, results: Mapping[str, Coordinates], places: Sequence[str], figure: Figure
) -> None:
    """Scale over sizes, a column per kind of place and a row per parametrization: a line per place and step, from
    initialization (light) to the last step (dark)."""
    from matplotlib import colormaps

    place_kinds = list(dict.fromkeys(place.rpartition(".")[2] for place in places))
    axis_grid = figure.subplots(len(grid.ways), len(place_kinds), squeeze=False, sharex=True, sharey="col")
    step_colours = colormaps["viridis_r"]([0.1 + 0.9 * t / max(1, grid.steps) for t in range(grid.steps + 1)])
    sizes = sorted(grid.sizes)
    for axis_row, way in zip(axis_grid, grid.ways, strict=True):
        models_by_size = {
            n: [name_depths(results[grid.model_name(way, n, seed)], grid.deep) for seed in grid.seeds]
            for n in sizes
        }
        for axis, kind in zip(axis_row, place_kinds, strict=True):
            for place in (place for place in places if place.rpartition(".")[2] == kind):
                for step in range(grid.steps + 1):
                    ys = [
                        limit_value(
                            geometric_mean([m.rms[place][step] for m in models_by_size[n]]), positive=True
                        )
                        for n in sizes
                    ]
                    line_label = f"step {step}" if step in (0, grid.steps) and place == places[0] else None
                    axis.plot(sizes, ys, ".-", color=step_colours[step], linewidth=0.9, label=line_label)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            lowest_y, highest_y = axis.get_ylim()
            middle_y, axis_span = (lowest_y * highest_y) ** 0.5, max(10.0, highest_y / lowest_y) ** 0.5
            axis.set_ylim(middle_y / axis_span, middle_y * axis_span)  # what is flat is to look flat
            axis.set_title(f"{kind}, {way}")
        axis_row[0].set_ylabel("root mean square")
    for axis in axis_grid[-1]:
        axis.set_xlabel("depth" if grid.deep else "width")
    axis_grid[0][0].legend(fontsize="small")
