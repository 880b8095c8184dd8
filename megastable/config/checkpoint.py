"""Checkpoints: how often, how many, and the thresholds by which one's content is trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megastable.config.section import Section


class VitalsConfig(Section):
    """What a checkpoint remembers of its state, and when a state is another one (checkpoint/vitals.py).

    Numbers are read back bit for bit, whatever the layout; only the order of a sum differs. Moments that are kept in
    bf16 are rounded: `size_change` is 2^-8 there. Losses are computed in fp32 when saved and when checked, and rounding
    moves single samples either way.
    """

    probes: NonNegativeInt = 32
    """Samples whose losses are remembered, the first ones of the order; each save and each start costs a forward pass
    over them; 0: none, sizes of weights and moments only. [samples]"""
    size_change: PositiveFloat = 1e-4
    """Relative change of a tensor's norm or largest magnitude that makes it another one."""
    loss_change: PositiveFloat = 0.005
    """Median change of the probes' losses that makes it another state. [nats per token]"""
    loss_change_low: PositiveFloat = 0.05
    """The same where one of the two was computed in 16 bits. [nats per token]"""
    rise: PositiveFloat = 0.5
    """Above the checkpoint before and the latest training losses: not healthy, however calm the steps after it. [nats
    per token]"""
    worse: PositiveFloat = 0.5
    """How much worse than when they were trained on, beyond four times their scatter, the latest samples must be on a
    resumed state before its checkpoint is blamed for trouble soon after. [nats per token]"""


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept (docs/checkpoints.md)."""

    interval: NonNegativeInt = 500
    """Between checkpoints; 0: only at the end and on a signal. [steps]"""
    keep: PositiveInt = 3
    """Newest ones that are kept, besides the newest healthy one and all pinned ones. [checkpoints]"""
    keep_every: NonNegativeInt = 0
    """The first checkpoint of every so many steps is kept for good; 0: none. [steps]"""
    healthy_after: NonNegativeInt = 50
    """Steps on trend after a checkpoint before it counts as healthy. [steps]"""
    asynchronous: bool = True
    """The step waits only for a copy in host memory."""
    staging: Path | None = Field(default=None, examples=["/scratch/megastable"])
    """Local disk of every host, to write to before uploading to `run.dir`; null: write to `run.dir`."""
    at_end: bool = True
    """Write one after the last step."""
    on_failure: Literal["continue", "stop"] = "continue"
    """When a checkpoint cannot be written."""
    vitals: VitalsConfig = VitalsConfig()
