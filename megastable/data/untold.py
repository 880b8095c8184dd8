"""What the ledgers say of an incident that the journal does not. Pure.

`skips.jsonl` and `blends.jsonl` decide what is read, and are written before the journal's event. If the process ends
between the two, the ledgers win: the next process tells the journal what they hold (`IncidentLog.restore`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megastable.data.blends import ExchangeEntry, Line
from megastable.data.order import LAST_POSITION, Order
from megastable.data.skip_ledger import Ledger, SampleEntry, SkipEntry
from megastable.data.skips import NONE, Identity, Range, Skips, numbers_of, sequences_of

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class UntoldSamples:
    """Of one incident, by position: convicted by identity; skipped in this epoch; freed, of those that the journal
    calls skipped; deferred and where they return. reason: of the newest line."""

    convicted: Int64s
    skipped: Int64s
    freed: Int64s
    deferred: list[Range]
    returns: list[Range]
    reason: str

    def __bool__(self) -> bool:
        return bool(self.convicted.size or self.skipped.size or self.freed.size or self.deferred)


def find_untold(
    incident: int,
    skipped: Sequence[Range],
    deferred: Sequence[Range],
    ledger: Ledger,
    lines: Sequence[Line],
    order: Order,
    cursor: int,
) -> UntoldSamples:
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
    mine = ledger.of_incident(incident)
    entries, exclusions = mine.entries, mine.exclusions
    told = Skips.of(skipped)
    places = order.locate(numbers_of(told.ranges))
    convicted, freed = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for index, corpus in enumerate(order.corpora):
        tokens = exclusions.tokens.get(Identity(corpus.name, corpus.fingerprint), NONE)
        named = numbers_of(sequences_of(tokens, order.sequence_length, order.sequences[index]).ranges)
        known = places.sequence[places.corpus == index]
        convicted.append(_nearest(order, index, np.setdiff1d(named, known), cursor))
        if any(isinstance(entry, SampleEntry) and entry.released for entry in entries):
            there = numbers_of(told.ranges)[places.corpus == index]
            freed.append(there[~np.isin(known, named)])
    by_position = [e for e in entries if isinstance(e, SkipEntry)]
    more = Skips.of((e.first, e.end) for e in by_position if e.corpus is None).minus(told)
    # Samples skipped by position are not freed by a line that frees others.
    positions = Skips.of((e.first, e.end) for e in by_position)
    free = np.concatenate(freed)
    here, there = _deferred(incident, deferred, lines, order)
    exchanged = [e for e in lines if isinstance(e, ExchangeEntry) and e.incident == incident]
    reasons = [e.reason for e in [*exchanged, *entries]]
    return UntoldSamples(
        np.sort(np.concatenate(convicted)), numbers_of(more.ranges), free[~positions.mask(free)], here, there,
        reasons[-1] if reasons else "",
    )  # fmt: skip


def _deferred(
    incident: int, deferred: Sequence[Range], lines: Sequence[Line], order: Order
) -> tuple[list[Range], list[Range]]:
    """What exchanges of the incident deferred, without those that were undone since."""
    names = [corpus.name for corpus in order.corpora]
    known, here, there = Skips.of(deferred), list[Range](), list[Range]()
    for number, line in enumerate(lines):
        if not isinstance(line, ExchangeEntry) or line.incident != incident or line.corpus not in names:
            continue
        undone = line.exchange[::-1]
        if any(isinstance(e, ExchangeEntry) and e.exchange == undone for e in lines[number + 1 :]):
            continue
        slots = np.concatenate([np.arange(first, first + count) for first, _, count in line.exchange])
        later = np.concatenate([np.arange(second, second + count) for _, second, count in line.exchange])
        corpus = names.index(line.corpus)
        positions, returns = order.positions_at(corpus, slots), order.positions_at(corpus, later)
        if not known.mask(positions).all():
            here += Skips.of_numbers(np.sort(positions)).ranges
            there += Skips.of_numbers(np.sort(returns)).ranges
    return here, there


def _nearest(order: Order, corpus: int, sequences: Int64s, cursor: int) -> Int64s:
    """The position nearest to `cursor` of each of n sequences, as far as it comes within two epochs."""
    reach = order.block
    while sequences.size:
        first, end = max(0, cursor - reach), min(LAST_POSITION, cursor + reach)
        found = order.positions_of(corpus, sequences, first, end)
        found = found[np.argsort(np.abs(found - cursor), kind="stable")]
        _, index = np.unique(order.locate(found).sequence, return_index=True)
        read = order.samples_before(end)[corpus] - order.samples_before(first)[corpus]
        if index.size == sequences.size or read > 2 * order.sequences[corpus] or end == LAST_POSITION:
            return found[index]
        reach *= 4
    return sequences
