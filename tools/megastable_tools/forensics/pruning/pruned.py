"""Provenance of a pruned corpus: `pruned.json`, and the map from old documents to new ones.

`documents.parquet` has a row for every document of the original: `shard`, `old`, its number there, and `new`, its
number in the shard of the same name, null if it was removed. A cut document has a row for each remaining piece: its
tokens [`first`, `end`), counted in the document, null for a whole one; `closed`: an added end-of-document token
follows; `opened`: an added begin-of-document token precedes. So the map locates every token of one corpus in the other.
`pruned.json` holds the hashes of map and manifest and a seal over itself: any changed byte is detected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megastable.base.errors import DataError
from megastable.base.text import plural
from megastable.data.local_copy import write_file
from megastable_tools.forensics.pruning.gaps import Gaps

FILE, MAP = "pruned.json", "documents.parquet"
SCHEMA = pa.schema(
    [
        ("shard", pa.dictionary(pa.int32(), pa.string())),
        ("old", pa.int64()),
        ("new", pa.int64()),
        ("first", pa.int64()),
        ("end", pa.int64()),
        ("closed", pa.bool_()),
        ("opened", pa.bool_()),
    ]
)

Int64s = npt.NDArray[np.int64]


class Cut(BaseModel):
    """The loss of a shard. left: it still exists in the pruned corpus; a shard without documents does not. cut: other
    documents that lost spans; None if the plan has no spans."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard: str
    documents: int = Field(ge=0)
    tokens: int = Field(ge=0)
    left: bool
    cut: int | None = Field(default=None, ge=0)


class Pruned(BaseModel):
    """original: path of the corpus; fingerprint: its own, not the new one's. plan_sha256: of the plan's file.

    removed: SHA-256 of the lines "shard document" of all removed documents and "shard document first:end"
    of all spans, in order. documents: removed as a whole; tokens: removed. cut: documents that lost spans; added:
    boundary tokens, which end and begin documents, added at cuts. Both are None, and not
    in the file, if the plan has no spans.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    original: str
    fingerprint: str
    plan: str
    plan_sha256: str
    removed: str
    documents: int
    tokens: int
    documents_left: int
    tokens_left: int
    cut: int | None = None
    added: int | None = None
    shards: list[Cut]
    made: datetime
    manifest_xxh3: str
    map_xxh3: str
    seal: str = ""

    def __str__(self) -> str:
        gone = gone_text(self.documents, self.tokens, self.cut, self.added)
        left = f"{plural(self.documents_left, 'document')} and {plural(self.tokens_left, 'token')} are left"
        lost = [
            f"\nthe shard {cut.shard} is gone: nothing of it remained" for cut in self.shards if not cut.left
        ]
        return f"{gone}, {left}{''.join(lost)}"

    def sealed(self) -> Pruned:
        return self.model_copy(update={"seal": self._digest()})

    def save(self, directory: Path) -> None:
        write_file(directory / FILE, self._text())

    @classmethod
    def load(cls, directory: Path) -> Pruned:
        """Raises DataError for a directory that is not a pruned corpus, and for a changed file."""
        path = directory / FILE
        try:
            content = path.read_bytes()
            found = cls.model_validate_json(content)
        except FileNotFoundError:
            raise DataError(
                f"{path} is missing: {directory} is not a pruned corpus (megastable prune apply makes them)"
            ) from None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}: restore it") from error
        except ValidationError as error:
            what = ".".join(map(str, error.errors()[0]["loc"])) or "it"
            raise DataError(f"{path} is damaged ({what}: {error.errors()[0]['msg']}): prune again") from error
        if found.seal != found._digest() or content != found._text():
            raise DataError(f"{path} was changed after it was written: prune again")
        return found

    def _digest(self) -> str:
        text = self.model_dump_json(exclude={"seal"}, exclude_none=True)
        return xxhash.xxh3_128_hexdigest(text.encode())

    def _text(self) -> bytes:
        return (self.model_dump_json(indent=1, exclude_none=True) + "\n").encode()


def gone_text(documents: int, tokens: int, cut: int | None, added: int | None) -> str:
    """The removals, as text."""
    gone = f"{plural(documents, 'document')} and {plural(tokens, 'token')} are gone"
    if not cut:
        return gone
    closed = f", {plural(added or 0, 'boundary token')} put in between" if added else ""
    return f"{gone}, {plural(cut, 'document')} {'was' if cut == 1 else 'were'} cut{closed}"


class Removed:
    """The digest of the removed documents, added in order, shard by shard."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, shard: str, gaps: Gaps) -> None:
        lines = [f"{shard} {document}\n" for document in gaps.documents.tolist()]
        lines += [f"{shard} {cut.number} {first}:{end}\n" for cut in gaps.cuts for first, end in cut.spans]
        self._digest.update("".join(lines).encode())

    def __str__(self) -> str:
        return self._digest.hexdigest()


