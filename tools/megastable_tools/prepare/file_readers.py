"""Read documents inside of files: the members of a tar archive, and one text column of a table (Parquet, Arrow IPC file
or stream, Feather, CSV).

An archive is a stream: nothing is unpacked, and no link is followed. A WebDataset is a tar in which consecutive members
`000.jpg`, `000.txt`, `000.json` form one sample; see https://github.com/webdataset/webdataset. An archive counts as one
if its first samples look like that.

A cell of a table is its bytes (UTF-8, or whatever is broken in the file) or a `Flaw` of its row. A file that lacks the
column or ends too early raises DataError.
"""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby, islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

from megastable.base.errors import DataError


class ForwardFile(io.RawIOBase):
    """`chunks` as a binary file: `read(n)` gives n bytes, fewer only at the end, and seeks go forward only.

    `ended`: a read has reached the end.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks: Iterator[bytes] = iter(chunks)
        self._rest = memoryview(b"")
        self._at = 0
        self.ended = False

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        parts, bytes_wanted = [], -1 if size is None else size
        while bytes_wanted and (some_bytes := self._some(bytes_wanted)):
            parts.append(bytes(some_bytes))
            bytes_wanted -= len(some_bytes) if bytes_wanted > 0 else 0
        return b"".join(parts)

    def readinto(self, buffer: Any, /) -> int:
        some_bytes = self._some(len(buffer))
        buffer[: len(some_bytes)] = some_bytes
        return len(some_bytes)

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence != io.SEEK_SET or offset < self._at:
            raise io.UnsupportedOperation("this file is read once, forward")
        while self._at < offset and self._some(offset - self._at):
            pass
        return self._at

    def remaining_pieces(self) -> Iterator[bytes]:
        """The remaining bytes, in pieces as they come."""
        while some_bytes := self._some(-1):
            yield bytes(some_bytes)

    def _some(self, most: int) -> memoryview:
        """The next bytes: at most `most` (no limit if below 0), at least one unless the end is reached."""
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                self.ended = True
                break
            self._rest = memoryview(chunk)
        piece_end = len(self._rest) if most < 0 else most
        some_bytes, self._rest = self._rest[:piece_end], self._rest[piece_end:]
        self._at += len(some_bytes)
        return some_bytes


PIECE = 1 << 20  # bytes of a member read at a time
LOOKED_AT = 64  # members looked at to recognise a WebDataset

Note = Callable[[str], None]  # called with the name of each member without readable content


class Member(NamedTuple):
    """A file of an archive; `chunks` can be read once, before the next member is requested."""

    name: str
    chunks: Iterator[bytes]


class ArchiveSample(NamedTuple):
    """Consecutive members of a WebDataset that share their name up to its first dot."""

    key: str
    members: Iterator[Member]


class _Header(tarfile.TarInfo):
    """Raises for a broken header and a missing end mark, where `tarfile` would end the archive silently."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Header:
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # a block of zeros: the end mark
                raise
            raise tarfile.ReadError(f"{error} at byte {archive.offset}") from error


