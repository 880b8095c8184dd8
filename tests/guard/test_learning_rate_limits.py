"""Cuts and caps of the learning rate: what they do to it, when they are lifted, and that they come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable_guard.actions import Action, Cause
from megastable_guard.guard_config import PolicyConfig
from megastable_guard.learning_rate_limits import Limit, after_rewind, follow, limited
from megastable_guard.policy import Policy
from megastable_guard.policy_state import PolicyState
from megastable_guard.signals import Verdict
from tests.guard.policies import CONFIG, run, seen, trip, trip_and_try

REWARM = CONFIG.rewarm_steps


def cut(policy: Policy, step: int = 100) -> None:
    assert trip_and_try(policy, step + 2, "cut_lr").action is Action.CUT_LR


def capped(policy: Policy, step: int = 100, good: float = 1e-3) -> None:
    assert trip_and_try(policy, step, "cap_lr", good, 10 * good).action is Action.CAP_LR


def train(policy: Policy, first: int, end: int, scheduled: float = 1.0) -> list[int]:
    """Healthy steps [first, end), an update each; those at which a limit was lifted."""
    lifted = []
    for step in range(first, end):
        policy.follow(scheduled)
        decision = policy.decide(seen(step), 0)
        if policy.relax(decision.finding, step, scheduled):
            lifted.append(step)
    return lifted


def test_after_a_cut_the_rate_warms_up_again() -> None:
    policy = Policy(CONFIG)
    cut(policy)
    at = policy.state.limits[0].updates
    assert policy.rate(at, 1.0) == pytest.approx(0.05)
    assert policy.rate(at + REWARM // 2, 1.0) == pytest.approx(0.275)
    assert policy.rate(at + REWARM, 1.0) == 0.5


def test_a_cut_counts_from_where_the_run_goes_on() -> None:
    policy = Policy(CONFIG)
    cut(policy, 10_000)
    policy.resumed(9_000, 9_000)
    assert policy.rate(9_000 + REWARM, 1.0) == 0.5


def test_a_cut_is_lifted_after_its_rest_and_the_rate_ramps_back() -> None:
    policy = Policy(CONFIG)
    cut(policy)
    (at,) = train(policy, 95, 102 + 3 * CONFIG.cut_rest)
    assert at == 102 + CONFIG.cut_rest
    ramp = [policy.rate(at + i, 1.0) for i in range(REWARM + 1)]
    assert ramp[0] == 0.5 and ramp[-1] == 1.0 and ramp == sorted(ramp) and len(set(ramp)) == REWARM + 1


def test_it_is_not_lifted_while_something_is_watched_or_off_the_trend() -> None:
    policy = Policy(CONFIG)
    cut(policy)
    train(policy, 95, 102 + CONFIG.cut_rest - 1)
    off = seen(102 + CONFIG.cut_rest, on_trend=False)
    policy.decide(off, 0)
    assert policy.relax(off, 0, 1.0) == []
    trip(policy, 102 + CONFIG.cut_rest + 1, Cause.DATA)
    assert train(policy, 300, 310) == []


def test_what_is_done_again_is_no_rest() -> None:
    policy = Policy(CONFIG)
    cut(policy)
    for _ in range(3):
        assert train(policy, 50, 102 + CONFIG.cut_rest) == []
    assert train(policy, 50, 102 + CONFIG.cut_rest + 1) == [102 + CONFIG.cut_rest]


def test_a_cut_that_was_right_comes_back_rests_twice_as_long_and_at_last_stays() -> None:
    policy = Policy(PolicyConfig(cuts=3, cut_rest=40))
    cut(policy)
    step, rests, begun = 95, [], 102
    for _ in range(2):
        (at,) = train(policy, step, begun + 200)[:1] or (None,)
        assert at is not None
        rests.append(at - begun)
        begun = policy.state.clock + 1
        assert trip_and_try(policy, begun, "cap_lr").action is Action.CUT_LR
        assert policy.rate(10**6, 1.0) == 0.5
        step = begun - 5
    assert rests == [40, 80] and len(policy.state.limits) == 1 and policy.state.limits[0].times == 3
    assert train(policy, step, begun + 2000) == []  # for good


def test_a_lifting_that_held_is_forgotten() -> None:
    """The cut was wrong, or no longer needed: its budget comes back with new ground."""
    policy = Policy(PolicyConfig(cuts=1, cut_rest=40, budget_window=300))
    cut(policy)
    assert train(policy, 95, 500) == []  # the only one of the budget stays for good
    policy = Policy(PolicyConfig(cuts=2, cut_rest=40, budget_window=300))
    cut(policy)
    train(policy, 95, 500)
    assert policy.state.limits == [] and policy.rate(10**6, 1.0) == 1.0


def test_a_cap_ends_when_the_schedule_comes_back_below_it_but_not_before_the_trouble_is_passed() -> None:
    policy = Policy(CONFIG)
    capped(policy)
    assert train(policy, 91, 101, scheduled=9e-4) == []  # done again, at the rate of then
    assert train(policy, 101, 150, scheduled=1e-2) == []
    assert policy.rate(150, 1e-2) == 1e-3
    assert train(policy, 150, 200, scheduled=8e-4) == [149 + CONFIG.verify_steps] and not policy.state.limits


def under_a_cap(policy: Policy, rates: list[float]) -> list[float]:
    """What becomes of the scheduled rates of consecutive updates."""
    found = []
    for rate in rates:
        policy.follow(rate)
        found.append(policy.rate(len(found), rate))
    return found


def test_a_capped_rate_goes_down_with_the_schedule_but_for_its_jumps() -> None:
    """As it would have without the mistake: ten times too high from 100 on, and right again from 140 on."""
    clean = [1e-3 * 0.99**i for i in range(90)]
    wrong = [r * (10 if 10 <= i < 50 else 1) for i, r in enumerate(clean)]
    policy = Policy(CONFIG)
    capped(policy)
    assert under_a_cap(policy, wrong) == pytest.approx(
        [r / (0.99 if 10 <= i < 50 else 1) for i, r in enumerate(clean)]
    )


def test_a_capped_rate_stays_where_it_is_when_the_schedule_jumps_again_or_rises() -> None:
    policy = Policy(CONFIG)
    capped(policy)
    assert under_a_cap(policy, [1e-2, 5e-3, 2e-2, 3e-2, 1.5e-2]) == pytest.approx(
        [1e-3, 5e-4, 5e-4, 5e-4, 3.75e-4]
    )


def test_a_rewind_to_before_the_schedule_came_back_finds_the_cap_still_there() -> None:
    policy = Policy(CONFIG)
    capped(policy)
    train(policy, 91, 150, scheduled=1e-2)
    assert train(policy, 150, 160, scheduled=8e-4) == []
    assert under_a_cap(policy, [1e-2]) == [1e-3]


def test_a_cap_of_before_it_followed_the_schedule_stays_where_it_is() -> None:
    old = {"kind": "cap", "value": 1e-3, "updates": 5, "clock": 5}
    policy = Policy(CONFIG, PolicyState.model_validate({"limits": [old]}))
    assert under_a_cap(policy, [1e-2, 5e-3, 1e-4]) == [1e-3, 1e-3, 1e-4]


def test_a_cap_under_a_schedule_that_stays_high_is_lifted_like_a_cut() -> None:
    policy = Policy(CONFIG)
    capped(policy)
    (at,) = train(policy, 91, 101 + CONFIG.cut_rest, scheduled=1e-2)
    assert policy.rate(at, 1e-2) == 1e-3 and policy.rate(at + REWARM, 1e-2) == 1e-2
    assert trip_and_try(policy, at + 10, "cap_lr").action is Action.CAP_LR  # the limit returns as it was
    assert policy.rate(at, 1e-2) == 1e-3


def test_restarts_remember_limits() -> None:
    policy = Policy(CONFIG)
    cut(policy)
    (at,) = train(policy, 95, 102 + CONFIG.cut_rest + 10)
    again = Policy(CONFIG, PolicyState.model_validate_json(policy.state.model_dump_json()))
    again.resumed(at + 10, at + 10)
    assert [again.rate(u, 0.3) for u in range(at, at + 60)] == [
        policy.rate(u, 0.3) for u in range(at, at + 60)
    ]


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
        follow(limits, updates, before)
    found = limited(limits, updates, scheduled, REWARM)
    assert 0 < found <= scheduled * (1 + 1e-12)
    for limit in limits:
        limit.lifted = limit.lifted or 0
    assert limited(limits, 300 + REWARM, scheduled, REWARM) == scheduled


def test_nothing_limits_a_run_without_incidents() -> None:
    policy = Policy(CONFIG)
    run(policy, [seen(s) for s in range(100)])
    assert policy.rate(100, 3e-4) == 3e-4 and policy.relax(seen(100), 100, 3e-4) == []


# The warm-up after a rewind

WARMUP = PolicyConfig(rewind_warmup=20, rewind_warmup_from=0.2)


@pytest.mark.parametrize(
    ("rewound", "updates", "share"),
    [
        (None, 30, 1.0),
        (30, 30, 0.2),
        (30, 31, 0.24),
        (30, 40, 0.6),
        (30, 49, 0.96),
        (30, 50, 1.0),
        (30, 999, 1.0),
    ],
)
def test_the_rate_warms_up_after_a_rewind(rewound: int | None, updates: int, share: float) -> None:
    assert after_rewind(rewound, updates, 20, 0.2) == pytest.approx(share, abs=1e-12)
    assert after_rewind(rewound, updates, 0, 0.2) == 1.0  # off by default


def test_a_policy_without_it_remembers_no_rewind() -> None:
    policy = Policy(CONFIG)
    assert (
        not policy.rewound(30, 10) and policy.state == PolicyState(redone=10) and policy.rate(30, 1.0) == 1.0
    )


def test_a_second_rewind_begins_again() -> None:
    policy = Policy(WARMUP)
    assert policy.rewound(30, 10)
    assert [policy.rate(n, 2.0) for n in (30, 40, 50)] == pytest.approx([0.4, 1.2, 2.0])
    policy.rewound(35, 10)
    assert [policy.rate(n, 2.0) for n in (35, 45, 55)] == pytest.approx([0.4, 1.2, 2.0])


def test_a_restart_goes_on_with_it() -> None:
    policy = Policy(WARMUP)
    policy.rewound(30, 10)
    again = Policy(WARMUP, PolicyState.model_validate_json(policy.state.model_dump_json()))
    again.resumed(36, 36)
    assert [again.rate(n, 1.0) for n in range(36, 60)] == [policy.rate(n, 1.0) for n in range(36, 60)]
    again.resumed(12, 12)  # from a checkpoint of before
    assert again.rate(12, 1.0) == pytest.approx(0.2) and again.rate(32, 1.0) == 1.0
    off = Policy(CONFIG, policy.state)
    assert off.rate(30, 1.0) == 1.0


def test_a_handover_begins_it_where_the_next_process_resumes() -> None:
    policy = Policy(WARMUP)
    policy.decide(seen(100, Verdict.SPIKE), 0)
    policy.handing_over(Cause.STATE)
    policy.resumed(60, 55)
    assert policy.rate(55, 1.0) == pytest.approx(0.2) and policy.rate(75, 1.0) == 1.0
    other = Policy(CONFIG)
    other.decide(seen(100, Verdict.SPIKE), 0)
    other.handing_over(Cause.STATE)
    assert other.state.rewound is None


def test_with_a_cut_the_lower_warmup_holds() -> None:
    policy = Policy(PolicyConfig(rewind_warmup=10, rewind_warmup_from=0.5))
    cut(policy)
    at = policy.state.limits[0].updates
    policy.rewound(at, 10)
    rewarm = 0.1 + 0.9 * 5 / REWARM
    assert policy.rate(at, 1.0) == pytest.approx(0.05) and policy.rate(at + 5, 1.0) == pytest.approx(
        0.5 * rewarm
    )
    long = Policy(PolicyConfig(rewind_warmup=10 * REWARM), policy.state)
    assert long.rate(at + REWARM, 1.0) == pytest.approx(0.5 * 0.19)
