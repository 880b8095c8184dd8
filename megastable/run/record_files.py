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
from megastable.base.folder_stamp import folder_stamp

log = logging.getLogger(__name__)

COMPACTED = 10_000  # rows of a compacted file at most
LOOSE = 20  # files that are left as they are while there are fewer: each compaction writes its rows again
TRIES, PAUSE = (
    8,
    0.1,
)  # listings until a file that is gone counts as damaged, and seconds between: a cache may be late
LAST_STEP = 1 << 62
GONE = "it is listed, and gone"
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


def name_file(low: int, high: int, *stamps: int) -> str:
    """The name of a file with the steps from `low` to `high`. stamps: one, or those of the first and the last flush."""
    return "-".join([f"{low:08d}", f"{high:08d}", *map(str, stamps)]) + ".parquet"


def parse_name(name: str) -> RecordFile:
    """What the name of a record file says."""
    found = NAME.fullmatch(name)
    if found is None:
        return RecordFile(0, 0, 0, LAST_STEP, name)
    low, high, begin, stamp = found.groups()
    return RecordFile(int(begin or stamp), int(stamp), int(low), int(high), name)


def list_files(folder: Path) -> list[RecordFile]:
    """The files of a folder that count, in the order of writing. Raises OSError."""
    return _list_all(folder)[0]


