"""A rank of a drilled run: megastable.train with a fault.

MEGASTABLE_DRILL=plan.json deepspeed --num_gpus 2 --module drills.worker RECIPE [OVERRIDE ...]
"""

from __future__ import annotations

import os
from pathlib import Path

from drills import faults
from drills.scenario import SEARCH, VARIABLE, Plan
from megastable import train


def main() -> None:
    """The entry point of every rank."""
    run_plan = Plan.model_validate_json(Path(os.environ[VARIABLE]).read_bytes())
    faults.install_fault(run_plan)
    faults.count_searches(run_plan.run.with_name(run_plan.run.name + SEARCH))
    train.main()


if __name__ == "__main__":
    main()
