"""Measures and judges slow signals through the whole run, and journals what there is to tell. Collective.

All methods are called on every rank with the same numbers, so that every rank judges alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megastable.checkpoint.store import RunState
from megastable.config.rules import ADAM_LIKE
from megastable.config.tree import RunConfig
from megastable.engine.engine import Engine
from megastable.engine.watch import Watch
from megastable.optim.schedule import progress, warmup
from megastable.run.events.stability_events import TrendEvent
from megastable.run.log import RunLog
from megastable.warnings.trends import TrendNotice, Trends, TrendsState


class TrendWatch(Watch):
    """Of one training process. state: as in the checkpoint."""

    name = "trends"

    def __init__(self, config: RunConfig, engine: Engine, state: TrendsState, log: RunLog) -> None:
        c = config.stability
        self.engine, self.log = engine, log
        self.enabled = c.enabled and c.trends.enabled
        self.trends = Trends(c.trends, config.model.hidden, state)
        self.schedule, self.ratio = config.schedule, config.model.width_ratio
        self.adam_sized = config.optimizer.name in ADAM_LIKE

    def begin_again(self) -> None:
        self.trends.changed()

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        if saved is not None:
            self.trends.rewind(TrendsState.model_validate(saved), step)

    def state_dict(self) -> dict[str, Any]:
        return self.trends.state.model_dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.trends = Trends(self.trends.config, self.trends.width, TrendsState.model_validate(state))

    def begin(self, state: RunState) -> bool:
        """Before the step after `state`: watch it, if a look is due; whether it is. None is while the rate warms up:
        weights that start at zero grow straight, attention sharpens and logits grow, as they should."""
        warming = progress(self.schedule, state.updates, state.trained_tokens) < warmup(self.schedule)
        due = self.enabled and not warming and self.trends.looks(state.step + 1)
        if due:
            self.engine.trends.watch()
        return due

    def after(self, state: RunState, lr: float, applied: bool, incident: bool) -> None:
        """After every step. lr: its rate; incident: one is open, whose numbers are no trend."""
        if not self.engine.trends.watching:
            return
        if incident or not applied:
            self.engine.trends.drop()
            return
        rows = self.engine.trends.collect(self.engine.flat_state(), self.engine.kept)
        # What is measured against the rate are updates of the blocks' matrices, which have muP's.
        rate = lr / self.ratio if self.adam_sized else None
        self._tell(state.step, self.trends.measured(state.step, rate, rows))

    def evaluated(self, state: RunState, loss: float) -> None:
        """After an evaluation at `state`; loss: nats per token."""
        if self.enabled:
            self._tell(state.step, self.trends.evaluated(state.step, loss, state.recent_losses))

    def _tell(self, step: int, found: Iterable[TrendNotice]) -> None:
        for trend in found:
            told = TrendEvent(
                what="over" if trend.over else "warned", step=step, signal=trend.signal, text=trend.text,
                remedy=trend.remedy, numbers=trend.numbers,
            )  # fmt: skip
            self.log.emit(told, say=told.line() if trend.over else f"WARNING: {told.line()}")
