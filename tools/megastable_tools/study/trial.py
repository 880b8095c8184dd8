"""A trial is one short training run of a study, on one rank, and its result is what the study keeps of it.

A run that diverges is a result: its losses are infinite from there on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import TypeAdapter

from megastable.base import durable
from megastable.base.errors import DataError
from megastable.run import records
from megastable.run.directory import RunDirectory, as_json, read_object

WINDOW = 10  # steps over which a loss is smoothed
LEARNT = 0.05  # nats per token by which a run must end below its first loss to count as trained
# One rank, no guard, and nothing that a run writes or measures beside its losses.
QUIET = (
    "parallel.tensor=1", "parallel.pipeline=1", "parallel.context=1", "parallel.sequence=false",
    "train.eval_interval=0", "checkpoint.interval=0", "checkpoint.at_end=false", "logging.trackers=[]",
    "logging.layers_interval=0", "logging.norms_interval=0", "logging.peak_tflops=1", "stability.enabled=false",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """name: of its files; no two of a study share one. overrides: of the study's recipe, with `QUIET` and run.seed."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class SavedResult:
    """A result of a study's run, with its file: complete, or not there at all."""

    def save(self, path: Path) -> None:
        """Raises DataError."""
        try:
            durable.write_file(path, (as_json(asdict(self)) + "\n").encode())
        except OSError as error:
            raise DataError(f"{path} could not be written: {error}: make room, start again") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises DataError for a file that is no result."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"{path}: not the result of a run ({reason}): remove it, and it runs again"
            ) from None


@dataclass(frozen=True)
class TrialResult(SavedResult):
    """losses: smoothed, of every step, nats per token; inf from the step on where it diverged. first: the loss of the
    first batch, before any update. validation: at the end; nan = not measured. seconds: of all steps."""

    losses: tuple[float, ...]
    first: float
    validation: float
    seconds: float
    parameters: int

    @property
    def final(self) -> float:
        return self.losses[-1]

    @property
    def capped(self) -> float:
        """The final loss, at most that of the initialization."""
        return min(self.final, self.first)

    @property
    def diverged(self) -> bool:
        """Whether it ended no better than it began."""
        return not self.final < self.first - LEARNT

    @classmethod
    def of(cls, run: Path) -> Self:
        """What a finished run directory says. Raises DataError."""
        table = records.read(run / "steps")
        losses = [math.nan if loss is None else loss for loss in table.column("loss").to_pylist()]
        summary = read_object(RunDirectory(run).summary)
        if not losses or not math.isfinite(losses[0]):
            raise DataError(f"{run}: the loss of the first batch, before any update, is not a finite number")
        validation = summary.get("val_loss")
        return cls(
            smoothed(losses), losses[0], math.nan if validation is None else float(validation),
            float(sum(table.column("seconds").to_pylist())), int(summary.get("parameters") or 0),
        )  # fmt: skip


def smoothed(losses: Sequence[float]) -> tuple[float, ...]:
    """The mean of the last `WINDOW` losses at every step, of fewer at the start; inf from a non-finite one on."""
    broken = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    sums = np.concatenate(([0.0], np.cumsum(losses[:broken])))
    ends = np.arange(1, broken + 1)
    begins = np.maximum(ends - WINDOW, 0)
    means = (sums[ends] - sums[begins]) / (ends - begins)
    return (*means.tolist(), *[math.inf] * (len(losses) - broken))
