"""Checkpoint settings: how often, how many, and the thresholds for trusting their content."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megastable.config.units import SampleCount, StepsOrTime, seconds_of
from megastable_guard.section import Section


class VitalsConfig(Section):
    """The vitals that a checkpoint stores, and the changes that make a state a different one (checkpoint/vitals.py).

    Numbers are read back bit for bit, whatever the layout; only the order of a sum differs. Moments kept in bf16 are
    rounded: `size_change` is 2^-8 there. Losses are computed in fp32 when saved and when checked, and rounding moves
    single samples either way.
    """

    probes: SampleCount = 32
    """Samples whose losses are stored, the first of the order; each save and each start costs a forward pass over them;
    0: none, sizes of weights and moments only. [samples]"""
    size_change: PositiveFloat = 1e-4
    """Relative change of a tensor's norm or largest magnitude that makes it a different one."""
    loss_change: PositiveFloat = 0.005
    """Median change of the probes' losses that makes it a different state. [nats per token]"""
    loss_change_low: PositiveFloat = 0.05
    """As `loss_change`, if one of the two was computed in 16 bits. [nats per token]"""
    rise: PositiveFloat = 0.5
    """Excess of the loss over the previous checkpoint's and the latest training losses that prevents a healthy mark,
    however calm later steps are. [nats per token]"""
    worse: PositiveFloat = 0.5
    """How much worse than when trained on, beyond four times their scatter, the latest samples must be on a resumed
    state before its checkpoint is blamed for trouble soon after. [nats per token]"""


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept (docs/checkpoints.md)."""

    interval: StepsOrTime = 500
    """Steps between checkpoints, or the time, by the clock of rank 0: `90s`, `30min`, `2h`; 0: only at the end and on
    a signal. [steps]"""
    keep: PositiveInt = 3
    """Newest checkpoints kept, besides the newest healthy one and all pinned ones. [checkpoints]"""
    keep_every: NonNegativeInt = 0
    """Keep one checkpoint for good per this many steps, the first; 0: none. [steps]"""
    healthy_after: NonNegativeInt = 50
    """Steps on trend after a checkpoint before it counts as healthy. [steps]"""
    asynchronous: bool = True
    """Write in the background: the step waits only for a copy in host memory."""
    staging: Path | None = Field(default=None, examples=["/scratch/megastable"])
    """Local disk of every host, to write to before uploading to `run.dir`; null: write to `run.dir`."""
    at_end: bool = True
    """Write a checkpoint after the last step."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Reaction when a checkpoint cannot be written."""
    vitals: VitalsConfig = VitalsConfig()

    @property
    def steps_between(self) -> int:
        """Steps from one checkpoint to the next; 0 if time decides, or if there are none."""
        return 0 if isinstance(self.interval, str) else self.interval

    @property
    def seconds_between(self) -> float | None:
        """Seconds from the begin of one checkpoint to that of the next; None if they do not decide."""
        return seconds_of(self.interval) if isinstance(self.interval, str) else None
