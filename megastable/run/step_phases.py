"""Names the phases of a step as columns of its record.

Of data it is the wait of the host, of the others the time on the device that computes: on a GPU by events in its stream
(engine/device_clock.py), on a CPU by the host's clock. `other` is the rest of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megastable.base.activity import DATA, PHASES

OTHER = "other"
COLUMNS = {phase: f"{phase}_seconds" for phase in (*PHASES, OTHER)}


def phase_columns(spent: Mapping[str, float], seconds: float, waited: float) -> dict[str, Any]:
    """The columns of a step, without that of data. spent: by activity; seconds: of the step; waited: for data."""
    known = {phase: max(0.0, spent.get(phase, 0.0)) for phase in PHASES if phase != DATA}
    rest = max(0.0, seconds - waited - sum(known.values()))
    return {COLUMNS[phase]: value for phase, value in {**known, OTHER: rest}.items()}
