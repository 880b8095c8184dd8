"""Lists, compacts and reads the files of a run's records, also while the run writes them.

A file holds the rows of one flush in the order in which the steps were done, and is complete once it has its name:
`00000001-00000050-1790000050000.parquet` has steps 1 to 50, and its stamp is larger than that of every file before it.
At a checkpoint `compact_files` makes one file of many, whose name has the stamps of the first and the last of them:
`00000001-00010000-1790000050000-1790010000000.parquet`. As soon as it has that name, files whose stamps lie within
its own do not count any more: there is one writer, whose stamps only grow. So whenever the process dies, no row is lost
and none is read twice. A reader that finds a file gone lists the folder again.
"""

from __future__ import annotations

import io
import logging
import math
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from megastable.base import durable
from megastable.base.durable import folder_stamp
from megastable_guard import step_files

log = logging.getLogger(__name__)

COMPACTED = 10_000  # rows of a compacted file at most
LOOSE = 20  # files that are left as they are while there are fewer: each compaction writes its rows again
# Listings until a file that is gone counts as damaged, and seconds between: a cache may be late.
TRIES, PAUSE = (8, 0.1)
LAST_STEP = 1 << 62
GONE = "it is listed, and gone"
name_file = step_files.name_file  # the guard writes such files, too
NAME = re.compile(r"(\d+)-(\d+)-(?:(\d+)-)?(\d+)\.parquet")


class RecordFile(NamedTuple):
    """What a name says. begin, stamp: of the first and the last flush in it, equal unless it is compacted; low, high:
    the lowest and the highest step. A file of another name comes first and may have any step."""

    begin: int
    stamp: int
    low: int
    high: int
    name: str


class ReadFile(NamedTuple):
    """A file that was read: its rows, or why there are none. has_others: columns beyond those asked for."""

    file: RecordFile
    table: pa.Table | None
    problem: str = ""
    has_others: bool = False


def parse_name(name: str) -> RecordFile:
    """What the name of a record file says."""
    name_match = NAME.fullmatch(name)
    if name_match is None:
        return RecordFile(0, 0, 0, LAST_STEP, name)
    low_step, high_step, first_stamp, last_stamp = name_match.groups()
    return RecordFile(int(first_stamp or last_stamp), int(last_stamp), int(low_step), int(high_step), name)


def list_files(folder: Path) -> list[RecordFile]:
    """The files of a folder that count, in the order of writing. Raises OSError."""
    return _list_all(folder)[0]


def _list_all(folder: Path) -> tuple[list[RecordFile], list[RecordFile]]:
    """The files that count, and those that a compacted one contains."""
    try:
        file_names = [file_name for file_name in os.listdir(folder) if file_name.endswith(".parquet")]
    except FileNotFoundError:
        return [], []
    record_files = sorted(map(parse_name, file_names), key=lambda file: (file.stamp, -file.begin, file.name))
    counting_files, contained_files = list[RecordFile](), list[RecordFile]()
    edge_stamp: float = math.inf  # where the compacted file begins that was passed last
    for file in reversed(record_files):
        if file.begin >= edge_stamp:
            contained_files.append(file)
            continue
        counting_files.append(file)
        if file.begin < file.stamp:
            edge_stamp = file.begin
    return counting_files[::-1], contained_files


def encode_table(table: pa.Table) -> bytes:
    """The content of a record file."""
    content = io.BytesIO()
    # A file is small: dictionaries, statistics and Arrow's own schema would be half of it.
    pq.write_table(
        table, content, compression="zstd", use_dictionary=False, write_statistics=False, store_schema=False
    )
    return content.getvalue()


