"""Sums up how long each phase of a run's steps took, from its step records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from megastable.base.errors import DataError
from megastable.base.text import plural
from megastable.run.record_files import read_files
from megastable.run.records import SCHEMA
from megastable.run.step_phases import COLUMNS, OTHER

READ = pa.schema([SCHEMA.field(name) for name in ("step", "time", "seconds", *COLUMNS.values())])


@dataclass(frozen=True)
class PhaseShare:
    """A phase in all steps: its share of their time, and the seconds of one step: mean, median, 99th percentile."""

    phase: str
    share: float
    mean: float
    p50: float
    p99: float


@dataclass(frozen=True)
class PhaseSummary:
    """phases: in the order of a step; steps: how many have phases, the first and last of them; without: how many have
    none; problems: files that could not be read. Steps that were done again count each time."""

    phases: list[PhaseShare]
    whole: PhaseShare
    steps: int
    first: int
    last: int
    without: int
    problems: list[str]


def read_phases(folder: Path, last: int | None = None) -> PhaseSummary:
    """The phases of the steps recorded in `folder`, or of the `last` ones. Raises DataError if none has any."""
    found = read_files(folder, READ)
    problems = [
        f"{folder / read.file.name}: not a readable record file ({read.problem})"
        for read in found
        if read.problem
    ]
    tables = [read.table for read in found if read.table is not None]
    if not tables:
        damaged = f" ({plural(len(problems), 'file')} cannot be read: {problems[0]})" if problems else ""
        raise DataError(f"{folder}: no step records{damaged}: has this run done a step?")
    table = pa.concat_tables(tables).sort_by("time")
    if last is not None:
        table = table.slice(max(0, len(table) - last))
    known = table.filter(table.column(COLUMNS[OTHER]).is_valid())
    if not len(known):
        raise DataError(f"{folder}: {plural(len(table), 'step')}, none with phases")
    seconds = _numbers(known, "seconds")
    columns = {phase: _numbers(known, column) for phase, column in COLUMNS.items()}
    total = float(seconds.sum()) or 1.0
    numbers = known.column("step").to_numpy()
    return PhaseSummary(
        [_share(phase, values, total) for phase, values in columns.items()], _share("step", seconds, total), len(known),
        int(numbers.min()), int(numbers.max()), len(table) - len(known), problems,
    )  # fmt: skip


def _numbers(table: pa.Table, column: str) -> np.ndarray:
    return np.nan_to_num(table.column(column).to_numpy().astype(float), posinf=0.0)


def _share(phase: str, seconds: np.ndarray, total: float) -> PhaseShare:
    p50, p99 = np.percentile(seconds, [50, 99])
    return PhaseShare(phase, float(seconds.sum()) / total, float(seconds.mean()), float(p50), float(p99))