def _list_all(folder: Path) -> tuple[list[RecordFile], list[RecordFile]]:
    """The files that count, and those that a compacted one contains."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".parquet")]
    except FileNotFoundError:
        return [], []
    files = sorted(map(parse_name, names), key=lambda file: (file.stamp, -file.begin, file.name))
    counting, contained = list[RecordFile](), list[RecordFile]()
    edge: float = math.inf  # where the compacted file begins that was passed last
    for file in reversed(files):
        if file.begin >= edge:
            contained.append(file)
            continue
        counting.append(file)
        if file.begin < file.stamp:
            edge = file.begin
    return counting[::-1], contained


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
        files, contained = _list_all(folder)
        for file in contained:  # of a process that died before it had removed them
            (folder / file.name).unlink(missing_ok=True)
        files = [file for file in files if file.stamp]
        # What was written before the newest compacted file did not fit into it, and fits into no other.
        files = files[max((n for n, file in enumerate(files) if file.begin < file.stamp), default=0) :]
        if len(files) >= LOOSE:
            _join_groups(folder, files, columns)
    except OSError as error:
        log.warning("%s: records were not compacted: %s", folder, error)


def _join_groups(folder: Path, files: Sequence[RecordFile], columns: pa.Schema) -> None:
    group, rows = list[ReadFile](), 0
    for file in files:
        found = read_file(folder, file, columns)
        if found.has_others:  # of another version: it stays as it is
            found = found._replace(table=None)
        if found.table is None or rows + len(found.table) > COMPACTED:
            _join(folder, group)
            group, rows = [], 0
        if found.table is not None:
            group.append(found)
            rows += len(found.table)
    if len(group) >= LOOSE:
        _join(folder, group)


def _join(folder: Path, group: Sequence[ReadFile]) -> None:
    if len(group) < 2:
        return
    table = pa.concat_tables([found.table for found in group])
    low, high = min(found.file.low for found in group), max(found.file.high for found in group)
    name = name_file(low, high, group[0].file.begin, group[-1].file.stamp)
    durable.write_file(folder / name, encode_table(table))
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
    for attempt in range(TRIES):
        time.sleep(PAUSE if attempt else 0.0)
        found = [_read_listed(folder, file, columns) for file in choose(list_files(folder))]
        if not any(one.problem == GONE for one in found):
            break
    return found


def _read_listed(folder: Path, file: RecordFile, columns: pa.Schema) -> ReadFile:
    try:
        return read_file(folder, file, columns)
    except FileNotFoundError:
        return ReadFile(file, None, GONE)


def read_file(folder: Path, file: RecordFile, columns: pa.Schema) -> ReadFile:
    """The rows of a file; a column that it does not have is null. Raises FileNotFoundError if it is gone."""
    path = folder / file.name
    try:
        # Several times as fast for a small file as `read_table`, or with reading ahead.
        with pq.ParquetFile(path, pre_buffer=False) as opened:
            there = opened.schema_arrow.names
            known = [name for name in columns.names if name in there]
            table = opened.read(columns=known, use_threads=False)
        for field in columns:
            if field.name not in known:
                table = table.append_column(field, pa.nulls(len(table), field.type))
        table = table.select(columns.names).cast(columns)
        return ReadFile(file, table, has_others=len(known) < len(there))
    except (pa.ArrowException, OSError, KeyError) as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
            raise
        return ReadFile(file, None, str(error).splitlines()[0])


def read_last(folder: Path, columns: pa.Schema, count: int) -> pa.Table:
    """The last rows of a folder, at least `count` of them if there are so many; damaged files are passed over."""

    def choose_last(files: list[RecordFile]) -> list[RecordFile]:
        # A name says how many rows there are at least: all steps between its two.
        chosen, rows = list[RecordFile](), 0
        while files and rows < count:
            file = files.pop()
            chosen.insert(0, file)
            rows += 0 if file.high == LAST_STEP else file.high - file.low + 1
        return chosen

    tables = [found.table for found in read_files(folder, columns, choose_last) if found.table is not None]
    return pa.concat_tables([columns.empty_table(), *tables])


class RecordFollower:
    """Reads the records of a run as they are written."""

    def __init__(self, folder: Path, columns: pa.Schema) -> None:
        self.folder, self.columns = folder, columns
        self.rows = 0  # read so far
        self._files: list[_FollowedFile] = []
        self._changed: int | None = None  # when the folder was (folder_stamp.py)
        self._unlisted = ""  # why the folder cannot be listed

    @property
    def damaged(self) -> dict[str, str]:
        """Names of files that cannot be read, with the reason."""
        found = {one.file.name: one.problem for one in self._files if one.problem}
        return found | ({str(self.folder): self._unlisted} if self._unlisted else {})

    def read_new(self) -> Iterator[tuple[int, pa.Table]]:
        """Read what is new, a file at a time: to be taken in whole.

        Yields:
            A number of rows, and the table that comes behind these, in place of all rows that were there. Rows come
            once more if their files were compacted, or if there is something new before them.
        """
        for attempt in range(TRIES):
            time.sleep(PAUSE if attempt else 0.0)
            if (yield from self._read_listed()):
                return

    def _read_listed(self) -> Generator[tuple[int, pa.Table], None, bool]:
        """As `read_new`; whether all was there that was listed."""
        try:
            changed = folder_stamp(self.folder)
            if changed is not None and changed == self._changed and not self.damaged:
                return True
            files = list_files(self.folder)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)  # the run has just begun
            self._unlisted = "" if missing else error.strerror or str(error)
            return True
        kept = self._count_kept(files)
        if kept < len(self._files):
            self.rows = self._files[kept].row
            del self._files[kept:]
            yield self.rows, self.columns.empty_table()
        for file in files[kept:]:
            try:
                _, table, problem, _ = read_file(self.folder, file, self.columns)
            except FileNotFoundError:  # it has been compacted since it was listed
                return False
            row, size = self.rows, self._measure(file) if problem else (0, 0)
            self._files.append(_FollowedFile(file, row, problem, size))
            if table is not None:
                self.rows += len(table)
                yield row, table
        self._changed, self._unlisted = changed, ""
        return True

    def _count_kept(self, files: Sequence[RecordFile]) -> int:
        """How many of the files that were read are as they were, up to the first that is not."""
        for count, (before, file) in enumerate(zip(self._files, files, strict=False)):
            if before.file != file or (before.problem and before.size != self._measure(file)):
                return count
        return min(len(self._files), len(files))

    def _measure(self, file: RecordFile) -> tuple[int, int]:
        """Size and time: a damaged file is read again once they have changed, as it was only half there."""
        try:
            status = (self.folder / file.name).stat()
        except OSError:
            return 0, 0
        return status.st_size, status.st_mtime_ns


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
