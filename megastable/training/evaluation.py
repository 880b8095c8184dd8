"""Evaluates the model on fixed samples of the validation text. Collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from megastable.base.collectives import agree
from megastable.config.tree import TrainConfig
from megastable.data.loader import Loader, MicroBatch
from megastable.data.source import Source
from megastable.engine.engine import Engine


@dataclass(frozen=True)
class Evaluation:
    """This rank's share of the samples, padded to whole micro-batches on every rank; samples: how many count."""

    engine: Engine
    micro_batches: list[MicroBatch]
    samples: int

    @classmethod
    def of(
        cls, engine: Engine, source: Source | None, config: TrainConfig, ranks: int,
        loader: Callable[[Source, int], Loader],
    ) -> Self | None:  # fmt: skip
        """None if the recipe or the corpora have no validation samples. ranks: that share them; loader: of a source's
        first samples, in global batches of a given size. Raises DataError on all ranks."""
        if not config.eval_samples or source is None:
            return None
        unit = config.micro_batch * ranks

        def read() -> list[MicroBatch]:
            with loader(source, -(-config.eval_samples // unit) * unit) as batches:
                return next(batches).micro_batches

        return cls(engine, agree(read), config.eval_samples)

    def loss(self) -> float:
        """Mean cross-entropy, nats per token."""
        return float(self.engine.evaluate(self.micro_batches)[: self.samples].mean())
