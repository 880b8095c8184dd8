"""Keeps the steps of a run as columns in memory, in the order in which they were done, and which were undone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megastable.run.events.event import read_real, read_whole
from megastable.run.record_files import RecordFollower, to_array
from megastable.run.records import SCHEMA
from megastable.run.run_history import FAR

# 4 bytes for all that is only drawn: a run may have millions of steps.
STEP = {
    "step": "i8", "time": "f8", "next_position": "i8", "attempt": "i4", "applied": "?", "clipped": "?", "loss": "f4",
    "grad_norm": "f4", "lr": "f4", "tokens_per_second": "f4", "mfu_full": "f4", "seconds": "f4",
    "data_seconds": "f4", "memory": "f4", "worst_loss": "f4", "token_entropy": "f4", "loss_scale": "f4",
    "noise_scale": "f4", "expert_violation": "f4", "expert_idle": "f4", "expert_dropped": "f4", "router_entropy": "f4",
    "router_z": "f4",
}  # fmt: skip
# Measured at some steps only: columns of a table of their own, which says of which row of the other they are.
SOMETIMES = (
    "parameter_norm", "update_ratio", "second_moment_norm", "attention_logit", "attention_entropy",
    "predictive_entropy", "fp8_saturation", "fp8_underflow",
)  # fmt: skip
LOOK = {"row": "i8", **dict.fromkeys(SOMETIMES, "f4")}

Columns = Mapping[str, npt.NDArray[Any]]


class GrowingColumns:
    """Columns of equal length that grow at their end. Pages that are not written yet cost no memory."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types
        self.length = 0
        self._room = {column_name: np.empty(1024, column_type) for column_name, column_type in types.items()}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._room[name][: self.length]

    def append_rows(self, columns: Columns) -> None:
        """Add rows. Columns that are not given are nan, or 0."""
        new_rows = len(next(iter(columns.values())))
        if not new_rows:
            return
        end_row = self.length + new_rows
        for column_name, column_room in self._room.items():
            if end_row > len(column_room):
                larger_room = np.empty(max(end_row, 2 * len(column_room)), column_room.dtype)
                larger_room[: self.length] = column_room[: self.length]
                self._room[column_name] = column_room = larger_room
            given_values = columns.get(column_name)
            with np.errstate(over="ignore"):  # a loss beyond fp32 is infinite
                column_room[self.length : end_row] = (
                    (np.nan if column_room.dtype.kind == "f" else 0) if given_values is None else given_values
                )
        self.length = end_row

    def cut_rows(self, length: int) -> None:
        """Forget all rows from `length` on."""
        self.length = min(length, self.length)


class StepTable:
    """steps: all recorded ones, and behind them those that were only seen in the run's progress so far. looks: what is
    measured at some steps only; `row` says of which."""

    def __init__(self) -> None:
        self.steps = GrowingColumns({**STEP, "undone": "?"})
        self.looks = GrowingColumns(LOOK)
        self.recorded = 0  # number of rows that are on disk

    @property
    def end(self) -> float:
        """The time of the last step, 0 if there is none."""
        return float(self.steps["time"][-1]) if len(self.steps) else 0.0

    def put_recorded(self, row: int, columns: Columns) -> None:
        """Put recorded steps, in order, behind the first `row` rows, in place of all that was there. What was only seen
        is forgotten; `see` it again where it is newer. Afterwards call `find_undone`."""
        self.steps.cut_rows(row)
        self.looks.cut_rows(int(np.searchsorted(self.looks["row"], row)))
        has_look = np.any([~np.isnan(columns[sometime_name]) for sometime_name in SOMETIMES], axis=0)
        look_rows = np.flatnonzero(has_look)
        self.looks.append_rows(
            {
                "row": row + look_rows,
                **{sometime_name: columns[sometime_name][look_rows] for sometime_name in SOMETIMES},
            }
        )
        self.steps.append_rows(columns)
        self.recorded = len(self.steps)

    def find_undone(self) -> None:
        """Mark the steps that were undone: a later one has the same number, or a lower one."""
        step_numbers, undone_flags = self.steps["step"], self.steps["undone"]
        undone_flags[-1:] = False
        undone_flags[:-1] = step_numbers[:-1] >= np.minimum.accumulate(step_numbers[:0:-1])[::-1]


COLUMNS = pa.schema([SCHEMA.field(name) for name in (*STEP, *SOMETIMES)])
TOLD = ("grad_norm", "lr", "tokens_per_second", "seconds")  # numbers that progress.json has of a step


class RecordReader:
    """The steps of a run. `look_again` and `see` are called by one thread, `hold_table` by any.

    Record files come with up to `logging.flush_steps` steps at a time. Until then, steps are known from progress.json,
    as far as somebody looked; `see` adds such a step to the table, and the next records replace it.
    """

    def __init__(self, folder: Path) -> None:
        self._follower = RecordFollower(folder, COLUMNS)
        self._table, self._lock = StepTable(), Lock()

    @property
    def damaged(self) -> dict[str, str]:
        """Names of files that cannot be read, with the reason."""
        return self._follower.damaged

    @contextmanager
    def hold_table(self) -> Iterator[StepTable]:
        """The table, which does not change meanwhile."""
        with self._lock:
            yield self._table

    def look_again(self) -> bool:
        """Read new records; whether there were any."""
        news = False
        with self._lock:
            for row, table in self._follower.read_new():
                columns = {field.name: to_array(table.column(field.name)) for field in COLUMNS}
                self._table.put_recorded(row, columns)
                news = True
            if news:
                self._table.find_undone()
        return news

    def see_progress(self, progress: Mapping[str, Any]) -> bool:
        """Add the newest step of progress.json; whether it was news."""
        step, step_time = read_whole(progress.get("measured_step")), read_real(progress.get("stepped"))
        loss = read_real(progress.get("loss"))
        if step is None or loss is None or step_time is None or not self._table.end < step_time < FAR:
            return False
        seen_step: dict[str, Any] = {
            "step": step, "time": step_time, "next_position": read_whole(progress.get("measured_cursor")) or 0,
            "loss": loss, "applied": progress.get("applied") is not False,
            "attempt": read_whole(progress.get("attempt")) or 0,
        }  # fmt: skip
        for name in TOLD:
            seen_number = read_real(progress.get(name))
            seen_step[name] = np.nan if seen_number is None else seen_number
        with self._lock:
            self._table.steps.append_rows({name: np.array([number]) for name, number in seen_step.items()})
            self._table.find_undone()
        return True
