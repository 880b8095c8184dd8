"""Measures a state's vitals: norms and largest magnitudes of its tensors, and losses of probe samples. Collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import xxhash

from megastable.base.collectives import agree, first
from megastable.base.errors import DataError
from megastable.checkpoint.vitals import Vitals
from megastable.data.corpora import Corpora
from megastable.data.loader import Loader, MicroBatch
from megastable.engine.engine import Engine
from megastable.run.events.training_events import Warned
from megastable.run.log import RunLog

# This rank's part of the samples, padded to whole micro-batches; digests of the tokens of each.
Probes = tuple[Sequence[MicroBatch], list[str]]


class ProbeSamples:
    """The first `count` samples of the order, read on demand. loader: a new one of the corpora's samples.

    These samples exist in every run, also without validation data, and do not change with the blend.
    """

    def __init__(self, engine: Engine, loader: Callable[[Corpora], Loader], count: int, log: RunLog) -> None:
        self.engine, self.loader, self.count, self.log = engine, loader, count, log
        self._read: tuple[Corpora, Probes] | None = None

    def vitals(self, corpora: Corpora, step: int) -> Vitals:
        """Of the state that the engine holds, after `step`. Without FP8, whose history may differ and which may be off
        at the next start."""
        if self._read is None or self._read[0] is not corpora:
            self._read = corpora, self._samples(corpora, step)
        (micro_batches, digests), engine, losses = self._read[1], self.engine, list[float]()
        if digests:
            counters, now = engine.counters(), engine.numerics.now
            engine.numerics.switch(replace(now, fp8=False))
            try:
                losses = engine.evaluate(micro_batches)[: len(digests)].tolist()
            finally:
                engine.numerics.switch(now)
                engine.restore_counters(counters)
        return Vitals(
            losses=losses, samples=digests, sizes=engine.flat_state().sizes(list(engine.probe.tally.rows)),
            precision=engine.config.precision.kind,
        )  # fmt: skip

    def _samples(self, corpora: Corpora, step: int) -> Probes:
        with self.loader(corpora) as loader:
            try:
                return read_probes(loader, self.count)
            except DataError as error:
                self.log.emit(
                    Warned(step=step, text=f"there are no probe samples: {error}"),
                    say=f"WARNING: the probe samples of checkpoints cannot be read: {error}",
                )
                return [], []


def read_probes(loader: Loader, count: int) -> Probes:
    """The samples at the first `count` positions, divided as by `loader`. Raises DataError on all ranks.

    A digest depends on the tokens and on whether attention crosses documents, so that only comparable losses are
    compared.
    """
    if not count:
        return [], []
    positions = np.arange(count, dtype=np.int64)
    padded = np.concatenate([positions, np.repeat(positions[-1:], -count % loader.unit)])
    apart = b"apart" if loader.keep_documents_apart else b""

    def digests() -> list[str]:
        samples = loader.source.samples(positions)
        return [xxhash.xxh3_64_hexdigest(row.tobytes() + apart) for row in samples]

    return agree(lambda: loader.read(padded)), first(digests)
