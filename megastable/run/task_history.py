"""Follows the evaluations of tasks: which there were, and which scores have fallen below their best. Pure.

A score of few questions is noisy, and the best of many noisy scores is a lucky one. So the median of the last three
evaluations is compared with the best such median, and the difference is also told in standard deviations of a single
evaluation: the median distance of two evaluations in a row, over 0.954 (of two normal variables with equal mean).
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field
from math import isfinite
from statistics import median

from megastable.base.text import visible
from megastable.run.events.training_events import TasksEvaluated, TasksFailed, TasksSkipped

OUTCOMES = ("evaluated", "failed", "skipped")
TOGETHER = 3  # evaluations in a median
KEPT = 20  # distances between two evaluations in a row
ENOUGH = 4  # of them, for a standard deviation
NORMAL = 0.954  # median distance of two evaluations, in standard deviations of one
# By the name of the metric, less is better; of all others, more.
LESS_IS_BETTER = re.compile(
    r"(?:.*[/_])?(?:perplexity|ppl|bits_per_byte|loss|nll|brier_score|error|ter|wer|cer|mse|mae|rmse|ece)(?:,.*)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ScoreDrop:
    """How much worse a score is than at its best. ratio: as a share of the best; sigmas: in standard deviations of one
    evaluation, infinite where it was always the same."""

    ratio: float
    sigmas: float


@dataclass(frozen=True)
class TaskSummary:
    """step: of the last evaluation, scores: its numbers by name, drops: of those with enough evaluations. settled:
    newest step whose checkpoint was evaluated, has failed or was passed over; failures: since the last success; counts:
    of checkpoints by outcome."""

    step: int
    scores: dict[str, float]
    drops: dict[str, ScoreDrop]
    settled: int
    failures: int
    counts: dict[str, int]


@dataclass
class _OneTask:
    last: deque[float] = field(default_factory=lambda: deque(maxlen=TOGETHER))
    distances: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    best: float | None = None

    def add(self, score: float, less: bool) -> None:
        if self.last:
            self.distances.append(abs(score - self.last[-1]))
        self.last.append(score)
        if len(self.last) == TOGETHER:
            now = median(self.last)
            better = min if less else max
            self.best = now if self.best is None else better(self.best, now)

    def drop(self) -> ScoreDrop | None:
        if not self.best or len(self.distances) < ENOUGH:
            return None
        fallen = abs(self.best - median(self.last))
        sigma = median(self.distances) / NORMAL
        return ScoreDrop(
            fallen / abs(self.best), fallen / sigma if sigma else float("inf") if fallen else 0.0
        )


@dataclass
class TaskHistory:
    """Of one run, from its events."""

    _step: int = 0
    _settled: int = 0
    _failures: int = 0
    _scores: dict[str, float] = field(default_factory=dict)
    _tasks: dict[str, _OneTask] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))

    def add(self, event: TasksEvaluated | TasksFailed | TasksSkipped) -> None:
        """Take in one event; missing or malformed fields are ignored."""
        step = event.of_step or 0
        self._settled = max(self._settled, step)
        match event:
            case TasksEvaluated():
                self._counts["evaluated"] += 1
                self._step, self._failures = step, 0
                self._scores = {visible(name, 120): value for name, value in event.numbers.items()}
                for name, score in self._scores.items():
                    one = self._tasks.setdefault(name, _OneTask())
                    if isfinite(score):
                        one.add(score, LESS_IS_BETTER.fullmatch(name) is not None)
            case TasksFailed():
                self._counts["failed"] += 1
                self._failures += 1
            case TasksSkipped():
                self._counts["skipped"] += 1

    def summary(self) -> TaskSummary:
        """What is known now."""
        drops = {name: drop for name in self._scores if (drop := self._tasks[name].drop()) is not None}
        counts = dict(self._counts)
        return TaskSummary(self._step, dict(self._scores), drops, self._settled, self._failures, counts)
