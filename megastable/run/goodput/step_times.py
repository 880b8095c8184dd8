"""Reads the times of steps from steps/*.parquet: five columns only, each file once."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megastable.run.records import SCHEMA


class StepTimes(NamedTuple):
    """Steps in the order of their times. time: unix seconds of their ends; seconds: how long they took; attempt: 0 if
    unknown. [n] each."""

    step: npt.NDArray[np.int64]
    time: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]
    applied: npt.NDArray[np.bool_]
    attempt: npt.NDArray[np.int64]

    def between(self, begin: float, end: float) -> StepTimes:
        """Those that ended after `begin`, up to `end`."""
        first, last = np.searchsorted(self.time, [begin, end], side="right")
        return self.rows(slice(first, last))

    def rows(self, chosen: slice | npt.NDArray[np.intp]) -> StepTimes:
        return StepTimes(
            self.step[chosen],
            self.time[chosen],
            self.seconds[chosen],
            self.applied[chosen],
            self.attempt[chosen],
        )


NO_STEPS = StepTimes(
    np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0, np.bool_), np.empty(0, np.int64)
)


COLUMNS = pa.schema([SCHEMA.field(name) for name in StepTimes._fields])
ATTEMPT = SCHEMA.field("attempt")
THREADS = min(8, os.cpu_count() or 1)
BATCH = 256  # files read before the time is looked at again


class TimedSteps(Protocol):
    """The steps of a run, as `StepFiles` reads them."""

    @property
    def damaged(self) -> dict[str, str]: ...

    @property
    def behind(self) -> bool: ...

    def look(self, budget: float = ...) -> bool: ...

    def all(self) -> StepTimes: ...


class StepFiles:
    """The record files of a run. damaged: names of those that cannot be read, with the reason."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: dict[str, str] = {}
        self.behind = False  # whether there are files that the last look had no time for
        self._seen = set[str]()
        self._parts: list[StepTimes] = []
        self._whole = NO_STEPS

    def look(self, budget: float = float("inf")) -> bool:
        """Read new files, the oldest first, for about `budget` seconds. Returns whether there were any."""
        try:
            names = [name for name in os.listdir(self.folder) if name.endswith(".parquet")]
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self.damaged[str(self.folder)] = error.strerror or str(error)
            return False
        new = sorted(set(names) - self._seen, key=_age)
        began, done = time.monotonic(), 0
        with ThreadPoolExecutor(THREADS) as pool:
            while done < len(new) and (not done or time.monotonic() - began < budget):
                batch = new[done : done + BATCH]
                tables = [table for table in pool.map(self._read, batch) if table is not None]
                self._parts += [_columns(pa.concat_tables(tables))] if tables else []
                self._seen.update(batch)
                done += len(batch)
        self.behind = done < len(new)
        return done > 0

    def _read(self, name: str) -> pa.Table | None:
        try:
            # Small files: read_table, and reading ahead, would take several times as long.
            with pq.ParquetFile(self.folder / name, pre_buffer=False) as file:
                table = file.read(columns=COLUMNS.names, use_threads=False)
            return table if table.schema.equals(COLUMNS) else _as_today(table)
        except FileNotFoundError:
            return None
        except (pa.ArrowException, OSError, KeyError) as error:
            self.damaged[name] = str(error).splitlines()[0]
            return None

    def all(self) -> StepTimes:
        """All steps read so far."""
        if self._parts:
            parts = [self._whole, *self._parts]
            columns = [np.concatenate([part[n] for part in parts]) for n in range(len(NO_STEPS))]
            if np.any(np.diff(columns[1]) < 0):
                order = np.argsort(columns[1], kind="stable")
                columns = [column[order] for column in columns]
            self._whole, self._parts = StepTimes(*columns), []
        return self._whole


def _as_today(table: pa.Table) -> pa.Table:
    """Of another version: older ones did not record the attempt."""
    if ATTEMPT.name not in table.column_names:
        table = table.append_column(ATTEMPT, pa.nulls(len(table), ATTEMPT.type))
    return table.select(COLUMNS.names).cast(COLUMNS)


def _columns(table: pa.Table) -> StepTimes:
    step, moment, seconds, applied, attempt = table.columns
    return StepTimes(
        step.to_numpy(), moment.to_numpy(), np.nan_to_num(seconds.to_numpy().astype(float), posinf=0.0),
        applied.to_numpy(), pc.fill_null(attempt, 0).to_numpy(),
    )  # fmt: skip


def _age(name: str) -> tuple[int, str]:
    """Its last time, which is the last part of its name."""
    last = name.removesuffix(".parquet").rpartition("-")[2]
    return (int(last) if last.isdecimal() else 0, name)
