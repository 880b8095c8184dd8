"""The skip ledger of a run, `skips.jsonl`: samples excluded from training, and why. Append-only, JSON lines.

A line is one of two kinds. It names absolute positions (`SkipEntry`), which are skipped in this pass over the corpora
only; or samples by identity (`SampleEntry`): tokens of a corpus's own training stream, which are skipped for the rest
of the run, or until a later line releases them. `Ledger` is all lines, `exclusions_of` what they say together, and
`skips.Selection` what an order has left then.

Read line by line by pydantic: 50,000 lines take half a second, and a line that the run writes names up to 4,096
ranges.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from megastable.base import jsonl
from megastable.base.errors import DataError
from megastable.data.append_only import LedgerEntry, append, append_all, parse_lines, read, warn_of_torn
from megastable.data.documents import Document
from megastable.data.order import LAST_POSITION, Order
from megastable.data.skips import NONE, NOTHING, Exclusions, Identity, Range, Selection, Skips

__all__ = [
    "RANGES",
    "AnyEntry",
    "Ledger",
    "SampleEntry",
    "ShardDocuments",
    "SkipEntry",
    "SkipLedger",
    "append",
    "append_all",
    "exclusions_of",
    "read_ledger",
    "released",
    "sample_entries",
]

Int64s = npt.NDArray[np.int64]

Place = Annotated[StrictInt, Field(ge=0, le=LAST_POSITION)]
Number = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]  # what other programs read as well
Pair = Annotated[list[Place], Field(min_length=2, max_length=2)]

RANGES = 4096  # per line: a longer line would not be repaired after a crash (jsonl.py)


class SkipEntry(LedgerEntry):
    """A line by position: [first, end), the reason, its incident, the step at which it was noticed.

    corpus: skip only the positions of that corpus, which is swapped out from `first` on.
    """

    first: Place
    end: Place
    reason: str
    incident: Number | None = None
    step: Number | None = None
    corpus: str | None = None

    @model_validator(mode="after")
    def _forward(self) -> Self:
        if self.first >= self.end:
            raise ValueError(f"first {self.first} is not below end {self.end}")
        return self


class ShardDocuments(BaseModel):
    """Documents by their number in a shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard: str
    documents: list[Number]


class SampleEntry(LedgerEntry):
    """A line by identity: skips every sample of `corpus`, while its manifest has `fingerprint`, that has any of
    `tokens` (ranges [first, end) of the training stream) among its own. documents: theirs, for people. released: the
    reverse: earlier lines about these tokens no longer hold; later lines may name them again."""

    corpus: Annotated[str, Field(min_length=1)]
    fingerprint: Annotated[str, Field(min_length=1)]
    tokens: Annotated[list[Pair], Field(min_length=1)]
    reason: str
    incident: Number | None = None
    step: Number | None = None
    documents: list[ShardDocuments] | None = None
    released: Literal[True] | None = None

    @field_validator("tokens")
    @classmethod
    def _forward(cls, tokens: list[list[int]]) -> list[list[int]]:
        if wrong := next(((first, end) for first, end in tokens if first >= end), None):
            raise ValueError(f"first {wrong[0]} is not below end {wrong[1]}")
        return tokens


AnyEntry = SkipEntry | SampleEntry


def sample_entries(
    order: Order,
    positions: Int64s,
    reason: str,
    documents: Iterable[Document] = (),
    incident: int | None = None,
    step: int | None = None,
) -> list[SampleEntry]:
    """The lines that skip the samples at `positions`, n integers, for the rest of the run: at least one for each of
    their corpora. documents: of the named ones, for people."""
    places, length = order.locate(positions), order.sequence_length
    named = list(documents)
    found = []
    for index in np.unique(places.corpus).tolist():
        corpus = order.corpora[index]
        firsts = places.first_token[places.corpus == index]
        edges = Skips.merged(np.column_stack([firsts, firsts + length])).edges
        shards: dict[str, list[int]] = {}
        for document in named:
            if document.corpus == corpus.name:
                shards.setdefault(document.shard, []).append(document.document)
        of = [ShardDocuments(shard=shard, documents=numbers) for shard, numbers in shards.items()]
        for number, part in enumerate(np.split(edges, range(RANGES, len(edges), RANGES))):
            found.append(
                SampleEntry(
                    corpus=corpus.name, fingerprint=corpus.fingerprint, tokens=part.tolist(), reason=reason,
                    incident=incident, step=step, documents=of if of and not number else None,
                )
            )  # fmt: skip
    return found


