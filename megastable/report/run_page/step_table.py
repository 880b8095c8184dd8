"""Keeps the steps of a run as columns in memory, in the order in which they were done, and which were undone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

# 4 bytes for all that is only drawn: a run may have millions of steps.
STEP = {
    "step": "i8", "time": "f8", "next_position": "i8", "attempt": "i4", "applied": "?", "clipped": "?", "loss": "f4",
    "grad_norm": "f4", "lr": "f4", "tokens_per_second": "f4", "mfu_full": "f4", "seconds": "f4",
    "data_seconds": "f4", "memory": "f4", "worst_loss": "f4", "token_entropy": "f4", "loss_scale": "f4",
    "noise_scale": "f4",
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
        self._room = {name: np.empty(1024, kind) for name, kind in types.items()}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._room[name][: self.length]

    def append(self, columns: Columns) -> None:
        """Add rows. Columns that are not given are nan, or 0."""
        more = len(next(iter(columns.values())))
        if not more:
            return
        end = self.length + more
        for name, room in self._room.items():
            if end > len(room):
                larger = np.empty(max(end, 2 * len(room)), room.dtype)
                larger[: self.length] = room[: self.length]
                self._room[name] = room = larger
            given = columns.get(name)
            with np.errstate(over="ignore"):  # a loss beyond fp32 is infinite
                room[self.length : end] = (
                    (np.nan if room.dtype.kind == "f" else 0) if given is None else given
                )
        self.length = end

    def cut(self, length: int) -> None:
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

    def record(self, row: int, columns: Columns) -> None:
        """Put recorded steps, in order, behind the first `row` rows, in place of all that was there. What was only seen
        is forgotten; `see` it again where it is newer. Afterwards call `find_undone`."""
        self.steps.cut(row)
        self.looks.cut(int(np.searchsorted(self.looks["row"], row)))
        some = np.zeros(len(columns["step"]), bool)
        for name in SOMETIMES:
            some |= ~np.isnan(columns[name])
        looks = np.flatnonzero(some)
        self.looks.append({"row": row + looks, **{name: columns[name][looks] for name in SOMETIMES}})
        self.steps.append(columns)
        self.recorded = len(self.steps)

    def see(self, columns: Columns) -> None:
        """Add steps that are not recorded yet. Afterwards call `find_undone`."""
        self.steps.append(columns)

    def find_undone(self) -> None:
        """Mark the steps that were undone: a later one has the same number, or a lower one."""
        step, undone = self.steps["step"], self.steps["undone"]
        undone[-1:] = False
        undone[:-1] = step[:-1] >= np.minimum.accumulate(step[:0:-1])[::-1]
