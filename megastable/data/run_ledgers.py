"""What a run writes to its ledgers, and reads from them: skips (`Skipping`), and deferrals of samples that were part of
an incident without being its cause (`Deferring`). Rank 0 reads and writes; all ranks follow, and see the same lines.

A deferral exchanges samples with later ones. `plan_deferral` is pure: which slots to exchange (`order.Exchange`), as
far from the incident as possible, best first:

1. in the same epoch of their corpus, at least `far` away: the instability is over by then;
2. in the same epoch, as late as possible, but not `near`;
3. in a later epoch, at least `far` away: over both epochs every sample is read equally often;
4. as late as possible, if only after the incident.

Never a slot that is skipped or already exchanged, nor one after the run's last step. Samples without a free slot are
reported as lost.

The ledgers decide what is read, and are written before the journal's event. If the process ends between the two, the
ledgers win: the next process tells the journal what they hold (`find_unjournalled`, `IncidentLog.restore`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.base.collectives import run_on_first as share_first
from megastable.base.errors import DataError, SpaceError
from megastable.config.tree import RunConfig
from megastable.data.blends import ExchangeEntry, Line
from megastable.data.order import LAST_POSITION, Exchange, Order, swaps_of
from megastable.data.samples import Source
from megastable.data.skip_ledger import (
    RANGES,
    Ledger,
    LedgerEntry,
    SampleEntry,
    SkipEntry,
    append_entries,
)
from megastable.data.skips import (
    NONE,
    Exclusions,
    Identity,
    Range,
    Selection,
    Skips,
    numbers_of,
    ranges_of,
    sequences_of,
)
from megastable.run.directory import RunDirectory


def append_durably(path: Path, entries: Sequence[LedgerEntry], what: str) -> None:
    """Add lines to a ledger, on disk when this returns. Raises SpaceError on all ranks if they cannot be written."""

    def write() -> None:
        try:
            append_entries(path, entries)
        except DataError as error:
            raise SpaceError(
                f"{error}. What {what} is not written down: make room and start again; the run goes on from its newest "
                "checkpoint, and meets it again"
            ) from None

    share_first(write)


class Skipping:
    """Of one process of a run: data.skip of the recipe, and skips.jsonl."""

    def __init__(self, config: RunConfig, run: RunDirectory) -> None:
        self._more = config.data.skip
        self._path = run.skips
        self._excluded = Exclusions()

    def check_ledger(self, strict: bool) -> None:
        """strict: raise DataError for a malformed line, when a person has started the run and can fix it."""

        def read() -> tuple[Exclusions, list[str]]:
            problems: list[str] = []
            return Ledger.read_ledger(self._path, problems).exclusions, problems

        self._excluded, line_problems = share_first(read)
        if strict and line_problems:
            raise DataError(line_problems[0])

    def select_samples(self, order: Order, strict: bool = True) -> Selection:
        """The samples left in `order`. Raises DataError as `check_ledger` and `Selection` do, if `strict`."""
        if not strict:
            return self.select_usable(order)[0]
        self.check_ledger(strict)
        return Selection(order, self._excluded, self._more)

    def select_usable(self, order: Order) -> tuple[Selection, list[str]]:
        """As `select_samples`, but during a run, which a malformed line does not end: such lines are ignored, and their
        problems are the second result."""

        def read() -> tuple[Exclusions, list[str]]:
            problems: list[str] = []
            excluded, refused_lines = Ledger.read_ledger(self._path, problems).usable_exclusions(
                self._path, order, self._more
            )
            return excluded, [*problems, *refused_lines]

        self._excluded, line_problems = share_first(read)
        return Selection(order, self._excluded, self._more), line_problems

    def find_foreign(self, order: Order) -> dict[Identity, int]:
        """Corpora that lines of the last read name tokens of, and how many, but that are not in `order`."""
        own_identities = {Identity(corpus.name, corpus.fingerprint) for corpus in order.corpora}
        return {
            token_key: token_of.count()
            for token_key, token_of in self._excluded.tokens.items()
            if token_key not in own_identities
        }


Int64s = npt.NDArray[np.int64]

NO_NUMBERS = np.empty(0, np.int64)
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


def plan_deferral(order: Order, left: Selection, positions: Int64s, room: DeferralRoom) -> Deferral:
    """New positions for the samples at `positions`, all before room.begin. Samples that are skipped anyway stay."""
    positions = np.unique(positions[~left.mask_skipped(positions)])
    corpus_indexes, slots = order.slots_at(positions)
    epochs = slots // np.array(order.sequences)[corpus_indexes]
    exchanges, old_positions, new_positions = list[Exchange](), [NO_NUMBERS], [NO_NUMBERS]
    taken = dict.fromkeys(np.unique(corpus_indexes).tolist(), NO_NUMBERS)
    for index, epoch in sorted({*zip(corpus_indexes.tolist(), epochs.tolist(), strict=True)}):
        mine = slots[(corpus_indexes == index) & (epochs == epoch)]
        found = NO_NUMBERS
        for first, end, late in _stretches(order, index, epoch, room):
            if found.size < mine.size:
                more = _free(order, left, index, first, end, late, mine.size - found.size, taken[index])
                taken[index] = np.union1d(taken[index], more)
                found = np.sort(np.concatenate([found, more]))
        mine = mine[: found.size]
        if found.size:
            exchanges.append(Exchange(order.corpora[index].name, swaps_of(mine, found)))
        old_positions.append(order.positions_at(index, mine))
        new_positions.append(order.positions_at(index, found))
    moved, returns = np.concatenate(old_positions), np.concatenate(new_positions)
    by_position = np.argsort(moved)
    lost_positions = np.setdiff1d(positions, moved)
    return Deferral(exchanges, moved[by_position], returns[by_position], lost_positions)


def _stretches(order: Order, corpus: int, epoch: int, room: DeferralRoom) -> Iterator[tuple[int, int, bool]]:
    """Slots [first, end) of a corpus to examine, best first; and whether the latest of them are best."""
    begin_slot, near_slot, far_slot, end_slot = (
        order.samples_before(p)[corpus] for p in (room.begin, room.near, room.far, room.end)
    )
    next_epoch = (epoch + 1) * order.sequences[corpus]  # the first slot of the next epoch
    yield far_slot, min(next_epoch, end_slot), False
    yield near_slot, min(next_epoch, far_slot, end_slot), True
    yield max(far_slot, next_epoch), end_slot, False
    yield begin_slot, end_slot, True


def _free(
    order: Order, left: Selection, corpus: int, first: int, end: int, late: bool, count: int, taken: Int64s
) -> Int64s:
    """Up to `count` slots of [first, end), the first or the last ones, whose samples are neither skipped nor
    exchanged."""
    found_slots, moved_slots = list[Int64s](), order.moved_slots(corpus)[:, 0]
    first, end = (max(first, end - MOST), end) if late else (first, min(end, first + MOST))
    chunk_starts: Sequence[int] = range(first, end, AT_ONCE)
    for first_slot in reversed(chunk_starts) if late else chunk_starts:
        slots = np.arange(first_slot, min(end, first_slot + AT_ONCE))
        slots = slots[~np.isin(slots, moved_slots) & ~np.isin(slots, taken)]
        slots = slots[~left.mask_skipped(order.positions_at(corpus, slots))]
        wanted_count = count - sum(some_slots.size for some_slots in found_slots)
        found_slots.append(slots[max(0, slots.size - wanted_count) :] if late else slots[:wanted_count])
        if wanted_count <= slots.size:
            break
    return np.concatenate([NO_NUMBERS, *found_slots])


class Deferring:
    """Of one process of a run. selection: what is left of the current order, collective."""

    def __init__(
        self, config: RunConfig, run: RunDirectory, source: Source, selection: Callable[[], Selection]
    ) -> None:
        self.run, self.source, self.selection = run, source, selection
        self.steps, self.batches = config.train.steps, config.batches
        self.verify_steps = config.stability.policy.verify_steps
        self.recur_steps = config.stability.policy.recur_steps

    def defer_samples(
        self, positions: Int64s, step: int, begin: int, reason: str, incident: int, ahead: int = 0
    ) -> Deferral:
        """Defer the samples at n positions, and up to `ahead` after them, as far as there is room for all. step: began
        at position `begin`, at or before them. Afterwards the source has the new order, so readers must go back to
        there or further. Raises SpaceError."""
        left_selection = self.selection()
        found_deferral = self._plan(left_selection, positions, step, begin, ahead)
        # Those ahead were not met yet: without room they are not lost.
        while ahead and (found_deferral is None or found_deferral.lost.size):
            ahead //= 2
            found_deferral = self._plan(left_selection, positions, step, begin, ahead)
        assert found_deferral is not None
        ledger_entries = [
            ExchangeEntry(
                corpus=e.corpus, exchange=list(e.swaps[at : at + RANGES]), reason=reason, incident=incident, step=step
            )
            for e in found_deferral.exchanges
            for at in range(0, len(e.swaps), RANGES)
        ]  # fmt: skip
        append_durably(self.run.blends, ledger_entries, f"incident {incident} wants deferred")
        self.source.order = self.source.order.with_exchanges(found_deferral.exchanges)
        return found_deferral

    def step_of(self, position: int, step: int, begin: int) -> int:
        """Approximate step that reads a position, as if nothing in between were skipped. step, begin: as
        `defer_samples`."""
        return step + self.batches.count_steps(begin, position)

    def _plan(self, left: Selection, positions: Int64s, step: int, begin: int, ahead: int) -> Deferral | None:
        """As `defer_samples`, with all of `ahead`; None if fewer are left."""
        end = int(positions.max()) + 1
        if ahead:
            try:
                more_positions, end = left.next_kept(end, ahead)
            except DataError:
                return None
            positions = np.concatenate([positions, more_positions])
        # Skips on the way only make the run get further.
        last = max(end, self.batches.reach_after(begin, self.steps - step + 1))

        def after(steps: int) -> int:
            count = self.batches.reach_after(end, steps) - end
            try:
                return min(last, left.next_kept(end, count)[1]) if count < last - end else last
            except DataError:  # nothing is left
                return last

        room = DeferralRoom(end, after(self.verify_steps), after(self.recur_steps), last)
        return plan_deferral(self.source.order, left, positions, room)


@dataclass(frozen=True)
class UntoldSamples:
    """Of one incident, by position: skipped by identity; skipped in this epoch; freed, of those that the journal
    calls skipped; deferred and where they return. reason: of the newest line."""

    identified: Int64s
    skipped: Int64s
    freed: Int64s
    deferred: list[Range]
    returns: list[Range]
    reason: str

    def __bool__(self) -> bool:
        return bool(self.identified.size or self.skipped.size or self.freed.size or self.deferred)


def find_unjournalled(
    incident: int, skipped: Sequence[Range], deferred: Sequence[Range], ledger: Ledger, lines: Sequence[Line],
    order: Order, cursor: int,
) -> UntoldSamples:  # fmt: skip
    """What the skip ledger and the lines of blends.jsonl hold of an incident that the journal does not say.

    Args:
        incident: Its number.
        skipped: Positions that the journal says it skipped; deferred: and deferred.
        ledger: The whole skip ledger.
        lines: Those of blends.jsonl, oldest first.
        order: The run's present order.
        cursor: Where the run goes on. Samples by identity, which have a position in every epoch, are named by the one
            nearest to it.
    """
    own_ledger = ledger.of_incident(incident)
    entries, exclusions = own_ledger.entries, own_ledger.exclusions
    told_skips = Skips.from_ranges(skipped)
    told_positions = numbers_of(told_skips.ranges)
    places = order.locate_samples(told_positions)
    identified, freed_by_corpus = [NO_NUMBERS], [NO_NUMBERS]
    for corpus_index, corpus in enumerate(order.corpora):
        tokens = exclusions.tokens.get(Identity(corpus.name, corpus.fingerprint), NONE)
        named = numbers_of(sequences_of(tokens, order.sequence_length, order.sequences[corpus_index]).ranges)
        known_sequences = places.sequence[places.corpus == corpus_index]
        identified.append(_nearest(order, corpus_index, np.setdiff1d(named, known_sequences), cursor))
        if any(isinstance(entry, SampleEntry) and entry.released for entry in entries):
            there = told_positions[places.corpus == corpus_index]
            freed_by_corpus.append(there[~np.isin(known_sequences, named)])
    by_position = [e for e in entries if isinstance(e, SkipEntry)]
    ledger_skips = Skips.from_ranges((e.first, e.end) for e in by_position if e.corpus is None)
    # Samples skipped by position are not freed by a line that frees others.
    positions = Skips.from_ranges((e.first, e.end) for e in by_position)
    free = np.concatenate(freed_by_corpus)
    here, there = _find_deferred(incident, deferred, lines, order)
    exchanged = [e for e in lines if isinstance(e, ExchangeEntry) and e.incident == incident]
    reasons = [e.reason for e in [*exchanged, *entries]]
    return UntoldSamples(
        np.sort(np.concatenate(identified)), numbers_of(ledger_skips.minus(told_skips).ranges),
        free[~positions.mask_skipped(free)],
        here, there,
        reasons[-1] if reasons else "",
    )  # fmt: skip


def _find_deferred(
    incident: int, deferred: Sequence[Range], lines: Sequence[Line], order: Order
) -> tuple[list[Range], list[Range]]:
    """What exchanges of the incident deferred, without those that were undone since."""
    names = [corpus.name for corpus in order.corpora]
    known_skips, deferred_ranges, return_ranges = Skips.from_ranges(deferred), list[Range](), list[Range]()
    for line_number, line in enumerate(lines):
        if not isinstance(line, ExchangeEntry) or line.incident != incident or line.corpus not in names:
            continue
        undone_swaps = line.exchange[::-1]
        if any(isinstance(e, ExchangeEntry) and e.exchange == undone_swaps for e in lines[line_number + 1 :]):
            continue
        slots = np.concatenate([np.arange(first, first + count) for first, _, count in line.exchange])
        later = np.concatenate([np.arange(second, second + count) for _, second, count in line.exchange])
        corpus = names.index(line.corpus)
        positions, returns = order.positions_at(corpus, slots), order.positions_at(corpus, later)
        if not known_skips.mask_skipped(positions).all():
            deferred_ranges += ranges_of(positions)
            return_ranges += ranges_of(returns)
    return deferred_ranges, return_ranges


def _nearest(order: Order, corpus: int, sequences: Int64s, cursor: int) -> Int64s:
    """The position nearest to `cursor` of each of n sequences, as far as it comes within two epochs."""
    reach = order.block
    while sequences.size:
        first_position, end = max(0, cursor - reach), min(LAST_POSITION, cursor + reach)
        found_positions = order.positions_of(corpus, sequences, first_position, end)
        found_positions = found_positions[np.argsort(np.abs(found_positions - cursor), kind="stable")]
        _, index = np.unique(order.locate_samples(found_positions).sequence, return_index=True)
        samples_read = order.samples_before(end)[corpus] - order.samples_before(first_position)[corpus]
        if index.size == sequences.size or samples_read > 2 * order.sequences[corpus] or end == LAST_POSITION:
            return found_positions[index]
        reach *= 4
    return sequences
