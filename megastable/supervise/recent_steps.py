"""The last steps of a run: of the records on the disk, and of those that were seen and are not there yet."""

from __future__ import annotations

import os
import statistics
from collections import deque
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

KEPT = 240  # steps
FILES = 6  # newest files of step records that are looked at
TIMED = 50  # steps whose median is the rate
ENOUGH = 5  # steps that were seen, to tell the rate by


class RecentSteps:
    """folder: of the records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: list[tuple[int, float, float]] = []  # step, loss, seconds
        self._changed = -1  # when the folder of the records had
        self._read: tuple[str, ...] = ()
        self._seen: deque[tuple[int, float, float]] = deque(maxlen=KEPT)

    def read(self) -> None:
        """The newest files of records, when there are others than the last time."""
        try:
            changed = self.folder.stat().st_mtime_ns
            if changed == self._changed:
                return
            names = [n for n in os.listdir(self.folder) if n.endswith(".parquet")]
        except OSError:
            return
        self._changed = changed
        newest = tuple(sorted(names, key=lambda n: n.rpartition("-")[2])[-FILES:])
        if newest == self._read:
            return
        self._read, rows = newest, dict[int, tuple[int, float, float]]()
        for name in newest:
            try:
                table = pq.read_table(self.folder / name, columns=["step", "loss", "seconds"])
            except (pa.ArrowException, OSError, KeyError):
                continue  # half-copied, or damaged: a picture with a gap is better than none
            rows |= {row[0]: row for row in zip(*(c.to_pylist() for c in table.columns), strict=True)}
        self._records = [rows[step] for step in sorted(rows)][-KEPT:]

    def see(self, step: int, loss: float | None, seconds: float | None) -> None:
        """The step that the run is at. After a return to an earlier one all that was seen is old."""
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()
        if loss is not None and seconds is not None and (not self._seen or self._seen[-1][0] != step):
            self._seen.append((step, loss, seconds))

    @property
    def last(self) -> int:
        """The last step in the records; 0 without any."""
        return self._records[-1][0] if self._records else 0

    def rate(self) -> float | None:
        """Seconds a step, of those that were seen, if these are enough: there may be other ranks now than the records
        tell of."""
        seen = [seconds for _, _, seconds in self._seen][-TIMED:]
        recorded = [seconds for _, _, seconds in self._records[-TIMED:]]
        chosen = seen if len(seen) >= ENOUGH or not recorded else recorded
        return statistics.median(chosen) if chosen else None

    def losses(self, step: int) -> tuple[tuple[int, float], ...]:
        """(step, loss) up to the present step, oldest first: what came after it was undone."""
        rows = {at: loss for at, loss, _ in [*self._records, *self._seen] if at <= step}
        return tuple((at, rows[at]) for at in sorted(rows))[-KEPT:]
