"""Sets of skipped data: ranges of absolute positions, and samples by identity at any position of the order.

A **position** is met once: a range of positions is skipped in this pass over the corpora only. A sample has an
**identity**, its tokens in the stream of its corpus, and is skipped in every epoch, for any blend, sequence
length and number of steps. Skipping is a lookup; nothing is read and thrown away. Ranges are half-open, [first, end).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.config.warmups import Stages
from megastable.data.order import LAST_POSITION, Order

Range = tuple[int, int]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

AT_ONCE = 1 << 16  # positions examined at a time if most are skipped


def ranges_of(numbers: npt.ArrayLike) -> list[Range]:
    """Whole numbers in any order as ascending ranges [first, end) that do not touch."""
    return Skips.from_numbers(np.asarray(numbers, dtype=np.int64)).ranges


def numbers_of(ranges: Iterable[Range]) -> Int64s:
    """The numbers of ranges [first, end), one range after another: int64."""
    return np.concatenate(
        [np.empty(0, np.int64), *(np.arange(range_first, range_end) for range_first, range_end in ranges)]
    )


class Skips:
    """A set of numbers (positions, tokens, sequences) as sorted ranges that neither overlap nor touch. Immutable."""

    def __init__(self, firsts: Int64s, ends: Int64s) -> None:
        self._firsts, self._ends = firsts, ends

    @classmethod
    def from_ranges(cls, ranges: Iterable[Range]) -> Skips:
        """The union of `ranges`, in any order, overlapping or not.

        Raises DataError for a range that violates 0 <= first < end <= 2^62 or is not of integers.
        """
        return cls.from_edges(np.array([_checked(item) for item in ranges], dtype=np.int64).reshape(-1, 2))

    @classmethod
    def from_edges(cls, edges: Int64s) -> Skips:
        """The union of n ranges, int64 [n, 2], each of them first < end."""
        edges = edges[np.argsort(edges[:, 0], kind="stable")]
        reach = np.maximum.accumulate(edges[:, 1])
        is_apart = edges[1:, 0] > reach[:-1]
        begins = np.flatnonzero(np.concatenate([np.ones(min(1, len(edges)), dtype=bool), is_apart]))
        return cls(edges[begins, 0], reach[np.append(begins[1:], len(edges)) - 1] if begins.size else reach)

    @classmethod
    def from_numbers(cls, numbers: Int64s) -> Skips:
        """A set of n numbers, int64 [n], in any order."""
        return cls.from_edges(np.column_stack([numbers, numbers + 1]))

    @property
    def edges(self) -> Int64s:
        """All ranges, ascending: int64 [n, 2]."""
        return np.column_stack([self._firsts, self._ends])

    @property
    def ranges(self) -> list[Range]:
        """All ranges [first, end), ascending."""
        return list(zip(self._firsts.tolist(), self._ends.tolist(), strict=True))

    def count(self) -> int:
        """Number of skipped positions."""
        return int((self._ends - self._firsts).sum())

    def contains(self, position: int) -> bool:
        """Whether `position` is skipped."""
        range_index = int(np.searchsorted(self._firsts, position, side="right")) - 1
        return range_index >= 0 and position < int(self._ends[range_index])

    def mask_skipped(self, positions: Int64s) -> Bools:
        """Which of `positions`, int64 [n], are skipped: bool [n]."""
        range_indexes = np.searchsorted(self._firsts, positions, side="right") - 1
        if not self._ends.size:
            return np.zeros(positions.shape, dtype=bool)
        return np.asarray((range_indexes >= 0) & (positions < self._ends[range_indexes]))

    def next_kept(self, cursor: int, count: int) -> tuple[Int64s, int]:
        """The next `count` positions from `cursor` on that are not skipped, int64 [count], and the cursor after the
        last of them. O(count + log n) for skipped ranges of any length. Raises DataError if fewer are left."""
        kept_positions = self.up_to(cursor, count)
        if kept_positions.size < count:
            raise nothing_left(cursor, count)
        return kept_positions, int(kept_positions[-1]) + 1 if count else cursor

    def up_to(self, cursor: int, count: int) -> Int64s:
        """As `next_kept`, but fewer if fewer are left."""
        # At least one kept position lies between two ranges, so at most this many ranges can be passed.
        low = int(np.searchsorted(self._ends, cursor, side="right"))
        range_firsts, range_ends = self._firsts[low : low + count], self._ends[low : low + count]
        gap_starts = np.maximum(np.concatenate(([cursor], range_ends)), cursor)
        # The positions from starts[i] to the next range are kept; the last gap has no end.
        gap_lengths = np.maximum(np.concatenate((range_firsts, [LAST_POSITION])) - gap_starts, 0)
        positions_before = np.minimum(np.cumsum(gap_lengths) - gap_lengths, count)
        positions_taken = np.minimum(gap_lengths, count - positions_before)
        return np.repeat(gap_starts - positions_before, positions_taken) + np.arange(positions_taken.sum())

    def ranges_between(self, first: int, end: int) -> list[Range]:
        """The skipped ranges inside [first, end), cut off at its edges."""
        if first >= end:
            return []
        low = int(np.searchsorted(self._ends, first, side="right"))
        high = int(np.searchsorted(self._firsts, end, side="left"))
        return Skips(np.maximum(self._firsts[low:high], first), np.minimum(self._ends[low:high], end)).ranges

    def gaps(self) -> Skips:
        """The positions in [0, 2^62) that are not skipped."""
        gap_firsts, gap_ends = np.append(0, self._ends), np.append(self._firsts, LAST_POSITION)
        is_filled = gap_firsts < gap_ends
        return Skips(gap_firsts[is_filled], gap_ends[is_filled])

    @classmethod
    def union_of(cls, parts: Iterable[Skips]) -> Skips:
        """The numbers in any of the parts."""
        return cls.from_edges(np.concatenate([np.empty((0, 2), np.int64), *(part.edges for part in parts)]))

    def union(self, other: Skips) -> Skips:
        """The numbers in either set."""
        return Skips.union_of((self, other))

    def minus(self, other: Skips) -> Skips:
        """The numbers in this set only."""
        return self.gaps().union(other).gaps()


NONE = Skips(np.empty(0, np.int64), np.empty(0, np.int64))


class Identity(NamedTuple):
    """A corpus by its name and its manifest's fingerprint: changed content is another identity."""

    corpus: str
    fingerprint: str


