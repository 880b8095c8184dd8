"""The skip ledger of a run, `skips.jsonl`: samples excluded from training, and why. Append-only, JSON lines.

A line names absolute positions, which are skipped in this pass over the corpora only, or samples by identity: tokens
of a corpus's own training stream, which are skipped for the rest of the run (skips.py), or until a later line
releases them. A ledger may have millions of lines: they are read as columns (pyarrow), and invalid lines again by
pydantic, for its error message.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import xxhash

from megastable.base import jsonl
from megastable.base.errors import DataError
from megastable.data.append_only import append, append_all, parse, remedy
from megastable.data.order import LAST_POSITION, Order
from megastable.data.skip_entries import (
    RANGES,
    AnyEntry,
    SampleEntry,
    ShardDocuments,
    SkipEntry,
    kind_of_line,
    sample_entries,
)
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
    "read_ledger",
    "released",
    "sample_entries",
]

log = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]

BLOCK = 32 << 20  # bytes read as columns at a time
LONGEST = 1 << 20  # bytes of a line read that way; also a thread's share
FEW = 64  # lines read one by one around an invalid one


SCHEMA = pa.schema(
    {
        "time": pa.string(), "first": pa.int64(), "end": pa.int64(), "reason": pa.string(), "incident": pa.int64(),
        "step": pa.int64(), "corpus": pa.string(), "fingerprint": pa.string(),
        "tokens": pa.list_(pa.list_(pa.int64())),
        "documents": pa.list_(pa.struct({"shard": pa.string(), "documents": pa.list_(pa.int64())})),
        "released": pa.bool_(),
    }
)  # fmt: skip


# Microseconds since 1970 of the times that Python can represent in every time zone.
EARLIEST, LATEST = -62_135_500_000_000_000, 253_402_200_000_000_000


@dataclass(frozen=True)
class Ledger:
    """The lines of a ledger, oldest first, as columns by `SCHEMA`, with `time` parsed."""

    table: pa.Table

    @classmethod
    def read(cls, path: Path, odd: list[str] | None = None) -> Ledger:
        """The lines of skips.jsonl; empty if the file does not exist. A torn last line (a crash during the write) is
        left out with a warning. Raises DataError as `ledger.read` does; `odd` as there."""
        whole, torn = jsonl.content(path)
        _warn(path, whole, torn)
        return cls(pa.concat_tables([_timed(SCHEMA.empty_table()), *_tables(path, whole, 0, 0, odd)]))

    @classmethod
    def of(cls, entries: Sequence[AnyEntry]) -> Ledger:
        """A ledger made from objects."""
        rows = [entry.model_dump(mode="json") | {"time": _told(entry.time)} for entry in entries]
        return cls(_timed(pa.Table.from_pylist(rows, SCHEMA)))

    @property
    def entries(self) -> list[AnyEntry]:
        """Every line as an object; slow for millions of lines."""
        found: list[AnyEntry] = []
        for row in self.table.to_pylist():
            given = {key: value for key, value in row.items() if value is not None}
            found.append(kind_of_line(given).model_validate(given))
        return found

    def newest(self, most: int) -> list[AnyEntry]:
        """The last `most` lines as objects, oldest first."""
        return Ledger(self.table.slice(max(0, len(self.table) - most))).entries

    @property
    def exclusions(self) -> Exclusions:
        """The exclusions of all lines together."""
        return _excluded([self.table])

    def usable(self, path: Path, order: Order, more: Iterable[Range] = ()) -> tuple[Selection, list[str]]:
        """The selection by the lines that still leave `order` something to train on, for readers of a ledger that
        others write to, and the problems of the other lines; more: as in `Selection`. path: of the ledger, for the
        messages."""
        more = list(more)
        excluded, odd = _usable(self.exclusions, lambda: self, path, order, more)
        return Selection(order, excluded, more), odd

    @property
    def reasons(self) -> Counter[str]:
        """Number of lines by reason."""
        counts = pc.value_counts(self.table.column("reason")).to_pylist()
        return Counter({count["values"]: count["counts"] for count in counts})

    def of_incident(self, number: int) -> Ledger:
        return Ledger(self.table.filter(pc.equal(self.table.column("incident"), number)))

    def without(self, incident: int, reason: str) -> Ledger:
        """All lines except those of an incident that give this reason."""
        one, other = (
            pc.equal(self.table.column("incident"), incident),
            pc.equal(self.table.column("reason"), reason),
        )
        return Ledger(self.table.filter(pc.invert(pc.fill_null(pc.and_(one, other), False))))

    def and_also(self, entries: Sequence[AnyEntry]) -> Ledger:
        """This ledger with more lines."""
        return Ledger(pa.concat_tables([self.table, Ledger.of(entries).table]))

    @property
    def by_position(self) -> Ledger:
        """The lines that name positions."""
        return Ledger(self.table.filter(self.table.column("first").is_valid()))

    @property
    def by_others(self) -> Ledger:
        """The lines that were not written by an incident."""
        return Ledger(self.table.filter(self.table.column("incident").is_null()))

    @property
    def ever(self) -> Ledger:
        """The lines as if nothing had been released."""
        return Ledger(self.table.filter(self.table.column("released").is_null()))

    @property
    def by_identity(self) -> Ledger:
        """The lines that name samples."""
        return Ledger(self.table.filter(self.table.column("tokens").is_valid()))

    def until(self, time: float) -> Ledger:
        """The lines written up to a time, in seconds since 1970; lines without a time always count."""
        then = pa.scalar(int(time * 1e6), self.table.schema.field("time").type)
        return Ledger(self.table.filter(pc.fill_null(pc.less_equal(self.table.column("time"), then), True)))

    def swaps(self, corpus: str) -> list[tuple[Range, datetime | None]]:
        """The skipped positions of a corpus, one range per line, and since when."""
        of = pc.and_(pc.equal(self.table.column("corpus"), corpus), self.table.column("first").is_valid())
        rows = self.table.filter(pc.fill_null(of, False))
        ranges, times = _edges(rows).tolist(), rows.column("time").to_pylist()
        return [((first, end), time) for (first, end), time in zip(ranges, times, strict=True)]


def released(
    ledger: Ledger, order: Order, positions: Int64s, reason: str, incident: int, step: int
) -> list[SampleEntry]:
    """The lines that release what incidents of the run said of the samples at n positions. Samples that a person or
    another tool also named stay skipped."""
    others = Selection(order, replace(ledger.by_others.exclusions, positions=NONE, swapped={}))
    free = positions[~others.mask(positions)]
    lines = sample_entries(order, free, f"released: {reason}", (), incident, step)
    return [line.model_copy(update={"released": True}) for line in lines]


class SkipLedger:
    """The ledger at `path`, read repeatedly by one process: known lines are not parsed again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._size, self._lines, self._digest = 0, 0, xxhash.xxh3_128_digest(b"")
        self._known, self._odd = Exclusions(), list[str]()

    def read(self) -> tuple[Exclusions, list[str]]:
        """The current exclusions, and the problems of the lines that are left out. Raises DataError if it cannot be
        read."""
        whole, torn = jsonl.content(self.path)
        _warn(self.path, whole, torn)
        view = memoryview(whole)
        if xxhash.xxh3_128_digest(view[: self._size]) != self._digest:
            self._forget()  # earlier content was changed or removed
        ended = whole.rfind(b"\n") + 1
        if ended > self._size:
            self._known = self._parsed(whole[:ended], self._odd)
            self._lines += whole.count(b"\n", self._size)
            self._size, self._digest = ended, xxhash.xxh3_128_digest(view[:ended])
        odd = list(self._odd)
        return self._parsed(whole, odd) if ended < len(whole) else self._known, odd

    def usable(self, order: Order, more: Iterable[Range] = ()) -> tuple[Exclusions, list[str]]:
        """As `read`, but also leaves out and reports the lines that would leave `order` nothing to train on."""
        excluded, odd = self.read()
        excluded, refused = _usable(
            excluded, lambda: Ledger.read(self.path, []), self.path, order, list(more)
        )
        return excluded, [*odd, *refused]

    def _parsed(self, content: bytes, odd: list[str]) -> Exclusions:
        """The known exclusions plus those of the complete lines that follow."""
        return _excluded(_tables(self.path, content, self._size, self._lines, odd), self._known)


