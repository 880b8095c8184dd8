"""Judge the start of a run, before it has a trend: does a rise of the loss recover?

Without warm-up, or with an aggressive optimizer, the loss rises in its first steps by 1 to 40 nats, far above its
initial value, and recovers within 30 to 80 steps; the best run of a sweep may be one of these. So the height says
nothing; the alarm is a rise that does not turn.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from megastable.config.stability import DetectorConfig
from megastable.guard.robust import median
from megastable.guard.signals import Verdict

_NEWEST = 9  # values per level
_TURNED = 0.1  # share of the rise: a drop of this much since half of the patience ago is a turn


class Opening(BaseModel):
    """newest: losses. levels: medians of them, as many as the patience is long. lowest: of all, and waited: the
    observations since then. onset: the step at which the loss rose, None before; risen: observations since.
    longest: of all rises. refused: the last value was refused.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

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
