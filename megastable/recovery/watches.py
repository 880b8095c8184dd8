"""All that watches a run, in one list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megastable.base.collectives import shared
from megastable.checkpoint import store
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.hardware.hardware_watch import HardwareWatch
from megastable.recovery.damage_watch import ProbeWatch, TensorWatch
from megastable.recovery.sample_watch import SampleWatch
from megastable.warnings.noise_scale import NoiseScaleWatch
from megastable.warnings.signs import StartSigns
from megastable.warnings.trends import TrendWatch


@dataclass(frozen=True)
class Watches:
    """In the order in which their hooks are called."""

    hardware: HardwareWatch
    samples: SampleWatch
    trends: TrendWatch
    signs: StartSigns
    probe: ProbeWatch
    tensors: TensorWatch
    noise: NoiseScaleWatch

    def __iter__(self) -> Iterator[Watch]:
        yield from self.hardware.watches
        yield from (self.samples, self.trends, self.signs, self.probe, self.tensors, self.noise)

    def ballot(self, step: int) -> dict[str, Sequence[float]]:
        """As `Watch.ballot`, by name."""
        return {watch.name: watch.ballot(step) for watch in self}

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        for watch in self:
            watch.after_update(measured, step, rate)

    def begin_again(self) -> None:
        for watch in self:
            watch.begin_again()

    def rewound(self, step: int, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """The run is back on the snapshot of `step`, which has `state_dicts`."""
        for watch in self:
            watch.rewound(step, saved.get(watch.name, {}))

    def repeated(self, step: int) -> None:
        """The step after `step` is done again, from the state that its refused update has left alone."""
        for watch in self:
            watch.rewound(step, None)

    def state_dicts(self) -> dict[str, dict[str, Any]]:
        """By name."""
        return {watch.name: state for watch in self if (state := watch.state_dict())}

    def load_state_dicts(self, saved: Mapping[str, Any]) -> None:
        """Continue from `state_dicts`. Raises CheckpointError, on all ranks, for what cannot be read."""
        for watch in self:
            try:
                watch.load_state_dict(saved.get(watch.name, {}))
            except ValidationError as error:
                raise shared(store.refuse_stability(f"the checkpoint's {watch.name}", error)) from None
