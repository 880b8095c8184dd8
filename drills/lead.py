"""How long before the loss shows a slow fault it was warned of. Pure except for the reading."""

from __future__ import annotations

from collections.abc import Mapping

from megastable.run import records
from megastable.run.directory import RunDirectory

SMOOTH = 10  # steps of the exponential average of losses
SHOWS = 0.05  # nats above the undisturbed run's
ENOUGH = 20  # steps


def smoothed(run: RunDirectory) -> dict[int, float]:
    """Exponential average of the training losses by step; empty without records."""
    found, level = dict[int, float](), None
    for row in records.read(run.steps).to_pylist() if run.steps.exists() else ():
        level = row["loss"] if level is None else level + (row["loss"] - level) / SMOOTH
        found[row["step"]] = level
    return found


def shows(losses: Mapping[int, float], undisturbed: Mapping[int, float], begin: int) -> int | None:
    """The first step from `begin` on whose smoothed loss is `SHOWS` above the undisturbed run's; None: none is."""
    above = (step for step in sorted(losses) if losses[step] - undisturbed.get(step, losses[step]) > SHOWS)
    return next((step for step in above if step >= begin), None)
