"""Evaluates the model on fixed samples of the validation text. Collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from megastable.base.collectives import agree
from megastable.config.training import TrainConfig
from megastable.data.held_out import CorpusSamples, HeldOut, corpus_samples, samples_in_turn
from megastable.data.loader import Loader, MicroBatch
from megastable.data.source import Source
from megastable.engine.engine import Engine
from megastable.run.events.training_events import Evaluated


@dataclass(frozen=True)
class Evaluation:
    """This rank's share of the samples, padded to whole micro-batches on every rank. samples: how many of the first
    ones are the blend's; places: of the samples of each corpus among all of them; sets: of which the first samples hold
    one each."""

    engine: Engine
    micro_batches: list[MicroBatch]
    samples: int
    places: Mapping[str, list[int]]
    sets: int = 1

    @classmethod
    def of(
        cls, engine: Engine, held_out: HeldOut, config: TrainConfig, ranks: int,
        loader: Callable[[Source, int], Loader],
    ) -> Self | None:  # fmt: skip
        """None if the recipe or the corpora have no validation samples. ranks: that share them; loader: of a source's
        first samples, in global batches of a given size. Raises DataError on all ranks."""
        blend, alone, unit = held_out.blend, held_out.alone, config.micro_batch * ranks
        if not config.eval_samples or blend is None:
            return None
        computed = -(-config.eval_samples // unit) * unit
        count = config.eval_samples_per_corpus
        if count is None or (held_out.in_turn and not count):
            # So that all corpora together cost at most as much as the blend does.
            count = -(-config.eval_samples // len(held_out.at_first))
        if held_out.in_turn:
            of_sets = samples_in_turn(blend.order, count)

            def read_sets() -> list[MicroBatch]:
                with loader(blend, unit) as batches:
                    return batches.read(_padded(of_sets.further, unit))

            sets, several = (
                len(of_sets.places),
                len(of_sets.places) > 1 and config.eval_samples_per_corpus != 0,
            )
            places = of_sets.places if several else {}
            return cls(engine, agree(read_sets), len(of_sets.further), places, sets)
        of_corpora = CorpusSamples(np.empty(0, np.int64), {})
        if alone is not None and count:
            of_corpora = corpus_samples(blend.order, computed, alone.order, count)
        further = _padded(of_corpora.further, unit)

        def read() -> list[MicroBatch]:
            with loader(blend, computed) as batches:
                found = next(batches).micro_batches
            if alone is None or not len(further):
                return found
            with loader(alone, unit) as batches:
                return found + batches.read(further)

        return cls(engine, agree(read), config.eval_samples, of_corpora.places)

    def measure(self, step: int) -> Evaluated:
        """Mean cross-entropy over the blend's samples, and over those of each corpus; nats per token."""
        begin = time.perf_counter()
        losses = self.engine.evaluate(self.micro_batches)
        corpora = {
            name: {"loss": float(losses[places].mean()), "samples": len(places)}
            for name, places in self.places.items()
        }
        return Evaluated(
            step=step, loss=float(losses[: self.samples].mean()), samples=self.samples,
            seconds=round(time.perf_counter() - begin, 3), **({"corpora": corpora} if corpora else {}),
        )  # fmt: skip


def _padded(positions: npt.NDArray[np.int64], unit: int) -> npt.NDArray[np.int64]:
    """A multiple of `unit` positions: the first one again at the end, whose loss counts once all the same."""
    return np.append(positions, np.repeat(positions[:1], -len(positions) % unit))
