"""Samples that nobody was found guilty of, but that trouble came with: read again later, in exchange for later ones.

Pure: which slots to exchange (exchange.py), as far from the trouble as there is room, best first:

1. in the same epoch of their corpus, `far` or further on: the same trouble is over by then;
2. in the same epoch, as late as there is room, but not `near`;
3. in a later epoch, `far` or further on: over both epochs all is read as often as ever;
4. as late as there is room, if only behind the trouble.

Never where something is left out, or was exchanged already, nor after the run's last step. What finds no place is lost,
and is said to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megastable.data.exchange import Exchange, swaps_of
from megastable.data.order import Order
from megastable.data.skips import Selection

Int64s = npt.NDArray[np.int64]
Range = tuple[int, int]

AT_ONCE = 1 << 14  # slots that are looked at together
MOST = 1 << 20  # slots that are looked at in all: where so many are left out, there is no room


@dataclass(frozen=True)
class DeferralRoom:
    """Positions behind the trouble: `begin` is the first, `end` the run's; for `near` and `far` see the module."""

    begin: int
    near: int
    far: int
    end: int


@dataclass(frozen=True)
class Deferral:
    """exchanges: for the order. positions: they hold other samples now, and `returns` theirs, in the same order; lost:
    positions whose samples found no place. int64; but for `returns`, ascending."""

    exchanges: list[Exchange]
    positions: Int64s
    returns: Int64s
    lost: Int64s


def plan(order: Order, left: Selection, positions: Int64s, room: DeferralRoom) -> Deferral:
    """Where the samples at `positions`, all before room.begin, go. Those that are left out anyway stay."""
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
    """Slots [first, end) of a corpus to look at, best first; and whether the latest of them are best."""
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
    """Up to `count` slots of [first, end), the first ones or the last, whose samples are read and at home."""
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