def read_members(where: str, chunks: Iterable[bytes], passed_over: Note) -> Iterator[Member]:
    """The plain files of a tar in their order; `passed_over` is called for links, devices and sparse files.

    where: names the archive. Raises DataError for a damaged archive, a missing end mark, and data after it.
    """
    archive_stream = ForwardFile(chunks)
    try:
        archive = tarfile.TarFile(fileobj=archive_stream, mode="r", tarinfo=_Header)
        while (member_info := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would remember them all
            if member_info.isreg() and not member_info.issparse():
                yield Member(member_info.name, _content(where, archive, member_info))
            elif not member_info.isdir():
                passed_over(member_info.name)
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
        _damaged(where, error)
    while bytes_behind := archive_stream.read(PIECE):
        if bytes_behind.strip(b"\0"):
            raise DataError(
                f"{where} goes on after the end mark of its archive (several in a row?): split it, or write it again"
            )


def _content(where: str, archive: tarfile.TarFile, info: tarfile.TarInfo) -> Iterator[bytes]:
    try:
        content = archive.extractfile(info)
        while content is not None and (content_piece := content.read(PIECE)):
            yield content_piece
    except tarfile.TarError as error:
        _damaged(where, error)


def _damaged(where: str, error: Exception) -> NoReturn:
    raise DataError(f"{where} is damaged: {error}; fetch it again") from error


def split_name(name: str) -> tuple[str, str]:
    """A member's sample and ending: ("a/000", "seg.png") of a/000.seg.png."""
    member_path = PurePosixPath(name)
    base_name, _, name_ending = member_path.name.partition(".")
    return str(member_path.parent / base_name), name_ending.lower()


def text_endings(key: str) -> list[str]:
    """The endings of sample parts that may hold the text `key`, the best first."""
    return list(dict.fromkeys([key.lower(), *(["txt"] if key == "text" else []), "json"]))


def is_webdataset(found: Iterable[Member], key: str) -> bool:
    """Whether the first two samples (or the only one) have the same parts, two or more, and one may hold the text.

    Reads no further than these samples: the rest may be long.
    """
    names = (split_name(member.name) for member in islice(found, LOOKED_AT))
    parts = (sorted(ending for _, ending in group) for _, group in groupby(names, key=lambda name: name[0]))
    first = next(parts, [])
    return len(first) > 1 and not set(text_endings(key)).isdisjoint(first) and next(parts, first) == first


def group_samples(found: Iterable[Member]) -> Iterator[ArchiveSample]:
    """The members of a WebDataset by sample."""
    for sample_key, group in groupby(found, key=lambda member: split_name(member.name)[0]):
        yield ArchiveSample(sample_key, group)


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
        with pq.ParquetFile(path) as parquet_file:
            _check_column(str(path), key, parquet_file.schema_arrow.names)
            row_number, row_count = 0, max(1, parquet_file.metadata.num_rows)
            for batch in parquet_file.iter_batches(batch_size=ROWS, columns=[key]):
                for cell in _cells(batch.column(0), key):
                    row_number += 1
                    yield cell, row_number / row_count
    except pa.ArrowException as error:
        raise DataError(f"{path} cannot be read as Parquet with text in {key!r}: {error}") from error


def arrow_cells(where: str, chunks: Iterable[bytes], key: str) -> Cells:
    """The cells of column `key`, in the memory of one record batch (1,000 rows in Hugging Face's datasets)."""
    import pyarrow as pa

    whole_stream = ForwardFile(chunks)
    first_bytes = whole_stream.read(len(_ARROW_FILE))
    arrow_stream = (
        whole_stream
        if first_bytes == _ARROW_FILE
        else ForwardFile(chain([first_bytes], whole_stream.remaining_pieces()))
    )
    try:
        with pa.ipc.open_stream(pa.PythonFile(arrow_stream, mode="r")) as reader:
            _check_column(where, key, reader.schema.names)
            for batch in reader:
                column = batch.column(reader.schema.names.index(key))
                for first_row in range(0, len(column), ROWS):
                    yield from _cells(column.slice(first_row, ROWS), key)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{where} cannot be read as Arrow with text in {key!r}: {error}") from error
    if arrow_stream.ended:  # with an end mark it stops reading before the end
        raise DataError(f"{where} ends too early, without the end mark of its data: fetch it again")


def csv_cells(where: str, chunks: Iterable[bytes], key: str, delimiter: str) -> Cells:
    """The cells of column `key` of the header, with quotes as in RFC 4180. A good row is as long as the header."""
    csv.field_size_limit(LONGEST_FIELD)
    raw_reader = io.BufferedReader(ForwardFile(chunks), buffer_size=1 << 20)
    # Bytes that are not UTF-8 pass through, so that they are a flaw of one row only.
    text_lines = io.TextIOWrapper(raw_reader, encoding="utf-8-sig", errors="surrogateescape", newline="")
    csv_rows = csv.reader(text_lines, delimiter=delimiter, strict=True)
    try:
        header = next(csv_rows, [])
    except csv.Error as error:
        raise DataError(f"{where}: its first line is not a header: {error}") from error
    _check_column(where, key, header)
    column_index = header.index(key)
    while True:
        first_line = csv_rows.line_num + 1
        try:
            row = next(csv_rows)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise DataError(
                    f"{where} ends too early, inside quotes that open in line {first_line} or later"
                ) from error
            yield Flaw(f"line {first_line}: {error}")
            continue
        if len(row) == len(header):
            yield row[column_index].encode("utf-8", "surrogateescape")
        elif row:
            yield Flaw(f"line {first_line}: {len(row)} fields, the header has {len(header)}")


def _cells(column: Any, key: str) -> Cells:
    """The cells of an Arrow array. As bytes, so that one that is not UTF-8 is one bad row, not a broken file."""
    import pyarrow as pa

    for raw_cell in column.cast(pa.large_binary()).to_pylist():
        yield Flaw(f"{key!r} is null, not text") if raw_cell is None else raw_cell


def _check_column(where: str, key: str, names: list[str]) -> None:
    if names.count(key) != 1:
        problem = "no column" if key not in names else "more than one column"
        raise DataError(f"{where}: {problem} {key!r} (there is {', '.join(names)}), name one with --key")
