"""What attribution needs to know: how samples look on the state that the engine holds. Collective; leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megastable.data.loader import Loader
from megastable.data.skips import Selection, Skips
from megastable.engine import Engine
from megastable.stability import attribution
from megastable.stability.attribution import Conclusion, Suspect
from megastable.stability.settings import AttributionConfig

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Trained:
    """A step of this process: its positions and per-sample losses, int64 and fp64 [global batch]."""

    step: int
    positions: Int64s
    losses: Floats
    applied: bool


class Laboratory:
    """Measures samples on the present state of `engine`, reading them through `loader`."""

    def __init__(self, config: AttributionConfig, engine: Engine, loader: Loader, batch: int) -> None:
        self.config, self.engine, self.loader, self.batch = config, engine, loader, batch
        self.order = loader.source.order

    def losses(self, positions: Int64s) -> Floats:
        """Per-sample cross-entropy, fp64 [n], by forward passes alone."""
        if not positions.size:
            return np.empty(0)
        unit = self.loader.unit
        padded = np.concatenate([positions, np.repeat(positions[-1:], -positions.size % unit)])
        return self.engine.evaluate(self.loader.read(padded)).numpy()[: positions.size]

    def gradient_norm(self, position: int) -> float:
        """Of one sample alone: a batch full of it has the sample's own mean gradient."""
        return self.engine.measure(self.loader.read(np.full(self.batch, position))).grad_norm

    def corpora(self, positions: Int64s) -> Int64s:
        return self.order.locate(positions).corpus

    def examine(
        self,
        window: Sequence[Trained],
        harmless: Int64s,
        reference: Floats,
        selection: Skips | Selection,
        recurred: bool,
    ) -> Conclusion:
        """Who of `window` (the steps since the onset) is guilty; beyond its end, too, where it ends in bad data.

        harmless: positions trained on before, without a complaint; reference: their losses on the present state.
        selection: what is skipped already.
        """
        positions = np.concatenate([t.positions for t in window])
        kinds = self.corpora(harmless)
        threshold = self.config.threshold
        losses = self.losses(positions)
        z = attribution.deviations(losses, self.corpora(positions), reference, kinds)
        bad = attribution.guilty_by_loss(z, threshold)
        cursor = int(positions.max()) + 1
        for _ in range(self.config.ahead):
            if not bad[-self.batch :].any():
                break
            more, cursor = selection.next_kept(cursor, self.batch)
            further = self.losses(more)
            further_z = attribution.deviations(further, self.corpora(more), reference, kinds)
            positions, losses = np.concatenate([positions, more]), np.concatenate([losses, further])
            z = np.concatenate([z, further_z])
            bad = np.concatenate([bad, attribution.guilty_by_loss(further_z, threshold)])
        norms, guilty_norms = self._gradients(positions, z, harmless, reference)
        suspects = [
            Suspect(position, loss, deviation, norms.get(position))
            for position, loss, deviation in zip(positions.tolist(), losses.tolist(), z.tolist(), strict=True)
        ]
        guilty = set(positions[bad].tolist()) or guilty_norms
        return attribution.conclude(suspects, sorted(guilty), recurred, harmless.size)

    def _gradients(
        self, positions: Int64s, z: Floats, harmless: Int64s, reference: Floats
    ) -> tuple[dict[int, float], set[int]]:
        """Gradient norms of the worst samples by position, and which of those are guilty by them."""
        count = self.config.gradients
        if not count or not harmless.size:
            return {}, set()
        worst = positions[np.argsort(-np.nan_to_num(z, nan=0.0, posinf=1e300), kind="stable")[:count]]
        # Samples of ordinary loss, for a gradient of ordinary size.
        middle = np.argsort(np.abs(reference - np.median(reference)), kind="stable")[:2]
        ordinary = np.array([self.gradient_norm(p) for p in harmless[middle].tolist()])
        norms = {p: self.gradient_norm(p) for p in worst.tolist()}
        bad = attribution.guilty_by_gradient(np.array(list(norms.values())), ordinary)
        return norms, {p for p, is_bad in zip(norms, bad.tolist(), strict=True) if is_bad}