def compact_files(folder: Path, columns: pa.Schema) -> None:
    """Make few files of many, each with at most `COMPACTED` rows. If the disk refuses, that is logged.

    Only the process that writes the records may call it. A damaged file stays, and nothing is joined across it.

    Args:
        folder: of the records.
        columns: of the new files; what a file does not have is null there.
    """
    try:
        files, contained_files = _list_all(folder)
        for contained_file in contained_files:  # of a process that died before it had removed them
            (folder / contained_file.name).unlink(missing_ok=True)
        files = [file for file in files if file.stamp]
        # What was written before the newest compacted file did not fit into it, and fits into no other.
        files = files[max((n for n, file in enumerate(files) if file.begin < file.stamp), default=0) :]
        if len(files) >= LOOSE:
            _join_groups(folder, files, columns)
    except OSError as error:
        log.warning("%s: records were not compacted: %s", folder, error)


def _join_groups(folder: Path, files: Sequence[RecordFile], columns: pa.Schema) -> None:
    join_group, row_count = list[ReadFile](), 0
    for record_file in files:
        read_records = read_file(folder, record_file, columns)
        if read_records.has_others:  # of another version: it stays as it is
            read_records = read_records._replace(table=None)
        if read_records.table is None or row_count + len(read_records.table) > COMPACTED:
            _join(folder, join_group)
            join_group, row_count = [], 0
        if read_records.table is not None:
            join_group.append(read_records)
            row_count += len(read_records.table)
    if len(join_group) >= LOOSE:
        _join(folder, join_group)


def _join(folder: Path, group: Sequence[ReadFile]) -> None:
    if len(group) < 2:
        return
    joined_table = pa.concat_tables([found.table for found in group])
    low_step, high_step = min(found.file.low for found in group), max(found.file.high for found in group)
    file_name = name_file(low_step, high_step, group[0].file.begin, group[-1].file.stamp)
    durable.write_file(folder / file_name, encode_table(joined_table))
    for found in group:
        (folder / found.file.name).unlink(missing_ok=True)


def read_files(
    folder: Path, columns: pa.Schema, choose: Callable[[list[RecordFile]], Sequence[RecordFile]] = list
) -> list[ReadFile]:
    """Read the files of a folder, in the order of writing.

    Args:
        folder: of the records; it need not exist.
        columns: to be read; what a file does not have is null, or nan.
        choose: picks files of all that count. It is called again if one of them has been compacted meanwhile; what a
            listing names for long after it is gone counts as damaged.

    Raises:
        OSError: the folder cannot be listed.
    """
    found = list[ReadFile]()
    for try_number in range(TRIES):
        time.sleep(PAUSE if try_number else 0.0)
        found.clear()
        for file in choose(list_files(folder)):
            try:
                found.append(read_file(folder, file, columns))
            except FileNotFoundError:
                found.append(ReadFile(file, None, GONE))
        if not any(one.problem == GONE for one in found):
            break
    return found


def read_file(folder: Path, file: RecordFile, columns: pa.Schema) -> ReadFile:
    """The rows of a file; a column that it does not have is null. Raises FileNotFoundError if it is gone."""
    file_path = folder / file.name
    try:
        # Several times as fast for a small file as `read_table`, or with reading ahead.
        with pq.ParquetFile(file_path, pre_buffer=False) as parquet_file:
            stored_columns = parquet_file.schema_arrow.names
            known_columns = [name for name in columns.names if name in stored_columns]
            record_table = parquet_file.read(columns=known_columns, use_threads=False)
        for field in columns:
            if field.name not in known_columns:
                record_table = record_table.append_column(field, pa.nulls(len(record_table), field.type))
        record_table = record_table.select(columns.names).cast(columns)
        return ReadFile(file, record_table, has_others=len(known_columns) < len(stored_columns))
    except (pa.ArrowException, OSError, KeyError) as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(file_path):
            raise
        return ReadFile(file, None, str(error).splitlines()[0])


