"""Reads the recorded steps around an incident, in the order in which they happened.

A run that rewinds repeats steps, and records them again: each repetition is a `pass`, the first of which shows what
went wrong, the last how it continued. Only files that may hold the wanted steps are read; unreadable ones are named and
left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megastable.report.postmortem.facts import StepRow

LAST = 1 << 62
NAMES = re.compile(r"(\d+)-(\d+)-(\d+)\.parquet")  # of a file: its first and last step, and the time


class RecordFolder:
    """The record files of a folder, listed once. slack: steps outside a file's name (its first and last row) that it
    may hold after a rewind: no more than one file holds."""

    def __init__(self, path: Path, kind: pa.Schema, slack: int) -> None:
        self.kind, self.name = kind, path.name
        self._files: list[tuple[int, int, Path]] = []
        for file in sorted(path.glob("*.parquet")):
            name = NAMES.fullmatch(file.name)
            first, last = (int(name[1]), int(name[2])) if name else (0, LAST)
            self._files.append((first - slack, last + slack, file))

    def files(self, first: int, last: int) -> list[Path]:
        """Files that may hold steps of [first, last], lowest first."""
        return [path for low, high, path in self._files if low <= last and high >= first]

    def rows(self, first: int, last: int, columns: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
        """Records of the steps [first, last] as {column: value}, in the order of time; and the damaged files."""
        wanted = pa.schema([self.kind.field(name) for name in columns])
        found, problems = list[dict[str, Any]](), list[str]()
        for path in self.files(first, last):
            try:
                table = pq.read_table(path, columns=list(columns), schema=self.kind).cast(wanted)
            except (pa.ArrowException, OSError):
                problems.append(f"{self.name}/{path.name} is damaged: its steps are missing here")
                continue
            found += [row for row in table.to_pylist() if first <= row["step"] <= last]
        return sorted(found, key=lambda row: row["time"]), problems


def passes(steps: Sequence[StepRow]) -> list[list[StepRow]]:
    """`steps`, in the order of their times, split at each rewind: no part is empty."""
    parts: list[list[StepRow]] = []
    for row in steps:
        if not parts or row.step <= parts[-1][-1].step:
            parts.append([])
        parts[-1].append(row)
    return parts
