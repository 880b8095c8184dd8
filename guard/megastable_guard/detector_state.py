"""The detector's state between steps: plain numbers, small, stored in every checkpoint and snapshot."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from megastable_guard.guard_config import DetectorConfig
from megastable_guard.robust import Scatter, Sum, median
from megastable_guard.signals import Verdict

_NEWEST = 9  # values per level of the opening
_TURNED = 0.1  # share of the rise: a drop of this much since half of the patience ago is a turn


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


class Opening(_DetectorState):
    """The start of a run, before it has a trend: does a rise of the loss recover?

    Without warm-up, or with an aggressive optimizer, the loss rises in its first steps by 1 to 40 nats, far above its
    initial value, and recovers within 30 to 80 steps; the best run of a sweep may be one of these. So the height says
    nothing; the alarm is a rise that does not turn.

    newest: losses. levels: medians of them, as many as the patience is long. lowest: of all, and waited: the
    observations since then. onset: the step at which the loss rose, None before; risen: observations since.
    longest: of all rises. refused: the last value was refused.
    """

    newest: list[float] = []
    levels: list[float] = []
    lowest: float | None = None
    waited: int = 0
    onset: int | None = None
    risen: int = 0
    longest: int = 0
    refused: bool = False

    def rise(self, loss: float) -> float:
        """Nats above the lowest level."""
        return 0.0 if self.lowest is None else loss - self.lowest

    def judge(self, loss: float, step: int, config: DetectorConfig) -> tuple[Verdict, str]:
        """OUTLIER: a single value beyond all before. DRIFT: a rise that does not turn. Otherwise HEALTHY."""
        alone = self.newest and loss - max(self.newest) > config.explosion
        if alone and self.onset is None and not self.refused:
            self.refused = True  # once: if the next one is as high, it is not a single batch
            return Verdict.OUTLIER, f"loss {loss:.4g} is {loss - max(self.newest):.3g} nats above all before"
        self.newest = [*self.newest, loss][-_NEWEST:]
        level = median(self.newest)
        self.levels = [*self.levels, level][-config.start_patience :]
        self.waited += 1
        if self.lowest is None or level < self.lowest:
            self.lowest, self.waited = level, 0
        if level - self.lowest < config.explosion / 2:
            self.onset, self.risen = None, 0
            self.refused = self.refused and level > self.lowest
            return Verdict.HEALTHY, ""
        if self.onset is None:
            self.onset = step
        self.risen += 1
        self.longest = max(self.longest, self.risen)
        if self.risen < config.start_patience:
            return Verdict.HEALTHY, ""
        half = self.levels[-1 - config.start_patience // 2]
        rise = level - self.lowest
        if half - level > _TURNED * rise:
            return Verdict.HEALTHY, ""
        return Verdict.DRIFT, (
            f"the loss has been {rise:.3g} nats above its lowest level since step {self.onset}, "
            f"for {self.risen} observations, and does not turn"
        )

    def over(self, config: DetectorConfig) -> bool:
        """Whether it is back at its lowest level, or has settled near it."""
        assert self.lowest is not None
        if self.onset is not None:
            return False
        return (
            self.newest[-1] <= self.lowest + config.explosion / 8
            or self.levels[-1] <= (self.lowest + config.explosion / 8)
            or self.waited >= config.start_patience
        )


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
