"""Says line by line what the skip ledger of a run skips, for pages. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megastable.base.text import ranges
from megastable.data.order import LAST_POSITION
from megastable.data.skip_ledger import AnyEntry, SampleEntry
from megastable.data.skips import ranges_of

RANGES = 4  # of a line that are told
DOCUMENTS = 8  # of a shard
SHARDS = 3  # of a line


@dataclass(frozen=True)
class SkipLine:
    """A line of the skip ledger. time: UTC; what: is skipped, by position of the data order or by tokens of a corpus's
    training stream; documents: by shard and number, if the line names them; samples: how many, None if it is not
    known."""

    time: str
    what: str
    documents: str
    samples: int | None
    reason: str
    incident: int | None
    step: int | None


def skip_lines(entries: Iterable[AnyEntry], length: int) -> list[SkipLine]:
    """Lines of the ledger, in order. length: tokens of a sample."""
    return [skip_line(entry, length) for entry in entries]


def skip_line(entry: AnyEntry, length: int) -> SkipLine:
    """One line of the ledger. length: tokens of a sample."""
    samples: int | None
    if isinstance(entry, SampleEntry):
        tokens = [(first, end) for first, end in entry.tokens]
        what = f"{entry.corpus}, tokens {ranges(tokens, RANGES)}" + (", read again" if entry.released else "")
        samples = math.ceil(sum(end - first for first, end in tokens) / max(1, length))
        named = [f"{one.shard}: {numbers(one.documents)}" for one in (entry.documents or [])[:SHARDS]]
        more = len(entry.documents or []) - len(named)
        documents = "; ".join(named) + (f"; {more} more shards" if more > 0 else "")
    else:
        ahead, documents = entry.end >= LAST_POSITION, ""
        what = (
            f"from position {entry.first} on" if ahead else f"positions {ranges([(entry.first, entry.end)])}"
        )
        what = f"{entry.corpus}, {what}" if entry.corpus else what
        samples = None if ahead or entry.corpus else entry.end - entry.first
    time = "" if entry.time is None else entry.time.strftime("%Y-%m-%d %H:%M")
    return SkipLine(time, what, documents, samples, entry.reason, entry.incident, entry.step)


def numbers(given: list[int]) -> str:
    """Numbers of documents as text: those in a row as a range."""
    return ("document " if len(given) == 1 else "documents ") + ranges(ranges_of(given), DOCUMENTS)
