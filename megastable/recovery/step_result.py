"""Holds a finished step: its batch, its measurements, and the run's state before and after it."""

from __future__ import annotations

from dataclasses import dataclass

from megastable.checkpoint.store import RunState
from megastable.data.loader import Step
from megastable.engine.measured import Measured


@dataclass(frozen=True)
class StepResult:
    """From `before` to `state`; applied: the update was not refused; lr: its rate. It took `seconds`, of which the rank
    waited `waited` for data. kept: the gradient's norm after clipping, as a share of that before; above 1 is possible
    with `worker`."""

    batch: Step
    measured: Measured
    applied: bool
    before: RunState
    state: RunState
    lr: float
    seconds: float
    waited: float
    kept: float = 1.0
