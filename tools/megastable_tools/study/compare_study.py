"""Compares candidates, each some overrides of a recipe, over several seeds: all train with the same seeds, on the same
samples, and differences are taken seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from rich.table import Table

from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.report.figures import limit_value
from megastable.report.text_output import make_table
from megastable_tools.study.study_directory import StudyReport
from megastable_tools.study.trial import Trial, TrialResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SHARE = 0.95  # of the confidence intervals


@dataclass(frozen=True)
class CompareGrid:
    """candidates: overrides with spaces between; the others are compared with the first. common: of all of them."""

    path: Path
    config: RunConfig
    common: tuple[str, ...]
    candidates: tuple[str, ...]
    seeds: tuple[int, ...]

    @property
    def axes(self) -> dict[str, Any]:
        """For the identity of the study."""
        return {"candidates": {str(i): one for i, one in enumerate(self.candidates)}, "seeds": self.seeds}

    def make_trial(self, index: int, seed: int) -> Trial:
        return Trial(f"{index}-s{seed}", (*self.common, *self.candidates[index].split(), f"run.seed={seed}"))

    def make_trials(self) -> list[Trial]:
        """Seed by seed, so that an interrupted study has whole pairs."""
        return [self.make_trial(index, seed) for seed in self.seeds for index in range(len(self.candidates))]

    def check_candidates(self) -> None:
        """Raises ConfigError for a candidate that could not start."""
        for index in range(len(self.candidates)):
            recipe.load_recipe(self.path, self.make_trial(index, self.seeds[0]).overrides)


# Means with confidence intervals, and paired differences


@dataclass(frozen=True)
class Interval:
    """A mean, and half the width of its confidence interval by Student's t: inf of one value. nan, if a value is no
    finite number."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def confidence_interval(values: Sequence[float]) -> Interval:
    """Of the mean of independent values."""
    if not all(map(math.isfinite, values)):
        return Interval(math.nan, math.nan)
    n = len(values)
    half_width = student_quantile(n - 1) * stdev(values) / math.sqrt(n) if n > 1 else math.inf
    return Interval(fmean(values), half_width)


