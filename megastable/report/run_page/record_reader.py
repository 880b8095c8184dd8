"""Reads step records into a table, each file once, and the steps that are only in the run's progress so far.

A run of a million steps has 20,000 files, which take a quarter of a minute to read. So the first look at them reads a
sample, which is a complete if coarse picture; and what was read is kept in a cache for the next time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from megastable.base.folder_stamp import folder_stamp
from megastable.report.run_page.record_cache import RecordCache
from megastable.report.run_page.step_table import SOMETIMES, STEP, StepTable
from megastable.run.events.event import real, whole
from megastable.run.goodput.step_times import StepTimes
from megastable.run.records import SCHEMA, stamp_of
from megastable.run.run_history import FAR

COLUMNS = pa.schema([SCHEMA.field(name) for name in (*STEP, *SOMETIMES)])
FLOATS = {field.name for field in COLUMNS if pa.types.is_floating(field.type)}
THREADS = 2
BATCH = 256  # files read at a time
SAMPLE = 120  # files of a first picture
MANY = 400  # files, from which on there is a first picture
LONG = 200_000  # steps
KEEP_AFTER = 500  # new files, after which the cache is written again


class RecordReader:
    """The step records of a run. damaged: names of files that cannot be read, with the reason; loaded: share of the
    files that are read; starts: how often it began anew, as files of an earlier time appeared."""

    def __init__(self, folder: Path, cache: RecordCache | None = None) -> None:
        self.folder, self.cache = folder, cache
        self.damaged: dict[str, str] = {}
        self.starts = 0
        self._changed: int | None = None  # mtime of the folder
        self._looked = False
        self._lock = Lock()
        self._forget()

    def _forget(self) -> None:
        self.starts += 1
        self.damaged.clear()
        with self._lock:
            self._table = StepTable()
            self._sample: StepTable | None = None
        self._read = list[str]()  # names, in the order of the table
        self._waiting = list[str]()
        self._kept = 0  # number of names in the cache
        self._seen: dict[str, Any] = {}
        self._broken: dict[str, tuple[int, int]] = {}  # damaged files: size and time

    @contextmanager
    def table(self) -> Iterator[StepTable]:
        """The table to show, which does not change meanwhile."""
        with self._lock:
            yield self._table if self._sample is None else self._sample

    @property
    def loaded(self) -> float:
        known = len(self._read) + len(self._waiting)
        return len(self._read) / known if known else float(self._looked)

    @property
    def rows(self) -> int:
        return len(self._table.steps)

    def look(self) -> bool:
        """Read some of the files that are new; whether there is more to show. Call it again while `loaded` is below
        1."""
        if not self._waiting and not self._find():
            self._looked = True
            return False
        self._looked = True
        if not self._read and len(self._waiting) > MANY:
            if self.cache is not None and (kept := self.cache.read(self._waiting)) is not None:
                table, known, broken = kept
                # A file that was damaged then may be whole now.
                if all(self._stamp(name) == stamp for name, (_, stamp) in broken.items()):
                    with self._lock:
                        self._table = table
                    self._read, self._waiting = self._waiting[:known], self._waiting[known:]
                    self._kept = known
                    for name, (why, stamp) in broken.items():
                        self.damaged[name], self._broken[name] = why, stamp
                    return True
            if self._sample is None:
                chosen = np.unique(np.linspace(0, len(self._waiting) - 1, SAMPLE).astype(int))
                sample = StepTable()
                for columns in self._columns([self._waiting[n] for n in chosen]):
                    sample.record(columns)
                self._sample = sample
                return True
        batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
        for columns in self._columns(batch):
            with self._lock:
                self._table.record(columns)
        self._read += batch
        if not self._waiting:
            with self._lock:
                self._sample = None
            if self.cache is not None and len(self._read) - self._kept > KEEP_AFTER:
                broken = {name: (self.damaged[name], stamp) for name, stamp in self._broken.items()}
                self.cache.write(self._table, self._read, broken)
                self._kept = len(self._read)
        return True

    def see(self, progress: Mapping[str, Any]) -> bool:
        """Add the last step of progress.json, if it is news."""
        measured = "measured_step" in progress
        names = ("measured_step", "measured_cursor", "stepped") if measured else ("step", "cursor", "time")
        step, cursor, moment = (
            whole(progress.get(names[0])),
            whole(progress.get(names[1])),
            real(progress.get(names[2])),
        )
        loss, table = real(progress.get("loss")), self._table
        if step is None or moment is None or not table.end < moment < FAR or loss is None or self.loaded < 1:
            return False
        told = {"step": step, "loss": progress.get("loss"), "grad_norm": progress.get("grad_norm")}
        if not measured:
            # Of older versions: after a rewind it names the step gone back to, with the numbers of the last one.
            if told["loss"] == self._seen.get("loss"):
                return False
            if (
                table.recorded
                and step <= table.steps["step"][-1]
                and loss == np.float32(table.steps["loss"][-1])
            ):
                return False
        self._seen = told
        numbers = {
            name: real(progress.get(name)) for name in ("grad_norm", "lr", "tokens_per_second", "seconds")
        }
        row: dict[str, Any] = {
            "step": step, "time": moment, "next_position": cursor or 0, "loss": loss,
            "applied": progress.get("applied") is not False, "attempt": whole(progress.get("attempt")) or 0,
            **{name: np.nan if value is None else value for name, value in numbers.items()},
        }  # fmt: skip
        with self._lock:
            table.see({name: np.array([value]) for name, value in row.items()})
        return True

    def _find(self) -> bool:
        """Whether there are new files."""
        try:
            changed = folder_stamp(self.folder)
            if changed is not None and changed == self._changed:
                return False
            names = [name for name in os.listdir(self.folder) if name.endswith(".parquet")]
        except FileNotFoundError:
            return False
        except OSError as error:
            self.damaged[str(self.folder)] = error.strerror or str(error)
            return False
        self._changed = changed
        self.damaged.pop(str(self.folder), None)
        for name, stamp in list(self._broken.items()):
            if stamp != self._stamp(name):  # it was only half there
                del self._broken[name], self.damaged[name]
                self._read.remove(name)
        new = sorted(set(names).difference(self._read), key=age)
        gone = set(self._read).difference(names)
        if gone or (new and self._read and age(new[0]) < age(self._read[-1])):
            # Copied later; or another run has begun in a directory of this name.
            self._forget()
            new = sorted(names, key=age)
        self._waiting = new
        return bool(new or gone)

    def _columns(self, names: Sequence[str]) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """The columns of files, in order; nothing of damaged ones."""
        with ThreadPoolExecutor(THREADS) as pool:
            tables = [table for table in pool.map(self._file, names) if table is not None]
        if tables:
            yield {field.name: as_array(pa.concat_tables(tables).column(field.name)) for field in COLUMNS}

    def _file(self, name: str) -> pa.Table | None:
        try:
            # Small files: read_table, and reading ahead, would take several times as long.
            with pq.ParquetFile(self.folder / name, pre_buffer=False) as file:
                wanted = [n for n in COLUMNS.names if n in file.schema_arrow.names]
                table = file.read(columns=wanted, use_threads=False)
            if table.schema.equals(COLUMNS):
                return table
            missing = {f.name: pa.nulls(len(table), f.type) for f in COLUMNS if f.name not in wanted}
            for column, nothing in missing.items():
                table = table.append_column(column, nothing)
            return table.select(COLUMNS.names).cast(COLUMNS)
        except FileNotFoundError:
            return None
        except (pa.ArrowException, OSError, KeyError) as error:
            self.damaged[name], self._broken[name] = str(error).splitlines()[0], self._stamp(name)
            return None

    def _stamp(self, name: str) -> tuple[int, int]:
        try:
            found = (self.folder / name).stat()
        except OSError:
            return (0, 0)
        return found.st_size, found.st_mtime_ns


class SharedStepTimes:
    """The files of a `RecordReader` for the account of time (run/goodput), which would read them all itself. wait:
    seconds that it waits, of a long run."""

    def __init__(self, reader: RecordReader, wait: float = 0.0) -> None:
        self.reader, self.wait = reader, wait
        self._since = 0.0
        self._known = (-1, -1, -1)  # starts, rows, moves
        self._whole = StepTimes(*(np.empty(0, kind) for kind in ("i8", "f8", "f8", "?", "i8")))

    @property
    def damaged(self) -> dict[str, str]:
        return self.reader.damaged

    @property
    def behind(self) -> bool:
        """Of a long run the account waits, until the page has been painted."""
        if self.reader.loaded < 1:
            return True
        self._since = self._since or time.monotonic()
        return self.reader.rows > LONG and time.monotonic() < self._since + self.wait

    def look(self, budget: float = float("inf")) -> bool:
        """Nothing to do: the reader looks."""
        return False

    def all(self) -> StepTimes:
        """All recorded steps."""
        with self.reader.table() as table:
            rows, known = table.recorded, (self.reader.starts, table.recorded, table.steps.moves)
            if known != self._known:
                columns = [table.steps[name][:rows] for name in StepTimes._fields]
                step, ends, seconds, applied, attempt = columns
                seconds = np.nan_to_num(seconds.astype(np.float64), posinf=0.0)
                times = StepTimes(step, ends, seconds, applied, attempt)
                ordered = not np.any(ends[1:] < ends[:-1])
                self._whole = times if ordered else times.rows(np.argsort(ends, kind="stable"))
                self._known = known
        return self._whole


def as_array(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Nulls are nan, or 0."""
    if column.null_count and not pa.types.is_floating(column.type):
        column = column.fill_null(0)
    return np.asarray(column.to_numpy())


def age(name: str) -> tuple[int, str]:
    """The place of a file in the order of writing."""
    return (stamp_of(name), name)
