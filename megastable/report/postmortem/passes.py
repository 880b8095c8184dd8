"""Reads the recorded steps around an incident, in the order in which they happened.

A run that rewinds repeats steps, and records them again: each repetition is a `pass`, the first of which shows what
went wrong, the last how it continued. Only files that may hold the wanted steps are read; unreadable ones are named and
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megastable.report.postmortem.facts import StepRow
from megastable.run.record_files import RecordFile, list_files, read_files


class RecordFolder:
    """The record files of a folder, which a run may be writing."""

    def __init__(self, path: Path, kind: pa.Schema) -> None:
        self.path, self.kind = path, kind

    def files(self, first: int, last: int) -> list[RecordFile]:
        """Files that may hold steps of [first, last], in the order of writing."""
        try:
            return _choose_between(list_files(self.path), first, last)
        except OSError:
            return []

    def rows(self, first: int, last: int, columns: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
        """Records of the steps [first, last] as {column: value}, in the order of time; and the damaged files."""
        wanted = pa.schema([self.kind.field(name) for name in columns])
        found, problems = list[dict[str, Any]](), list[str]()
        try:
            read = read_files(self.path, wanted, lambda files: _choose_between(files, first, last))
        except OSError as error:
            return [], [f"{self.path.name} cannot be read: {error.strerror}"]
        for file, table, *_ in read:
            if table is None:
                problems.append(f"{self.path.name}/{file.name} is damaged: its steps are missing here")
                continue
            step = table.column("step").to_numpy()
            found += table.take(np.flatnonzero((first <= step) & (step <= last))).to_pylist()
        return sorted(found, key=lambda row: row["time"]), problems


def _choose_between(files: list[RecordFile], first: int, last: int) -> list[RecordFile]:
    return [file for file in files if file.low <= last and file.high >= first]


def passes(steps: Sequence[StepRow]) -> list[list[StepRow]]:
    """`steps`, in the order of their times, split at each rewind: no part is empty."""
    parts: list[list[StepRow]] = []
    for row in steps:
        if not parts or row.step <= parts[-1][-1].step:
            parts.append([])
        parts[-1].append(row)
    return parts