def paired_interval(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Of the mean of `values` less `others`, pair by pair: what a pair shares, such as a seed's data, cancels."""
    return confidence_interval([a - b for a, b in zip(values, others, strict=True)])


def student_quantile(freedom: int, share: float = SHARE) -> float:
    """The t below which |t| is in this share of cases; freedom: degrees of freedom, at least 1."""
    low_t, high_t = 0.0, 1.0
    while student_share_within(high_t, freedom) < share:
        high_t *= 2
    for _ in range(60):
        middle_t = (low_t + high_t) / 2
        low_t, high_t = (
            (middle_t, high_t) if student_share_within(middle_t, freedom) < share else (low_t, middle_t)
        )
    return high_t


def student_share_within(t: float, freedom: int) -> float:
    """The probability that |Student's t| is below `t` (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


# The comparison


@dataclass(frozen=True)
class Compared:
    """A candidate's final losses, nats per token: the training loss, at most that at initialization, and the validation
    loss. Differences: to the first candidate, paired by seed. results: by seed."""

    candidate: str
    results: tuple[TrialResult, ...]
    training: Interval
    validation: Interval
    training_difference: Interval
    validation_difference: Interval

    @property
    def diverged(self) -> int:
        return sum(result.diverged for result in self.results)


def compare_candidates(grid: CompareGrid, results: Mapping[str, TrialResult]) -> list[Compared]:
    """In the order of the candidates."""
    found: list[Compared] = []
    for index, candidate in enumerate(grid.candidates):
        own_results = tuple(results[grid.make_trial(index, seed).name] for seed in grid.seeds)
        first = found[0].results if found else own_results
        training, validation = [r.capped for r in own_results], [r.validation for r in own_results]
        found.append(Compared(
            candidate, own_results, confidence_interval(training), confidence_interval(validation),
            paired_interval(training, [r.capped for r in first]),
            paired_interval(validation, [r.validation for r in first]),
        ))  # fmt: skip
    return found


# What it shows


def label(candidate: str) -> str:
    return candidate or "the recipe"


def _table(found: Sequence[Compared]) -> Table:
    """A row per candidate."""
    result_table = make_table(
        "candidate", "final loss", "validation", "less the first", "validation, less the first", "diverged", "s a step",
        caption=f"nats per token; ±: {SHARE:.0%} confidence interval of the mean over {len(found[0].results)} seeds; "
        "differences are paired by seed",
    )  # fmt: skip
    for index, one in enumerate(found):
        step_count = sum(len(result.losses) for result in one.results)
        result_table.add_row(
            label(one.candidate), _said(one.training), _said(one.validation),
            *(("", "") if not index else (_said(one.training_difference, "+"), _said(one.validation_difference, "+"))),
            str(one.diverged or "-"), f"{sum(result.seconds for result in one.results) / step_count:.3f}",
        )  # fmt: skip
    return result_table


def _said(one: Interval, sign: str = "") -> str:
    if math.isnan(one.mean):
        return "-"
    return f"{one.mean:{sign}.3f}" + ("" if math.isinf(one.half) else f" ± {one.half:.3f}")


def describe_differences(found: Sequence[Compared]) -> list[str]:
    """A sentence for each candidate but the first: whether the seeds show a difference."""
    sentences_told = []
    for compared_candidate in found[1:]:
        by = compared_candidate.training_difference
        if math.isinf(by.half):
            verdict_text = "one seed shows nothing: give more --seeds"
        elif not by.excludes_zero:
            verdict_text = "no difference is shown"
        else:
            verdict_text = "worse" if by.mean > 0 else "better"
        interval_text = "" if math.isinf(by.half) else f" ({SHARE:.0%}: {by.low:+.3f} to {by.high:+.3f})"
        sentences_told.append(
            f"{label(compared_candidate.candidate)}: {by.mean:+.3f} nat{interval_text}: {verdict_text}"
        )
    return sentences_told


def make_report(grid: CompareGrid, found: Sequence[Compared], about: dict[str, Any]) -> StudyReport:
    """Everything, the losses of every step, too."""
    report_facts = about | {
        "confidence": SHARE, "seeds": grid.seeds, "candidates": [
            {
                "overrides": compared_candidate.candidate, "diverged": compared_candidate.diverged,
                **{
                    interval_name: asdict(getattr(compared_candidate, interval_name))
                    for interval_name in ("training", "validation", "training_difference", "validation_difference")
                },
                "trials": [
                    {"seed": seed, "final": trial_result.final, **asdict(trial_result)}
                    for seed, trial_result in zip(grid.seeds, compared_candidate.results, strict=True)
                ],
            }
            for compared_candidate in found
        ],
    }  # fmt: skip
    return StudyReport(
        report_facts, _table(found), describe_differences(found), partial(_draw, found), (12, 4.5)
    )


def _draw(found: Sequence[Compared], figure: Figure) -> None:
    """Left the loss over the steps, the mean of the seeds between lowest and highest; right the differences to the
    first candidate, every seed and the interval of their mean."""
    loss_axis, right = figure.subplots(1, 2)
    for candidate_index, one in enumerate(found):
        colour, steps = f"C{candidate_index % 10}", range(1, 1 + len(one.results[0].losses))
        by_step = [
            list(map(limit_value, step_losses))
            for step_losses in zip(*(trial_result.losses for trial_result in one.results), strict=True)
        ]
        loss_axis.plot(
            steps,
            [fmean(step_losses) for step_losses in by_step],
            color=colour,
            linewidth=1,
            label=label(one.candidate),
        )
        loss_axis.fill_between(
            steps, [min(x) for x in by_step], [max(x) for x in by_step], color=colour, alpha=0.2, linewidth=0
        )
        if candidate_index:
            pairs = zip(one.results, found[0].results, strict=True)
            points = [
                limit_value(own_result.capped - first_result.capped) for own_result, first_result in pairs
            ]
            by, row_number = one.training_difference, len(found) - candidate_index
            right.plot(points, [row_number] * len(points), "o", color=colour, markersize=4, alpha=0.5)
            half_width = by.half if math.isfinite(by.half) else 0.0
            right.errorbar([by.mean], [row_number], xerr=[half_width], fmt="D", color=colour, capsize=5)
    last_losses = sorted(loss for one in found for loss in one.results[0].losses if math.isfinite(loss))
    if last_losses:
        loss_axis.set_ylim(
            last_losses[0] - 0.1, last_losses[int(0.9 * (len(last_losses) - 1))] + 0.2
        )  # the start is far above the rest
    loss_axis.set(xlabel="step", ylabel="training loss (nats per token)")
    loss_axis.legend(fontsize="small")
    right.axvline(0, color="0.6", linewidth=1)
    right.set_yticks(
        range(1, len(found)), [label(one.candidate) for one in reversed(found[1:])], fontsize="small"
    )
    right.set_ylim(0.5, max(1, len(found) - 1) + 0.5)
    right.set_xlabel(f"final loss less that of {label(found[0].candidate)}, by seed (nats per token)")
