"""The detector's state between steps: plain numbers, small, stored in every checkpoint and snapshot."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from megastable.guard.opening import Opening
from megastable.guard.robust import Sum
from megastable.guard.scatter import Scatter
from megastable.guard.signals import Verdict


class _DetectorState(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class Channel(_DetectorState):
    """The state of one series.

    times, values: the accepted ones. raw: the newest finite ones, accepted or not. record: the farthest harmless jump
    in sigma, slowly forgotten. pending: jumps (observation, sigma) that are not yet known to be harmless.
    """

    times: list[int] = []
    values: list[float] = []
    raw: list[float] = []
    record: float = 0.0
    pending: list[tuple[int, float]] = []


class Excursion(_DetectorState):
    """verdict, onset (a step), since (the observation that raised it), and the newest residuals of loss and norm.

    loss_again, joint_again: the tests for a further jump on top of it.
    """

    verdict: Verdict
    onset: int
    since: int
    severity: float
    reason: str
    loss: list[float] = []
    norm: list[float] = []
    loss_again: Sum = Field(default_factory=Sum)
    joint_again: Sum = Field(default_factory=Sum)


class Drop(_DetectorState):
    """A sudden fall of the loss, such as in a shard of easy text: the way back up to `level` is not a spike."""

    level: float
    since: int


class Sums(_DetectorState):
    """The running sequential tests. All restart when an excursion is over."""

    spike: Sum = Field(default_factory=Sum)
    joint: Sum = Field(default_factory=Sum)
    drift: Sum = Field(default_factory=Sum)
    wide_up: Sum = Field(default_factory=Sum)
    wide_down: Sum = Field(default_factory=Sum)
    fall: Sum = Field(default_factory=Sum)


class DetectorState(_DetectorState):
    """The complete state of the detector, from which it continues bit for bit; under 20 KB as JSON."""

    seen: int = 0
    loss: Channel = Field(default_factory=Channel)
    norm: Channel = Field(default_factory=Channel)
    sums: Sums = Field(default_factory=Sums)
    best: float | None = None  # lowest level of the loss held so far
    best_lr: float | None = None
    width: float | None = None  # the smallest scatter of the loss, slowly forgotten
    drop: Drop | None = None
    excursion: Excursion | None = None
    opening: Opening | None = Field(default_factory=Opening)
    scatter: Scatter = Field(default_factory=Scatter)
    mixed: int | None = None  # the observation at which the data changed, if known
    doubted: int = 0  # until this observation an ordinary norm proves nothing: it was learnt in an excursion
