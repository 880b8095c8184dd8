"""What the parts of recovery share: the run that they watch, and a step of it that is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megastable.checkpoint.store import RunState
from megastable.config.tree import RunConfig
from megastable.data.loader import Loader, Step
from megastable.data.run_ledgers import Skipping
from megastable.data.samples import Source
from megastable.data.skips import Selection
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import SkipsRefused
from megastable.run.log import RunLog


@dataclass(frozen=True)
class RunParts:
    """A run, as one process has it. skipping: the skip ledger, read and extended; phase: tells the heartbeat what the
    process does."""

    config: RunConfig
    engine: Engine
    loader: Loader
    run: RunDirectory
    skipping: Skipping
    log: RunLog
    phase: Callable[[str], None]

    @property
    def source(self) -> Source:
        return self.loader.source

    @property
    def acts(self) -> bool:
        """Whether anything is done besides refusing non-finite updates."""
        return self.config.stability.enabled and not self.config.stability.dry_run

    def select_unskipped(self) -> Selection:
        """What the ledger leaves of the current order. Collective."""
        usable_selection, malformed_lines = self.skipping.select_usable(self.source.order)
        for malformed_line in malformed_lines:
            self.log.emit_event(SkipsRefused(problem=malformed_line))
        return usable_selection


@dataclass(frozen=True)
class StepResult:
    """From `before` to `state`; applied: the update was not refused; lr: its rate. It took `seconds`, of which the rank
    waited `waited` for data. kept: the gradient's norm after clipping, as a share of that before; above 1 is possible
    with `worker`."""

    batch: Step
    measured: Measured
    applied: bool
    before: RunState
    state: RunState
    lr: float
    seconds: float
    waited: float
    kept: float = 1.0
