"""Cuts and caps of the learning rate: what they do to it, when they are lifted, and that they come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable_guard.actions import Action, Cause, Verdict
from megastable_guard.guard_config import PolicyConfig
from megastable_guard.policy import Policy
from megastable_guard.policy_state import Limit, PolicyState, follow_schedule, limit_rate, warmup_share
from tests.guard.traces import CONFIG, seen, trip, trip_and_try

REWARM, REST = CONFIG.rewarm_steps, CONFIG.cut_rest


def cut(**config: int) -> Policy:
    policy = Policy(PolicyConfig(**config))
    assert trip_and_try(policy, 102, "cut_lr").action is Action.CUT_LR
    return policy


def capped() -> Policy:
    policy = Policy(CONFIG)
    assert trip_and_try(policy, 100, "cap_lr", 1e-3, 1e-2).action is Action.CAP_LR
    return policy


def train(policy: Policy, first: int, end: int, scheduled: float = 1.0) -> list[int]:
    """Healthy steps [first, end), an update each; those at which a limit was lifted."""
    lifted = []
    for step in range(first, end):
        policy.follow_schedule(scheduled)
        decision = policy.decide_on_step(seen(step), 0)
        if policy.lift_limits(decision.finding, step, scheduled):
            lifted.append(step)
    return lifted


def under_a_cap(policy: Policy, rates: list[float]) -> list[float]:
    """What becomes of the scheduled rates of consecutive updates."""
    found = []
    for rate in rates:
        policy.follow_schedule(rate)
        found.append(policy.limit_rate(len(found), rate))
    return found


def test_cut_warms_up_rests_on_new_ground_and_ramps_back() -> None:
    policy = cut()
    at = policy.state.limits[0].updates
    assert [policy.limit_rate(at + n, 1.0) for n in (0, REWARM // 2, REWARM)] == pytest.approx(
        [0.05, 0.275, 0.5]
    )
    for _ in range(3):
        assert train(policy, 50, 102 + REST) == []  # what is done again is no rest
    assert train(policy, 50, 102 + 3 * REST) == [102 + REST]
    ramp = [policy.limit_rate(102 + REST + i, 1.0) for i in range(REWARM + 1)]
    assert ramp[0] == 0.5 and ramp[-1] == 1.0 and ramp == sorted(ramp) and len(set(ramp)) == REWARM + 1
    older = cut()
    older.resume_from(60, 60)  # it counts from where the run goes on
    assert older.limit_rate(60 + REWARM, 1.0) == 0.5


def test_cut_is_not_lifted_while_something_is_watched_or_off_the_trend() -> None:
    policy = cut()
    train(policy, 95, 102 + REST - 1)
    off = seen(102 + REST, on_trend=False)
    policy.decide_on_step(off, 0)
    assert policy.lift_limits(off, 0, 1.0) == []
    trip(policy, 102 + REST + 1, Cause.DATA)
    assert train(policy, 300, 310) == []


def test_cut_that_was_right_comes_back_rests_twice_as_long_and_at_last_stays() -> None:
    policy = cut(cuts=3, cut_rest=40)
    step, rests, begun = 95, [], 102
    for _ in range(2):
        (at,) = train(policy, step, begun + 200)[:1]
        rests.append(at - begun)
        begun = policy.state.clock + 1
        assert trip_and_try(policy, begun, "cap_lr").action is Action.CUT_LR
        assert policy.limit_rate(10**6, 1.0) == 0.5
        step = begun - 5
    assert rests == [40, 80] and len(policy.state.limits) == 1 and policy.state.limits[0].times == 3
    assert train(policy, step, begun + 2000) == []  # for good


def test_cut_whose_lifting_held_is_forgotten() -> None:
    """The cut was wrong, or no longer needed: its budget comes back with new ground."""
    assert train(cut(cuts=1, cut_rest=40, budget_window=300), 95, 500) == []  # the only one stays for good
    policy = cut(cuts=2, cut_rest=40, budget_window=300)
    train(policy, 95, 500)
    assert policy.state.limits == [] and policy.limit_rate(10**6, 1.0) == 1.0


def test_cap_ends_when_the_schedule_comes_back_below_it_but_not_before_the_trouble_is_passed() -> None:
    policy = capped()
    assert train(policy, 91, 101, scheduled=9e-4) == []  # done again, at the rate of then
    assert train(policy, 101, 150, scheduled=1e-2) == []
    assert policy.limit_rate(150, 1e-2) == 1e-3
    assert train(policy, 150, 200, scheduled=8e-4) == [149 + CONFIG.verify_steps] and not policy.state.limits
    policy = capped()
    train(policy, 91, 150, scheduled=1e-2)
    assert train(policy, 150, 160, scheduled=8e-4) == []
    assert under_a_cap(policy, [1e-2]) == [1e-3]  # a rewind to before the schedule came back


def test_cap_goes_down_with_the_schedule_but_for_its_jumps() -> None:
    """As it would have without the mistake: ten times too high from 100 on, and right again from 140 on."""
    clean = [1e-3 * 0.99**i for i in range(90)]
    wrong = [r * (10 if 10 <= i < 50 else 1) for i, r in enumerate(clean)]
    assert under_a_cap(capped(), wrong) == pytest.approx(
        [r / (0.99 if 10 <= i < 50 else 1) for i, r in enumerate(clean)]
    )
    jumps = [1e-2, 5e-3, 2e-2, 3e-2, 1.5e-2]
    assert under_a_cap(capped(), jumps) == pytest.approx([1e-3, 5e-4, 5e-4, 5e-4, 3.75e-4])


def test_cap_under_a_schedule_that_stays_high_is_lifted_like_a_cut_and_returns_as_it_was() -> None:
    policy = capped()
    (at,) = train(policy, 91, 101 + REST, scheduled=1e-2)
    assert policy.limit_rate(at, 1e-2) == 1e-3 and policy.limit_rate(at + REWARM, 1e-2) == 1e-2
    assert trip_and_try(policy, at + 10, "cap_lr").action is Action.CAP_LR
    assert policy.limit_rate(at, 1e-2) == 1e-3


LIMITS = st.builds(
    Limit,
    kind=st.sampled_from(["cut", "cap"]),
    value=st.floats(0.01, 0.9),
    updates=st.integers(0, 200),
    clock=st.integers(0, 200),
    scheduled=st.none() | st.floats(0.001, 1.0),
    lifted=st.none() | st.integers(0, 300),
    lifted_updates=st.integers(0, 300),
)


@given(st.lists(LIMITS, max_size=4), st.integers(0, 400), st.floats(1e-6, 1.0))
def test_limits_only_lower_the_rate_and_end(limits: list[Limit], updates: int, scheduled: float) -> None:
    for before in (1.0, 0.0, 1e-3, 3e-3, scheduled):
        follow_schedule(limits, updates, before)
    found = limit_rate(limits, updates, scheduled, REWARM)
    assert 0 < found <= scheduled * (1 + 1e-12)
    for limit in limits:
        limit.lifted = limit.lifted or 0
    assert limit_rate(limits, 300 + REWARM, scheduled, REWARM) == scheduled


# The warm-up after a rewind

WARMUP = PolicyConfig(rewind_warmup=20, rewind_warmup_from=0.2)


def test_rewind_warms_the_rate_up_again_each_time_also_in_the_next_process() -> None:
    assert warmup_share(None, 30, 20, 0.2) == warmup_share(30, 30, 0, 0.2) == 1.0
    policy = Policy(WARMUP)
    for at in (30, 35):
        assert policy.note_rewind(at, 10)
        shares = [policy.limit_rate(n, 2.0) for n in (at, at + 1, at + 10, at + 19, at + 20, 999)]
        assert shares == pytest.approx([0.4, 0.48, 1.2, 1.92, 2.0, 2.0])
    again = Policy(WARMUP, PolicyState.model_validate_json(policy.state.model_dump_json()))
    again.resume_from(36, 36)
    assert [again.limit_rate(n, 1.0) for n in range(36, 60)] == [
        policy.limit_rate(n, 1.0) for n in range(36, 60)
    ]
    again.resume_from(12, 12)  # from a checkpoint of before
    assert again.limit_rate(12, 1.0) == pytest.approx(0.2) and again.limit_rate(32, 1.0) == 1.0
    assert Policy(CONFIG, policy.state).limit_rate(30, 1.0) == 1.0
    assert not Policy(CONFIG).note_rewind(30, 10)  # off by default


def test_handover_begins_the_warm_up_where_the_next_process_resumes() -> None:
    for config in (WARMUP, CONFIG):
        policy = Policy(config)
        policy.decide_on_step(seen(100, Verdict.SPIKE), 0)
        policy.carry_out_handover(Cause.STATE)
        if config is WARMUP:
            policy.resume_from(60, 55)
            assert policy.limit_rate(55, 1.0) == pytest.approx(0.2) and policy.limit_rate(75, 1.0) == 1.0
        else:
            assert policy.state.rewound is None


def test_of_two_warm_ups_the_lower_one_holds() -> None:
    policy = cut(rewind_warmup=10)
    at = policy.state.limits[0].updates
    policy.note_rewind(at, 10)
    share = 0.1 + 0.9 * 5 / REWARM
    assert [policy.limit_rate(at + n, 1.0) for n in (0, 5)] == pytest.approx([0.05, 0.5 * share])
    long = Policy(PolicyConfig(rewind_warmup=10 * REWARM), policy.state)
    assert long.limit_rate(at + REWARM, 1.0) == pytest.approx(0.5 * 0.19)
