"""Defers samples to a later position of the order: rank 0 plans and writes, all ranks follow. Collective."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.config.tree import RunConfig
from megastable.data.blends import ExchangeEntry
from megastable.data.deferral import Deferral, DeferralRoom, plan
from megastable.data.skip_entries import RANGES
from megastable.data.skips import Selection
from megastable.data.source import Source
from megastable.recovery.skipping import persist
from megastable.run.directory import RunDirectory

Int64s = npt.NDArray[np.int64]


class Deferring:
    """Of one process of a run. selection: what is left of the current order, collective."""

    def __init__(
        self, config: RunConfig, run: RunDirectory, source: Source, selection: Callable[[], Selection]
    ) -> None:
        self.run, self.source, self.selection = run, source, selection
        self.steps, self.batches = config.train.steps, config.batches
        self.verify_steps = config.stability.policy.verify_steps
        self.recur_steps = config.stability.policy.recur_steps

    def defer(
        self, positions: Int64s, step: int, begin: int, reason: str, incident: int, ahead: int = 0
    ) -> Deferral:
        """Defer the samples at n positions, and up to `ahead` after them, as far as there is room for all. step: began
        at position `begin`, at or before them. Afterwards the source has the new order, so readers must go back to
        there or further. Raises SpaceError."""
        left = self.selection()
        found = self._plan(left, positions, step, begin, ahead)
        # Those ahead were not met yet: without room they are not lost.
        while ahead and (found is None or found.lost.size):
            ahead //= 2
            found = self._plan(left, positions, step, begin, ahead)
        assert found is not None
        entries = [
            ExchangeEntry(
                corpus=e.corpus, exchange=list(e.swaps[at : at + RANGES]), reason=reason, incident=incident, step=step
            )
            for e in found.exchanges
            for at in range(0, len(e.swaps), RANGES)
        ]  # fmt: skip
        persist(self.run.blends, entries, f"incident {incident} wants deferred")
        self.source.order = self.source.order.exchanging(found.exchanges)
        return found

    def step_of(self, position: int, step: int, begin: int) -> int:
        """Approximate step that reads a position, as if nothing in between were skipped. step, begin: as `defer`."""
        return step + self.batches.steps(begin, position)

    def _plan(self, left: Selection, positions: Int64s, step: int, begin: int, ahead: int) -> Deferral | None:
        """As `defer`, with all of `ahead`; None if fewer are left."""
        end = int(positions.max()) + 1
        if ahead:
            try:
                more, end = left.next_kept(end, ahead)
            except DataError:
                return None
            positions = np.concatenate([positions, more])
        return plan(self.source.order, left, positions, self._room(left, end, step, begin))

    def _room(self, left: Selection, end: int, step: int, begin: int) -> DeferralRoom:
        # Skips on the way only make the run get further.
        last = max(end, self.batches.reach(begin, self.steps - step + 1))

        def after(steps: int) -> int:
            count = self.batches.reach(end, steps) - end
            try:
                return min(last, left.next_kept(end, count)[1]) if count < last - end else last
            except DataError:  # nothing is left
                return last

        return DeferralRoom(end, after(self.verify_steps), after(self.recur_steps), last)
