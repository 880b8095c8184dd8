"""The small-scale proxy experiment of Wortsman et al. (arXiv:2309.14322): final loss against learning rate, for several
widths and interventions.

The first seeds train at every rate. More seeds then train where a curve leaves its basin: at the best rate, at the
highest usable one and at the one above it. So the end of the usable range gets a spread without three whole grids.
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

from megastable.base.text import plural
from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.report.text_output import make_table
from megastable_tools.study.lr_sensitivity import LrCurve, Trend, edges, optimum, trends, usable
from megastable_tools.study.study_directory import StudyDirectory, StudyReport, run_missing
from megastable_tools.study.trial import QUIET, Trial, TrialResult
from megastable_tools.study.variations import at_width

MARGIN = 0.1  # nats per token above the best loss: usable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LrPreset:
    """What a study does if nobody says otherwise. length: of a sample, in tokens."""

    widths: tuple[int, ...]
    rates: tuple[float, ...]
    interventions: tuple[str, ...]
    edge_seeds: int
    steps: int
    batch: int
    length: int


EVERY = ("none", "qk_norm", "z_loss", "all")
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)  # the paper's range
# With the quickstart's recipe on two idle cores: 5 minutes, 20 minutes, two hours.
QUICK = LrPreset((64, 128, 256), RATES[:-1], ("none", "all"), 1, 100, 16, 64)
USUAL = LrPreset((64, 128, 256), RATES, EVERY, 0, 300, 16, 64)
FULL = LrPreset((64, 128, 256), RATES, EVERY, 2, 500, 16, 128)


@dataclass(frozen=True)
class LrGrid:
    """common: overrides of all trials. interventions: more of them, by name. seeds: at every rate; edge_seeds: others,
    at the edges."""

    path: Path
    config: RunConfig
    common: tuple[str, ...]
    widths: tuple[int, ...]
    rates: tuple[float, ...]
    interventions: Mapping[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    edge_seeds: tuple[int, ...]
    margin: float

    @property
    def axes(self) -> dict[str, Any]:
        """For the identity of the study."""
        return {
            "widths": self.widths, "rates": self.rates, "interventions": dict(self.interventions),
            "seeds": (*self.seeds, *self.edge_seeds),
        }  # fmt: skip

    def trial(self, intervention: str, width: int, rate: float, seed: int) -> Trial:
        return Trial(
            f"{intervention}-w{width}-lr{rate}-s{seed}",
            (
                *self.common, *at_width(self.config.model, width), *self.interventions[intervention],
                f"optimizer.lr={rate!r}", f"run.seed={seed}",
            ),
        )  # fmt: skip

    def check(self) -> None:
        """Raises ConfigError for a trial that could not start: before hours of training, not after."""
        for width in self.widths:
            for name in self.interventions:
                recipe.load(self.path, self.trial(name, width, self.rates[0], self.seeds[0]).overrides)

    def whole(self) -> list[Trial]:
        """The trials of all rates, the slowest first, so that the last ones to end are short."""
        return [
            self.trial(name, width, rate, seed)
            for width in sorted(self.widths, reverse=True) for seed in self.seeds
            for name in self.interventions for rate in self.rates
        ]  # fmt: skip

    def at_the_edges(self, curves: Sequence[LrCurve]) -> list[Trial]:
        return [
            self.trial(curve.intervention, curve.width, rate, seed)
            for curve in sorted(curves, key=lambda curve: -curve.width) for seed in self.edge_seeds
            for rate in edges(curve.mean, self.margin)
        ]  # fmt: skip

    def curves(self, results: Mapping[str, TrialResult]) -> list[LrCurve]:
        """By intervention, then by width; of each, all results that there are."""
        found = []
        for name in self.interventions:
            for width in self.widths:
                by_seed = {
                    seed: {
                        rate: results[trial.name] for rate in self.rates
                        if (trial := self.trial(name, width, rate, seed)).name in results
                    }
                    for seed in (*self.seeds, *self.edge_seeds)
                }  # fmt: skip
                some = {seed: runs for seed, runs in by_seed.items() if runs}
                found.append(LrCurve(name, width, some, self.seeds))
        return found


def common(path: Path, preset: LrPreset, overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides of all trials: quiet, as short as the preset, with the shares of the recipe's schedule, and then
    the user's. Raises ConfigError."""
    short = (
        *QUIET, "train.batch_warmup=null", "train.sequence_warmup=null", f"train.steps={preset.steps}",
        f"train.global_batch={preset.batch}", f"train.micro_batch={preset.batch}", "train.eval_samples=128",
        f"model.sequence_length={preset.length}",
    )  # fmt: skip
    steps = recipe.load(path, [*short, *overrides]).train.steps
    return (*short, *schedule_of(recipe.load(path), steps), *overrides)