def read_ledger(path: Path, odd: list[str] | None = None) -> list[AnyEntry]:
    """The entries of skips.jsonl, oldest first; see `Ledger.read`."""
    return Ledger.read(path, odd).entries


def _usable(
    excluded: Exclusions, lines: Callable[[], Ledger], path: Path, order: Order, more: Sequence[Range]
) -> tuple[Exclusions, list[str]]:
    """The part of a ledger that leaves something of `order` to train on, and the problems of the rest. lines: the whole
    ledger, used if not all of it can hold; then a line holds if it leaves something beside the older lines that
    hold."""
    known = {corpus.name for corpus in order.corpora}
    odd = [f"{path}: there is no corpus {name!r}" for name in sorted(set(excluded.swapped) - known)]
    excluded = excluded.of_corpora(known)

    def wrong_with(some: Exclusions) -> str:
        try:
            Selection(order, some, more)
        except DataError as error:
            return str(error)
        return (
            "every position after some point is named" if some.positions.contains(LAST_POSITION - 1) else ""
        )

    def leaves(table: pa.Table) -> bool:
        return not wrong_with(Ledger(table).exclusions.of_corpora(known))

    if not (problem := wrong_with(excluded)):
        return excluded, odd
    Selection(order, NOTHING, more)  # raises if the ledger is not the cause
    table = lines().table
    while len(table) and not leaves(table):
        some, all_gone = 0, len(table)  # `some` of the lines leave something, `all_gone` do not
        while all_gone - some > 1:
            middle = (some + all_gone) // 2
            some, all_gone = (middle, all_gone) if leaves(table.slice(0, middle)) else (some, middle)
        wrong = table.slice(some, 1).to_pylist()[0]
        odd.append(
            f"{path}: {problem}. The line with the reason {wrong['reason']!r}, of {wrong['time']}, is left out"
        )
        table = pa.concat_tables([table.slice(0, some), table.slice(all_gone)])
    return Ledger(table).exclusions.of_corpora(known), odd


