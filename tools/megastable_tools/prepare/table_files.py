"""Read one text column of a table, cell by cell: Parquet, Arrow (IPC file or stream, Feather) and CSV.

A cell is its bytes (UTF-8, or whatever is broken in the file) or a `Flaw` of its row. A file that lacks the column or
ends too early raises DataError.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from megastable.base.errors import DataError
from megastable_tools.prepare.forward import ForwardFile

ROWS = 1024  # of Parquet and Arrow, at a time
LONGEST_FIELD = 1 << 28  # characters of a CSV field: an unclosed quote must not fill the memory
_ARROW_FILE = b"ARROW1\0\0"  # precedes the stream in an Arrow file


class Flaw(NamedTuple):
    """A problem with one row."""

    problem: str


Cells = Iterator[bytes | Flaw]


def parquet_cells(path: Path, key: str) -> Iterator[tuple[bytes | Flaw, float]]:
    """The cells of column `key`, and the share of the rows read with each."""
    import pyarrow as pa  # takes about a second: only for such files
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            _check_column(str(path), key, table.schema_arrow.names)
            row, rows = 0, max(1, table.metadata.num_rows)
            for batch in table.iter_batches(batch_size=ROWS, columns=[key]):
                for cell in _cells(batch.column(0), key):
                    row += 1
                    yield cell, row / rows
    except pa.ArrowException as error:
        raise DataError(f"{path} cannot be read as Parquet with text in {key!r}: {error}") from error


def arrow_cells(where: str, chunks: Iterable[bytes], key: str) -> Cells:
    """The cells of column `key`, in the memory of one record batch (1,000 rows in Hugging Face's datasets)."""
    import pyarrow as pa

    whole = ForwardFile(chunks)
    head = whole.read(len(_ARROW_FILE))
    file = whole if head == _ARROW_FILE else ForwardFile(chain([head], whole.pieces()))
    try:
        with pa.ipc.open_stream(pa.PythonFile(file, mode="r")) as reader:
            _check_column(where, key, reader.schema.names)
            for batch in reader:
                column = batch.column(reader.schema.names.index(key))
                for first in range(0, len(column), ROWS):
                    yield from _cells(column.slice(first, ROWS), key)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{where} cannot be read as Arrow with text in {key!r}: {error}") from error
    if file.ended:  # with an end mark it stops reading before the end
        raise DataError(f"{where} ends too early, without the end mark of its data: fetch it again")


def csv_cells(where: str, chunks: Iterable[bytes], key: str, delimiter: str) -> Cells:
    """The cells of column `key` of the header, with quotes as in RFC 4180. A good row is as long as the header."""
    csv.field_size_limit(LONGEST_FIELD)
    raw = io.BufferedReader(ForwardFile(chunks), buffer_size=1 << 20)
    # Bytes that are not UTF-8 pass through, so that they are a flaw of one row only.
    lines = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        header = next(rows, [])
    except csv.Error as error:
        raise DataError(f"{where}: its first line is not a header: {error}") from error
    _check_column(where, key, header)
    column = header.index(key)
    while True:
        began = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise DataError(
                    f"{where} ends too early, inside quotes that open in line {began} or later"
                ) from error
            yield Flaw(f"line {began}: {error}")
            continue
        if len(row) == len(header):
            yield row[column].encode("utf-8", "surrogateescape")
        elif row:
            yield Flaw(f"line {began}: {len(row)} fields, the header has {len(header)}")


def _cells(column: Any, key: str) -> Cells:
    """The cells of an Arrow array. As bytes, so that one that is not UTF-8 is one bad row, not a broken file."""
    import pyarrow as pa

    for raw in column.cast(pa.large_binary()).to_pylist():
        yield Flaw(f"{key!r} is null, not text") if raw is None else raw


def _check_column(where: str, key: str, names: list[str]) -> None:
    if names.count(key) != 1:
        problem = "no column" if key not in names else "more than one column"
        raise DataError(f"{where}: {problem} {key!r} (there is {', '.join(names)}), name one with --key")
