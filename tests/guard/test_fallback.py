"""Leaving FP8 and returning to it: how long, after what, and never beyond the budget."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megastable_guard.actions import Action, Cause
from megastable_guard.guard_config import PolicyConfig
from megastable_guard.policy import Policy
from megastable_guard.policy_state import PolicyState
from megastable_guard.signals import Finding, Verdict
from tests.guard.policies import CONFIG, VERDICTS, seen, trip, trip_and_try
from tests.tiers import examples


def with_fp8(**config: int) -> Policy:
    return Policy(PolicyConfig(**config), has_fp8=True)


def calm(policy: Policy, first: int, end: int) -> list[int]:
    """Healthy steps [first, end); those after which the coming step computes in FP8."""
    return [step for step in range(first, end) if policy.decide(seen(step), 0).applies and policy.fp8]


def test_numerics_fall_back_and_fp8_returns_after_a_rest_of_new_ground() -> None:
    policy = with_fp8(fp8_rest=50)
    assert policy.fp8 and trip(policy, 100, Cause.NUMERICS) is Action.FALL_BACK and Action.FALL_BACK.rewinds
    assert not policy.fp8 and policy.rate(99, 1.0) == 1
    # Rewound to step 90: what is done again is no rest.
    assert calm(policy, 91, 200)[0] == 150
    assert (policy.state.fallbacks, policy.state.returns, policy.state.rested) == ([100], [150], 50)


def test_fp8_is_left_where_that_branch_won() -> None:
    policy, plain = with_fp8(), Policy(CONFIG)
    assert trip_and_try(policy, 100, "leave_fp8").action is Action.FALL_BACK
    assert not policy.fp8 and not policy.state.limits
    left = [offer.name for offer in policy.offer_remedies(99, None, None)]
    assert "leave_fp8" not in left and left == [offer.name for offer in plain.offer_remedies(99, None, None)]


@pytest.mark.parametrize("cause", [Cause.DATA, Cause.STATE, Cause.HARDWARE])
def test_other_causes_leave_fp8_alone(cause: Cause) -> None:
    policy = with_fp8()
    assert trip(policy, 100, cause) is Action.REWIND and policy.fp8 and not policy.state.fallbacks


def test_every_fall_back_rests_twice_as_long_and_the_last_one_for_good() -> None:
    policy, step, rests = with_fp8(fallbacks=3, fp8_rest=40, budget_window=1000), 100, []
    for _ in range(3):
        assert trip(policy, step, Cause.NUMERICS) is Action.FALL_BACK
        again = calm(policy, step - 5, step + 2000)
        rests.append(again[0] - step if again else None)
        step += 2000
    assert (
        rests == [40, 80, None] and "for good" in policy.precision and "fall-back 3 of 3" in policy.precision
    )
    # Where a person gives it more, it is tried again.
    more = Policy(PolicyConfig(fallbacks=4, fp8_rest=40), policy.state, has_fp8=True)
    assert calm(more, step, step + 10)


@pytest.mark.parametrize(
    ("config", "words"),
    [({"fp8_rest": 0}, "for good"), ({"fallbacks": 1}, "for good"), ({}, "for 200 steps")],
)
def test_how_long_it_is_left_is_said(config: dict[str, int], words: str) -> None:
    policy = with_fp8(**config)
    policy.decide(seen(100, Verdict.SPIKE), 0)
    assert words in policy.remedy(Cause.NUMERICS, 99).reason
    assert bool(calm(policy, 95, 2000)) == (words != "for good")


def test_it_does_not_return_while_something_is_watched_or_was_refused_lately() -> None:
    policy = with_fp8(fp8_rest=10)
    trip(policy, 100, Cause.NUMERICS)
    assert not calm(policy, 95, 100 + CONFIG.verify_steps // 2) and policy.state.watching
    late = 100 + CONFIG.verify_steps // 2
    assert policy.decide(seen(late, Verdict.OUTLIER), 0).action is Action.DISCARD
    assert policy.decide(seen(late + 1), 0).healed and not policy.fp8
    (first, *_) = calm(policy, late + 2, late + 40)
    assert first == late + 16


def test_without_any_fall_backs_fp8_is_never_left() -> None:
    policy = with_fp8(fallbacks=0)
    assert not policy.may_fall_back and trip(policy, 400, Cause.NUMERICS) is Action.ALERT and policy.fp8


def test_a_second_handover_leaves_fp8() -> None:
    policy = with_fp8(handovers=3)
    for step, words in ((100, ""), (130, "without FP8")):
        assert policy.decide(seen(step, Verdict.SPIKE), None).action is Action.HANDOVER and policy.fp8
        told = policy.handing_over(Cause.UNKNOWN)
        assert words in told and policy.fp8 is not bool(words)
        policy.resumed(step - 20, step - 20)
    restarted = Policy(policy.config, PolicyState.model_validate_json(policy.state.model_dump_json()), True)
    restarted.resumed(110, 108)
    assert not restarted.fp8 and not restarted.state.limits


@pytest.mark.parametrize("cause", [Cause.HARDWARE, Cause.NUMERICS])
def test_fp8_is_left_with_a_handover_unless_it_was_the_hardware(cause: Cause) -> None:
    policy = with_fp8()
    for step in (100, 130):
        decision = policy.hand_over(
            policy.decide(seen(step, Verdict.SPIKE), 0).finding, "no snapshot is good"
        )
        assert decision.action is Action.HANDOVER and policy.fp8 is (step == 100 or cause is Cause.HARDWARE)
        policy.handing_over(cause)
    assert policy.fp8 is (cause is Cause.HARDWARE)


def test_a_handover_that_cannot_be_leaves_fp8_as_it_was() -> None:
    policy = with_fp8()
    decision = policy.hand_over(policy.decide(seen(100, Verdict.SPIKE), 0).finding, "no snapshot is good")
    assert policy.cannot_hand_over(decision, "no checkpoint").action is Action.ALERT and policy.fp8


def test_kernels_are_left_once_and_for_good_and_fp8_is_not_left_for_them() -> None:
    policy = with_fp8()
    for step in (100, 400):
        policy.decide(seen(step, Verdict.SPIKE), 0)
        remedy = policy.remedy(Cause.NUMERICS, step - 1, kernels=("attention", "loss"))
        assert (
            remedy.action is Action.FALL_BACK and "without attention and loss for the rest" in remedy.reason
        )
    calm(policy, 395, 2000)
    assert policy.state.kernels == ["attention", "loss"] and policy.fp8 and not policy.state.fallbacks
    assert policy.may_leave_kernels and not with_fp8(fallbacks=0).may_leave_kernels


@pytest.mark.parametrize("cause", [Cause.NUMERICS, Cause.STORAGE])
def test_kernels_are_left_with_a_handover_whatever_the_checkpoint_is_worth(cause: Cause) -> None:
    policy = with_fp8()
    policy.hand_over(policy.decide(seen(100, Verdict.SPIKE), 0).finding, "no snapshot is good")
    assert "without attention" in policy.handing_over(cause, ("attention",))
    assert policy.state.kernels == ["attention"] and policy.fp8


class Fallbacks(RuleBasedStateMachine):
    """A run in FP8 as the training loop drives it: every sequence of steps, incidents, rewinds and restarts."""

    config = PolicyConfig(
        fallbacks=3, fp8_rest=25, rewinds=50, handovers=2, budget_window=400, verify_steps=10
    )

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.other, self.step = (
            Policy(self.config, None, True),
            Policy(self.config, None, True),
            0,
        )
        self.left: list[int] = []  # clocks at which it was left, as seen from outside
        self.over = False

    def both(self, act: Any) -> Any:
        """The same done to two policies, one of which is saved and loaded again and again."""
        before, one = self.policy.fp8, act(self.policy)
        assert one == act(self.other) and self.policy.state == self.other.state
        clock, now = self.policy.state.clock, self.policy.fp8
        if before and not now:
            self.left.append(clock)
        elif now and not before:
            rest = self.config.fp8_rest * 2 ** (len(self.left) - 1)
            assert clock - self.left[-1] >= rest and len(self.left) < self.config.fallbacks
            assert not self.policy.state.watching and not self.policy.state.refused
        return one

    @precondition(lambda self: not self.over)
    @rule(count=st.integers(1, 40), on_trend=st.booleans())
    def healthy(self, count: int, on_trend: bool) -> None:
        for _ in range(count):
            self.step += 1
            finding = seen(self.step, on_trend=on_trend)
            if self.act(finding) is not Action.APPLY:
                return

    @precondition(lambda self: not self.over)
    @rule(verdict=VERDICTS.filter(lambda v: v is not Verdict.HEALTHY), cause=st.sampled_from(list(Cause)))
    def trouble(self, verdict: Verdict, cause: Cause) -> None:
        self.step += 1
        self.act(seen(self.step, verdict), cause)

    def act(self, finding: Finding, cause: Cause = Cause.UNKNOWN) -> Action:
        def decide(policy: Policy) -> Action:
            action = policy.decide(finding, 0).action
            if action is not Action.REWIND:
                return action
            return policy.remedy(cause, finding.step, "a", "", True).action

        before = self.policy.fp8
        action: Action = self.both(decide)
        assert (action is Action.FALL_BACK) <= (before and not self.policy.fp8)
        self.over = action.ends and action is not Action.HANDOVER
        if action.rewinds or action is Action.HANDOVER:
            self.step = max(0, self.step - 7)
        return action

    @rule()
    def restart(self) -> None:
        state = PolicyState.model_validate_json(self.other.state.model_dump_json())
        self.other = Policy(self.config, state, True)
        for policy in (self.policy, self.other):
            policy.resumed(self.step, self.step)

    @invariant()
    def budget(self) -> None:
        s = self.policy.state
        assert len(s.fallbacks) == len(self.left) <= self.config.fallbacks
        assert len(s.returns) in (len(s.fallbacks), len(s.fallbacks) - 1) or not s.fallbacks
        assert self.policy.fp8 is not s.resting and 0 <= s.rested <= s.clock
        assert (
            sorted([*s.fallbacks, *s.returns])
            == [x for pair in zip_longest(s.fallbacks, s.returns) for x in pair][
                : len(s.fallbacks) + len(s.returns)
            ]
        )


Fallbacks.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestFallbacks = Fallbacks.TestCase
