"""Reads the times of steps from a run's records: five columns only, each file once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megastable.run.record_files import RecordFollower, to_array
from megastable.run.records import SCHEMA


class StepTimes(NamedTuple):
    """Steps in the order of their times. time: unix seconds of their ends; seconds: how long they took; attempt: 0 if
    unknown. [n] each."""

    step: npt.NDArray[np.int64]
    time: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]
    applied: npt.NDArray[np.bool_]
    attempt: npt.NDArray[np.int32]

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
    np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0, np.bool_), np.empty(0, np.int32)
)
COLUMNS = pa.schema([SCHEMA.field(name) for name in StepTimes._fields])


class StepFiles:
    """The times in the record files of a run, as far as they were read."""

    def __init__(self, folder: Path) -> None:
        self._follower = RecordFollower(folder, COLUMNS)
        self._written = self._ordered = NO_STEPS  # in the order of writing, and of time

    @property
    def damaged(self) -> dict[str, str]:
        """Names of files that cannot be read, with the reason."""
        return self._follower.damaged

    def look(self) -> None:
        """Read what is new."""
        parts = [(0, self._written)]
        for row, table in self._follower.read_new():
            while parts and parts[-1][0] >= row:
                parts.pop()
            if parts:
                begin, times = parts[-1]
                parts[-1] = begin, times.rows(slice(row - begin))
            parts.append((row, _times_of(table)))
        if len(parts) == 1 and parts[0][1] is self._written:
            return
        self._written = StepTimes(*map(np.concatenate, zip(*(times for _, times in parts), strict=True)))
        ascending = not np.any(np.diff(self._written.time) < 0)
        order = slice(None) if ascending else np.argsort(self._written.time, kind="stable")
        self._ordered = self._written.rows(order)

    def all(self) -> StepTimes:
        """All steps read so far."""
        return self._ordered


def _times_of(table: pa.Table) -> StepTimes:
    step, moment, seconds, applied, attempt = map(to_array, table.columns)
    seconds = np.nan_to_num(seconds.astype(np.float64), posinf=0.0)
    return StepTimes(step, moment, seconds, applied, attempt.astype(np.int32))
