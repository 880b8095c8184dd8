"""Looks for damage to the model that no batch shows, at every snapshot and once in a while: the probe, losses of the
same few samples, which are never trained on; and the norms of every tensor and of its second moments. Collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from megastable.base.collectives import first
from megastable.checkpoint.store import RunState
from megastable.data.loader import Loader, MicroBatch
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.guard.damage import ProbeTrend, Rise, TensorJump, TensorNorms, TensorPaces
from megastable.run.events.stability_events import Probed
from megastable.run.log import RunLog

EVERY = 25  # steps between two looks, at most
MOST = 64  # samples
SHARE = 0.2  # of a global batch: a look is a forward pass of so much, 0.3 % of the time of its steps
FORGETFUL = "spam", "stable_spam"  # whose moments begin again every so many updates


class ProbeWatch(Watch):
    """held_out: this rank's part of the validation samples; without any there is no probe. Rank 0 has the trend."""

    name = "probe"

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
        first(lambda: self.trend.accept(step, self._losses))

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        self.trend.rewind(step)


class TensorWatch(Watch):
    name = "tensors"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        flat = engine.flat_state()
        self._names = sorted(flat.whole_parameters(engine.topology.layout.tensor))
        self.paces = TensorPaces(None)
        self._rates = 0.0
        self._looked: tuple[int, float, int, dict[str, TensorNorms]] | None = None

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        self._rates += rate

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
        if self.engine.config.optimizer.name not in FORGETFUL:
            self.paces.beta2 = min(betas, default=None)
        self._looked = state.step, self._rates, state.updates, self.measure()
        return self.paces.judge(*self._looked)

    def accept(self) -> None:
        """The jump of the last look is the run's own work."""
        if self._looked is not None:
            self.paces.accept(*self._looked)

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        self.paces.rewind(step)
        if saved is not None:
            self.load_state_dict(saved)

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self._rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rates = TypeAdapter(dict[str, float]).validate_python(state).get("rates", 0.0)
