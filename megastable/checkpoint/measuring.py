"""Measure a state's vitals: norms and largest magnitudes of its tensors, and losses of probe samples. Collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from megastable.base.collectives import agree, first
from megastable.checkpoint.vitals import Vitals
from megastable.data.loader import Loader, MicroBatch


@dataclass(frozen=True)
class Probes:
    """Fixed samples: this rank's part of them, padded to whole micro-batches; digests: of the tokens of each."""

    micro_batches: Sequence[MicroBatch]
    digests: list[str]


NONE = Probes([], [])


def read_probes(loader: Loader, count: int) -> Probes:
    """The samples at the first `count` positions, divided as by `loader`. Raises DataError on all ranks.

    These samples exist in every run, also without validation data, and do not change with the blend.
    A digest depends on the tokens and on whether attention crosses documents, so that only comparable losses are
    compared.
    """
    if not count:
        return NONE
    positions = np.arange(count, dtype=np.int64)
    padded = np.concatenate([positions, np.repeat(positions[-1:], -count % loader.unit)])
    apart = b"apart" if loader.keep_documents_apart else b""

    def digests() -> list[str]:
        samples = loader.source.samples(positions)
        return [xxhash.xxh3_64_hexdigest(row.tobytes() + apart) for row in samples]

    return Probes(agree(lambda: loader.read(padded)), first(digests))


def measure(engine: Any, probes: Probes) -> Vitals:
    """The vitals of the engine's state. Without FP8, whose history may differ and which may be off at the next
    start."""
    losses: list[float] = []
    if probes.digests:
        counters, now = engine.counters(), engine.numerics.now
        engine.numerics.switch(replace(now, fp8=False))
        try:
            losses = engine.evaluate(probes.micro_batches)[: len(probes.digests)].tolist()
        finally:
            engine.numerics.switch(now)
            engine.restore_counters(counters)
    return Vitals(
        losses=losses, samples=probes.digests, sizes=engine.flat_state().sizes(list(engine.probe.tally.rows)),
        precision=engine.config.precision.kind,
    )  # fmt: skip
