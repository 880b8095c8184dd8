"""A rank of a drilled run: megastable.train with a fault, and with the policy under comparison.

MEGASTABLE_DRILL=plan.json deepspeed --num_gpus 2 --module drills.worker RECIPE [OVERRIDE ...]
"""

from __future__ import annotations

import os
from pathlib import Path

from drills import faults
from drills.plan import SEARCH, VARIABLE, Plan, Policy
from drills.skipstep import SkipStep
from megastable import train
from megastable.engine.measured import Measured
from megastable.guard.signals import Verdict
from megastable.recovery.recovery import Recovery


def main() -> None:
    """The entry point of every rank."""
    plan = Plan.model_validate_json(Path(os.environ[VARIABLE]).read_bytes())
    if plan.policy is not Policy.OURS:
        replace_gate(SkipStep() if plan.policy is Policy.SKIPPING else None)
    faults.install(plan)
    faults.count_searches(plan.run.with_name(plan.run.name + SEARCH))
    train.main()


def replace_gate(rule: SkipStep | None) -> None:
    """Judge every update by `rule` alone; without a rule, apply all that DeepSpeed accepts."""

    def judge(self: Recovery, measured: Measured, step: int, lr: float) -> bool:
        return rule is None or rule.applies(measured.loss, measured.grad_norm)

    def refusal(self: Recovery, measured: Measured) -> tuple[str, str]:
        numbers = f"loss {measured.loss:.4g}, gradient norm {measured.grad_norm:.4g}"
        return (Verdict.OUTLIER if measured.finite else Verdict.NON_FINITE), numbers

    Recovery.judge = judge  # type: ignore[method-assign]
    Recovery.refusal = refusal  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