@dataclass(frozen=True)
class Exclusions:
    """The content of a skip ledger. positions: of any corpus; swapped: positions by the corpus that is swapped out
    there; tokens: of the training streams of corpora. counts: lines by the corpus that they swap out, None for all
    others."""

    positions: Skips = NONE
    swapped: Mapping[str, Skips] = field(default_factory=dict)
    tokens: Mapping[Identity, Skips] = field(default_factory=dict)
    counts: Mapping[str | None, int] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        """Number of lines."""
        return sum(self.counts.values())

    def of_corpora(self, names: Set[str]) -> Exclusions:
        """Without the swapped positions of other corpora."""
        swapped = {name: corpus_skips for name, corpus_skips in self.swapped.items() if name in names}
        counts = {
            count_name: count
            for count_name, count in self.counts.items()
            if count_name is None or count_name in names
        }
        return replace(self, swapped=swapped, counts=counts)


NOTHING = Exclusions()


class Selection:
    """The positions that a run trains on: those not skipped in any way. The only place that decides this."""

    def __init__(self, order: Order, excluded: Exclusions = NOTHING, more: Iterable[Range] = ()) -> None:
        """excluded: of the ledger; more: further positions. Raises DataError if a swapped-out corpus is not in `order`,
        or nothing is left.

        `lines`: of the ledger; `positions`: skipped by position, of any corpus; `sequences`: skipped by identity, by
        the index of the corpus.
        """
        self.lines = excluded.lines
        self.positions = Skips.from_ranges(more).union(excluded.positions)
        self._order = order
        names = [corpus.name for corpus in order.corpora]
        if unknown := sorted(set(excluded.swapped) - set(names)):
            raise DataError(
                f"the skip ledger swaps out corpus {unknown[0]!r}, which is not one of {names}: correct its name, or "
                "delete that line"
            )
        self.sequences: dict[int, Skips] = {}
        self._out: dict[int, Skips] = {}
        for corpus_index, corpus in enumerate(order.corpora):
            absent = Skips.from_ranges(order.absent_ranges(corpus_index))
            out = excluded.swapped.get(corpus.name, NONE).union(absent)
            tokens = excluded.tokens.get(Identity(corpus.name, corpus.fingerprint), NONE)
            chosen_sequences = sequences_of(tokens, order.sequence_length, order.sequences[corpus_index])
            if chosen_sequences.count() == order.sequences[corpus_index]:
                out = NONE.gaps()  # otherwise the search for a kept one would not end
            if chosen_sequences.count():
                self.sequences[corpus_index] = chosen_sequences
            if out.count():
                self._out[corpus_index] = out
        if not self.corpora_left:
            raise DataError(
                "the skip ledger swaps out every corpus, or names all samples of those that it leaves: delete one of "
                "those lines, or blend in another corpus"
            )
        self._passed = self.positions
        if len(self._out) == len(names):
            # If every corpus is swapped out there is nothing to search, however far that reaches.
            in_some = Skips.union_of(skips.gaps() for skips in self._out.values())
            self._passed = self._passed.union(in_some.gaps())

    @property
    def text(self) -> str:
        """How much is skipped, as text; empty for nothing."""
        skip_texts = [f"{count:,} positions"] if (count := self.positions.count()) else []
        for corpus_index, sequences in self.sequences.items():
            how_many = f"{sequences.count():,} of {self._order.sequences[corpus_index]:,} samples"
            skip_texts.append(f"{how_many} of corpus {self._order.corpora[corpus_index].name} in every epoch")
        return ", ".join(skip_texts)

    @property
    def corpora_left(self) -> int:
        """Number of corpora that are not swapped out for good."""
        return len(self._order.corpora) - len(self._gone())

    def share_without(self, *corpora: str) -> float:
        """The share of the blend that is left if `corpora` are swapped out as well."""
        gone_corpora = self._gone() | {i for i, c in enumerate(self._order.corpora) if c.name in corpora}
        quotas_left = [quota for i, quota in enumerate(self._order.quotas) if i not in gone_corpora]
        return sum(quotas_left) / sum(self._order.quotas)

    @property
    def kept(self) -> float:
        """The share of the current blend's positions that is trained on in the long run, ignoring ranges skipped by
        position."""
        gone_corpora, order = self._gone(), self._order
        quotas_left = (
            quota * (1 - self.sequences.get(i, NONE).count() / order.sequences[i])
            for i, quota in enumerate(order.quotas)
            if i not in gone_corpora
        )
        return sum(quotas_left) / sum(order.quotas)

    def mix_at(self, position: int) -> dict[str, float]:
        """The share of each corpus around a position, without corpora swapped out there."""
        quotas = self._order.quotas_at(position)
        corpora_out = {i for i, skips in self._out.items() if skips.contains(position)}
        left = {i: quota for i, quota in enumerate(quotas) if quota and i not in corpora_out}
        return {self._order.corpora[i].name: quota / sum(left.values()) for i, quota in left.items()}

    def mask_skipped(self, positions: Int64s) -> Bools:
        """Which of n `positions` are skipped: bool [n]."""
        return self._passed.mask_skipped(positions) | self._left_out(positions)

    def next_kept(self, cursor: int, count: int) -> tuple[Int64s, int]:
        """As `Skips.next_kept`."""
        found_parts = [np.empty(0, np.int64)]
        search_position, missing, asked = cursor, count, count
        while missing:
            positions = self._passed.up_to(search_position, asked)
            if not positions.size:
                raise nothing_left(cursor, count)
            kept_positions = positions[~self._left_out(positions)][:missing]
            found_parts.append(kept_positions)
            search_position, missing = int(positions[-1]) + 1, missing - kept_positions.size
            # If little is left, examine more and more at a time.
            asked = missing if 2 * kept_positions.size > asked else max(missing, min(2 * asked, AT_ONCE))
        chosen_positions = np.concatenate(found_parts)
        return chosen_positions, int(chosen_positions[-1]) + 1 if count else cursor

    def named_between(self, first: int, end: int) -> Int64s:
        """The positions in [first, end) of samples skipped by identity: int64, ascending. O(samples) for each epoch."""
        found_positions = [np.empty(0, np.int64)]
        for corpus_index, sequences in self.sequences.items():
            sequence_numbers = sequences.gaps().next_kept(0, sequences.count())[0]
            found_positions.append(self._order.positions_of(corpus_index, sequence_numbers, first, end))
        return np.sort(np.concatenate(found_positions))

    def _left_out(self, positions: Int64s) -> Bools:
        """Which of n positions hold a sample that is skipped by identity or by its corpus: bool [n]."""
        is_out = np.zeros(positions.shape, dtype=bool)
        if not self._out and not self.sequences:
            return is_out
        located_samples = self._order.locate_samples(positions)
        for corpus, skips in self._out.items():
            is_out |= (located_samples.corpus == corpus) & skips.mask_skipped(positions)
        for corpus, sequences in self.sequences.items():
            is_out |= (located_samples.corpus == corpus) & sequences.mask_skipped(located_samples.sequence)
        return is_out

    def _gone(self) -> set[int]:
        return {index for index, skips in self._out.items() if skips.edges[-1, 1] == LAST_POSITION}


