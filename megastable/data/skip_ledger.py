"""Ledgers of a run that decide its data, and the skip ledger, `skips.jsonl`: samples excluded from training, and why.

A ledger is append-only: a pydantic model per line (JSON), on disk before `append_entry` returns. A line of the skip
ledger is one of two kinds. It names absolute positions (`SkipEntry`), which are skipped in this pass over the corpora
only; or samples by identity (`SampleEntry`): tokens of a corpus's own training stream, which are skipped for the rest
of the run, or until a later line releases them. `Ledger` is all lines, its `exclusions` what they say together, and
`skips.Selection` what an order has left then.

Read line by line by pydantic: 50,000 lines take half a second, and a line that the run writes names up to 4,096
ranges.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from megastable.base import durable
from megastable.base.errors import DataError
from megastable.data.order import LAST_POSITION, Order
from megastable.data.samples import Document
from megastable.data.skips import NONE, NOTHING, Exclusions, Identity, Range, Selection, Skips

log = logging.getLogger(__name__)


def _as_utc(time: datetime) -> datetime:
    try:
        return time.astimezone(UTC)
    except OverflowError as error:
        raise ValueError(str(error)) from error


Time = Annotated[datetime, AfterValidator(_as_utc)]


class LedgerEntry(BaseModel):
    """A line of a ledger."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: Time | None = None  # `append_entry` fills it in


E = TypeVar("E", bound=LedgerEntry)


def append_entry(path: Path, entry: LedgerEntry) -> None:
    """Append a line to a ledger and wait until it is on disk. Raises DataError on failure."""
    append_entries(path, [entry])


def append_entries(path: Path, entries: Sequence[LedgerEntry]) -> None:
    """Append several lines atomically. Raises DataError on failure."""
    current_time = datetime.now(UTC)
    stamped = [e if e.time is not None else e.model_copy(update={"time": current_time}) for e in entries]
    if stamped:
        durable.append_line(path, "\n".join(entry.model_dump_json(exclude_none=True) for entry in stamped))


def read_entries(path: Path, kind: Callable[[Any], type[E]], odd: list[str] | None = None) -> list[E]:
    """The entries of a ledger, oldest first; empty if the file does not exist.

    A torn last line (a crash during the write) is left out with a warning.

    Args:
        path: Of the ledger.
        kind: Chooses the class of a line by its content.
        odd: Gets the problems of invalid lines, which are left out, so that a running run continues.

    Raises:
        DataError: for an invalid line, which it names, if `odd` is not given; if the file cannot be read.
    """
    lines, torn_rest = durable.read_lines(path)
    if torn_rest:
        line_number = len(lines) + 1
        log.warning("%s: line %d was torn by a crash and is ignored: %r", path, line_number, torn_rest[:200])
    entries = []
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            # Python's parser refuses what is nested too deep; pydantic's refuses strings that cannot be written again.
            entries.append(kind(json.loads(line)).model_validate_json(line))
            continue
        except ValidationError as error:
            detail = error.errors()[0]
            problem = ": " + f"{'.'.join(map(str, detail['loc']))} {detail['msg']}".strip()
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deep
            problem = f" is not JSON ({error})"
        remedy_text = f"correct or delete line {line_number} of {path}, nothing else depends on it"
        problem = f"{path} line {line_number}{problem}: {remedy_text}"
        if odd is None:
            raise DataError(problem)
        odd.append(problem)
    return entries


Int64s = npt.NDArray[np.int64]

Place = Annotated[StrictInt, Field(ge=0, le=LAST_POSITION)]
Number = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]  # what other programs read as well
Pair = Annotated[list[Place], Field(min_length=2, max_length=2)]

RANGES = 4096  # per line: a longer line would not be repaired after a crash (durable.py)


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
        if wrong_range := next(
            ((range_first, range_end) for range_first, range_end in tokens if range_first >= range_end), None
        ):
            raise ValueError(f"first {wrong_range[0]} is not below end {wrong_range[1]}")
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
    located_samples, sequence_length = order.locate_samples(positions), order.sequence_length
    named_documents = list(documents)
    made_entries = []
    for corpus_index in np.unique(located_samples.corpus).tolist():
        corpus = order.corpora[corpus_index]
        first_tokens = located_samples.first_token[located_samples.corpus == corpus_index]
        token_edges = Skips.from_edges(np.column_stack([first_tokens, first_tokens + sequence_length])).edges
        shards: dict[str, list[int]] = {}
        for named_document in named_documents:
            if named_document.corpus == corpus.name:
                shards.setdefault(named_document.shard, []).append(named_document.document)
        named_shards = [ShardDocuments(shard=shard, documents=numbers) for shard, numbers in shards.items()]
        edge_parts = np.split(token_edges, range(RANGES, len(token_edges), RANGES))
        for part_number, edge_part in enumerate(edge_parts):
            made_entries.append(
                SampleEntry(
                    corpus=corpus.name, fingerprint=corpus.fingerprint, tokens=edge_part.tolist(), reason=reason,
                    incident=incident, step=step, documents=named_shards if named_shards and not part_number else None,
                )
            )  # fmt: skip
    return made_entries


