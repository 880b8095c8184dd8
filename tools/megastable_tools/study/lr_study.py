"""The small-scale proxy experiment of Wortsman et al. (arXiv:2309.14322): final loss against learning rate, for several
widths and interventions.

The first seeds train at every rate. More seeds then train where a curve leaves its basin: at the best rate, at the
highest usable one and at the one above it. So the end of the usable range gets a spread without three whole grids.

The numbers are the sensitivity of section 2.2, the range of usable rates, the best rate, and their trends over widths.
A curve maps rates to final losses in nats per token, at most the loss at initialization. Between two rates it is linear
in the logarithm of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Table

from megastable.base.text import count_noun
from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.report.text_output import make_table
from megastable_tools.study.study_directory import StudyDirectory, StudyReport, run_missing
from megastable_tools.study.trial import QUIET, Trial, TrialResult
from megastable_tools.study.variations import at_width

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Losses = Mapping[float, float]


def lr_sensitivity(losses: Losses) -> float:
    """How much is lost, on average over the rates, compared with the best of them; nats per token.

    The mean over the rates of min(loss, loss at initialization) less the lowest loss (section 2.2).
    """
    return fmean(losses.values()) - min(losses.values())


def find_best_rate(losses: Losses) -> float:
    """The rate with the lowest loss; of equal ones the lower."""
    return min(losses, key=lambda rate: (losses[rate], rate))


@dataclass(frozen=True)
class Optimum:
    """The best rate, between those tried where it can be. inside: whether both neighbours of the best one are worse."""

    rate: float
    inside: bool


def find_optimum(losses: Losses) -> Optimum:
    """The lowest point of the parabola, in the logarithm of the rate, through the best rate and its neighbours; at an
    end of the curve, the rate there."""
    rates = sorted(losses)
    best_index = rates.index(find_best_rate(losses))
    if best_index in (0, len(rates) - 1):
        return Optimum(rates[best_index], False)
    x0, x1, x2 = (math.log(rate) for rate in rates[best_index - 1 : best_index + 2])
    y0, y1, y2 = (losses[rate] for rate in rates[best_index - 1 : best_index + 2])
    below_term, above_term = (x1 - x0) * (y1 - y2), (x1 - x2) * (y1 - y0)
    if below_term == above_term:  # three equal losses
        return Optimum(rates[best_index], True)
    lowest = x1 - 0.5 * ((x1 - x0) * below_term - (x1 - x2) * above_term) / (below_term - above_term)
    return Optimum(math.exp(lowest), True)


@dataclass(frozen=True)
class UsableRates:
    """Rates around the best one whose loss is within a margin of the best; open: the curve ends before it leaves."""

    lowest: float
    highest: float
    open_below: bool
    open_above: bool

    @property
    def factor(self) -> float:
        return self.highest / self.lowest


def find_usable_rates(losses: Losses, margin: float) -> UsableRates:
    """margin: nats per token above the lowest loss."""
    rates, middle = sorted(losses), find_best_rate(losses)
    loss_limit = losses[middle] + margin
    lowest, open_below = _crossing(losses, [rate for rate in reversed(rates) if rate <= middle], loss_limit)
    highest_rate, open_above = _crossing(losses, [rate for rate in rates if rate >= middle], loss_limit)
    return UsableRates(lowest, highest_rate, open_below, open_above)


def _crossing(losses: Losses, rates: Sequence[float], limit: float) -> tuple[float, bool]:
    """(where the loss first passes `limit` on the way along `rates`, False), or (the last of them, True)."""
    for inner_rate, outer_rate in pairwise(rates):
        if losses[outer_rate] > limit:
            crossing_share = (limit - losses[inner_rate]) / (losses[outer_rate] - losses[inner_rate])
            return inner_rate * (outer_rate / inner_rate) ** crossing_share, False
    return rates[-1], True


def find_edge_rates(losses: Losses, margin: float) -> tuple[float, ...]:
    """The rates to try with more seeds: the best one, the highest usable one, and the one above it."""
    rates, loss_limit = sorted(losses), min(losses.values()) + margin
    best_index = rates.index(find_best_rate(losses))
    last_index = best_index
    while last_index + 1 < len(rates) and losses[rates[last_index + 1]] <= loss_limit:
        last_index += 1
    return tuple(dict.fromkeys(rates[i] for i in (best_index, last_index, last_index + 1) if i < len(rates)))


def fit_slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the line of least squares; nan of fewer than two different xs."""
    x, y = fmean(xs), fmean(ys)
    spread = sum((a - x) ** 2 for a in xs)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread if spread else math.nan