def nothing_left(cursor: int, count: int) -> DataError:
    return DataError(f"from position {cursor} on fewer than {count} are left: all others are skipped")


def sequences_of(tokens: Skips, length: int, count: int) -> Skips:
    """The sequences, of the `count` of a stream, that have any of `tokens` among their own `length` tokens."""
    first_tokens, end_tokens = tokens.edges.T
    sequence_edges = np.column_stack([first_tokens // length, np.minimum(-(-end_tokens // length), count)])
    return Skips.from_edges(sequence_edges[sequence_edges[:, 0] < sequence_edges[:, 1]])


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


def batches_ahead(selection: Skips | Selection, batches: Stages, cursor: int, steps: int) -> list[Int64s]:
    """The positions of each of the next `steps` steps from `cursor` on, int64 [global batch]. Raises DataError if fewer
    are left."""
    found_batches: list[Int64s] = []
    for batch_size, stage_end in batches.from_position(cursor):
        count = steps - len(found_batches)
        if stage_end is not None:  # those that begin before it
            count = max(0, min(count, -((cursor - stage_end) // batch_size)))
        positions, _ = selection.next_kept(cursor, count * batch_size)
        for batch in positions.reshape(count, batch_size):
            if stage_end is not None and cursor >= stage_end:
                break
            found_batches.append(batch)
            cursor = int(batch[-1]) + 1
    return found_batches
