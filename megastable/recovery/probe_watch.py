"""Measures the probe: the losses of the same few samples, which are never trained on, at every snapshot and once in a
while. Collective."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megastable.base.collectives import first
from megastable.data.loader import Loader, MicroBatch
from megastable.engine.engine import Engine
from megastable.guard.probe_trend import ProbeTrend, Rise
from megastable.run.events.stability_events import Probed
from megastable.run.log import RunLog

EVERY = 25  # steps between two looks, at most
MOST = 64  # samples
SHARE = 0.2  # of a global batch: a look is a forward pass of so much, 0.3 % of the time of its steps


class ProbeWatch:
    """held_out: this rank's part of the validation samples; without any there is no probe."""

    def __init__(self, engine: Engine, loader: Loader, held_out: Sequence[MicroBatch], log: RunLog) -> None:
        self.engine, self.log = engine, log
        wanted = min(MOST, int(SHARE * loader.batch))
        self._batches = list(held_out[: max(1, wanted // loader.unit)])  # of each rank, one at least
        self.trend = ProbeTrend()
        self._losses = np.empty(0)

    def look(self, step: int) -> Rise | None:
        """After `step`: whether the probe has risen."""
        if not self._batches:
            return None
        self._losses = self.engine.evaluate(self._batches).numpy()
        self.log.emit(Probed(step=step, loss=float(self._losses.mean()), samples=self._losses.size))
        return first(lambda: self.trend.judge(step, self._losses))

    def accept(self, step: int) -> None:
        """The rise of the last look was no damage."""
        self.trend.accept(step, self._losses)
