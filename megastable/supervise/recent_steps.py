"""Keeps the last steps of a run: those recorded on disk, and newer ones seen in its progress; and the newest values of
what is recorded only now and then."""

from __future__ import annotations

import statistics
from collections import deque
from pathlib import Path

import pyarrow as pa

from megastable.base.folder_stamp import folder_stamp
from megastable.run.record_files import read_last
from megastable.run.records import SCHEMA
from megastable.run.step_phases import COLUMNS, OTHER

KEPT = 240  # steps
RECENT = 300  # rows that are read: steps done again are among them
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
        self._seen: deque[tuple[int, float, float]] = deque(maxlen=KEPT)

    def read(self) -> None:
        """Read the newest records, if there may be new ones."""
        try:
            changed = folder_stamp(self.folder)
            if changed is not None and changed == self._changed:
                return
            # Of damaged files nothing: a gap in the plot is better than none.
            table = read_last(self.folder, READ, RECENT)
        except OSError:
            return
        self._changed = changed
        rows = table.slice(max(0, len(table) - RECENT)).to_pylist()
        for row in rows:
            self.newest |= {key: row[key] for key in NEWEST if row[key] is not None}
        steps = {row["step"]: (row["step"], row["loss"], row["seconds"]) for row in rows}
        self._records = [steps[step] for step in sorted(steps)][-KEPT:]
        timed = [row for row in rows if row[COLUMNS[OTHER]] is not None][-TIMED:]
        self.phases = {
            phase: statistics.median(row[column] or 0.0 for row in timed)
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
