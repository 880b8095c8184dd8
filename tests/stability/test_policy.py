"""The ladder: which verdict leads to which action, when budgets are spent, and what verification does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
