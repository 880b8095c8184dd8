"""The skip ledger of a run, `skips.jsonl`: what is not trained on, and why. Append-only, a JSON object per line.

A line names absolute positions, which are left out in this pass over the corpora only, or samples by identity: tokens
of a corpus's own training stream, which are left out for as long as the run goes (skips.py). A ledger may have millions
of lines: they are read as columns (pyarrow), and where a line is not as it should be by pydantic, which says why.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import xxhash
from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from megastable import jsonl
from megastable.data.documents import Document
from megastable.data.ledger import Entry, append, append_all, parse
from megastable.data.order import LAST_POSITION, Order
from megastable.data.skips import NONE, Exclusions, Identity, Range, Selection, Skips
from megastable.errors import DataError

__all__ = [
    "Ledger",
    "SampleEntry",
    "ShardDocuments",
    "SkipEntry",
    "SkipLedger",
    "append",
    "append_all",
    "read_ledger",
    "sample_entries",
]

log = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]
Place = Annotated[StrictInt, Field(ge=0, le=LAST_POSITION)]
Pair = Annotated[list[Place], Field(min_length=2, max_length=2)]

BLOCK = 32 << 20  # bytes that are read as columns together
LONGEST = 1 << 20  # bytes of a line that is read so; also what a thread takes at once
RANGES = 4096  # of a line: a longer one would not be mended after a crash (jsonl.py)


class SkipEntry(Entry):
    """A line by position: [first, end), why, by which incident, noticed at which step.

    corpus: only the positions of that corpus; from `first` on it is swapped out.
    """

    first: Place
    end: Place
    reason: str
    incident: int | None = None
    step: int | None = None
    corpus: str | None = None

    @model_validator(mode="after")
    def _forward(self) -> Self:
        if self.first >= self.end:
            raise ValueError(f"first {self.first} is not below end {self.end}")
        return self


class ShardDocuments(BaseModel):
    """Documents by their numbers in a shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard: str
    documents: list[int]


class SampleEntry(Entry):
    """A line by identity: of `corpus`, as long as its manifest has `fingerprint`, every sample is left out that has any
    of `tokens` among its own: ranges [first, end) of the training stream. documents: they are of, for people."""

    corpus: Annotated[str, Field(min_length=1)]
    fingerprint: Annotated[str, Field(min_length=1)]
    tokens: Annotated[list[Pair], Field(min_length=1)]
    reason: str
    incident: int | None = None
    step: int | None = None
    documents: list[ShardDocuments] | None = None

    @field_validator("tokens")
    @classmethod
    def _forward(cls, tokens: list[list[int]]) -> list[list[int]]:
        if wrong := next(((first, end) for first, end in tokens if first >= end), None):
            raise ValueError(f"first {wrong[0]} is not below end {wrong[1]}")
        return tokens


AnyEntry = SkipEntry | SampleEntry

SCHEMA = pa.schema(
    {
        "time": pa.string(), "first": pa.int64(), "end": pa.int64(), "reason": pa.string(), "incident": pa.int64(),
        "step": pa.int64(), "corpus": pa.string(), "fingerprint": pa.string(),
        "tokens": pa.list_(pa.list_(pa.int64())),
        "documents": pa.list_(pa.struct({"shard": pa.string(), "documents": pa.list_(pa.int64())})),
    }
)  # fmt: skip


@dataclass(frozen=True)
class Ledger:
    """The lines of a ledger, oldest first, as columns by `SCHEMA`, with `time` as time."""

    table: pa.Table

    @classmethod
    def read(cls, path: Path, odd: list[str] | None = None) -> Ledger:
        """Of skips.jsonl; empty when there is no such file. A torn last line (a crash while it was written) is reported
        as a warning and left out. Raises DataError as `ledger.read` does; `odd` as there."""
        whole, torn = jsonl.content(path)
        _warn(path, whole, torn)
        return cls(pa.concat_tables([_timed(SCHEMA.empty_table()), *_tables(path, whole, 0, 0, odd)]))

    @classmethod
    def of(cls, entries: Sequence[AnyEntry]) -> Ledger:
        """Made of objects."""
        rows = [entry.model_dump(mode="json") | {"time": _told(entry.time)} for entry in entries]
        return cls(_timed(pa.Table.from_pylist(rows, SCHEMA)))

    @property
    def entries(self) -> list[AnyEntry]:
        """Each as an object: takes its time where there are millions."""
        found: list[AnyEntry] = []
        for row in self.table.to_pylist():
            given = {key: value for key, value in row.items() if value is not None}
            found.append(_kind(given).model_validate(given))
        return found

    @property
    def exclusions(self) -> Exclusions:
        """What all of them leave out."""
        named, pairs = _known(self.table, "tokens"), _pairs(self.table)
        edges = _edges(self.table)
        swapped: dict[str | None, Skips] = {}
        counts: dict[str | None, int] = {None: int(named.sum())}
        for (corpus,), of in _groups(self.table, "corpus"):
            if (mine := of & ~named).any():
                swapped[corpus] = Skips.merged(edges[mine])
                counts[corpus] = counts.get(corpus, 0) + int(mine.sum())
        tokens = {}
        ranges = _lengths(self.table, "tokens")
        for identity, of in _groups(self.table, *Identity._fields):
            if (mine := of & named).any():
                tokens[Identity(*map(str, identity))] = Skips.merged(pairs[np.repeat(mine, ranges)])
        of_any = swapped.pop(None, NONE)
        return Exclusions(of_any, {str(name): skips for name, skips in swapped.items()}, tokens, counts)

    @property
    def reasons(self) -> Counter[str]:
        """How many lines give which reason."""
        counts = pc.value_counts(self.table.column("reason")).to_pylist()
        return Counter({count["values"]: count["counts"] for count in counts})

    def of_incident(self, number: int) -> Ledger:
        return Ledger(self.table.filter(pc.equal(self.table.column("incident"), number)))

    def until(self, time: float) -> Ledger:
        """Those that were there at a time, in seconds since 1970; lines without one always were."""
        then = pa.scalar(int(time * 1e6), self.table.schema.field("time").type)
        return Ledger(self.table.filter(pc.fill_null(pc.less_equal(self.table.column("time"), then), True)))

    def swaps(self, corpus: str) -> list[tuple[Range, datetime | None]]:
        """The positions of a corpus that are left out, a line each, and since when."""
        of = pc.and_(pc.equal(self.table.column("corpus"), corpus), self.table.column("first").is_valid())
        rows = self.table.filter(pc.fill_null(of, False))
        ranges, times = _edges(rows).tolist(), rows.column("time").to_pylist()
        return [((first, end), time) for (first, end), time in zip(ranges, times, strict=True)]