def _kind_of_line(content: Any) -> type[SkipEntry] | type[SampleEntry]:
    """The class of a line, by its content."""
    named = isinstance(content, dict) and ("tokens" in content or "fingerprint" in content)
    return SampleEntry if named else SkipEntry


@dataclass(frozen=True)
class Ledger:
    """The lines of a ledger, oldest first."""

    entries: Sequence[AnyEntry]

    @classmethod
    def read(cls, path: Path, odd: list[str] | None = None) -> Ledger:
        """The lines of skips.jsonl, as `append_only.read` reads them."""
        return cls(read(path, _kind_of_line, odd))

    @property
    def exclusions(self) -> Exclusions:
        """The exclusions of all lines together."""
        return exclusions_of(self.entries)

    @property
    def reasons(self) -> Counter[str]:
        """Number of lines by reason."""
        return Counter(entry.reason for entry in self.entries)

    def usable(self, path: Path, order: Order, more: Iterable[Range] = ()) -> tuple[Selection, list[str]]:
        """The selection by the lines that still leave `order` something to train on, for readers of a ledger that
        others write to.

        Args:
            path: Of the ledger, for the messages.
            order: That the selection is of.
            more: As in `Selection`.

        Returns:
            The selection, and the problems of the other lines.
        """
        more = list(more)
        excluded, odd = _usable(self.exclusions, lambda: self.entries, path, order, more)
        return Selection(order, excluded, more), odd

    def of_incident(self, number: int) -> Ledger:
        return Ledger([entry for entry in self.entries if entry.incident == number])

    def without(self, incident: int, reason: str) -> Ledger:
        """All lines except those of an incident that give this reason."""
        return Ledger([e for e in self.entries if (e.incident, e.reason) != (incident, reason)])

    @property
    def by_position(self) -> Ledger:
        """The lines that name positions."""
        return Ledger([entry for entry in self.entries if isinstance(entry, SkipEntry)])

    @property
    def by_identity(self) -> Ledger:
        """The lines that name samples."""
        return Ledger([entry for entry in self.entries if isinstance(entry, SampleEntry)])

    @property
    def by_others(self) -> Ledger:
        """The lines that were not written by an incident."""
        return Ledger([entry for entry in self.entries if entry.incident is None])

    @property
    def ever(self) -> Ledger:
        """The lines as if nothing had been released."""
        return Ledger([entry for entry in self.entries if not _releases(entry)])

    def until(self, time: float) -> Ledger:
        """The lines written up to a time, in seconds since 1970; lines without a time always count."""
        return Ledger([e for e in self.entries if e.time is None or e.time.timestamp() <= time])

    def swaps(self, corpus: str) -> list[tuple[Range, datetime | None]]:
        """The skipped positions of a corpus, one range per line, and since when."""
        lines = (e for e in self.entries if isinstance(e, SkipEntry) and e.corpus == corpus)
        return [((entry.first, entry.end), entry.time) for entry in lines]


def read_ledger(path: Path, odd: list[str] | None = None) -> list[AnyEntry]:
    """The entries of skips.jsonl, oldest first, as `append_only.read` reads them."""
    return read(path, _kind_of_line, odd)


def released(
    ledger: Ledger, order: Order, positions: Int64s, reason: str, incident: int, step: int
) -> list[SampleEntry]:
    """The lines that release what incidents of the run said of the samples at n positions. Samples that a person or
    another tool also named stay skipped."""
    others = Selection(order, replace(ledger.by_others.exclusions, positions=NONE, swapped={}))
    free = positions[~others.mask(positions)]
    lines = sample_entries(order, free, f"released: {reason}", (), incident, step)
    return [line.model_copy(update={"released": True}) for line in lines]


def exclusions_of(entries: Iterable[AnyEntry], known: Exclusions = NOTHING) -> Exclusions:
    """The exclusions `known`, plus those of some later lines."""
    ranges_by_corpus: dict[str | None, list[Range]] = defaultdict(list)
    tokens, counts = dict(known.tokens), Counter(known.counts)
    # A line that releases is about earlier lines only, so that the order of the two kinds counts.
    for is_release, lines in groupby(entries, key=_releases):
        named: dict[Identity, list[list[int]]] = defaultdict(list)
        for entry in lines:
            if isinstance(entry, SampleEntry):
                named[Identity(entry.corpus, entry.fingerprint)] += entry.tokens
                counts[None] += 1
            else:
                ranges_by_corpus[entry.corpus].append((entry.first, entry.end))
                counts[entry.corpus] += 1
        for identity, pairs in named.items():
            earlier, ranges = tokens.get(identity, NONE), Skips.merged(np.array(pairs, dtype=np.int64))
            tokens[identity] = earlier.minus(ranges) if is_release else earlier.union(ranges)
    positions, swapped = known.positions, dict(known.swapped)
    for corpus, chosen in ranges_by_corpus.items():
        skips = Skips.merged(np.array(chosen, dtype=np.int64))
        if corpus is None:
            positions = positions.union(skips)
        else:
            swapped[corpus] = swapped.get(corpus, NONE).union(skips)
    some_tokens = {identity: skips for identity, skips in tokens.items() if skips.count()}
    return Exclusions(positions, swapped, some_tokens, dict(counts))


