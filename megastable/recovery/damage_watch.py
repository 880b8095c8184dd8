"""Looks for damage to the model that no batch shows, at every snapshot and once in a while: the probe, losses of the
same few samples, which are never trained on; and the norms of every tensor and of its second moments. Collective."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megastable.base.collectives import first
from megastable.checkpoint.store import RunState
from megastable.data.loader import Loader, MicroBatch
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.run.events.stability_events import Probed
from megastable.run.log import RunLog
from megastable_guard.damage import ProbeTrend, Rise, TensorJump, TensorLook, TensorNorms, TensorPaces

EVERY = 25  # steps between two looks, at most
MOST = 64  # samples
SHARE = 0.2  # of a global batch: a look is a forward pass of so much, 0.3 % of the time of its steps
FORGETFUL = "spam", "stable_spam"  # whose moments begin again every so many updates


class ProbeWatch(Watch):
    """held_out: this rank's part of the validation samples; without any there is no probe. sets: of which the first
    samples hold one each, and the probe at least that. Rank 0 has the trend."""

    name = "probe"
    state: ProbeTrend

    def __init__(
        self, engine: Engine, loader: Loader, held_out: Sequence[MicroBatch], log: RunLog, sets: int = 1
    ) -> None:
        self.engine, self.log = engine, log
        wanted = min(MOST, int(SHARE * loader.batch))
        self._batches = list(held_out[: max(wanted // loader.unit, -(-sets // loader.unit))])
        digests = [zlib.crc32(batch.tokens.numpy().tobytes()) for batch in self._batches]
        self.state = ProbeTrend(samples=f"{digests} {loader.unit}")
        self._losses = np.empty(0)

    def look(self, step: int) -> Rise | None:
        """After `step`: whether the probe has risen."""
        if not self._batches:
            return None
        self._losses = self.engine.evaluate(self._batches).numpy()
        self.log.emit(Probed(step=step, loss=float(self._losses.mean()), samples=self._losses.size))
        return first(lambda: self.state.judge(step, self._losses))

    def accept(self, step: int) -> None:
        """The rise of the last look was no damage."""
        first(lambda: self.state.accept(step, self._losses))

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        self.state.rewind(step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("samples") == self.state.samples:  # else other validation data, or another batch
            super().load_state_dict(state)


class TensorWatch(Watch):
    name = "tensors"
    state: TensorPaces

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._names = sorted(engine.flat_state().whole_parameters(engine.topology.layout.tensor))
        self.state = TensorPaces()
        self._look: TensorLook | None = None

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        self.state.rates += rate

    def measure(self) -> dict[str, TensorNorms]:
        """The norms of the state that the engine holds, by tensor."""
        weights, moments = self.engine.flat_state().tensor_norms(self._names)
        return {
            name: TensorNorms(weight, moment)
            for name, weight, moment in zip(self._names, weights, moments, strict=True)
        }

    def look(self, state: RunState) -> TensorJump | None:
        """After a step: whether a tensor has jumped since the last look."""
        betas = [group["betas"][1] for group in self.engine.optimizer.param_groups if "betas" in group]
        forgets = self.engine.config.optimizer.name in FORGETFUL
        self._look = TensorLook(state.step, self.state.rates, state.updates, self.measure())
        return self.state.judge(self._look, None if forgets else min(betas, default=None))

    def accept(self) -> None:
        """The jump of the last look is the run's own work."""
        if self._look is not None:
            self.state.accept(self._look)

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        self.state.rewind(step)
        if saved is not None:
            self.state.rates = TensorPaces.model_validate(saved).rates
