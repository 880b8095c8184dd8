"""Keeps the last steps of a run: those recorded on disk, and newer ones seen in its progress; and the newest values of
what is recorded only now and then."""

from __future__ import annotations

import os
import statistics
from collections import deque
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megastable.base.folder_stamp import folder_stamp
from megastable.run.records import SCHEMA, stamp_of
from megastable.run.step_phases import COLUMNS, OTHER

KEPT = 240  # steps
FILES = 6  # newest record files that are read
TIMED = 50  # steps whose median is the rate
ENOUGH = 5  # observed steps needed for a rate
NEWEST = (
    "time", "grad_norm", "mfu_full", "mfu_causal", "memory", "loss_scale", "clipped_fraction", "update_ratio",
    "attention_logit", "attention_entropy", "fp8_saturation",
)  # fmt: skip
READ = pa.schema([SCHEMA.field(name) for name in ("step", "loss", "seconds", *NEWEST, *COLUMNS.values())])


class RecentSteps:
    """folder: of the step records. newest: the last known value of each of NEWEST; phases: seconds of a step by phase,
    the median of the last ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest: dict[str, float] = {}
        self.phases: dict[str, float] = {}
        self._records: list[tuple[int, float, float]] = []  # step, loss, seconds
        self._changed: int | None = None  # when the folder was (folder_stamp.py)
        self._read: tuple[str, ...] = ()
        self._seen: deque[tuple[int, float, float]] = deque(maxlen=KEPT)

    def read(self) -> None:
        """Read the newest record files, if there are new ones."""
        try:
            changed = folder_stamp(self.folder)
            if changed is not None and changed == self._changed:
                return
            names = [n for n in os.listdir(self.folder) if n.endswith(".parquet")]
        except OSError:
            return
        self._changed = changed
        newest = tuple(sorted(names, key=stamp_of)[-FILES:])
        if newest == self._read:
            return
        self._read, rows = newest, dict[int, tuple[int, float, float]]()
        timed = list[dict[str, float | None]]()
        for name in newest:
            try:
                found = pq.read_table(self.folder / name, schema=READ).to_pylist()
            except (pa.ArrowException, OSError, KeyError):
                continue  # half-copied or damaged: a gap in the plot is better than none
            rows |= {row["step"]: (row["step"], row["loss"], row["seconds"]) for row in found}
            for row in found:
                self.newest |= {key: row[key] for key in NEWEST if row[key] is not None}
            timed += [row for row in found if row[COLUMNS[OTHER]] is not None]
        self._records = [rows[step] for step in sorted(rows)][-KEPT:]
        self.phases = {
            phase: statistics.median(row[column] or 0.0 for row in timed[-TIMED:])
            for phase, column in COLUMNS.items()
            if timed
        }

    def see(self, step: int, loss: float | None, seconds: float | None) -> None:
        """Add the current step. After a rewind, all that was seen is outdated."""
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()
        if loss is not None and seconds is not None and (not self._seen or self._seen[-1][0] != step):
            self._seen.append((step, loss, seconds))

    @property
    def last(self) -> int:
        """The last recorded step; 0 if none."""
        return self._records[-1][0] if self._records else 0

    def rate(self) -> float | None:
        """Seconds per step, of observed steps, if there are enough: the records may be of another number of ranks."""
        seen = [seconds for _, _, seconds in self._seen][-TIMED:]
        recorded = [seconds for _, _, seconds in self._records[-TIMED:]]
        chosen = seen if len(seen) >= ENOUGH or not recorded else recorded
        return statistics.median(chosen) if chosen else None

    def losses(self, step: int) -> tuple[tuple[int, float], ...]:
        """(step, loss) up to the current step, oldest first: later ones were undone."""
        rows = {at: loss for at, loss, _ in [*self._records, *self._seen] if at <= step}
        return tuple((at, rows[at]) for at in sorted(rows))[-KEPT:]