def _warn(path: Path, whole: bytes, torn: bytes) -> None:
    if torn:
        number = whole.count(b"\n") + 1
        log.warning("%s: line %d was torn by a crash and is ignored: %r", path, number, torn[:200])


def _tables(path: Path, content: bytes, at: int, before: int, odd: list[str] | None) -> Iterator[pa.Table]:
    """The columns of the complete lines from byte `at` on, in parts; before: number of lines before them."""
    while at < len(content):
        end = content.find(b"\n", at + BLOCK) + 1 or len(content)
        block, at = content[at:end], end
        for part, lines in _parts(path, _columns(block), block, before, odd):
            before += lines
            yield part


def _parts(
    path: Path, table: pa.Table | None, block: bytes, before: int, odd: list[str] | None
) -> Iterator[tuple[pa.Table, int]]:
    """The columns of a block, and their number of lines. table: the whole block if no line is invalid; an invalid line
    costs reading a few others one by one, not the whole block."""
    middle = block.find(b"\n", len(block) // 2) + 1
    if table is not None:
        yield table, len(table)
    elif block.count(b"\n") <= FEW or not 0 < middle < len(block):
        yield _by_line(path, block, before, odd), block.count(b"\n")
    else:
        for half in (block[:middle], block[middle:]):
            for part, lines in _parts(path, _columns(half), half, before, odd):
                before += lines
                yield part, lines


def _columns(block: bytes) -> pa.Table | None:
    """The lines of a block; None if `_by_line` would read any of them differently."""
    options = pa.json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="error")
    reading = pa.json.ReadOptions(block_size=LONGEST)
    try:
        table = pa.json.read_json(pa.BufferReader(block), reading, options)
        if not block.isascii():
            table.validate(full=True)  # strings that are not UTF-8
        table = _timed(table)
    except pa.ArrowInvalid:
        return None
    return table if _valid(table, block) else None


def _timed(table: pa.Table) -> pa.Table:
    times = table.column("time").cast(pa.timestamp("us", tz="UTC"))
    return table.set_column(table.schema.get_field_index("time"), "time", times)


