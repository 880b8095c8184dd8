"""Deferral of samples that were part of an incident without being guilty: they are exchanged with later samples.

`plan` is pure: which slots to exchange (exchange.py), as far from the incident as possible, best first:

1. in the same epoch of their corpus, at least `far` away: the instability is over by then;
2. in the same epoch, as late as possible, but not `near`;
3. in a later epoch, at least `far` away: over both epochs every sample is read equally often;
4. as late as possible, if only after the incident.

Never a slot that is skipped or already exchanged, nor one after the run's last step. Samples without a free slot are
reported as lost. `Deferring` has rank 0 plan and write, and all ranks follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.config.tree import RunConfig
from megastable.data.blends import ExchangeEntry
from megastable.data.exchange import Exchange, swaps_of
from megastable.data.order import Order
from megastable.data.skip_ledger import RANGES
from megastable.data.skipping import persist
from megastable.data.skips import Selection
from megastable.data.source import Source
from megastable.run.directory import RunDirectory

Int64s = npt.NDArray[np.int64]
Range = tuple[int, int]

AT_ONCE = 1 << 14  # slots examined at a time
MOST = 1 << 20  # slots examined in all: if so many are taken, none is free


@dataclass(frozen=True)
class DeferralRoom:
    """Positions after the incident: `begin` is the first, `end` the run's; for `near` and `far` see the module."""

    begin: int
    near: int
    far: int
    end: int


@dataclass(frozen=True)
class Deferral:
    """exchanges: for the order. positions: these now hold other samples, and `returns` holds theirs, in the same order;
    lost: positions whose samples found no slot. int64; all but `returns` ascending."""

    exchanges: list[Exchange]
    positions: Int64s
    returns: Int64s
    lost: Int64s


def plan(order: Order, left: Selection, positions: Int64s, room: DeferralRoom) -> Deferral:
    """New positions for the samples at `positions`, all before room.begin. Samples that are skipped anyway stay."""
    positions = np.unique(positions[~left.mask(positions)])
    corpora, slots = order.slots_at(positions)
    epochs = slots // np.array(order.sequences)[corpora]
    exchanges, here, there = list[Exchange](), [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    taken = {index: np.empty(0, np.int64) for index in np.unique(corpora).tolist()}
    for index, epoch in sorted({*zip(corpora.tolist(), epochs.tolist(), strict=True)}):
        mine = slots[(corpora == index) & (epochs == epoch)]
        found = np.empty(0, np.int64)
        for first, end, late in _stretches(order, index, epoch, room):
            if found.size < mine.size:
                more = _free(order, left, index, first, end, late, mine.size - found.size, taken[index])
                taken[index] = np.union1d(taken[index], more)
                found = np.sort(np.concatenate([found, more]))
        mine = mine[: found.size]
        if found.size:
            exchanges.append(Exchange(order.corpora[index].name, swaps_of(mine, found)))
        here.append(order.positions_at(index, mine))
        there.append(order.positions_at(index, found))
    moved, returns = np.concatenate(here), np.concatenate(there)
    by_position = np.argsort(moved)
    lost = np.setdiff1d(positions, moved)
    return Deferral(exchanges, moved[by_position], returns[by_position], lost)


def _stretches(order: Order, corpus: int, epoch: int, room: DeferralRoom) -> Iterator[tuple[int, int, bool]]:
    """Slots [first, end) of a corpus to examine, best first; and whether the latest of them are best."""
    begin, near, far, end = (
        order.samples_before(p)[corpus] for p in (room.begin, room.near, room.far, room.end)
    )
    over = (epoch + 1) * order.sequences[corpus]  # the first slot of the next epoch
    yield far, min(over, end), False
    yield near, min(over, far, end), True
    yield max(far, over), end, False
    yield begin, end, True


def _free(
    order: Order, left: Selection, corpus: int, first: int, end: int, late: bool, count: int, taken: Int64s
) -> Int64s:
    """Up to `count` slots of [first, end), the first or the last ones, whose samples are neither skipped nor
    exchanged."""
    found, moved = list[Int64s](), order.moved(corpus)[:, 0]
    first, end = (max(first, end - MOST), end) if late else (first, min(end, first + MOST))
    starts: Sequence[int] = range(first, end, AT_ONCE)
    for start in reversed(starts) if late else starts:
        slots = np.arange(start, min(end, start + AT_ONCE))
        slots = slots[~np.isin(slots, moved) & ~np.isin(slots, taken)]
        slots = slots[~left.mask(order.positions_at(corpus, slots))]
        wanted = count - sum(some.size for some in found)
        found.append(slots[max(0, slots.size - wanted) :] if late else slots[:wanted])
        if wanted <= slots.size:
            break
    return np.concatenate([np.empty(0, np.int64), *found])


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