class MapWriter:
    """Writes the map, a piece of a shard at a time."""

    def __init__(self, directory: Path) -> None:
        # Ascending numbers take almost no space as differences.
        options: dict[str, Any] = {"use_dictionary": ["shard"], "compression": "zstd", "store_schema": False}
        delta = dict.fromkeys(("old", "new", "first", "end"), "DELTA_BINARY_PACKED")
        self._writer = pq.ParquetWriter(directory / MAP, SCHEMA, column_encoding=delta, **options)

    def add(self, shard: str, first: int, count: int, gaps: Gaps) -> None:
        """Add the documents [first, first + count) of a shard."""
        rows = Rows.of(first, count, gaps)
        names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows.old.size, np.int32)), pa.array([shard]))
        columns = [pa.array(values, mask=values < 0) for values in (rows.new, rows.first, rows.end)]
        table = pa.table(
            [names, pa.array(rows.old), *columns, pa.array(rows.closed), pa.array(rows.opened)], schema=SCHEMA
        )
        self._writer.write_table(table, row_group_size=max(rows.old.size, 1))

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True)
class Rows:
    """Some rows of the map, of one shard: int64 [n], -1 for null; closed, opened: bool [n]."""

    old: Int64s
    new: Int64s
    first: Int64s
    end: Int64s
    closed: npt.NDArray[np.bool_]
    opened: npt.NDArray[np.bool_]

    @property
    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        return self.old, self.new, self.first, self.end, self.closed, self.opened

    @classmethod
    def of(cls, first: int, count: int, gaps: Gaps) -> Rows:
        """The fate of the documents [first, first + count) of a shard."""
        cuts, copies = gaps.cut_among(first, count), np.ones(count, np.int64)
        for cut in cuts:
            copies[cut.number - first] = len(cut.pieces)
        old = np.repeat(np.arange(first, first + count), copies)
        new = np.repeat(gaps.renumbered(first, count), copies)
        edges, put = np.full((2, old.size), -1), np.zeros((2, old.size), bool)
        found = cls(old, new, *edges, *put)
        for cut in cuts:
            at = int(np.searchsorted(old, cut.number))
            for place, piece in enumerate(cut.pieces):
                found.new[at + place] += place
                found.first[at + place], found.end[at + place] = piece.first, piece.end
                found.closed[at + place], found.opened[at + place] = piece.closed, piece.opened
        return found


def read_map(directory: Path) -> Iterator[tuple[str, Rows]]:
    """The map in its pieces, each of one shard. Raises DataError if it is damaged."""
    path = directory / MAP
    try:
        with pq.ParquetFile(path) as file:
            # Versions without spans have no columns for them, versions without added BOS tokens none for those.
            columns = [name for name in SCHEMA.names if name in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=columns).combine_chunks()
                names = table["shard"].unique().to_pylist()
                if len(names) != 1:
                    raise DataError(f"{path}: its row group {group} spans several shards: prune again")
                none = np.full(len(table), -1)
                new, first, end = (
                    table[name].fill_null(-1).to_numpy() if name in columns else none
                    for name in ("new", "first", "end")
                )
                closed, opened = (
                    table[name].to_numpy() if name in columns else none >= 0 for name in ("closed", "opened")
                )
                yield str(names[0]), Rows(table["old"].to_numpy(), new, first, end, closed, opened)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error}: prune again") from error
