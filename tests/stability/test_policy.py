"""The ladder: which verdict leads to which action, when budgets are spent, and what verification does."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megastable.stability.policy import (
    Action,
    Cause,
    Decision,
    Failure,
    Policy,
    PolicyState,
    after_failure,
    pause,
)
from megastable.stability.settings import PolicyConfig
from megastable.stability.signals import Finding, Verdict

CONFIG = PolicyConfig()


def seen(step: int, verdict: Verdict = Verdict.HEALTHY, severity: float = 2.0, **more: object) -> Finding:
    healthy = verdict is Verdict.HEALTHY
    fields = {"onset": step, "reason": f"{verdict} at {step}", "on_trend": healthy} | more
    return Finding(step=step, verdict=verdict, severity=0.0 if healthy else severity, **fields)  # type: ignore[arg-type]


def run(policy: Policy, findings: list[Finding], oldest: int | None = 0) -> list[Action]:
    return [policy.decide(finding, oldest).action for finding in findings]


def test_a_single_hard_batch_is_refused_and_forgotten() -> None:
    policy = Policy(CONFIG)
    steps = [seen(100), seen(101, Verdict.OUTLIER), *(seen(s) for s in range(102, 140))]
    assert run(policy, steps) == [Action.APPLY, Action.DISCARD, *[Action.APPLY] * 38]
    assert policy.state.taken == [] and policy.state.refused == [] and not policy.state.watching


def test_what_only_stands_out_is_let_through() -> None:
    assert run(Policy(CONFIG), [seen(100, Verdict.OUTLIER, 0.9)]) == [Action.APPLY]


@pytest.mark.parametrize(
    ("verdict", "most"), [(Verdict.OUTLIER, CONFIG.discards), (Verdict.NON_FINITE, CONFIG.non_finite)]
)
def test_refusing_again_and_again_ends_in_a_rewind(verdict: Verdict, most: int) -> None:
    steps = [seen(100 + i, verdict) for i in range(most)]
    assert run(Policy(CONFIG), steps) == [*[Action.DISCARD] * (most - 1), Action.REWIND]


@pytest.mark.parametrize("verdict", [Verdict.SPIKE, Verdict.DRIFT, Verdict.PLATEAU, Verdict.OSCILLATION])
def test_what_lasts_is_rewound_at_once(verdict: Verdict) -> None:
    policy = Policy(CONFIG)
    decision = policy.decide(seen(100, verdict, onset=98), oldest=90)
    assert decision.action is Action.REWIND and "at 100" in decision.reason
    assert policy.state.watching and policy.state.taken[0].step == 100


@pytest.mark.parametrize(
    ("oldest", "words"), [(None, "there is no snapshot"), (98, "the oldest snapshot is of step 98")]
)
def test_without_a_snapshot_from_before_the_onset_it_hands_over(oldest: int | None, words: str) -> None:
    decision = Policy(CONFIG).decide(seen(100, Verdict.SPIKE, onset=98), oldest)
    assert decision.action is Action.HANDOVER and words in decision.reason


def trip(policy: Policy, step: int, cause: Cause, corpus: str = "a", may_swap: bool = False) -> Action:
    """A spike, and the remedy for its cause."""
    decision = policy.decide(seen(step, Verdict.SPIKE), 0)
    if decision.action is not Action.REWIND:
        return decision.action
    return policy.remedy(cause, step, corpus, may_swap)[0]


def test_spent_rewinds_lead_to_handovers_and_those_to_a_stop() -> None:
    policy = Policy(PolicyConfig(rewinds=2, handovers=1))
    actions = [trip(policy, 100 * i, Cause.DATA) for i in range(1, 5)]
    assert actions == [Action.REWIND, Action.REWIND, Action.HANDOVER, Action.STOP]
    assert "the 2 rewinds per 2000 steps (stability.policy) are spent" in (
        policy.decide(seen(999, Verdict.SPIKE), 0).reason
    )


def test_budgets_come_back_after_their_window() -> None:
    policy = Policy(PolicyConfig(rewinds=1, budget_window=50))
    assert trip(policy, 10, Cause.DATA) is Action.REWIND
    run(policy, [seen(s) for s in range(11, 70)])
    assert trip(policy, 70, Cause.DATA) is Action.REWIND


def test_what_recurs_without_a_guilty_sample_is_the_learning_rate() -> None:
    policy = Policy(CONFIG)
    policy.decide(seen(100, Verdict.SPIKE), 0)
    assert not policy.recurred()
    assert policy.remedy(Cause.STATE, 99, None, False)[0] is Action.REWIND
    policy.decide(seen(105, Verdict.SPIKE), 0)
    assert policy.recurred()
    action, reason = policy.remedy(Cause.LEARNING_RATE, 95, None, False)
    assert action is Action.CUT_LR and "0.5" in reason
    assert policy.rate_factor(95) == pytest.approx(0.05)
    assert policy.rate_factor(95 + CONFIG.rewarm_steps // 2) == pytest.approx(0.275)
    assert policy.rate_factor(95 + CONFIG.rewarm_steps) == 0.5


def test_two_bad_regions_in_a_row_are_not_the_learning_rate() -> None:
    policy = Policy(CONFIG)
    assert trip(policy, 100, Cause.DATA) is Action.REWIND
    policy.decide(seen(105, Verdict.SPIKE), 0)
    assert not policy.recurred()


def test_spent_cuts_lead_to_a_handover() -> None:
    policy = Policy(PolicyConfig(cuts=1))
    assert trip(policy, 100, Cause.LEARNING_RATE) is Action.CUT_LR
    assert trip(policy, 110, Cause.LEARNING_RATE) is Action.HANDOVER


def test_a_corpus_that_is_guilty_again_and_again_is_swapped_out_if_enough_is_left() -> None:
    for may_swap, last in ((False, Action.REWIND), (True, Action.SWAP_CORPUS)):
        policy = Policy(PolicyConfig(swap_after=3))
        actions = [trip(policy, 100 * i, Cause.DATA, may_swap=may_swap) for i in range(1, 4)]
        assert actions == [Action.REWIND, Action.REWIND, last]


def test_nobody_is_swapped_out_for_the_incidents_of_others() -> None:
    policy = Policy(PolicyConfig(swap_after=3))
    actions = [trip(policy, 100 * i, Cause.DATA, corpus, True) for i, corpus in enumerate("aabbcc", 1)]
    assert actions == [Action.REWIND] * 6
    assert trip(policy, 700, Cause.DATA, "c", True) is Action.SWAP_CORPUS


def test_a_host_that_computes_wrongly_three_times_is_left() -> None:
    policy = Policy(CONFIG)
    actions = [trip(policy, 100 * i, Cause.HARDWARE) for i in range(1, 4)]
    assert actions == [Action.REWIND, Action.REWIND, Action.HANDOVER]


def test_an_action_is_verified() -> None:
    policy = Policy(CONFIG)
    trip(policy, 100, Cause.DATA)
    back = [policy.decide(seen(s), 0) for s in range(91, 130)]  # rewound to step 90
    healed = [d.finding.step for d in back if d.healed]
    assert healed == [100 + CONFIG.verify_steps // 2] and not policy.state.watching


def test_a_single_step_on_the_trend_proves_nothing() -> None:
    policy = Policy(CONFIG)
    trip(policy, 100, Cause.DATA)
    back = [policy.decide(seen(s, on_trend=s % 3 == 0), 0) for s in range(91, 130)]
    assert not any(d.healed for d in back)


def test_not_back_on_the_trend_in_time_climbs_on() -> None:
    policy = Policy(CONFIG)
    trip(policy, 100, Cause.STATE)
    after = [policy.decide(seen(s, on_trend=False), 0) for s in range(91, 131)]
    assert [d.action for d in after[:-1]] == [Action.APPLY] * 39
    assert (
        after[-1].action is Action.REWIND and after[-1].finding.onset == 100 and after[-1].finding.step == 130
    )
    assert "not back on the trend" in after[-1].reason and policy.recurred()


def test_what_is_done_again_is_no_new_ground() -> None:
    policy = Policy(PolicyConfig(rewinds=3, budget_window=50))
    actions = []
    for _ in range(5):  # 200 steps for every attempt, always back to the same place
        actions.append(trip(policy, 300, Cause.DATA))
        run(policy, [seen(s) for s in range(100, 300)])
    assert actions == [Action.REWIND] * 3 + [Action.HANDOVER] * 2


def test_spikes_far_apart_with_nobody_guilty_are_the_learning_rate_in_the_end() -> None:
    policy, causes = Policy(CONFIG), []
    for step in range(1000, 3000, 300):
        if policy.decide(seen(step, Verdict.SPIKE), 0).action is not Action.REWIND:
            break
        causes.append(Cause.LEARNING_RATE if policy.recurred() else Cause.STATE)
        policy.remedy(causes[-1], step, None, False)
        run(policy, [seen(s) for s in range(step - 5, step + 60)])
    assert causes[:2] == [Cause.STATE] * 2 and set(causes[2:]) == {Cause.LEARNING_RATE}


def test_a_cut_counts_from_where_the_run_goes_on() -> None:
    policy = Policy(CONFIG)
    trip(policy, 10_000, Cause.LEARNING_RATE)
    policy.resumed(9_000, 9_000)
    assert policy.rate_factor(9_000 + CONFIG.rewarm_steps) == 0.5
    healed = [s for s in range(9_001, 10_100) if policy.decide(seen(s), 0).healed]
    assert healed == [10_000 + CONFIG.verify_steps // 2]  # not before the trouble is passed


def test_the_refused_steps_before_belong_to_the_incident() -> None:
    policy = Policy(CONFIG)
    decisions = [policy.decide(seen(s, Verdict.NON_FINITE), 0) for s in (61, 62, 63)]
    assert decisions[-1].action is Action.REWIND and decisions[-1].finding.onset == 61


VERDICTS = st.sampled_from(list(Verdict))


# FP8


def with_fp8(**config: int) -> Policy:
    return Policy(PolicyConfig(**config), has_fp8=True)


def calm(policy: Policy, first: int, end: int) -> list[int]:
    """Healthy steps [first, end); those after which the coming step computes in FP8."""
    return [step for step in range(first, end) if policy.decide(seen(step), 0).applies and policy.fp8]


def test_numerics_fall_back_and_fp8_returns_after_a_rest_of_new_ground() -> None:
    policy = with_fp8(fp8_rest=50)
    assert policy.fp8 and trip(policy, 100, Cause.NUMERICS) is Action.FALL_BACK and Action.FALL_BACK.rewinds
    assert not policy.fp8 and policy.rate_factor(99) == 1
    # Rewound to step 90: what is done again is no rest.
    assert calm(policy, 91, 200)[0] == 150
    assert (policy.state.fallbacks, policy.state.returns, policy.state.rested) == ([100], [150], 50)


def test_what_comes_back_with_other_data_leaves_fp8_before_the_rate_is_cut() -> None:
    policy = with_fp8()
    assert trip(policy, 100, Cause.STATE) is Action.REWIND and policy.fp8
    assert (
        trip(policy, 105, Cause.LEARNING_RATE) is Action.FALL_BACK
        and not policy.fp8
        and not policy.state.cuts
    )
    assert trip(policy, 108, Cause.LEARNING_RATE) is Action.CUT_LR
    assert Policy(CONFIG).fp8 is False  # a run without it has nothing to leave
    assert trip(Policy(CONFIG), 100, Cause.LEARNING_RATE) is Action.CUT_LR


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
    assert rests == [40, 80, None] and policy.rest is None
    assert "for good" in policy.precision and "fall-back 3 of 3" in policy.precision
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
    assert words in policy.remedy(Cause.NUMERICS, 99, None, False)[1]
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
    assert not policy.may_fall_back and trip(policy, 100, Cause.LEARNING_RATE) is Action.CUT_LR
    assert trip(policy, 400, Cause.NUMERICS) is Action.HANDOVER and policy.fp8


def test_a_second_handover_leaves_fp8_and_a_third_cuts_the_rate() -> None:
    policy = with_fp8(rewinds=0, handovers=3)
    assert policy.decide(seen(100, Verdict.SPIKE), None).action is Action.HANDOVER and policy.fp8
    policy.resumed(80, 80)
    second = policy.decide(seen(130, Verdict.SPIKE), None)
    assert second.action is Action.HANDOVER and "without FP8" in second.reason and not policy.fp8
    restarted = Policy(policy.config, PolicyState.model_validate_json(policy.state.model_dump_json()), True)
    restarted.resumed(110, 108)
    assert not restarted.fp8 and not restarted.state.cuts
    assert "the learning rate" in restarted.decide(seen(135, Verdict.SPIKE), None).reason


@pytest.mark.parametrize("before", [False, True])
def test_a_handover_that_cannot_be_leaves_fp8_as_it_was(before: bool) -> None:
    policy = with_fp8(rewinds=1, handovers=1)
    if before:
        trip(policy, 100, Cause.NUMERICS)
    decision = policy.leave(policy.decide(seen(100, Verdict.SPIKE), 0), "no snapshot is good", Cause.NUMERICS)
    assert decision.action is (Action.STOP if before else Action.HANDOVER) and not policy.fp8
    policy.cannot_hand_over()
    assert policy.fp8 is not before


@pytest.mark.parametrize("cause", [Cause.UNKNOWN, Cause.HARDWARE])
def test_hardware_without_a_good_snapshot_cuts_no_rate(cause: Cause) -> None:
    """A hand-over that did not help leads to a cut, but not where the rate is innocent."""
    policy = Policy(PolicyConfig(handovers=3))
    for step in (100, 130):
        policy.leave(policy.decide(seen(step, Verdict.SPIKE), 0), "no snapshot is good", cause)
    assert len(policy.state.cuts) == (cause is Cause.UNKNOWN)


def test_a_memory_of_before_there_was_fp8_can_be_read() -> None:
    old = {
        "clock": 40,
        "refused": [],
        "watching": False,
        "tripped": 0,
        "watch_until": 0,
        "good": 0,
        "recurrences": 0,
    }
    old |= {
        "taken": [{"clock": 30, "step": 30, "action": "rewind", "cause": "data", "corpus": "a"}],
        "cuts": [20],
    }
    policy = Policy(CONFIG, PolicyState.model_validate(old), has_fp8=True)
    assert policy.fp8 and policy.state.rested == 0


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
            return policy.remedy(cause, finding.step, "a", False)[0] if action is Action.REWIND else action

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


Fallbacks.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestFallbacks = Fallbacks.TestCase


@given(
    st.lists(st.tuples(VERDICTS, st.floats(0, 9), st.booleans()), max_size=120),
    st.integers(0, 119),
    st.lists(st.sampled_from(list(Cause)), min_size=120, max_size=120),
)
def test_saved_and_restored_it_decides_the_same_and_stays_within_budgets(
    steps: list[tuple[Verdict, float, bool]], cut: int, causes: list[Cause]
) -> None:
    config = PolicyConfig(rewinds=4, cuts=2, swaps=1, handovers=2, budget_window=1000)
    straight, saved = Policy(config), Policy(config)
    counts = dict.fromkeys(Action, 0)
    for i, (verdict, severity, on_trend) in enumerate(steps):
        if i == cut:
            saved = Policy(config, PolicyState.model_validate_json(saved.state.model_dump_json()))
        finding = seen(i + 1, verdict, severity, on_trend=on_trend or verdict is not Verdict.HEALTHY)

        def decide(policy: Policy, finding: Finding = finding, i: int = i) -> tuple[Decision, object]:
            decision = policy.decide(finding, 0)
            if decision.action is not Action.REWIND:
                return decision, None
            return decision, policy.remedy(causes[i], i, "a", True)

        one, other = decide(straight), decide(saved)
        assert one == other and straight.state == saved.state
        counts[one[0].action] += 1
        if verdict is Verdict.NON_FINITE:
            assert not one[0].applies  # whatever budgets say, such an update is never applied
    assert counts[Action.REWIND] <= config.rewinds and counts[Action.HANDOVER] <= config.handovers
    assert 0 < straight.rate_factor(10**6) <= 1


# Above the process


def failed(
    *places: tuple[str, int | None, int], host: str | None = "a", skipped: bool = False
) -> list[Failure]:
    return [Failure(what, step, host, clock, skipped) for what, step, clock in places]


def after(failures: list[Failure], hosts: int = 1, **limits: int) -> tuple[Action, Cause, bool]:
    remedy = after_failure(failures, hosts, CONFIG.model_copy(update=limits))
    return remedy.action, remedy.cause, remedy.skip


def test_luck_is_met_with_a_restart() -> None:
    kills = [("SIGKILL", clock + 1, clock) for clock in (7, 19, 20, 33)]
    assert after(failed(*kills)) == (Action.RESTART, Cause.PROCESS, False)


def test_the_same_failure_at_the_same_step_is_data_and_then_code() -> None:
    same = failed(*[("ValueError: x", 8, 7)] * 3)
    assert after(same[:2]) == (Action.RESTART, Cause.PROCESS, False)
    assert after(same) == (Action.RESTART, Cause.DATA, True)
    skipped = [*same[:2], *failed(("ValueError: x", 8, 7), skipped=True)]
    assert after([*skipped, same[0]]) == (Action.STOP, Cause.CODE, False)
    assert after([*skipped, *failed(("ValueError: x", 9, 8))]) == (Action.RESTART, Cause.PROCESS, False)


def test_another_failure_in_between_is_no_row() -> None:
    mixed = failed(("KeyError: x", 8, 7), ("KeyError: x", 8, 7), ("SIGKILL", 8, 7), ("KeyError: x", 8, 7))
    assert after(mixed) == (Action.RESTART, Cause.PROCESS, False)


def test_what_never_begins_is_given_up() -> None:
    barren = failed(*[("code 1", None, 0)] * CONFIG.barren)
    assert after(barren[:-1]) == (Action.RESTART, Cause.PROCESS, False)
    assert after(barren) == (Action.STOP, Cause.PROCESS, False)
    assert after([*barren[:-1], *failed(("SIGKILL", 3, 2))])[0] is Action.RESTART  # new ground


def test_one_host_among_several_is_left() -> None:
    kills = failed(("SIGKILL", 8, 7), ("code 1", 30, 29), ("hang in step", 50, 49))
    assert after(kills, hosts=4) == (Action.STOP, Cause.HARDWARE, False)
    assert after(kills, hosts=1) == (Action.RESTART, Cause.PROCESS, False)
    elsewhere = [*kills[:2], *failed(("hang in step", 50, 49), host="b")]
    assert after(elsewhere, hosts=4)[0] is Action.RESTART
    assert after(failed(("x", 8, 7), ("x", 30, 29), ("x", 50, 49), host=None), hosts=4)[0] is Action.RESTART


def test_restarts_have_a_budget_that_comes_back() -> None:
    kills = failed(*(("SIGKILL", step + 1, step) for step in range(0, 60, 10)))
    assert after(kills, restarts=5)[:2] == (Action.STOP, Cause.PROCESS)
    assert after(kills, restarts=5, budget_window=40)[0] is Action.RESTART


def test_it_waits_longer_and_longer_where_nothing_is_gained() -> None:
    barren = failed(*[("code 1", None, 0)] * 8)
    assert [pause(barren[:n], 10.0) for n in range(1, 9)] == [0, 1, 2, 4, 8, 10, 10, 10]
    assert pause([*barren, *failed(("SIGKILL", 3, 2))], 10.0) == 0


def test_a_second_handover_cuts_the_rate_from_where_the_run_goes_on() -> None:
    policy = Policy(PolicyConfig(rewinds=0, handovers=2))
    assert policy.decide(seen(100, Verdict.SPIKE), None).action is Action.HANDOVER and not policy.state.cuts
    policy.resumed(80, 80)
    second = policy.decide(seen(130, Verdict.SPIKE), None)
    assert second.action is Action.HANDOVER and "the learning rate" in second.reason
    policy.resumed(110, 108)
    assert policy.state.cuts == [108] and policy.rate_factor(108 + 50) == CONFIG.cut_factor
    assert policy.decide(seen(140, Verdict.SPIKE), None).action is Action.STOP
