"""Compares candidates, each some overrides of a recipe, over several seeds: all train with the same seeds, on the same
samples, and differences are taken seed by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.study.paired import Interval, interval, paired
from megastable.study.trial import QUIET, Trial, TrialResult


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

    def trial(self, index: int, seed: int) -> Trial:
        return Trial(f"{index}-s{seed}", (*self.common, *self.candidates[index].split(), f"run.seed={seed}"))

    def trials(self) -> list[Trial]:
        """Seed by seed, so that an interrupted study has whole pairs."""
        return [self.trial(index, seed) for seed in self.seeds for index in range(len(self.candidates))]

    def check(self) -> None:
        """Raises ConfigError for a candidate that could not start."""
        for index in range(len(self.candidates)):
            recipe.load(self.path, self.trial(index, self.seeds[0]).overrides)


def common(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides of all trials."""
    return (*QUIET, *overrides)


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


def compare(grid: CompareGrid, results: Mapping[str, TrialResult]) -> list[Compared]:
    """In the order of the candidates."""
    found: list[Compared] = []
    for index, candidate in enumerate(grid.candidates):
        mine = tuple(results[grid.trial(index, seed).name] for seed in grid.seeds)
        first = found[0].results if found else mine
        training, validation = [r.capped for r in mine], [r.validation for r in mine]
        found.append(Compared(
            candidate, mine, interval(training), interval(validation), paired(training, [r.capped for r in first]),
            paired(validation, [r.validation for r in first]),
        ))  # fmt: skip
    return found