class SkipLedger:
    """The ledger at `path`, read again and again by one process: what is known already is not parsed again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._size, self._lines, self._digest = 0, 0, xxhash.xxh3_128_digest(b"")
        self._known, self._odd = Exclusions(), list[str]()

    def read(self) -> tuple[Exclusions, list[str]]:
        """What it says now, and what is wrong with the lines that are left out. Raises DataError where it cannot be
        read."""
        whole, torn = jsonl.content(self.path)
        _warn(self.path, whole, torn)
        view = memoryview(whole)
        if xxhash.xxh3_128_digest(view[: self._size]) != self._digest:
            self._forget()  # somebody changed or took back what was there
        ended = whole.rfind(b"\n") + 1
        if ended > self._size:
            self._known = self._parsed(whole[:ended], self._odd)
            self._lines += whole.count(b"\n", self._size)
            self._size, self._digest = ended, xxhash.xxh3_128_digest(view[:ended])
        odd = list(self._odd)
        return self._parsed(whole, odd) if ended < len(whole) else self._known, odd

    def _parsed(self, content: bytes, odd: list[str]) -> Exclusions:
        """What is known, and the whole lines that come after that."""
        tables = _tables(self.path, content, self._size, self._lines, odd)
        return Exclusions.of([self._known, *(Ledger(table).exclusions for table in tables)])


def read_ledger(path: Path, odd: list[str] | None = None) -> list[AnyEntry]:
    """The entries of skips.jsonl, oldest first; see `Ledger.read`."""
    return Ledger.read(path, odd).entries


def sample_entries(
    order: Order,
    positions: Int64s,
    reason: str,
    documents: Iterable[Document] = (),
    incident: int | None = None,
    step: int | None = None,
) -> list[SampleEntry]:
    """The lines that leave out the samples at `positions`, n integers, for as long as the run goes: at least one for
    each of their corpora. documents: of those that are named, for people."""
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


def usable(
    excluded: Exclusions, odd: Sequence[str], path: Path, order: Order, more: Iterable[Range] = ()
) -> tuple[Selection, list[str]]:
    """The selection of what of a ledger can be, for who works while somebody else writes there; and what is wrong with
    the rest, after `odd`."""
    known, odd = {corpus.name for corpus in order.corpora}, list(odd)
    odd += [f"{path}: there is no corpus {name!r}" for name in sorted(set(excluded.swapped) - known)]
    swapped = {name: skips for name, skips in excluded.swapped.items() if name in known}
    counts = {name: count for name, count in excluded.counts.items() if name is None or name in known}
    others: dict[str | None, int] = {None: counts.get(None, 0)}
    for left in (
        Exclusions(excluded.positions, swapped, excluded.tokens, counts),
        Exclusions(excluded.positions, {}, excluded.tokens, others),
    ):
        try:
            return Selection(order, left, more), odd
        except DataError as error:
            odd.append(str(error))
    return Selection(order, Exclusions(excluded.positions, {}, {}, others), more), odd


def _warn(path: Path, whole: bytes, torn: bytes) -> None:
    if torn:
        number = whole.count(b"\n") + 1
        log.warning("%s: line %d was torn by a crash and is ignored: %r", path, number, torn[:200])


def _tables(path: Path, content: bytes, at: int, before: int, odd: list[str] | None) -> Iterator[pa.Table]:
    """The columns of the whole lines from byte `at` on, some at a time; before: how many lines come before them."""
    while at < len(content):
        end = content.find(b"\n", at + BLOCK) + 1 or len(content)
        block, at = content[at:end], end
        table = _columns(block)
        if table is not None:
            before += len(table)
            yield table
        else:
            yield _by_line(path, block, before, odd)
            before += block.count(b"\n")


def _columns(block: bytes) -> pa.Table | None:
    """The lines of a block; None where any of them is not as `_by_line` would have it."""
    options = pa.json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="error")
    reading = pa.json.ReadOptions(block_size=LONGEST)
    try:
        table = pa.json.read_json(pa.BufferReader(block), reading, options)
        if not block.isascii():
            table.validate(full=True)  # texts that are no UTF-8
        table = _timed(table)
    except pa.ArrowInvalid:
        return None
    return table if _valid(table, block) else None


def _timed(table: pa.Table) -> pa.Table:
    times = table.column("time").cast(pa.timestamp("us", tz="UTC"))
    return table.set_column(table.schema.get_field_index("time"), "time", times)


def _valid(table: pa.Table, block: bytes) -> bool:
    """Whether every line of a block gave a row, and every row is a whole entry of one kind."""
    if len(table) != block.count(b"\n") + (not block.endswith(b"\n")):
        return False
    known = {name: _known(table, name) for name in SCHEMA.names}
    named = known["tokens"]
    if not (
        np.array_equal(known["first"], ~named) and np.array_equal(known["end"], ~named)
        and np.array_equal(known["fingerprint"], named) and known["corpus"][named].all()
        and not known["documents"][~named].any() and known["reason"].all()
    ):  # fmt: skip
        return False
    texts = np.stack([_lengths(table, name, pc.binary_length) for name in Identity._fields])
    some = texts[:, named].all() and _lengths(table, "tokens")[named].all()
    return bool(some) and _whole_pairs(table) and _whole_documents(table) and all(
        bool(np.all((first >= 0) & (first < end) & (end <= LAST_POSITION)))
        for first, end in (_edges(table)[~named].T, _pairs(table).T)
    )  # fmt: skip


def _whole_pairs(table: pa.Table) -> bool:
    pairs = pc.list_flatten(table.column("tokens"))
    twos = pc.all(pc.equal(pc.list_value_length(pairs), 2)).as_py() in (True, None)
    return twos and not pairs.null_count and not pc.list_flatten(pairs).null_count


def _whole_documents(table: pa.Table) -> bool:
    each = pc.list_flatten(table.column("documents"))
    shards, numbers = pc.struct_field(each, "shard"), pc.struct_field(each, "documents")
    return not any(x.null_count for x in (each, shards, numbers, pc.list_flatten(numbers)))


def _known(table: pa.Table, column: str) -> npt.NDArray[np.bool_]:
    return np.asarray(table.column(column).is_valid().to_numpy())


def _lengths(table: pa.Table, column: str, of: Any = pc.list_value_length) -> Int64s:
    """Of the texts or lists of a column: int64 [n], 0 where there is none."""
    return np.asarray(of(table.column(column)).fill_null(0).to_numpy(), dtype=np.int64)


def _edges(table: pa.Table) -> Int64s:
    """`first` and `end`: int64 [n, 2], 0 where there are none."""
    columns = [table.column(name).fill_null(0).to_numpy() for name in ("first", "end")]
    return np.column_stack(columns).astype(np.int64, copy=False)


def _pairs(table: pa.Table) -> Int64s:
    """The ranges of tokens of all rows: int64 [n, 2]."""
    numbers = pc.list_flatten(pc.list_flatten(table.column("tokens")))
    return np.asarray(numbers.to_numpy(), dtype=np.int64).reshape(-1, 2)


def _groups(table: pa.Table, *columns: str) -> Iterator[tuple[tuple[str | None, ...], npt.NDArray[np.bool_]]]:
    """Each combination of texts in some columns, and which rows have it: bool [n]."""
    code, texts = np.zeros(len(table), dtype=np.int64), list[list[str | None]]()
    for name in columns:
        coded = pc.dictionary_encode(table.column(name), null_encoding="encode").combine_chunks()
        texts.append(coded.dictionary.to_pylist())
        code = code * len(texts[-1]) + coded.indices.to_numpy()
    for number, values in enumerate(product(*texts)):
        if (of := code == number).any():
            yield values, of


def _by_line(path: Path, block: bytes, before: int, odd: list[str] | None) -> pa.Table:
    """The lines of a block, one by one, as `ledger.read` reads them."""
    entries = list[AnyEntry]()
    for number, line in enumerate(block.removesuffix(b"\n").split(b"\n"), start=before + 1):
        try:
            if line.strip():
                entries.append(parse(path, number, line, _kind))
        except DataError as error:
            if odd is None:
                raise
            odd.append(str(error))
    return Ledger.of(entries).table


def _told(time: datetime | None) -> str | None:
    return None if time is None else time.astimezone().isoformat()


def _kind(content: Any) -> type[SkipEntry] | type[SampleEntry]:
    """What a line is to be, by its content."""
    named = isinstance(content, dict) and ("tokens" in content or "fingerprint" in content)
    return SampleEntry if named else SkipEntry