@dataclass(frozen=True)
class Ledger:
    """The lines of a ledger, oldest first."""

    entries: Sequence[AnyEntry]

    @classmethod
    def read_ledger(cls, path: Path, odd: list[str] | None = None) -> Ledger:
        """The lines of skips.jsonl, as `read_entries` reads them."""
        return cls(read_ledger(path, odd))

    @cached_property
    def exclusions(self) -> Exclusions:
        """The exclusions of all lines together."""
        ranges_by_corpus: dict[str | None, list[Range]] = defaultdict(list)
        tokens, counts = dict[Identity, Skips](), Counter[str | None]()
        # A line that releases is about earlier lines only, so that the order of the two kinds counts.
        for is_release, lines in groupby(self.entries, key=_releases):
            pairs_by_identity: dict[Identity, list[list[int]]] = defaultdict(list)
            for entry in lines:
                if isinstance(entry, SampleEntry):
                    pairs_by_identity[Identity(entry.corpus, entry.fingerprint)] += entry.tokens
                    counts[None] += 1
                else:
                    ranges_by_corpus[entry.corpus].append((entry.first, entry.end))
                    counts[entry.corpus] += 1
            for identity, pairs in pairs_by_identity.items():
                earlier = tokens.get(identity, NONE)
                ranges = Skips.from_edges(np.array(pairs, dtype=np.int64))
                tokens[identity] = earlier.minus(ranges) if is_release else earlier.union(ranges)
        skipped = {
            corpus: Skips.from_edges(np.array(chosen_ranges, dtype=np.int64))
            for corpus, chosen_ranges in ranges_by_corpus.items()
        }
        swapped = {name: skips for name, skips in skipped.items() if name is not None}
        some_tokens = {identity: skips for identity, skips in tokens.items() if skips.count()}
        return Exclusions(skipped.get(None, NONE), swapped, some_tokens, dict(counts))

    @property
    def reasons(self) -> Counter[str]:
        """Number of lines by reason."""
        return Counter(entry.reason for entry in self.entries)

    def select_usable(
        self, path: Path, order: Order, more: Sequence[Range] = ()
    ) -> tuple[Selection, list[str]]:
        """The selection by `usable_exclusions`, with the problems of the other lines."""
        usable_exclusions, line_problems = self.usable_exclusions(path, order, more)
        return Selection(order, usable_exclusions, more), line_problems

    def usable_exclusions(
        self, path: Path, order: Order, more: Sequence[Range] = ()
    ) -> tuple[Exclusions, list[str]]:
        """What the lines exclude that still leave `order` something to train on, for readers of a ledger that others
        write to: if not all lines can hold, a line does if it leaves something beside the older lines that hold.

        Args:
            path: Of the ledger, for the messages.
            order: That has to have something left.
            more: As in `Selection`.

        Returns:
            The exclusions, and the problems of the lines that do not hold.
        """
        known_names = {corpus.name for corpus in order.corpora}
        excluded = self.exclusions
        odd = [f"{path}: there is no corpus {name!r}" for name in sorted(set(excluded.swapped) - known_names)]
        excluded = excluded.of_corpora(known_names)

        def find_problem(some: Exclusions) -> str:
            try:
                Selection(order, some, more)
            except DataError as error:
                return str(error)
            names_everything = some.positions.contains(LAST_POSITION - 1)
            return "every position after some point is named" if names_everything else ""

        def leave_some(lines: Sequence[AnyEntry]) -> bool:
            return not find_problem(Ledger(lines).exclusions.of_corpora(known_names))

        if not (problem := find_problem(excluded)):
            return excluded, odd
        Selection(order, NOTHING, more)  # raises if the ledger is not the cause
        lines = list(self.entries)
        while lines and not leave_some(lines):
            some_left, none_left = 0, len(lines)  # so many of the lines leave something, so many do not
            while none_left - some_left > 1:
                middle_count = (some_left + none_left) // 2
                if leave_some(lines[:middle_count]):
                    some_left = middle_count
                else:
                    none_left = middle_count
            wrong_line = lines.pop(some_left)
            odd.append(
                f"{path}: {problem}. The line with the reason {wrong_line.reason!r}, of {wrong_line.time}, is left out"
            )
        return Ledger(lines).exclusions.of_corpora(known_names), odd

    def of_incident(self, number: int) -> Ledger:
        return Ledger([entry for entry in self.entries if entry.incident == number])

    def without_reason(self, incident: int, reason: str) -> Ledger:
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

    def lines_until(self, time: float) -> Ledger:
        """The lines written up to a time, in seconds since 1970; lines without a time always count."""
        return Ledger([e for e in self.entries if e.time is None or e.time.timestamp() <= time])

    def swapped_ranges(self, corpus: str) -> list[tuple[Range, datetime | None]]:
        """The skipped positions of a corpus, one range per line, and since when."""
        swap_entries = (e for e in self.entries if isinstance(e, SkipEntry) and e.corpus == corpus)
        return [((swap_entry.first, swap_entry.end), swap_entry.time) for swap_entry in swap_entries]


def read_ledger(path: Path, odd: list[str] | None = None) -> list[AnyEntry]:
    """The entries of skips.jsonl, oldest first, as `read_entries` reads them."""

    def choose_kind(content: Any) -> type[SkipEntry] | type[SampleEntry]:
        names_samples = isinstance(content, dict) and ("tokens" in content or "fingerprint" in content)
        return SampleEntry if names_samples else SkipEntry

    return read_entries(path, choose_kind, odd)


def release_entries(
    ledger: Ledger, order: Order, positions: Int64s, reason: str, incident: int, step: int
) -> list[SampleEntry]:
    """The lines that release what incidents of the run said of the samples at n positions. Samples that a person or
    another tool also named stay skipped."""
    foreign_selection = Selection(order, replace(ledger.by_others.exclusions, positions=NONE, swapped={}))
    free_positions = positions[~foreign_selection.mask_skipped(positions)]
    release_lines = sample_entries(order, free_positions, f"released: {reason}", (), incident, step)
    return [release_line.model_copy(update={"released": True}) for release_line in release_lines]


def _releases(entry: AnyEntry) -> bool:
    return isinstance(entry, SampleEntry) and entry.released is not None
