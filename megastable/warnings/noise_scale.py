"""Estimates the gradient noise scale, the batch beyond which larger ones save few steps (McCandlish et al.,
arXiv:1812.06162, appendix A.1), from what the gate sums anyway: `NoiseScaleWatch` measures, the rest is pure.

The squared norm of a gradient over b samples is on average |G|^2 + tr(S) / b: that of the true gradient, and its noise.
Two sizes of b tell the two apart: the gradient of a data rank, and the sum over all D of them. Both are averaged over
the updates, by themselves, as their ratio alone would be biased: the scale is tr(S) / |G|^2, in samples.

With one data rank there is no second size, and with context parallelism ranks share their samples: no estimate then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from megastable.config.tree import RunConfig
from megastable.engine.engine import Engine
from megastable.engine.local_gradients import RankGradient, read_columns
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.run.events.training_events import BatchFarOff
from megastable.run.log import RunLog

DECAY = 0.99  # of the two averages
FAR = 4.0  # the batch over the scale, or the scale over the batch, that is told
EARLY = 0.1  # share of the run before which nothing is told: the scale grows most at the start
LEAST, LASTING = 500, 100  # updates in the averages, and in a row so far off, before it is told


class NoiseScale(BaseModel):
    """State for checkpoints and snapshots. noise, signal: averages of estimates of tr(S) and |G|^2, over as many
    `updates`; beyond: updates in a row with a batch far off; told: that was told."""

    model_config = ConfigDict(extra="forbid")

    updates: int = 0
    noise: float = 0.0
    signal: float = 0.0
    beyond: int = 0
    told: bool = False

    @property
    def samples(self) -> float | None:
        """The scale; None while the averages are not positive, which their noise may make them."""
        return self.noise / self.signal if self.noise > 0 and self.signal > 0 else None

    def add_estimates(self, noise: float, signal: float) -> None:
        self.updates += 1
        self.noise += (1 - DECAY) * (noise - self.noise)
        self.signal += (1 - DECAY) * (signal - self.signal)

    def is_far_off(self, batch: int) -> bool:
        """Whether to tell now that the batch is far off; it is told once. batch: of the last update, in samples."""
        batch_ratio = 1.0 if self.samples is None else batch / self.samples
        self.beyond = self.beyond + 1 if not 1 / FAR <= batch_ratio <= FAR else 0
        if self.told or self.updates < LEAST or self.beyond < LASTING:
            return False
        self.told = True
        return True


def estimate_noise(found: Sequence[RankGradient], samples: int, apart: int = 1) -> tuple[float, float] | None:
    """Estimates of tr(S), times samples, and of |G|^2, from one update; None if nothing was measured.

    Args:
        found: of every data rank.
        samples: of a rank's gradient.
        apart: gradients of so many samples, one after the other, that the numbers of `found` add up, each divided by
            this number.
    """
    ranks = len(found)
    small = sum(rank_row.square for rank_row in found) / ranks * apart if found else 0.0
    large = sum(rank_row.summed for rank_row in found) / ranks**2 * apart if found else 0.0
    if ranks < 2 or not (math.isfinite(small) and math.isfinite(large)) or small == 0 or large == 0:
        return None
    return samples * ranks * (small - large) / (ranks - 1), (ranks * large - small) / (ranks - 1)


def describe_batch(scale: float, batch: int) -> str:
    """What a batch that is far off means."""
    told = f"the gradient noise scale is about {scale:,.3g} samples, and the batch {batch:,}"
    if batch > scale:
        return f"{told}, {batch / scale:.3g} times as large: a smaller train.global_batch would need fewer tokens"
    return (
        f"{told}, {scale / batch:.3g} times smaller: a larger train.global_batch, up to the scale, would need fewer "
        "steps, for few more tokens"
    )


class NoiseScaleWatch(Watch):
    """Of one process. Where it has no estimate it does nothing."""

    name = "noise_scale"
    state: NoiseScale

    def __init__(self, config: RunConfig, engine: Engine, log: RunLog) -> None:
        rank_layout = engine.topology.layout
        # Of ranks that compute together, no gradient is that of a rank's own samples.
        self.measures = engine.zero.local is not None and rank_layout.data > 1 and rank_layout.team == 1
        self._train, self._ranks, self.log = config.train, rank_layout.data, log
        self._apart, self._divided_by = engine.zero.sums_apart, engine.zero.divided_by
        self.state = NoiseScale()

    def observe_step(self, measured: Measured, step: int, applied: bool) -> None:
        if not self.measures or not applied:
            return
        batch, micro_batch = measured.losses.numel(), self._train.micro_batch
        gradients_apart = batch // (self._ranks * micro_batch) if self._apart else 1
        rank_samples = batch // self._ranks // gradients_apart
        noise_estimates = estimate_noise(read_columns(measured.gradients), rank_samples, gradients_apart)
        if noise_estimates is None:
            return
        # Of other loss scales, and after a change of layout, the averages go on.
        noise, signal = (one * (self._divided_by / measured.loss_scale) ** 2 for one in noise_estimates)
        self.state.add_estimates(noise, signal)
        if batch < self._train.global_batch or step < EARLY * self._train.steps:
            self.state.beyond = 0  # it grows still
        elif self.state.is_far_off(batch) and (scale := self.state.samples) is not None:
            event = BatchFarOff(step=step, scale=scale, batch=batch, text=describe_batch(scale, batch))
            self.log.emit_event(event, say=f"note: {event.text}")

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        if saved:
            was_told = self.state.told
            self.load_state_dict(saved)
            self.state.told |= was_told
