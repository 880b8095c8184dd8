"""Record files are compacted: wherever the process dies, goes back or is read, every row is there once, in order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.run import record_files
from megastable.run.record_files import (
    RecordFile,
    RecordFollower,
    compact_files,
    list_files,
    name_file,
    parse_name,
    read_files,
    read_last,
)
from megastable.run.records import SCHEMA, Recorder, encode_records, read_newest_records
from tests.full_disk import files_no_larger_than
from tests.run.test_records import record

ROWS = pa.schema([SCHEMA.field(name) for name in ("step", "time")])
BEGIN = 1.7e9


class Killed(BaseException):
    """The process was."""


@contextmanager
def killed_after(calls: int) -> Iterator[None]:
    """Kill the process when it has changed the file system so often: a file is written, or one is removed."""
    left = calls
    write, unlink = record_files.durable.write_file, Path.unlink

    def count() -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1

    def write_file(path: Path, content: bytes) -> None:
        count()
        write(path, content)

    def unlink_file(path: Path, missing_ok: bool = False) -> None:
        if not path.name.startswith("."):  # a temporary file of `write_file`
            count()
        unlink(path, missing_ok)

    with (
        patch.object(record_files.durable, "write_file", write_file),
        patch.object(Path, "unlink", unlink_file),
    ):
        yield


class Run:
    """A run that writes records of few columns, and what it has written: (step, time), in order."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.recorder = folder, Recorder(folder, 1000, ROWS)
        self.written, self.step, self.now = list[tuple[int, float]](), 0, BEGIN
        self.follower, self.followed = RecordFollower(folder, ROWS), list[tuple[int, float]]()

    def steps(self, back: int, count: int) -> None:
        """Go back, and write a file of steps."""
        self.step = max(0, self.step - back)
        for _ in range(count):
            self.step, self.now = self.step + 1, self.now + 0.25
            self.recorder.add_records(record(self.step, self.now))
            self.written.append((self.step, self.now))
        self.recorder.flush_records()

    def start(self, clock: float) -> None:
        """Another process goes on, whose host may have another clock; from a memory copy that it has nothing to do for
        with what is written."""
        self.recorder = Recorder(self.folder, 1000, ROWS)
        if self.written:
            copy = self.folder / "pending"
            copy.write_bytes(encode_records([record(step, time) for step, time in self.written[-3:]]))
            with patch.object(self.recorder, "columns", SCHEMA):
                self.recorder.restore_records(copy)
            copy.unlink()
        self.now += clock

    def compact(self, kill: int) -> None:
        with suppress(Killed), killed_after(kill):
            self.recorder.compact_records()

    def look(self, kill: float = math.inf, after: float = math.inf) -> None:
        """As a reader, under whose hands the files are compacted after it has read some of them."""
        for number, (row, table) in enumerate(self.follower.read_new()):
            self.followed = self.followed[:row] + rows(table)
            assert len(self.followed) <= self.follower.rows
            if number == after:
                self.compact(kill)
        assert self.followed == self.written

    def read_meanwhile(self, kill: int) -> None:
        """The files are compacted after a reader has listed them."""
        told = list[int]()

        def choose(files: list[RecordFile]) -> list[RecordFile]:
            if not told:
                self.compact(kill)
            told.append(len(files))
            return files

        assert all_rows(self.folder, choose) == self.written

    def check(self) -> None:
        assert all_rows(self.folder) == self.written
        for file, some, *_ in read_files(self.folder, ROWS):
            steps = some.column("step").to_pylist() if some is not None else []
            assert (file.low, file.high) == (min(steps), max(steps))
        table, newest = read_newest_records(self.folder, ROWS), dict[int, float]()
        for step, time in self.written:
            newest[step] = time
        assert rows(table) == sorted(newest.items())


def rows(table: pa.Table) -> list[tuple[int, float]]:
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def all_rows(folder: Path, choose=list) -> list[tuple[int, float]]:  # type: ignore[no-untyped-def]
    found = read_files(folder, ROWS, choose)
    return [row for one in found if one.table is not None for row in rows(one.table)]


