"""Feeds the training loop with global batches; picks up new skip-ledger lines during training. Collective."""

from __future__ import annotations

import time
from collections.abc import Mapping

from megastable.base import activity
from megastable.base.collectives import first
from megastable.base.text import plural
from megastable.checkpoint.store import RunState
from megastable.data.loader import Loader, Step
from megastable.data.skips import Selection
from megastable.run.events.data_events import BatchChanged, LengthChanged, MixChanged, SkipsRead
from megastable.training.data_order import DataOrder
from megastable.training.heartbeat import Heartbeat


class Feed:
    """loader: of the order's samples, from the run's cursor on. waited: seconds for the last batch."""

    def __init__(self, order: DataOrder, loader: Loader, heart: Heartbeat) -> None:
        self.order, self.loader, self.heart = order, loader, heart
        self.waited = 0.0

    def next(self) -> Step:
        """The next global batch, with this rank's part of it."""
        activity.enter(activity.DATA)
        begin = time.perf_counter()
        batch = next(self.loader)
        self.waited = time.perf_counter() - begin
        return batch

    def mix(self, batch: Step) -> dict[str, float]:
        """The share of each corpus in the last sample's block; empty if unknown."""
        skips = self.loader.skips
        return skips.mix(batch.next - 1) if isinstance(skips, Selection) else {}

    def tell_changes(self, state: RunState, batch: Step, mix: Mapping[str, float]) -> bool:
        """Journal what changes on purpose at the step after `state`. Whether losses have another level from there on:
        with another mix, or with the same text in other pieces."""
        step, size, log = state.step + 1, batch.positions.size, self.order.log
        mixed, cut = bool(state.mix) and mix != state.mix, bool(state.piece) and batch.piece != state.piece
        if mixed:
            log.emit(MixChanged(step=step, old=state.mix, new=mix), say=True)
        if cut:
            event = LengthChanged(step=step, position=batch.first, old=state.piece, new=batch.piece)
            log.emit(event, say=True)
        if state.batch and size != state.batch:
            log.emit(BatchChanged(step=step, position=batch.first, old=state.batch, new=size), say=True)
        return mixed or cut

    def read_ledger(self, step: int, cursor: int) -> None:
        """The skip ledger has new lines: continue at `cursor` without the samples they name. Collective."""
        first(self.heart.skips.begin_to_read)
        wanted = self.order.usable(step)
        before = self.loader.skips.lines if isinstance(self.loader.skips, Selection) else 0
        self.loader.go_to(cursor, wanted)
        self.order.warn_of_foreign(step)
        if (more := wanted.lines - before) > 0:
            self.order.log.emit(
                SkipsRead(step=step, cursor=cursor, entries=more),
                say=f"step {step}: {plural(more, 'new line')} in {self.order.run.skips.name}: skipped from now on",
            )
