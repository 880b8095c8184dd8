"""Findings for a policy, and incidents as a run would meet them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from megastable_guard.actions import Action, Cause, Remedy
from megastable_guard.guard_config import PolicyConfig
from megastable_guard.policy import Policy
from megastable_guard.signals import Finding, Verdict

CONFIG = PolicyConfig()
VERDICTS = st.sampled_from(list(Verdict))


def seen(step: int, verdict: Verdict = Verdict.HEALTHY, severity: float = 2.0, **more: object) -> Finding:
    healthy = verdict is Verdict.HEALTHY
    fields = {"onset": step, "reason": f"{verdict} at {step}", "on_trend": healthy} | more
    return Finding(step=step, verdict=verdict, severity=0.0 if healthy else severity, **fields)  # type: ignore[arg-type]


def run(policy: Policy, findings: list[Finding], oldest: int | None = 0) -> list[Action]:
    return [policy.decide(finding, oldest).action for finding in findings]


def trip(
    policy: Policy,
    step: int,
    cause: Cause,
    corpus: str = "a",
    may_swap: bool = False,
    proven: bool = True,
    bad: Sequence[int] = (),
) -> Action:
    """A spike, and the remedy for its cause as it was found out; by default by a clear trial. may_swap: a
    branch without the corpus would win."""
    decision = policy.decide(seen(step, Verdict.SPIKE), 0)
    if decision.action is not Action.REWIND:
        return decision.action
    swap = "without it the others are easier" if may_swap and policy.may_swap(corpus) else ""
    return policy.remedy(cause, step, corpus, swap, proven, bad).action


def trip_and_try(
    policy: Policy, step: int, name: str, good_rate: float | None = None, rate: float | None = None
) -> Remedy:
    """A spike, and a remedy whose branch won."""
    assert policy.decide(seen(step, Verdict.SPIKE), 0).action is Action.REWIND
    offers = {offer.name: offer for offer in policy.offer_remedies(step, good_rate, rate)}
    return policy.adopt(offers[name], "it won")
