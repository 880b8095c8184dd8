"""Measures the norms of every tensor of the model and of its second moments, once in a while. Collective."""

from __future__ import annotations

from megastable.checkpoint.store import RunState
from megastable.engine.engine import Engine
from megastable.guard.tensor_jumps import TensorJump, TensorNorms, TensorPaces

FORGETFUL = "spam", "stable_spam"  # whose moments begin again every so many updates


class TensorWatch:
    """`applied` is told of every update."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        flat = engine.flat_state()
        self._names = sorted(flat.whole_parameters(engine.topology.layout.tensor))
        self.paces = TensorPaces(None)
        self._rates = 0.0
        self._looked: tuple[int, float, int, dict[str, TensorNorms]] | None = None

    def applied(self, rate: float) -> None:
        """An update was applied at this rate."""
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