@dataclass(frozen=True)
class LrCurve:
    """A width under an intervention. results: by seed and rate; the seeds of `whole` have all rates, others
    those at the edge."""

    intervention: str
    width: int
    results: Mapping[int, Mapping[float, TrialResult]]
    whole: tuple[int, ...]

    def losses_by_rate(self, seed: int) -> dict[float, float]:
        return {rate: result.capped for rate, result in self.results[seed].items()}

    @property
    def mean(self) -> dict[float, float]:
        """The curve of all whole seeds."""
        return {
            r: fmean(self.losses_by_rate(s)[r] for s in self.whole)
            for r in sorted(self.results[self.whole[0]])
        }

    @property
    def sensitivities(self) -> list[float]:
        """Of the whole seeds."""
        return [lr_sensitivity(self.losses_by_rate(seed)) for seed in self.whole]

    def highest_rates(self, margin: float) -> list[float]:
        """The highest usable rate by every seed."""
        return [find_usable_rates(self.losses_by_rate(seed), margin).highest for seed in self.results]

    @property
    def parameters(self) -> int:
        return max(result.parameters for seed_runs in self.results.values() for result in seed_runs.values())

    @property
    def diverged(self) -> list[float]:
        """Rates at which a seed ended no better than it began."""
        return sorted({r for runs in self.results.values() for r, result in runs.items() if result.diverged})


@dataclass(frozen=True)
class Trend:
    """Over the widths of an intervention. sensitivity: change per doubling of the width, nats per token. best_rate: the
    exponent k of best rate ~ width^k, of the `inside` best rates that lie inside their curves; nan of fewer than
    two."""

    intervention: str
    sensitivity: float
    best_rate: float
    inside: int


def find_trends(curves: Sequence[LrCurve]) -> list[Trend]:
    trends_found = []
    for intervention_name in dict.fromkeys(curve.intervention for curve in curves):
        own_curves = [curve for curve in curves if curve.intervention == intervention_name]
        log_widths = [math.log2(own_curve.width) for own_curve in own_curves]
        width_optima = [
            (w, find_optimum(curve.mean)) for w, curve in zip(log_widths, own_curves, strict=True)
        ]
        inside = [
            (w, math.log2(curve_optimum.rate)) for w, curve_optimum in width_optima if curve_optimum.inside
        ]
        trends_found.append(Trend(
            intervention_name, fit_slope(log_widths, [fmean(curve.sensitivities) for curve in own_curves]),
            fit_slope([w for w, _ in inside], [rate for _, rate in inside]) if inside else math.nan, len(inside),
        ))  # fmt: skip
    return trends_found


MARGIN = 0.1  # nats per token above the best loss: usable


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

    def make_trial(self, intervention: str, width: int, rate: float, seed: int) -> Trial:
        return Trial(
            f"{intervention}-w{width}-lr{rate}-s{seed}",
            (
                *self.common, *at_width(self.config.model, width), *self.interventions[intervention],
                f"optimizer.lr={rate!r}", f"run.seed={seed}",
            ),
        )  # fmt: skip

    def check_trials(self) -> None:
        """Raises ConfigError for a trial that could not start: before hours of training, not after."""
        for width in self.widths:
            for name in self.interventions:
                recipe.load_recipe(
                    self.path, self.make_trial(name, width, self.rates[0], self.seeds[0]).overrides
                )

    def whole_trials(self) -> list[Trial]:
        """The trials of all rates, the slowest first, so that the last ones to end are short."""
        return [
            self.make_trial(intervention_name, width, rate, seed)
            for width in sorted(self.widths, reverse=True) for seed in self.seeds
            for intervention_name in self.interventions for rate in self.rates
        ]  # fmt: skip

    def at_the_edges(self, curves: Sequence[LrCurve]) -> list[Trial]:
        return [
            self.make_trial(curve.intervention, curve.width, rate, edge_seed)
            for curve in sorted(curves, key=lambda curve: -curve.width) for edge_seed in self.edge_seeds
            for rate in find_edge_rates(curve.mean, self.margin)
        ]  # fmt: skip

    def make_curves(self, results: Mapping[str, TrialResult]) -> list[LrCurve]:
        """By intervention, then by width; of each, all results that there are."""
        curves_found = []
        for intervention_name in self.interventions:
            for width in self.widths:
                by_seed = {
                    seed: {
                        rate: results[trial.name] for rate in self.rates
                        if (trial := self.make_trial(intervention_name, width, rate, seed)).name in results
                    }
                    for seed in (*self.seeds, *self.edge_seeds)
                }  # fmt: skip
                runs_by_seed = {seed: seed_runs for seed, seed_runs in by_seed.items() if seed_runs}
                curves_found.append(LrCurve(intervention_name, width, runs_by_seed, self.seeds))
        return curves_found


