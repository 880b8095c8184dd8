"""Names the phases of a step: as columns of its record, and in the traces of a run (training/step_profiler.py).

Of data it is the wait of the host, of the others the time on the device that computes: on a GPU by events in its stream
(engine/measured.py), on a CPU by the host's clock. `other` is the rest of the step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megastable.base.activity import DATA, PHASES

OTHER = "other"
COLUMNS = {phase: f"{phase}_seconds" for phase in (*PHASES, OTHER)}


def phase_columns(spent: Mapping[str, float], seconds: float, waited: float) -> dict[str, Any]:
    """The columns of a step, without that of data. spent: by activity; seconds: of the step; waited: for data."""
    known = {phase: max(0.0, spent.get(phase, 0.0)) for phase in PHASES if phase != DATA}
    other_seconds = max(0.0, seconds - waited - sum(known.values()))
    return {COLUMNS[phase]: phase_seconds for phase, phase_seconds in {**known, OTHER: other_seconds}.items()}


METADATA = "megastable"  # key of the trace's own facts: rank, steps, device
_TRACE = re.compile(r"step-(\d+)-rank-(\d+)\.json\.gz")
_STEP, _PHASE = "megastable: step ", "megastable: "


def trace_name(step: int, rank: int) -> str:
    """The file of a trace that begins at `step`, in the run directory's profiles/."""
    return f"step-{step:08d}-rank-{rank}.json.gz"


def of_trace(name: str) -> tuple[int, int] | None:
    """First step and rank of a trace, from its file name; None of another file."""
    name_match = _TRACE.fullmatch(name)
    return None if name_match is None else (int(name_match[1]), int(name_match[2]))


def step_range(step: int) -> str:
    return f"{_STEP}{step}"


def phase_range(phase: str) -> str:
    return f"{_PHASE}{phase}"


def step_of(name: str) -> int | None:
    """The step of a range, if it is that of a step."""
    step_digits = name.removeprefix(_STEP)
    return int(step_digits) if step_digits != name and step_digits.isdecimal() else None


def phase_of(name: str) -> str | None:
    """The phase of a range, if it is that of a phase."""
    return name.removeprefix(_PHASE) if name.startswith(_PHASE) and not name.startswith(_STEP) else None
