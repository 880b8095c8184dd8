"""The small-scale proxy experiment of Wortsman et al. (arXiv:2309.14322): final loss against learning rate, for several
widths and interventions.

The first seeds train at every rate. More seeds then train where a curve leaves its basin: at the best rate, at the
highest usable one and at the one above it. So the end of the usable range gets a spread without three whole grids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.study.lr_sensitivity import LrCurve, edges
from megastable.study.model_shapes import at_width
from megastable.study.study_directory import StudyDirectory, run_missing
from megastable.study.trial import QUIET, Trial, TrialResult

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
