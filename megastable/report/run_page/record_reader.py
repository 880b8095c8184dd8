"""Keeps the table of a run's steps up to date: from its step records, and from what it says of the newest step.

Record files come with up to `logging.flush_steps` steps at a time. Until then, steps are known from progress.json, as
far as somebody looked; `see` adds such a step to the table, and the next records replace it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa

from megastable.report.run_page.step_table import SOMETIMES, STEP, StepTable
from megastable.run.events.event import real, whole
from megastable.run.record_files import RecordFollower, to_array
from megastable.run.records import SCHEMA
from megastable.run.run_history import FAR

COLUMNS = pa.schema([SCHEMA.field(name) for name in (*STEP, *SOMETIMES)])
TOLD = ("grad_norm", "lr", "tokens_per_second", "seconds")  # numbers that progress.json has of a step


class RecordReader:
    """The steps of a run. `look` and `see` are called by one thread, `table` by any."""

    def __init__(self, folder: Path) -> None:
        self._follower = RecordFollower(folder, COLUMNS)
        self._table, self._lock = StepTable(), Lock()

    @property
    def damaged(self) -> dict[str, str]:
        """Names of files that cannot be read, with the reason."""
        return self._follower.damaged

    @contextmanager
    def table(self) -> Iterator[StepTable]:
        """The table, which does not change meanwhile."""
        with self._lock:
            yield self._table

    def look(self) -> bool:
        """Read new records; whether there were any."""
        news = False
        with self._lock:
            for row, table in self._follower.read_new():
                self._table.record(row, {field.name: to_array(table.column(field.name)) for field in COLUMNS})
                news = True
            if news:
                self._table.find_undone()
        return news

    def see(self, progress: Mapping[str, Any]) -> bool:
        """Add the newest step of progress.json; whether it was news."""
        step, moment = whole(progress.get("measured_step")), real(progress.get("stepped"))
        loss = real(progress.get("loss"))
        if step is None or loss is None or moment is None or not self._table.end < moment < FAR:
            return False
        row: dict[str, Any] = {
            "step": step, "time": moment, "next_position": whole(progress.get("measured_cursor")) or 0,
            "loss": loss, "applied": progress.get("applied") is not False,
            "attempt": whole(progress.get("attempt")) or 0,
        }  # fmt: skip
        for name in TOLD:
            value = real(progress.get(name))
            row[name] = np.nan if value is None else value
        with self._lock:
            self._table.see({name: np.array([value]) for name, value in row.items()})
            self._table.find_undone()
        return True