def common_overrides(path: Path, preset: LrPreset, overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides of all trials: quiet, as short as the preset, with the shares of the recipe's schedule, and then
    the user's. Raises ConfigError."""
    short = (
        *QUIET, "train.batch_warmup=null", "train.sequence_warmup=null", f"train.steps={preset.steps}",
        f"train.global_batch={preset.batch}", f"train.micro_batch={preset.batch}", "train.eval_samples=128",
        f"model.sequence_length={preset.length}",
    )  # fmt: skip
    steps = recipe.load_recipe(path, [*short, *overrides]).train.steps
    return (*short, *schedule_of(recipe.load_recipe(path), steps), *overrides)


def schedule_of(config: RunConfig, steps: int) -> tuple[str, ...]:
    """The recipe's schedule in another number of steps: warm-up and decay keep their shares of the run."""
    s = config.schedule
    if s.by_tokens:
        whole, warmup, decay_length = s.total_tokens or config.tokens, s.warmup_tokens, s.decay_tokens
    else:
        whole, warmup, decay_length = s.total_steps or config.train.steps, s.warmup_steps, s.decay_steps
    return (
        "schedule.warmup_tokens=null", "schedule.total_tokens=null", "schedule.decay_tokens=null",
        "schedule.total_steps=null", f"schedule.warmup_steps={round((warmup or 0) / whole * steps)}",
        f"schedule.decay_steps={max(1, round(decay_length / whole * steps)) if decay_length else 'null'}",
    )  # fmt: skip


def run_grid(
    grid: LrGrid, study: StudyDirectory[TrialResult], jobs: int, watch: Callable[[str, TrialResult], None],
    more: Callable[[int], None],
) -> list[LrCurve]:  # fmt: skip
    """Run what is missing, and return the curves. more: told of further trials, once the edges are known."""
    curves = grid.make_curves(run_missing(study, grid.path, grid.whole_trials(), jobs, watch))
    edge_trials = grid.at_the_edges(curves)
    more(len(study.list_missing(edge_trial.name for edge_trial in edge_trials)))
    run_missing(study, grid.path, edge_trials, jobs, watch)
    return grid.make_curves(study.results)


# What it shows


def _table(curves: Sequence[LrCurve], margin: float) -> Table:
    """A row per curve."""
    curve_table = make_table(
        "intervention", "width", "params", "best loss", "best rate", "LR sensitivity", "usable rates", "span",
        "highest by seed", "diverged",
        caption=f"usable: within {margin:g} nat of the best loss. LR sensitivity: mean loss over the rates, at most "
        "that at initialization, less the best. > and <: beyond the rates tried",
    )  # fmt: skip
    for curve in curves:
        mean_losses = curve.mean
        at, rates = find_optimum(mean_losses), find_usable_rates(mean_losses, margin)
        open_ends = (rates.open_below, rates.open_above)
        curve_table.add_row(
            curve.intervention, str(curve.width), f"{curve.parameters / 1e6:.2f}M", f"{min(mean_losses.values()):.3f}",
            ("" if at.inside else ">" if at.rate == max(mean_losses) else "<") + f"{at.rate:.2g}",
            _spread(curve.sensitivities),
            f"{'<' if open_ends[0] else ''}{rates.lowest:.2g} to {'>' if open_ends[1] else ''}{rates.highest:.2g}",
            f"{'>' if any(open_ends) else ''}{rates.factor:.0f}x",
            ", ".join(f"{rate:.2g}" for rate in curve.highest_rates(margin)),
            ", ".join(f"{rate:g}" for rate in curve.diverged) or "-",
        )  # fmt: skip
    return curve_table


def _spread(values: Sequence[float]) -> str:
    middle = f"{fmean(values):.3f}"
    return middle if len(values) == 1 else f"{middle} ± {(max(values) - min(values)) / 2:.3f}"


def in_words(found: Sequence[Trend]) -> list[str]:
    """A sentence per intervention on what changes with the width."""
    sentences_told = []
    for trend in found:
        if math.isnan(trend.sensitivity):
            continue
        rate_text = (
            "the best rates lie at the ends of the grid: no trend"
            if math.isnan(trend.best_rate)
            else f"the best rate goes with width^{trend.best_rate:+.2f}, by {count_noun(trend.inside, 'width')}"
        )
        sentences_told.append(
            f"{trend.intervention}: LR sensitivity {trend.sensitivity:+.3f} nat per doubling of the width; {rate_text}"
        )
    return sentences_told


def make_report(grid: LrGrid, curves: Sequence[LrCurve], about: dict[str, Any]) -> StudyReport:
    """Everything. Losses in nats per token; `losses` are the mean over the whole seeds, capped."""
    curve_rows = []
    for curve in curves:
        mean_losses, usable_rates = curve.mean, find_usable_rates(curve.mean, grid.margin)
        curve_rows.append({
            "intervention": curve.intervention, "width": curve.width, "parameters": curve.parameters,
            "losses": [{"rate": loss_rate, "loss": loss} for loss_rate, loss in mean_losses.items()],
            "best_loss": min(mean_losses.values()), "best_rate": asdict(find_optimum(mean_losses)),
            "lr_sensitivity": curve.sensitivities, "usable": asdict(usable_rates) | {"factor": usable_rates.factor},
            "highest_by_seed": dict(zip(map(str, curve.results), curve.highest_rates(grid.margin), strict=True)),
            "trials": [
                {
                    "rate": rate, "seed": seed, "final": result.final, "first": result.first,
                    "validation": result.validation, "diverged": result.diverged, "seconds": result.seconds,
                }
                for seed, seed_runs in curve.results.items() for rate, result in seed_runs.items()
            ],
        })  # fmt: skip
    trends_found = find_trends(curves)
    report_facts = about | {
        "margin": grid.margin, "rates": grid.rates, "widths": grid.widths, "steps": grid.config.train.steps,
        "interventions": {name: list(overrides) for name, overrides in grid.interventions.items()},
        "curves": curve_rows, "trends": [asdict(trend) for trend in trends_found],
    }  # fmt: skip
    size = (3.6 * (len(grid.interventions) + 1), 4.2)
    return StudyReport(
        report_facts, _table(curves, grid.margin), in_words(trends_found), partial(_draw, grid, curves), size
    )


def _draw(grid: LrGrid, curves: Sequence[LrCurve], figure: Figure) -> None:
    """Loss against rate, a panel per intervention and a curve per width; on the right LR sensitivity over widths."""
    from matplotlib import colormaps

    names, widths = list(grid.interventions), sorted(grid.widths)
    all_axes = figure.subplots(1, len(names) + 1)
    width_colours = colormaps["viridis"]([0.85 * i / max(1, len(widths) - 1) for i in range(len(widths))])
    for curve in curves:
        axis, colour = all_axes[names.index(curve.intervention)], width_colours[widths.index(curve.width)]
        losses = curve.mean
        line_label = f"width {curve.width}"
        axis.plot(list(losses), list(losses.values()), "o-", color=colour, markersize=4, label=line_label)
        others = [
            (rate, loss) for seed in curve.results if seed not in curve.whole
            for rate, loss in curve.losses_by_rate(seed).items()
        ]  # fmt: skip
        axis.plot(
            [r for r, _ in others], [loss for _, loss in others], "x", color=colour, markersize=5, alpha=0.7
        )
    mean_first = fmean(
        result.first for curve in curves for runs in curve.results.values() for result in runs.values()
    )
    low = min(min(curve.mean.values()) for curve in curves)
    for name, axis in zip(names, all_axes, strict=False):
        axis.axhline(mean_first, color="0.6", linestyle=":", linewidth=1)
        loss_limits = (low - 0.05 * (mean_first - low), mean_first + 0.08 * (mean_first - low))
        axis.set(xscale="log", ylim=loss_limits, title=name, xlabel="learning rate")
    all_axes[0].set_ylabel("final training loss (nats per token)")
    all_axes[0].legend(
        fontsize="small", title="dotted: at initialization\nx: more seeds", title_fontsize="x-small"
    )
    for name in names:
        mine = [curve for curve in curves if curve.intervention == name]
        all_axes[-1].plot(
            [c.width for c in mine], [fmean(c.sensitivities) for c in mine], "o-", markersize=4, label=name
        )
    all_axes[-1].set_xscale("log", base=2)
    all_axes[-1].set_ylim(bottom=0)
    all_axes[-1].set(title="LR sensitivity", xlabel="width", ylabel="nats per token")
    all_axes[-1].legend(fontsize="small")
