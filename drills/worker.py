"""A rank of a drilled run: megastable.train with a fault, and with the policy under comparison.

MEGASTABLE_DRILL=plan.json deepspeed --num_gpus 2 --module drills.worker RECIPE [OVERRIDE ...]
"""

from __future__ import annotations

import math
import os
from collections import deque
from pathlib import Path
from statistics import fmean, stdev

from drills import faults
from drills.scenario import SEARCH, VARIABLE, Plan, Policy
from megastable import train
from megastable.engine.measured import Measured
from megastable.recovery.recovery import Recovery
from megastable_guard.actions import Verdict

WINDOW = 128
SIGMA = 6.0


def main() -> None:
    """The entry point of every rank."""
    run_plan = Plan.model_validate_json(Path(os.environ[VARIABLE]).read_bytes())
    if run_plan.policy is not Policy.OURS:
        replace_gate(SkipStep() if run_plan.policy is Policy.SKIPPING else None)
    faults.install_fault(run_plan)
    faults.count_searches(run_plan.run.with_name(run_plan.run.name + SEARCH))
    train.main()


def replace_gate(rule: SkipStep | None) -> None:
    """Judge every update by `rule` alone; without a rule, apply all that DeepSpeed accepts."""

    def judge(self: Recovery, measured: Measured, step: int, lr: float) -> bool:
        return rule is None or rule.applies_update(measured.loss, measured.grad_norm)

    def refusal(self: Recovery, measured: Measured) -> tuple[str, str]:
        numbers = f"loss {measured.loss:.4g}, gradient norm {measured.grad_norm:.4g}"
        return (Verdict.OUTLIER if measured.finite else Verdict.NON_FINITE), numbers

    Recovery.judge_update = judge  # type: ignore[method-assign]
    Recovery.explain_refusal = refusal  # type: ignore[method-assign]


class SkipStep:
    """The rule of OLMo-core's SkipStepOptimizer for one run; called once for every step, in order.

    An update is skipped if loss or gradient norm is more than `SIGMA` standard deviations above the mean of the
    `WINDOW` steps before it, skipped ones included; none is before half of them are known. Non-finite steps are skipped
    and not recorded: they would make mean and deviation non-finite, and every later step skipped.
    Source: allenai/OLMo-core, src/olmo_core/optim/skip_step_optimizer.py (rolling_interval_length 128, sigma_factor 6).
    """

    def __init__(self) -> None:
        self._seen: tuple[deque[float], deque[float]] = (deque(maxlen=WINDOW), deque(maxlen=WINDOW))

    def applies_update(self, loss: float, grad_norm: float) -> bool:
        """Whether the update of a step with this loss (nats) and gradient norm before clipping is applied."""
        values = (loss, grad_norm)
        if not all(map(math.isfinite, values)):
            return False
        usual = all(_usual(value, values_seen) for value, values_seen in zip(values, self._seen, strict=True))
        for value, values_seen in zip(values, self._seen, strict=True):
            values_seen.append(value)
        return usual


def _usual(value: float, seen: deque[float]) -> bool:
    # OLMo-core includes the present value.
    return len(seen) + 1 < WINDOW // 2 or value - fmean(seen) <= SIGMA * stdev(seen)


if __name__ == "__main__":
    main()