def read_last(folder: Path, columns: pa.Schema, count: int) -> pa.Table:
    """The last rows of a folder, at least `count` of them if there are so many; damaged files are passed over."""

    def choose_last(files: list[RecordFile]) -> list[RecordFile]:
        # A name says how many rows there are at least: all steps between its two.
        chosen_files, row_count = list[RecordFile](), 0
        while files and row_count < count:
            record_file = files.pop()
            chosen_files.insert(0, record_file)
            row_count += 0 if record_file.high == LAST_STEP else record_file.high - record_file.low + 1
        return chosen_files

    tables = [found.table for found in read_files(folder, columns, choose_last) if found.table is not None]
    return pa.concat_tables([columns.empty_table(), *tables])


class RecordFollower:
    """Reads the records of a run as they are written."""

    def __init__(self, folder: Path, columns: pa.Schema) -> None:
        self.folder, self.columns = folder, columns
        self.rows = 0  # read so far
        self._files: list[_FollowedFile] = []
        self._changed: int | None = None  # when the folder was (`folder_stamp`)
        self._unlisted = ""  # why the folder cannot be listed

    @property
    def damaged(self) -> dict[str, str]:
        """Names of files that cannot be read, with the reason."""
        problem_by_name = {one.file.name: one.problem for one in self._files if one.problem}
        return problem_by_name | ({str(self.folder): self._unlisted} if self._unlisted else {})

    def read_new(self) -> Iterator[tuple[int, pa.Table]]:
        """Read what is new, a file at a time: to be taken in whole.

        Yields:
            A number of rows, and the table that comes behind these, in place of all rows that were there. Rows come
            once more if their files were compacted, or if there is something new before them.
        """
        for try_number in range(TRIES):
            time.sleep(PAUSE if try_number else 0.0)
            if (yield from self._read_listed()):
                return

    def _read_listed(self) -> Generator[tuple[int, pa.Table], None, bool]:
        """As `read_new`; whether all was there that was listed."""
        try:
            folder_change = folder_stamp(self.folder)
            if folder_change is not None and folder_change == self._changed and not self.damaged:
                return True
            record_files = list_files(self.folder)
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)  # the run has just begun
            self._unlisted = "" if is_missing else error.strerror or str(error)
            return True
        kept_count = self._count_kept(record_files)
        if kept_count < len(self._files):
            self.rows = self._files[kept_count].row
            del self._files[kept_count:]
            yield self.rows, self.columns.empty_table()
        for record_file in record_files[kept_count:]:
            try:
                _, record_table, file_problem, _ = read_file(self.folder, record_file, self.columns)
            except FileNotFoundError:  # it has been compacted since it was listed
                return False
            first_row, file_size = self.rows, self._measure(record_file) if file_problem else (0, 0)
            self._files.append(_FollowedFile(record_file, first_row, file_problem, file_size))
            if record_table is not None:
                self.rows += len(record_table)
                yield first_row, record_table
        self._changed, self._unlisted = folder_change, ""
        return True

    def _count_kept(self, files: Sequence[RecordFile]) -> int:
        """How many of the files that were read are as they were, up to the first that is not."""
        for kept_count, (before, record_file) in enumerate(zip(self._files, files, strict=False)):
            if before.file != record_file or (before.problem and before.size != self._measure(record_file)):
                return kept_count
        return min(len(self._files), len(files))

    def _measure(self, file: RecordFile) -> tuple[int, int]:
        """Size and time: a damaged file is read again once they have changed, as it was only half there."""
        try:
            file_status = (self.folder / file.name).stat()
        except OSError:
            return 0, 0
        return file_status.st_size, file_status.st_mtime_ns


class _FollowedFile(NamedTuple):
    """row: at which its rows begin; size: of a damaged one, see `_measure`."""

    file: RecordFile
    row: int
    problem: str
    size: tuple[int, int]


def to_array(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """The values of a column; nulls are nan, or 0."""
    if column.null_count and not pa.types.is_floating(column.type):
        column = column.fill_null(pa.scalar(0).cast(column.type))
    return np.asarray(column.to_numpy())