class SkipLedger:
    """The ledger at `path`, read repeatedly by one process: known lines are not parsed again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._size, self._digest = 0, xxhash.xxh3_128_digest(b"")
        self._known, self._odd = Exclusions(), list[str]()

    def read(self) -> tuple[Exclusions, list[str]]:
        """The current exclusions, and the problems of the lines that are left out. Raises DataError if it cannot be
        read."""
        whole, torn = jsonl.content(self.path)
        warn_of_torn(self.path, whole, torn)
        view = memoryview(whole)
        if xxhash.xxh3_128_digest(view[: self._size]) != self._digest:
            self._forget()  # earlier content was changed or removed
        # A last line without its newline counts, but is not yet known: more of it may come.
        size = whole.rfind(b"\n") + 1
        if size > self._size:
            self._known = self._parse(whole, size, self._odd)
            self._size, self._digest = size, xxhash.xxh3_128_digest(view[:size])
        odd = list(self._odd)
        return self._parse(whole, len(whole), odd), odd

    def usable(self, order: Order, more: Iterable[Range] = ()) -> tuple[Exclusions, list[str]]:
        """As `read`, but also leaves out and reports the lines that would leave `order` nothing to train on."""
        excluded, odd = self.read()
        excluded, refused = _usable(
            excluded, lambda: read_ledger(self.path, []), self.path, order, list(more)
        )
        return excluded, [*odd, *refused]

    def _parse(self, whole: bytes, end: int, odd: list[str]) -> Exclusions:
        """The known exclusions plus those of the lines that follow, up to byte `end`."""
        if end == self._size:
            return self._known
        number = whole.count(b"\n", 0, self._size) + 1
        new_lines = parse_lines(self.path, whole[self._size : end], number, _kind_of_line, odd)
        return exclusions_of(new_lines, self._known)


def _releases(entry: AnyEntry) -> bool:
    return isinstance(entry, SampleEntry) and entry.released is not None


def _usable(
    excluded: Exclusions,
    read_lines: Callable[[], Sequence[AnyEntry]],
    path: Path,
    order: Order,
    more: Sequence[Range],
) -> tuple[Exclusions, list[str]]:
    """The part of a ledger that leaves something of `order` to train on.

    Args:
        excluded: By all lines.
        read_lines: Gives the lines, if not all of them can hold; then a line holds if it leaves something beside the
            older lines that hold.
        path: Of the ledger, for the messages.
        order: That has to have something left.
        more: As in `Selection`.

    Returns:
        The exclusions, and the problems of the lines that do not hold.
    """
    known = {corpus.name for corpus in order.corpora}
    odd = [f"{path}: there is no corpus {name!r}" for name in sorted(set(excluded.swapped) - known)]
    excluded = excluded.of_corpora(known)

    def find_problem(some: Exclusions) -> str:
        try:
            Selection(order, some, more)
        except DataError as error:
            return str(error)
        return (
            "every position after some point is named" if some.positions.contains(LAST_POSITION - 1) else ""
        )

    def leave_some(lines: Sequence[AnyEntry]) -> bool:
        return not find_problem(exclusions_of(lines).of_corpora(known))

    if not (problem := find_problem(excluded)):
        return excluded, odd
    Selection(order, NOTHING, more)  # raises if the ledger is not the cause
    lines = list(read_lines())
    while lines and not leave_some(lines):
        some_left, none_left = 0, len(lines)  # so many of the lines leave something, so many do not
        while none_left - some_left > 1:
            middle = (some_left + none_left) // 2
            if leave_some(lines[:middle]):
                some_left = middle
            else:
                none_left = middle
        wrong = lines.pop(some_left)
        odd.append(
            f"{path}: {problem}. The line with the reason {wrong.reason!r}, of {wrong.time}, is left out"
        )
    return exclusions_of(lines).of_corpora(known), odd
