"""The recorded steps around an incident, in the order in which they happened.

A run that goes back does steps again, and records them again: each time through is a `pass`, the first of which shows
what went wrong, the last how it went on. Only files that may hold the wanted steps are read; one that cannot be read
is named, and done without.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megastable import records
from megastable.report.postmortem.facts import Row

_NAME = re.compile(r"(\d+)-(\d+)-\d+\.parquet")
# A file is named after its first and its last row; where the run went back in between, it holds more than those say.
SLACK = 1000


def rows(
    folder: Path, first: int, last: int, columns: Sequence[str], kind: pa.Schema = records.SCHEMA
) -> tuple[list[dict[str, Any]], list[str]]:
    """Records of the steps [first, last] as {column: value}, in the order of time; and which files are damaged."""
    wanted = pa.schema([kind.field(name) for name in columns])
    found, problems = list[dict[str, Any]](), list[str]()
    for path in files(folder, first, last):
        try:
            table = pq.read_table(path, columns=list(columns), schema=kind).cast(wanted)
        except (pa.ArrowException, OSError):
            problems.append(f"{folder.name}/{path.name} is damaged: its steps are missing here")
            continue
        found += [row for row in table.to_pylist() if first <= row["step"] <= last]
    return sorted(found, key=lambda row: row["time"]), problems


def files(folder: Path, first: int, last: int, slack: int = SLACK) -> list[Path]:
    """The record files that may hold steps of [first, last], oldest first. slack: how far a run goes back, at most."""
    chosen = []
    for path in sorted(folder.glob("*.parquet")):
        name = _NAME.fullmatch(path.name)
        if name is None or (int(name[1]) <= last + slack and int(name[2]) >= first - slack):
            chosen.append(path)
    return chosen


def passes(steps: Sequence[Row]) -> list[list[Row]]:
    """`steps`, in the order of their times, cut where the run went back: never empty parts."""
    parts: list[list[Row]] = []
    for row in steps:
        if not parts or row.step <= parts[-1][-1].step:
            parts.append([])
        parts[-1].append(row)
    return parts


def around(
    folder: Path, onset: float, first: int, last: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """The looks into every layer last before and first after the time `onset`, of the steps [first, last]."""
    names = [field.name for field in records.LAYER_SCHEMA]
    found, problems = rows(folder, first, last, names, records.LAYER_SCHEMA)
    before = [row for row in found if row["time"] < onset]
    after = [row for row in found if row["time"] >= onset]
    return (
        [row for row in before if row["time"] == before[-1]["time"]],
        [row for row in after if row["time"] == after[0]["time"]],
        problems,
    )