def _valid(table: pa.Table, block: bytes) -> bool:
    """Whether every line of a block gave a row, and every row is a complete entry of one kind."""
    # Between two entries is one line end and nothing else: no string contains one.
    if len(table) != block.count(b"}\n{") + 1 or not (
        block.startswith(b"{") and block.endswith((b"}", b"}\n"))
    ):
        return False
    times = pc.min_max(table.column("time"))
    if times["min"].is_valid and not (times["min"].value >= EARLIEST and times["max"].value <= LATEST):
        return False
    known = {name: _known(table, name) for name in SCHEMA.names}
    named = known["tokens"]
    if not (
        np.array_equal(known["first"], ~named) and np.array_equal(known["end"], ~named)
        and np.array_equal(known["fingerprint"], named) and known["corpus"][named].all()
        and not known["documents"][~named].any() and known["reason"].all()
        and not known["released"][~named].any() and pc.all(table.column("released")).as_py() in (True, None)
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
    """Lengths of the strings or lists of a column: int64 [n], 0 for null."""
    return np.asarray(of(table.column(column)).fill_null(0).to_numpy(), dtype=np.int64)


def _edges(table: pa.Table) -> Int64s:
    """`first` and `end`: int64 [n, 2], 0 for null."""
    columns = [table.column(name).fill_null(0).to_numpy() for name in ("first", "end")]
    return np.column_stack(columns).astype(np.int64, copy=False)


def _pairs(table: pa.Table) -> Int64s:
    """The ranges of tokens of all rows: int64 [n, 2]."""
    numbers = pc.list_flatten(pc.list_flatten(table.column("tokens")))
    return np.asarray(numbers.to_numpy(), dtype=np.int64).reshape(-1, 2)


def _excluded(tables: Iterable[pa.Table], known: Exclusions = NOTHING) -> Exclusions:
    """The exclusions `known`, plus those of the lines of some tables."""
    swapped: dict[str | None, list[Int64s]] = {name: [skips.edges] for name, skips in known.swapped.items()}
    swapped[None] = [known.positions.edges]
    tokens = {identity: [skips.edges] for identity, skips in known.tokens.items()}
    counts = Counter(known.counts)
    for table in tables:
        named, edges = _known(table, "tokens"), _edges(table)
        counts[None] += int(named.sum())
        for (corpus,), of in _groups(table, "corpus"):
            if (mine := of & ~named).any():
                swapped.setdefault(corpus, []).append(edges[mine])
                counts[corpus] += int(mine.sum())
        for part, released in _by_release(table):
            for key, ranges in _tokens(part):
                some = tokens.setdefault(key, [np.empty((0, 2), np.int64)])
                if released:
                    tokens[key] = [Skips.merged(np.concatenate(some)).minus(Skips.merged(ranges)).edges]
                else:
                    some.append(ranges)
    of_any, *others = (Skips.merged(np.concatenate(some)) for some in (swapped.pop(None), *swapped.values()))
    merged = {identity: Skips.merged(np.concatenate(some)) for identity, some in tokens.items()}
    return Exclusions(
        of_any,
        {str(name): skips for name, skips in zip(swapped, others, strict=True)},
        {identity: skips for identity, skips in merged.items() if skips.count()},
        dict(counts),
    )


def _by_release(table: pa.Table) -> Iterator[tuple[pa.Table, bool]]:
    """A table in order, cut between lines that release and lines that do not, with which kind each part is."""
    released = _known(table, "released")
    edges = [0, *(np.flatnonzero(np.diff(released)) + 1).tolist(), len(table)]
    for first, end in pairwise(edges):
        if first < end:
            yield table.slice(first, end - first), bool(released[first])


def _tokens(table: pa.Table) -> Iterator[tuple[Identity, Int64s]]:
    """The token ranges that lines name, by corpus: int64 [n, 2]."""
    named, pairs, ranges = _known(table, "tokens"), _pairs(table), _lengths(table, "tokens")
    for identity, of in _groups(table, *Identity._fields):
        if (mine := of & named).any():
            yield Identity(*map(str, identity)), pairs[np.repeat(mine, ranges)]


def _groups(table: pa.Table, *columns: str) -> Iterator[tuple[tuple[str | None, ...], npt.NDArray[np.bool_]]]:
    """Each combination of values in some columns, and its rows: bool [n]."""
    code, texts = np.zeros(len(table), dtype=np.int64), list[list[str | None]]()
    for name in columns:
        coded = pc.dictionary_encode(table.column(name), null_encoding="encode").combine_chunks()
        texts.append(coded.dictionary.to_pylist())
        code = code * len(texts[-1]) + coded.indices.to_numpy()
    for number in np.unique(code).tolist():
        values = list[str | None]()
        of, left = code == number, number
        for some in reversed(texts):
            left, index = divmod(left, len(some))
            values.insert(0, some[index])
        yield tuple(values), of


def _by_line(path: Path, block: bytes, before: int, odd: list[str] | None) -> pa.Table:
    """The lines of a block, read one by one like `ledger.read`."""
    tables = [Ledger.of([]).table]
    for number, line in enumerate(block.removesuffix(b"\n").split(b"\n"), start=before + 1):
        try:
            if line.strip():
                tables.append(_row(path, number, line))
        except DataError as error:
            if odd is None:
                raise
            odd.append(str(error))
    return pa.concat_tables(tables)


def _row(path: Path, number: int, line: bytes) -> pa.Table:
    """The columns of a line. Raises DataError as `parse` does, and if a value does not fit its column."""
    entry = parse(path, number, line, kind_of_line)
    try:
        return Ledger.of([entry]).table
    except (pa.ArrowException, OverflowError, ValueError) as error:  # half a surrogate pair, an invalid year
        raise DataError(f"{path} line {number}: {error}: {remedy(path, number)}") from error


def _told(time: datetime | None) -> str | None:
    return None if time is None else time.astimezone(UTC).isoformat()
