"""Measures the vitals of a run's state on the probe samples, which its checkpoints remember. Collective."""

from __future__ import annotations

from collections.abc import Callable

from megastable.base.errors import DataError
from megastable.checkpoint.measuring import NONE, Probes, measure, read_probes
from megastable.checkpoint.vitals import Vitals
from megastable.data.corpora import Corpora
from megastable.data.loader import Loader
from megastable.engine.engine import Engine
from megastable.run.events.training_events import Warned
from megastable.run.log import RunLog


class ProbeSamples:
    """The first `count` samples of the order, read on demand. loader: a new one of the corpora's samples."""

    def __init__(self, engine: Engine, loader: Callable[[Corpora], Loader], count: int, log: RunLog) -> None:
        self.engine, self.loader, self.count, self.log = engine, loader, count, log
        self._read: tuple[Corpora, Probes] | None = None

    def vitals(self, corpora: Corpora, step: int) -> Vitals:
        """Of the state that the engine holds, after `step`."""
        if self._read is None or self._read[0] is not corpora:
            self._read = corpora, self._samples(corpora, step)
        return measure(self.engine, self._read[1])

    def _samples(self, corpora: Corpora, step: int) -> Probes:
        with self.loader(corpora) as loader:
            try:
                return read_probes(loader, self.count)
            except DataError as error:
                self.log.emit(
                    Warned(step=step, text=f"there are no probe samples: {error}"),
                    say=f"WARNING: the probe samples of checkpoints cannot be read: {error}",
                )
                return NONE
