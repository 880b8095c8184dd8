"""Evaluates the model on fixed samples: the validation text, and probes for the vitals of checkpoints. Collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import xxhash

from megastable.base.collectives import run_on_all, run_on_first
from megastable.base.errors import DataError
from megastable.checkpoint.vitals import Vitals
from megastable.config.training import TrainConfig
from megastable.data.corpora import Corpora, CorpusSamples, HeldOut, corpus_samples, samples_in_turn
from megastable.data.loader import Loader, MicroBatch
from megastable.data.samples import Source
from megastable.engine.engine import Engine
from megastable.run.events.training_events import Evaluated, Warned
from megastable.run.log import RunLog


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
    def for_run(
        cls, engine: Engine, held_out: HeldOut, config: TrainConfig, ranks: int,
        loader: Callable[[Source, int], Loader],
    ) -> Self | None:  # fmt: skip
        """None if the recipe or the corpora have no validation samples. ranks: that share them; loader: of a source's
        first samples, in global batches of a given size. Raises DataError on all ranks."""
        blend_source, alone_source = held_out.blend, held_out.alone
        samples_together = config.micro_batch * ranks
        if not config.eval_samples or blend_source is None:
            return None
        computed_samples = -(-config.eval_samples // samples_together) * samples_together
        samples_each = config.eval_samples_per_corpus
        if samples_each is None or (held_out.in_turn and not samples_each):
            # So that all corpora together cost at most as much as the blend does.
            samples_each = -(-config.eval_samples // len(held_out.at_first))

        def read_positions(source: Source, positions: npt.NDArray[np.int64]) -> list[MicroBatch]:
            with loader(source, samples_together) as batches:
                return batches.read_micro_batches(_padded(positions, samples_together))

        if held_out.in_turn:
            of_sets = samples_in_turn(blend_source.order, samples_each)
            set_batches = run_on_all(lambda: read_positions(blend_source, of_sets.further))
            has_several = len(of_sets.places) > 1 and config.eval_samples_per_corpus != 0
            places_by_set = of_sets.places if has_several else {}
            return cls(engine, set_batches, len(of_sets.further), places_by_set, len(of_sets.places))
        of_corpora = CorpusSamples(np.empty(0, np.int64), {})
        if alone_source is not None and samples_each:
            of_corpora = corpus_samples(
                blend_source.order, computed_samples, alone_source.order, samples_each
            )

        def read() -> list[MicroBatch]:
            with loader(blend_source, computed_samples) as batches:
                blend_batches = next(batches).micro_batches
            if alone_source is None or not len(of_corpora.further):
                return blend_batches
            return blend_batches + read_positions(alone_source, of_corpora.further)

        return cls(engine, run_on_all(read), config.eval_samples, of_corpora.places)

    def measure_losses(self, step: int) -> Evaluated:
        """Mean cross-entropy over the blend's samples, and over those of each corpus; nats per token."""
        begin_time = time.perf_counter()
        sample_losses = self.engine.evaluate_samples(self.micro_batches)
        corpus_losses = {
            corpus_name: {"loss": float(sample_losses[places].mean()), "samples": len(places)}
            for corpus_name, places in self.places.items()
        }
        return Evaluated(
            step=step, loss=float(sample_losses[: self.samples].mean()), samples=self.samples,
            seconds=round(time.perf_counter() - begin_time, 3), **({"corpora": corpus_losses} if corpus_losses else {}),
        )  # fmt: skip


def _padded(positions: npt.NDArray[np.int64], unit: int) -> npt.NDArray[np.int64]:
    """A multiple of `unit` positions: the first one again at the end, whose loss counts once all the same."""
    return np.append(positions, np.repeat(positions[:1], -len(positions) % unit))


# This rank's part of the samples, padded to whole micro-batches; digests of the tokens of each.
Probes = tuple[Sequence[MicroBatch], list[str]]


class ProbeSamples:
    """The first `count` samples of the order, read on demand. loader: a new one of the corpora's samples.

    These samples exist in every run, also without validation data, and do not change with the blend.
    """

    def __init__(self, engine: Engine, loader: Callable[[Corpora], Loader], count: int, log: RunLog) -> None:
        self.engine, self.loader, self.count, self.log = engine, loader, count, log
        self._read: tuple[Corpora, Probes] | None = None

    def measure_vitals(self, corpora: Corpora, step: int) -> Vitals:
        """Of the state that the engine holds, after `step`. Without FP8, whose history may differ and which may be off
        at the next start."""
        if self._read is None or self._read[0] is not corpora:
            self._read = corpora, self._samples(corpora, step)
        (micro_batches, digests), engine, probe_losses = self._read[1], self.engine, list[float]()
        if digests:
            saved_counters, current_numerics = engine.read_counters(), engine.numerics.now
            engine.numerics.switch_to(replace(current_numerics, fp8=False))
            try:
                probe_losses = engine.evaluate_samples(micro_batches)[: len(digests)].tolist()
            finally:
                engine.numerics.switch_to(current_numerics)
                engine.restore_counters(saved_counters)
        return Vitals(
            losses=probe_losses, samples=digests,
            sizes=engine.flat_state().measure_sizes(list(engine.probe.tally.rows)),
            precision=engine.config.precision.kind,
        )  # fmt: skip

    def _samples(self, corpora: Corpora, step: int) -> Probes:
        with self.loader(corpora) as loader:
            try:
                return read_probes(loader, self.count)
            except DataError as error:
                self.log.emit_event(
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
    probe_positions = np.arange(count, dtype=np.int64)
    padded_positions = np.append(probe_positions, np.repeat(probe_positions[-1:], -count % loader.unit))
    apart_mark = b"apart" if loader.keep_documents_apart else b""

    def digests() -> list[str]:
        probe_tokens = loader.source.read_samples(probe_positions)
        return [xxhash.xxh3_64_hexdigest(sample_row.tobytes() + apart_mark) for sample_row in probe_tokens]

    return run_on_all(lambda: loader.read_micro_batches(padded_positions)), run_on_first(digests)