KILLS = st.integers(0, 12) | st.just(math.inf)
DEEDS = st.one_of(
    st.tuples(st.just("steps"), st.integers(0, 6), st.integers(1, 5)),
    st.tuples(st.just("start"), st.sampled_from([0.0, 3600.0, -3600.0])),
    st.tuples(st.just("compact"), KILLS),
    st.tuples(st.just("read_meanwhile"), KILLS),
    st.tuples(st.just("look"), KILLS, st.integers(0, 4)),
)


@settings(deadline=None)
@given(st.lists(DEEDS, min_size=10, max_size=30))
def test_compaction_keeps_every_row_once_whatever_happens(deeds: list[tuple]) -> None:  # type: ignore[type-arg]
    with (
        TemporaryDirectory() as name, patch.object(record_files, "COMPACTED", 12),
        patch.object(record_files, "LOOSE", 3), patch.object(record_files, "folder_stamp", lambda _: None),
    ):  # fmt: skip
        run = Run(Path(name))
        for deed, *arguments in deeds:
            getattr(run, deed)(*arguments)
            run.check()
        run.compact(math.inf)
        run.look()
        run.check()
        # Two neighbours that are both compacted have more rows than fit into one.
        assert len(list_files(run.folder)) <= 2 * len(run.written) / 12 + 4
        assert len(list(run.folder.iterdir())) == len(list_files(run.folder))


def test_compaction_loses_nothing_wherever_it_is_killed() -> None:
    """Before the new file, before each of the old ones is removed, and after; with a rewind among them."""
    for kill in range(8):
        with TemporaryDirectory() as name, patch.object(record_files, "LOOSE", 3):
            run = Run(Path(name))
            for back in (0, 0, 4, 0, 7, 0):
                run.steps(back, 3)
            run.compact(kill)
            run.check()
            run.read_meanwhile(math.inf)
            for back in (2, 0, 0):
                run.steps(back, 3)
            run.look()
            run.compact(kill)
            run.check()
            run.look()
            run.compact(math.inf)
            run.look()
            run.check()


def write(folder: Path, files: int, size: int = 5, first: int = 1) -> list[str]:
    recorder = Recorder(folder, size)
    for step in range(first, first + files * size):
        recorder.add_records(record(step))
    return [file.name for file in list_files(folder)]


def test_compact_files_leaves_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large ones as may be; and a name says what is in them."""
    monkeypatch.setattr(record_files, "COMPACTED", 500)
    before = write(tmp_path, 19)
    compact_files(tmp_path, SCHEMA)
    assert [file.name for file in list_files(tmp_path)] == before  # too few to be worth it
    write(tmp_path, 110, first=96)
    compact_files(tmp_path, SCHEMA)
    names = [parse_name(path.name) for path in sorted(tmp_path.iterdir())]
    assert [(file.low, file.high) for file in names] == [(1, 500), (501, 645)]
    assert names[0].begin == parse_name(before[0]).begin
    table, alone = (
        read_newest_records(tmp_path),
        pq.read_table(BytesIO(encode_records([record(50)])), schema=SCHEMA),
    )
    assert table.column("step").to_pylist() == list(range(1, 646)) and table.schema.equals(SCHEMA)
    assert table.slice(49, 1).to_pylist() == alone.to_pylist()


def test_compact_files_leaves_a_damaged_file_where_it_is(tmp_path: Path) -> None:
    """And files of other names, which are nobody's, too."""
    names = write(tmp_path, 60)
    whole = (tmp_path / names[30]).read_bytes()
    (tmp_path / names[30]).write_bytes(whole[:100])
    (tmp_path / "by hand.parquet").write_bytes(whole)
    compact_files(tmp_path, SCHEMA)
    left = [file.name for file in list_files(tmp_path)]
    assert len(left) == 4 and left[0] == "by hand.parquet" and left[2] == names[30]
    (tmp_path / left[0]).unlink()
    (tmp_path / names[30]).write_bytes(whole)
    assert read_newest_records(tmp_path).column("step").to_pylist() == list(range(1, 301))


