"""Records every step: layer statistics, start signs and trends, step records, refused updates."""

from __future__ import annotations

from collections.abc import Sequence

from megastable.checkpoint.store import RunState
from megastable.config.tree import LoggingConfig
from megastable.engine.engine import Engine
from megastable.recovery.recovery import Recovery
from megastable.recovery.run_parts import StepResult
from megastable.run.events.stability_events import Discarded
from megastable.run.events.training_events import Evaluated
from megastable.run.log import RunLog
from megastable.run.records import LayerRecord, StepRecord
from megastable.training.observer import Observer


def due(interval: int, step: int) -> bool:
    """Whether something that happens every `interval` steps (0 = never) happens at this one."""
    return interval > 0 and step % interval == 0


class StepRecorder:
    """Of one rank. observer: keeps and shows the steps, None if another rank does. Collective."""

    def __init__(
        self,
        config: LoggingConfig,
        engine: Engine,
        recovery: Recovery,
        log: RunLog,
        observer: Observer | None,
    ) -> None:
        self.config, self.engine, self.recovery, self.log = config, engine, recovery, log
        self.observer = observer
        self._look = False  # whether to record layers in the current step

    def begin(self, state: RunState) -> None:
        """Before the step after `state`."""
        # Also at the second refused update, to see the trouble per layer.
        step = state.step + 1
        self._look = due(self.config.layers_interval, step) or state.discards_in_a_row == 1
        trend = self.recovery.watches.trends.begin(state)
        self.engine.measures_update = (
            self._look
            or trend
            or due(self.config.norms_interval, step)
            or self.recovery.watches.signs.measures(step)
        )
        if self._look or self.recovery.watches.signs.looks(step):
            self.engine.probe.watch()

    def step(self, done: StepResult) -> None:
        """Measure, judge and record a finished step."""
        state, measured, batch = done.state, done.measured, done.batch
        signs, statistics = self.recovery.watches.signs, None
        if self._look or due(self.config.norms_interval, state.step) or signs.measures(state.step):
            statistics = self.engine.statistics()
        incident = self.recovery.incident_log.incident is not None
        signs.after(state, statistics, incident)
        self.recovery.watches.trends.after(state, done.lr, done.applied, incident)
        noise = self.recovery.watches.noise
        noise.after(measured, state.step, done.applied)
        if self.observer is not None:
            self.observer.step(done, statistics, self.engine.loss.z_loss, noise.state.samples)
        if not done.applied:
            verdict, reason = self.recovery.refusal(measured)
            self.log.emit(Discarded(
                step=state.step, verdict=verdict, reason=reason, first_position=batch.first,
                next_position=batch.next, loss=measured.loss, grad_norm=measured.grad_norm,
                loss_scale=measured.loss_scale,
            ))  # fmt: skip

    def validation(self, state: RunState, found: Evaluated) -> None:
        """An evaluation at `state`."""
        assert found.loss is not None
        self.recovery.watches.trends.after_evaluation(state, found.loss)
        if self.observer is not None:
            self.observer.validation(state, found)

    @property
    def pending(self) -> Sequence[StepRecord | LayerRecord]:
        """Step records that are on no disk yet."""
        return () if self.observer is None else self.observer.steps.pending

    def flush(self, compact: bool = False) -> None:
        if self.observer is not None:
            self.observer.flush(compact)
