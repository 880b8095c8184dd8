"""Provenance of a pruned corpus: `pruned.json`, and the map from old documents to new ones.

`documents.parquet` has a row for every document of the original: `shard`, `old`, its number there, and `new`, its
number in the shard of the same name, null if it was removed. A cut document has a row for each remaining piece: its
tokens [`first`, `end`), counted in the document, null for a whole one; `closed`: an added end-of-document token
follows; `opened`: an added begin-of-document token precedes. So the map locates every token of one corpus in the other.
`pruned.json` holds the hashes of map and manifest and a seal over itself: any changed byte is detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megastable.base.durable import write_data_file
from megastable.base.errors import DataError
from megastable.base.text import count_noun
from megastable_tools.forensics.pruning.gaps import Gaps

if TYPE_CHECKING:
    from hashlib import _Hash as Digest

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
    documents that lost spans."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard: str
    documents: int = Field(ge=0)
    tokens: int = Field(ge=0)
    left: bool
    cut: int = Field(ge=0)


class Pruned(BaseModel):
    """original: path of the corpus; fingerprint: its own, not the new one's. plan_sha256: of the plan's file.

    removed: SHA-256 of the lines "shard document" of all removed documents and "shard document first:end"
    of all spans, in order. documents: removed as a whole; tokens: removed. cut: documents that lost spans; added:
    boundary tokens, which end and begin documents, added at cuts.
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
    cut: int
    added: int
    shards: list[Cut]
    made: datetime
    manifest_xxh3: str
    map_xxh3: str
    seal: str = ""

    def __str__(self) -> str:
        gone = gone_text(self.documents, self.tokens, self.cut, self.added)
        left = f"{count_noun(self.documents_left, 'document')} and {count_noun(self.tokens_left, 'token')} are left"
        lost_shards = [cut.shard for cut in self.shards if not cut.left]
        lost = "".join(
            f"\nthe shard {lost_shard} is gone: nothing of it remained" for lost_shard in lost_shards
        )
        return f"{gone}, {left}{lost}"

    def add_seal(self) -> Pruned:
        return self.model_copy(update={"seal": self._digest()})

    def save_file(self, directory: Path) -> None:
        write_data_file(directory / FILE, self._text())

    @classmethod
    def load_file(cls, directory: Path) -> Pruned:
        """Raises DataError for a directory that is not a pruned corpus, and for a changed file."""
        path = directory / FILE
        try:
            file_content = path.read_bytes()
            pruned_found = cls.model_validate_json(file_content)
        except FileNotFoundError:
            raise DataError(
                f"{path} is missing: {directory} is not a pruned corpus (megastable prune apply makes them)"
            ) from None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}: restore it") from error
        except ValidationError as error:
            detail = error.errors()[0]
            field_named = ".".join(map(str, detail["loc"])) or "it"
            raise DataError(f"{path} is damaged ({field_named}: {detail['msg']}): prune again") from error
        if pruned_found.seal != pruned_found._digest() or file_content != pruned_found._text():
            raise DataError(f"{path} was changed after it was written: prune again")
        return pruned_found

    def _digest(self) -> str:
        json_text = self.model_dump_json(exclude={"seal"})
        return xxhash.xxh3_128_hexdigest(json_text.encode())

    def _text(self) -> bytes:
        return (self.model_dump_json(indent=1) + "\n").encode()


def gone_text(documents: int, tokens: int, cut: int, added: int) -> str:
    """The removals, as text."""
    text_gone = f"{count_noun(documents, 'document')} and {count_noun(tokens, 'token')} are gone"
    if not cut:
        return text_gone
    closed_text = f", {count_noun(added, 'boundary token')} put in between" if added else ""
    return f"{text_gone}, {count_noun(cut, 'document')} {'was' if cut == 1 else 'were'} cut{closed_text}"


def add_removed(digest: Digest, shard: str, gaps: Gaps) -> None:
    """Add what is removed from a shard to the digest of `Pruned.removed`."""
    lines = [f"{shard} {document_number}\n" for document_number in gaps.documents.tolist()]
    lines += [
        f"{shard} {cut.number} {range_first}:{range_end}\n"
        for cut in gaps.cuts
        for range_first, range_end in cut.spans
    ]
    digest.update("".join(lines).encode())


class MapWriter:
    """Writes the map, a piece of a shard at a time."""

    def __init__(self, directory: Path) -> None:
        # Ascending numbers take almost no space as differences.
        options: dict[str, Any] = {"use_dictionary": ["shard"], "compression": "zstd", "store_schema": False}
        delta_encodings = dict.fromkeys(("old", "new", "first", "end"), "DELTA_BINARY_PACKED")
        self._writer = pq.ParquetWriter(directory / MAP, SCHEMA, column_encoding=delta_encodings, **options)

    def add_documents(self, shard: str, first: int, count: int, gaps: Gaps) -> None:
        """Add the documents [first, first + count) of a shard."""
        rows = Rows.of_gaps(first, count, gaps)
        names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows.old.size, np.int32)), pa.array([shard]))
        number_columns = [pa.array(values, mask=values < 0) for values in (rows.new, rows.first, rows.end)]
        mark_columns = [pa.array(rows.closed), pa.array(rows.opened)]
        map_table = pa.table([names, pa.array(rows.old), *number_columns, *mark_columns], schema=SCHEMA)
        self._writer.write_table(map_table, row_group_size=max(rows.old.size, 1))

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
    def of_gaps(cls, first: int, count: int, gaps: Gaps) -> Rows:
        """The fate of the documents [first, first + count) of a shard."""
        document_cuts, row_counts = gaps.cut_among(first, count), np.ones(count, np.int64)
        for document_cut in document_cuts:
            row_counts[document_cut.number - first] = len(document_cut.pieces)
        old_numbers = np.repeat(np.arange(first, first + count), row_counts)
        new_numbers = np.repeat(gaps.renumber_documents(first, count), row_counts)
        piece_edges, piece_marks = np.full((2, old_numbers.size), -1), np.zeros((2, old_numbers.size), bool)
        rows_found = cls(old_numbers, new_numbers, *piece_edges, *piece_marks)
        for document_cut in document_cuts:
            at = int(np.searchsorted(old_numbers, document_cut.number))
            for place, piece in enumerate(document_cut.pieces):
                rows_found.new[at + place] += place
                rows_found.first[at + place], rows_found.end[at + place] = piece.first, piece.end
                rows_found.closed[at + place], rows_found.opened[at + place] = piece.closed, piece.opened
        return rows_found


def read_map(directory: Path) -> Iterator[tuple[str, Rows]]:
    """The map in its pieces, each of one shard. Raises DataError if it is damaged."""
    map_path = directory / MAP
    try:
        with pq.ParquetFile(map_path) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=SCHEMA.names).combine_chunks()
                shard_names = table["shard"].unique().to_pylist()
                if len(shard_names) != 1:
                    raise DataError(f"{map_path}: its row group {group} spans several shards: prune again")
                new, first, end = (table[name].fill_null(-1).to_numpy() for name in ("new", "first", "end"))
                closed, opened = (table[name].to_numpy() for name in ("closed", "opened"))
                yield str(shard_names[0]), Rows(table["old"].to_numpy(), new, first, end, closed, opened)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{map_path} cannot be read: {error}: prune again") from error
