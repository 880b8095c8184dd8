"""Compare recipes by the steps that each needs to reach a loss, every one tuned over the same number of rates.

A first seed chooses each candidate's learning rate, by the loss at its end; the other seeds are measured at that rate.
The loss to reach is the mean one of the first candidate at its end. Losses are training losses of a single pass,
smoothed by the mean of the last `WINDOW` steps. Real runs in processes of their own: nothing is shared but the corpus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from megastable.study.trial import QUIET, WINDOW, Trial, TrialResult
from megastable.study.workers import run_trials


@dataclass(frozen=True)
class TunedRun:
    """One run of a candidate."""

    rate: float
    seed: int
    result: TrialResult

    @property
    def final(self) -> float:
        return self.result.final


@dataclass(frozen=True)
class Tuned:
    """A candidate. overrides: of the recipe; tuning: one run per rate; measured: runs at the best rate, other seeds."""

    overrides: str
    tuning: tuple[TunedRun, ...]
    measured: tuple[TunedRun, ...]

    @property
    def rate(self) -> float:
        return best(self.tuning).rate

    def steps_to(self, target: float) -> list[int | None]:
        return [steps_to(run.result.losses, target) for run in self.measured]


def best(runs: Sequence[TunedRun]) -> TunedRun:
    """The run with the lowest final loss; of equal ones that with the lower rate."""
    return min(runs, key=lambda run: (run.final if math.isfinite(run.final) else math.inf, run.rate))


def steps_to(losses: Sequence[float], target: float) -> int | None:
    """The first step, counted from 1, with a whole window of losses and a mean of at most `target`; None = never."""
    return next(
        (i for i, loss in enumerate(losses, 1) if i >= min(WINDOW, len(losses)) and loss <= target), None
    )


def spread(values: Sequence[float]) -> str:
    """Mean and half the range of some numbers."""
    return f"{fmean(values):.3f} ± {(max(values) - min(values)) / 2:.3f}"


def target_of(first: Tuned) -> float:
    """The loss to reach: the first candidate's at its end, the mean of its measured seeds."""
    return fmean(run.final for run in first.measured)


def compare(
    recipe: Path,
    candidates: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    overrides: Sequence[str],
    folder: Path,
    jobs: int,
    watch: Callable[[], None],
) -> list[Tuned]:
    """Run everything, `jobs` runs at a time, in new run directories below `folder`. seeds: the first one tunes.

    Raises DataError, with the end of its output, for a run that fails.
    """

    found: dict[str, TrialResult] = {}

    def keep(trial: Trial, result: TrialResult) -> None:
        found[trial.name] = result
        watch()

    def train(wanted: Sequence[tuple[str, float, int]]) -> list[TunedRun]:
        """Runs of (candidate, rate, seed), in that order."""
        trials = [
            Trial(
                f"{candidates.index(candidate)}-{rate:g}-{seed}",
                (*QUIET, *overrides, *candidate.split(), f"optimizer.lr={rate!r}", f"run.seed={seed}"),
            )
            for candidate, rate, seed in wanted
        ]
        run_trials(recipe, trials, folder, jobs, keep)
        return [
            TunedRun(rate, seed, found[t.name]) for t, (_, rate, seed) in zip(trials, wanted, strict=True)
        ]

    tuning = train([(c, rate, seeds[0]) for c in candidates for rate in rates])
    tuned = {c: tuple(tuning[i * len(rates) : (i + 1) * len(rates)]) for i, c in enumerate(candidates)}
    measured = train([(c, best(tuned[c]).rate, seed) for c in candidates for seed in seeds[1:]])
    more = len(seeds) - 1
    return [Tuned(c, tuned[c], tuple(measured[i * more : (i + 1) * more])) for i, c in enumerate(candidates)]
