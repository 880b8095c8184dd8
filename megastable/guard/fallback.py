"""Fall-back from FP8 and return to it, and from kernels: how long each fall-back lasts, and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megastable.config.stability import PolicyConfig
from megastable.guard.policy_state import PolicyState

WRONG_KERNELS = (
    "steps went wrong that are harmless by plain PyTorch, which computes in its place for the rest of the run"
)


def rest(state: PolicyState, config: PolicyConfig) -> int | None:
    """Minimum duration of the last fall-back, in steps of new ground; None = for good."""
    count = len(state.fallbacks)
    if count >= config.fallbacks or not config.fp8_rest:
        return None
    return config.fp8_rest * 2 ** max(0, count - 1)


def is_over(state: PolicyState, config: PolicyConfig) -> bool:
    """Whether FP8 may be tried again; asked at a step on the trend."""
    s, steps = state, rest(state, config)
    calm = s.resting and not s.watching and not s.refused
    return calm and steps is not None and s.clock - s.fallbacks[-1] >= steps


def reason(state: PolicyState, config: PolicyConfig) -> str:
    """Why the coming step computes in FP8, or not: a sentence, after FP8 was left once."""
    s = state
    if s.resting:
        return f"fall-back {len(s.fallbacks)} of {config.fallbacks}: without FP8 {lasting(s, config)}"
    steps = s.returns[-1] - s.fallbacks[-1] if s.returns else 0
    return f"{steps} steps of new ground without FP8, nothing is being watched, no update was refused lately"


def lasting(state: PolicyState, config: PolicyConfig) -> str:
    """How long FP8 stays off, in words."""
    steps = rest(state, config)
    if steps is not None:
        return f"for {steps} steps of new ground at least"
    return f"for good (stability.policy.fallbacks={config.fallbacks}, fp8_rest={config.fp8_rest})"


def leave_kernels(state: PolicyState, names: Sequence[str]) -> str:
    """Leave kernels for the rest of the run, in words. Numbers that were wrong once cannot be trusted later, so they
    are not tried again by this version of them."""
    state.kernels += [name for name in names if name not in state.kernels]
    return f"without {' and '.join(names)} for the rest of the run"