def test_compact_files_keeps_the_files_on_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = write(tmp_path, 30)
    with files_no_larger_than(100):
        compact_files(tmp_path, SCHEMA)
    assert [file.name for file in list_files(tmp_path)] == names and "were not compacted" in caplog.text
    assert len(list(tmp_path.iterdir())) == 30


def test_read_last_reads_the_last_files_only(tmp_path: Path) -> None:
    names = write(tmp_path, 30)
    with patch.object(record_files, "read_file", wraps=record_files.read_file) as reading:
        assert read_last(tmp_path, ROWS, 12).column("step").to_pylist() == list(range(136, 151))
        assert [call.args[1].name for call in reading.call_args_list] == names[-3:]
    assert (
        read_last(tmp_path, ROWS, 1000).num_rows == 150
        and read_last(tmp_path / "none", ROWS, 3).num_rows == 0
    )


def new_rows(follower: RecordFollower) -> list[tuple[int, list[int]]]:
    return [(row, table.column("step").to_pylist()) for row, table in follower.read_new()]


def test_follower_reads_only_what_is_new_and_a_damaged_file_when_it_is_whole(tmp_path: Path) -> None:
    names = write(tmp_path, 3)
    whole = (tmp_path / names[1]).read_bytes()
    (tmp_path / names[1]).write_bytes(whole[:200])
    follower = RecordFollower(tmp_path, ROWS)
    assert new_rows(follower) == [(0, [1, 2, 3, 4, 5]), (5, [11, 12, 13, 14, 15])]
    assert list(follower.damaged) == [names[1]] and new_rows(follower) == []
    write(tmp_path, 1, first=16)
    assert new_rows(follower) == [(10, [16, 17, 18, 19, 20])]
    (tmp_path / names[1]).write_bytes(whole)
    assert new_rows(follower) == [
        (5, []),
        (5, [6, 7, 8, 9, 10]),
        (10, [*range(11, 16)]),
        (15, [*range(16, 21)]),
    ]
    assert follower.damaged == {}


def test_compact_files_leaves_columns_of_another_version(tmp_path: Path) -> None:
    for number in range(25):
        name = name_file(number + 1, number + 1, 1000 + number)
        other = {"unknown": [7]} if number == 12 else {}
        pq.write_table(pa.table({"step": [number + 1], "time": [BEGIN], **other}), tmp_path / name)
    compact_files(tmp_path, ROWS)
    assert len(list_files(tmp_path)) < 25
    kept = [file for file in list_files(tmp_path) if file.low <= 13 <= file.high]
    assert [pq.read_table(tmp_path / file.name).column_names for file in kept] == [
        ["step", "time", "unknown"]
    ]
    tables = [found.table for found in read_files(tmp_path, ROWS)]
    assert pa.concat_tables(tables)["step"].to_pylist() == list(range(1, 26))


def test_read_files_ends_where_a_listing_names_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file server's cache may for seconds."""
    pq.write_table(pa.table({"step": [1], "time": [BEGIN]}), tmp_path / name_file(1, 1, 1000))
    gone = parse_name(name_file(2, 2, 2000))
    real = record_files.list_files
    monkeypatch.setattr(record_files, "PAUSE", 0.0)
    with monkeypatch.context() as stale:
        stale.setattr(record_files, "list_files", lambda folder: [*real(folder), gone])
        found = read_files(tmp_path, ROWS)
        assert [one.problem for one in found] == ["", record_files.GONE]
        follower = RecordFollower(tmp_path, ROWS)
        assert sum(len(table) for _, table in follower.read_new()) == 1
    assert not list(follower.read_new()) or follower.rows == 1
    assert follower.rows == 1 and not follower.damaged
