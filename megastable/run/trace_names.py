"""Names the traces of a run (training/step_profiler.py) and the ranges in them."""

from __future__ import annotations

import re

METADATA = "megastable"  # key of the trace's own facts: rank, steps, device
_TRACE = re.compile(r"step-(\d+)-rank-(\d+)\.json\.gz")
_STEP, _PHASE = "megastable: step ", "megastable: "


def trace_name(step: int, rank: int) -> str:
    """The file of a trace that begins at `step`, in the run directory's profiles/."""
    return f"step-{step:08d}-rank-{rank}.json.gz"


def of_trace(name: str) -> tuple[int, int] | None:
    """First step and rank of a trace, from its file name; None of another file."""
    found = _TRACE.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))


def step_range(step: int) -> str:
    return f"{_STEP}{step}"


def phase_range(phase: str) -> str:
    return f"{_PHASE}{phase}"


def step_of(name: str) -> int | None:
    """The step of a range, if it is that of a step."""
    number = name.removeprefix(_STEP)
    return int(number) if number != name and number.isdecimal() else None


def phase_of(name: str) -> str | None:
    """The phase of a range, if it is that of a phase."""
    return name.removeprefix(_PHASE) if name.startswith(_PHASE) and not name.startswith(_STEP) else None
