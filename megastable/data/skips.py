"""Positions that are not trained on: ranges of absolute positions, and the ledger that keeps them.

`skips.jsonl` is append-only: one JSON object per line, on the disk before `append` returns. A skipped
position is passed over by a lookup; nothing is read and thrown away. Ranges are half-open, [first, end).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, StrictInt, model_validator

from megastable.data import ledger
from megastable.data.ledger import Entry, append, append_all
from megastable.data.order import LAST_POSITION, Order
from megastable.errors import DataError

__all__ = [
    "Range",
    "Selection",
    "SkipEntry",
    "Skips",
    "append",
    "append_all",
    "entries_that_can_be",
    "read_ledger",
]

Range = tuple[int, int]
Position = Annotated[StrictInt, Field(ge=0, le=LAST_POSITION)]


class Skips:
    """A set of positions as sorted ranges that neither overlap nor touch. Immutable."""

    def __init__(self, firsts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        self._firsts, self._ends = firsts, ends

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> Skips:
        """The union of `ranges`, in any order, overlapping or not.

        Raises DataError for a range that is not 0 <= first < end <= 2^62 in whole numbers.
        """
        merged: list[list[int]] = []
        for first, end in sorted(_checked(item) for item in ranges):
            if merged and first <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([first, end])
        edges = np.array(merged, dtype=np.int64).reshape(-1, 2)
        return cls(edges[:, 0].copy(), edges[:, 1].copy())

    @property
    def ranges(self) -> list[Range]:
        """All ranges [first, end), ascending."""
        return list(zip(self._firsts.tolist(), self._ends.tolist(), strict=True))

    def count(self) -> int:
        """How many positions are skipped."""
        return int((self._ends - self._firsts).sum())

    def contains(self, position: int) -> bool:
        """Whether `position` is skipped."""
        index = int(np.searchsorted(self._firsts, position, side="right")) - 1
        return index >= 0 and position < int(self._ends[index])

    def mask(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of `positions`, int64 [n], are skipped: bool [n]."""
        index = np.searchsorted(self._firsts, positions, side="right") - 1
        if not self._ends.size:
            return np.zeros(positions.shape, dtype=bool)
        return np.asarray((index >= 0) & (positions < self._ends[index]))

    def next_kept(self, cursor: int, count: int) -> tuple[npt.NDArray[np.int64], int]:
        """The next `count` positions from `cursor` on that are not skipped, int64 [count], and the cursor
        after the last of them. O(count + log n), however long the skipped ranges are."""
        # At least one kept position lies between two ranges, so no more than these can be passed.
        low = int(np.searchsorted(self._ends, cursor, side="right"))
        firsts, ends = self._firsts[low : low + count], self._ends[low : low + count]
        starts = np.maximum(np.concatenate(([cursor], ends)), cursor)
        # The stretch from starts[i] to the range behind it is kept; the last one has no end.
        lengths = np.maximum(np.concatenate((firsts, [LAST_POSITION])) - starts, 0)
        before = np.minimum(np.cumsum(lengths) - lengths, count)
        taken = np.minimum(lengths, count - before)
        positions = np.repeat(starts - before, taken) + np.arange(taken.sum())
        if positions.size < count:
            raise DataError(f"from position {cursor} on fewer than {count} are left: all others are skipped")
        return positions, int(positions[-1]) + 1 if count else cursor

    def between(self, first: int, end: int) -> list[Range]:
        """The skipped ranges inside [first, end), cut off at its edges."""
        low = int(np.searchsorted(self._ends, first, side="right"))
        high = int(np.searchsorted(self._firsts, end, side="left"))
        firsts, ends = np.maximum(self._firsts[low:high], first), np.minimum(self._ends[low:high], end)
        return list(zip(firsts.tolist(), ends.tolist(), strict=True)) if first < end else []

    def gaps(self) -> Skips:
        """The positions in [0, 2^62) that are not skipped."""
        firsts, ends = np.append(0, self._ends), np.append(self._firsts, LAST_POSITION)
        some = firsts < ends
        return Skips(firsts[some], ends[some])

    def union(self, other: Skips) -> Skips:
        """The positions that are in either."""
        return Skips.of([*self.ranges, *other.ranges])