def schedule_of(config: RunConfig, steps: int) -> tuple[str, ...]:
    """The recipe's schedule in another number of steps: warm-up and decay keep their shares of the run."""
    s = config.schedule
    if s.by_tokens:
        whole, warmup, decay = s.total_tokens or config.tokens, s.warmup_tokens, s.decay_tokens
    else:
        whole, warmup, decay = s.total_steps or config.train.steps, s.warmup_steps, s.decay_steps
    return (
        "schedule.warmup_tokens=null", "schedule.total_tokens=null", "schedule.decay_tokens=null",
        "schedule.total_steps=null", f"schedule.warmup_steps={round((warmup or 0) / whole * steps)}",
        f"schedule.decay_steps={max(1, round(decay / whole * steps)) if decay else 'null'}",
    )  # fmt: skip


def run_grid(
    grid: LrGrid, study: StudyDirectory[TrialResult], jobs: int, watch: Callable[[str, TrialResult], None],
    more: Callable[[int], None],
) -> list[LrCurve]:  # fmt: skip
    """Run what is missing, and return the curves. more: told of further trials, once the edges are known."""
    curves = grid.curves(run_missing(study, grid.path, grid.whole(), jobs, watch))
    beyond = grid.at_the_edges(curves)
    more(len(study.missing(trial.name for trial in beyond)))
    run_missing(study, grid.path, beyond, jobs, watch)
    return grid.curves(study.results)


# What it shows


def _table(curves: Sequence[LrCurve], margin: float) -> Table:
    """A row per curve."""
    shown = make_table(
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


def make_report(grid: LrGrid, curves: Sequence[LrCurve], about: dict[str, Any]) -> StudyReport:
    """Everything. Losses in nats per token; `losses` are the mean over the whole seeds, capped."""
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
    found = trends(curves)
    facts = about | {
        "margin": grid.margin, "rates": grid.rates, "widths": grid.widths, "steps": grid.config.train.steps,
        "interventions": {name: list(overrides) for name, overrides in grid.interventions.items()},
        "curves": rows, "trends": [asdict(trend) for trend in found],
    }  # fmt: skip
    size = (3.6 * (len(grid.interventions) + 1), 4.2)
    return StudyReport(
        facts, _table(curves, grid.margin), in_words(found), partial(_draw, grid, curves), size
    )


def _draw(grid: LrGrid, curves: Sequence[LrCurve], figure: Figure) -> None:
    """Loss against rate, a panel per intervention and a curve per width; on the right LR sensitivity over widths."""
    from matplotlib import colormaps

    names, widths = list(grid.interventions), sorted(grid.widths)
    axes = figure.subplots(1, len(names) + 1)
    colours = colormaps["viridis"]([0.85 * i / max(1, len(widths) - 1) for i in range(len(widths))])
    for curve in curves:
        axis, colour = axes[names.index(curve.intervention)], colours[widths.index(curve.width)]
        losses = curve.mean
        label = f"width {curve.width}"
        axis.plot(list(losses), list(losses.values()), "o-", color=colour, markersize=4, label=label)
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
        limits = (low - 0.05 * (first - low), first + 0.08 * (first - low))
        axis.set(xscale="log", ylim=limits, title=name, xlabel="learning rate")
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
    axes[-1].set(title="LR sensitivity", xlabel="width", ylabel="nats per token")
    axes[-1].legend(fontsize="small")
