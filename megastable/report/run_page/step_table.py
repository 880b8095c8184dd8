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
    """Columns of equal length that grow at their end. Pages that are not written yet cost no memory. moves: how often
    they were copied to more room; who keeps views of them takes new ones then, or the old room stays."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types
        self.length = self.moves = 0
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
        self.moves += any(end > len(room) for room in self._room.values())
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

    def adopt(self, columns: Columns) -> None:
        """Take over columns as they are, in place of all rows; the first rows to be added copy them."""
        self._room = dict(columns)
        self.length = len(next(iter(columns.values())))
        self.moves += 1

    def cut(self, length: int) -> None:
        """Forget all rows from `length` on."""
        self.length = min(length, self.length)


def mark_undone(step: npt.NDArray[np.int64], undone: npt.NDArray[np.bool_], first: int) -> None:
    """Mark in `undone` what rows from `first` on, which are new, do again, among themselves too. [n] each, in the order
    in which the steps were done."""
    new = step[first:]
    if not len(new):
        return
    later = np.minimum.accumulate(new[::-1])[::-1]  # the lowest step from a row on
    undone[first:] = np.append(new[:-1] >= later[1:], False)
    np.logical_or(undone[:first], step[:first] >= later[0], out=undone[:first])


class StepTable:
    """steps: all recorded ones, and those that were only seen in the run's progress so far (`seen`, at the end)."""

    def __init__(self) -> None:
        self.steps = GrowingColumns({**STEP, "undone": "?"})
        self.looks = GrowingColumns(LOOK)
        self.recorded = 0  # number of rows that are on disk
        self._doubted = np.empty(0, np.intp)  # of these, those that only what was seen has marked as undone

    @property
    def end(self) -> float:
        """The time of the last step, 0 if there is none."""
        return float(self.steps["time"][-1]) if len(self.steps) else 0.0

    def record(self, columns: Columns) -> None:
        """Add recorded steps, in order. What was only seen is forgotten; `see` it again where it is newer."""
        self.steps.cut(self.recorded)
        if len(self._doubted):
            self.steps["undone"][self._doubted] = False
            self._doubted = self._doubted[:0]
        self._add(columns)
        some = np.zeros(len(columns["step"]), bool)
        for name in SOMETIMES:
            some |= ~np.isnan(columns[name])
        if len(rows := np.flatnonzero(some)):
            looks = {name: columns[name][rows] for name in SOMETIMES}
            self.looks.append({"row": self.recorded + rows, **looks})
        self.recorded = len(self.steps)

    def see(self, columns: Columns) -> None:
        """Add steps that are not recorded yet."""
        before = self.steps["undone"][: self.recorded].copy()
        self._add(columns)
        newly = np.flatnonzero(self.steps["undone"][: self.recorded] & ~before)
        self._doubted = np.concatenate([self._doubted, newly])

    def _add(self, columns: Columns) -> None:
        first = len(self.steps)
        self.steps.append(columns)
        mark_undone(self.steps["step"], self.steps["undone"], first)