class Selection:
    """Which positions a run trains on: those not skipped, nor of a corpus where that was swapped out."""

    def __init__(self, order: Order, entries: Iterable[SkipEntry], more: Iterable[Range] = ()) -> None:
        """entries: of the ledger; more: further ranges. Raises DataError where a corpus is not one of `order`, or
        all of them are out. `entries` is how many there are."""
        entries = list(entries)
        self.entries = len(entries)
        self.skips = Skips.of([*more, *((e.first, e.end) for e in entries if e.corpus is None)])
        names = [corpus.name for corpus in order.corpora]
        out: dict[str, list[Range]] = {}
        for entry in entries:
            if entry.corpus is not None:
                out.setdefault(entry.corpus, []).append((entry.first, entry.end))
        if unknown := sorted(set(out) - set(names)):
            raise DataError(
                f"the skip ledger swaps out corpus {unknown[0]!r}, which is none of {names}: correct its name, or "
                "delete that line"
            )
        self._order = order
        for index, name in enumerate(names):
            if absent := order.absent(index):
                out.setdefault(name, []).extend(absent)
        self._out = {names.index(name): Skips.of(ranges) for name, ranges in out.items()}
        if not self.corpora_left:
            raise DataError(
                "the skip ledger swaps out every corpus: delete one of those lines, or blend in another corpus"
            )
        if len(self._out) == len(names):
            # Where every corpus is out there is nothing to look for, however far that reaches.
            in_some = Skips.of(kept for skips in self._out.values() for kept in skips.gaps().ranges)
            self.skips = self.skips.union(in_some.gaps())

    @property
    def corpora_left(self) -> int:
        """How many corpora are not swapped out for good."""
        return len(self._order.corpora) - len(self._gone())

    def share_without(self, *corpora: str) -> float:
        """Which part of the blend is left when `corpora` are swapped out, too."""
        names = [c.name for c in self._order.corpora]
        gone = self._gone() | {names.index(corpus) for corpus in corpora}
        left = [quota for index, quota in enumerate(self._order.quotas) if index not in gone]
        return sum(left) / sum(self._order.quotas)

    def mix(self, position: int) -> dict[str, float]:
        """The share of each corpus around a position, as far as it is not swapped out there."""
        quotas = self._order.quotas_at(position)
        out = {index for index, skips in self._out.items() if skips.contains(position)}
        left = {i: quota for i, quota in enumerate(quotas) if quota and i not in out}
        return {self._order.corpora[i].name: quota / sum(left.values()) for i, quota in left.items()}

    def _gone(self) -> set[int]:
        return {index for index, skips in self._out.items() if skips.ranges[-1][1] == LAST_POSITION}

    def next_kept(self, cursor: int, count: int) -> tuple[npt.NDArray[np.int64], int]:
        """As `Skips.next_kept`."""
        if not self._out:
            return self.skips.next_kept(cursor, count)
        found: list[npt.NDArray[np.int64]] = []
        missing = count
        while missing:
            positions, cursor = self.skips.next_kept(cursor, missing)
            corpora = self._order.locate(positions).corpus
            kept = np.ones(positions.size, dtype=bool)
            for corpus, skips in self._out.items():
                kept &= (corpora != corpus) | ~skips.mask(positions)
            found.append(positions[kept])
            missing -= found[-1].size
        chosen = np.concatenate([np.empty(0, np.int64), *found])
        return chosen, int(chosen[-1]) + 1 if count else cursor


class SkipEntry(Entry):
    """A line of the ledger: positions [first, end), why, by which incident, noticed at which step.

    corpus: only the positions of that corpus; from `first` on it is swapped out.
    """

    first: Position
    end: Position
    reason: str
    incident: int | None = None
    step: int | None = None
    corpus: str | None = None

    @model_validator(mode="after")
    def _forward(self) -> Self:
        if self.first >= self.end:
            raise ValueError(f"first {self.first} is not below end {self.end}")
        return self


def read_ledger(path: Path, odd: list[str] | None = None) -> list[SkipEntry]:
    """The entries of skips.jsonl, oldest first; see `ledger.read`."""
    return ledger.read(path, SkipEntry, odd)


def entries_that_can_be(
    path: Path, order: Order, more: Iterable[Range] = ()
) -> tuple[list[SkipEntry], list[str]]:
    """The entries of skips.jsonl that `Selection` takes, for who works while somebody else writes there; and what is
    wrong with the others."""
    odd: list[str] = []
    entries = read_ledger(path, odd)
    known = {corpus.name for corpus in order.corpora}
    odd += [f"{path}: there is no corpus {e.corpus!r}" for e in entries if e.corpus not in (None, *known)]
    entries = [e for e in entries if e.corpus is None or e.corpus in known]
    try:
        Selection(order, entries, more)
    except DataError as error:
        odd.append(str(error))
        entries = [e for e in entries if e.corpus is None]
    return entries, odd


def _checked(item: Range) -> Range:
    try:
        first, end = item
    except (TypeError, ValueError):
        raise DataError(f"skip range {item!r}: give [first, end]") from None
    for number in (first, end):
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise DataError(f"skip range [{first!r}, {end!r}): positions are whole numbers")
    if not 0 <= first < end <= LAST_POSITION:
        raise DataError(f"skip range [{first}, {end}): it must hold that 0 <= first < end <= 2^62")
    return int(first), int(end)
