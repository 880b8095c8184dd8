"""The ladder: which verdict leads to which action, what evidence each needs, and that a spent budget ends no run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable_guard.actions import Action, Cause, Decision
from megastable_guard.guard_config import PolicyConfig
from megastable_guard.policy import (
    OUTLIER_STEPS,
    OUTLIERS,
    SAME_PLACE,
    SUSPICION,
    TRIED,
    UNTRIED,
    UNTRIED_STEPS,
    Offer,
    Policy,
)
from megastable_guard.policy_state import PolicyState
from megastable_guard.signals import Verdict
from tests.guard.policies import CONFIG, VERDICTS, run, seen, trip, trip_and_try

LASTING = [Verdict.SPIKE, Verdict.DRIFT, Verdict.PLATEAU, Verdict.OSCILLATION]


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


@pytest.mark.parametrize("verdict", LASTING)
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


# A spent budget pauses the remedy


@pytest.mark.parametrize(("last_resort", "end"), [("train_on", Action.ALERT), ("stop", Action.STOP)])
def test_spent_rewinds_lead_to_an_alert_or_where_a_person_wants_it_to_a_stop(
    last_resort: str, end: Action
) -> None:
    policy = Policy(PolicyConfig.model_validate({"rewinds": 2, "last_resort": last_resort}))
    actions = [trip(policy, 100 * i, Cause.STATE) for i in range(1, 4)]
    assert actions == [Action.REWIND, Action.REWIND, end]
    assert "the 2 rewinds per 2000 steps (stability.policy) are spent" in (
        policy.state.alert.reason if policy.state.alert else policy.decide(seen(999, Verdict.SPIKE), 0).reason
    )


def alerted(**config: Any) -> Policy:
    policy = Policy(PolicyConfig(rewinds=0, **config))
    assert policy.decide(seen(100, Verdict.SPIKE), 0).action is Action.ALERT
    return policy


def test_an_alert_is_raised_once_and_everything_finite_is_applied() -> None:
    policy = alerted()
    for step, verdict in enumerate([*LASTING, Verdict.NON_FINITE, *LASTING], start=101):
        decision = policy.decide(seen(step, verdict), 0)
        assert decision.action is (Action.DISCARD if verdict is Verdict.NON_FINITE else Action.APPLY)
        assert verdict is Verdict.NON_FINITE or decision.reason.startswith("alert since step 100")
    assert policy.state.alert is not None and policy.state.alert.step == 100


def test_a_lasting_excursion_is_not_refused_on_and_on() -> None:
    """Single outliers are, as always; but no more than `discards` of any 16 steps."""
    policy = alerted()
    actions = run(policy, [seen(s, Verdict.OUTLIER) for s in range(101, 401)])
    refused = [i for i, action in enumerate(actions) if action is Action.DISCARD]
    assert set(actions) == {Action.APPLY, Action.DISCARD}
    for i in refused:
        assert sum(i <= j < i + SUSPICION for j in refused) <= CONFIG.discards
    calm = alerted()
    assert run(calm, [seen(101), seen(102, Verdict.OUTLIER), seen(103)])[1] is Action.DISCARD


def test_an_alert_is_over_when_it_is_calm_again_or_a_remedy_resumes() -> None:
    policy = alerted()
    healed = [s for s in range(101, 140) if policy.decide(seen(s), 0).healed]
    assert healed == [100 + CONFIG.verify_steps // 2] and policy.state.alert is None

    policy = Policy(PolicyConfig(rewinds=1, budget_window=50))
    assert trip(policy, 10, Cause.STATE) is Action.REWIND
    assert trip(policy, 12, Cause.STATE) is Action.ALERT
    run(policy, [seen(s, Verdict.SPIKE) for s in range(13, 59)])
    assert policy.state.alert is not None
    assert trip(policy, 61, Cause.STATE) is Action.REWIND and policy.state.alert is None


def test_an_update_that_is_not_finite_is_never_applied_in_an_alert() -> None:
    policy = Policy(PolicyConfig(rewinds=0))
    decisions = [policy.decide(seen(100 + i, Verdict.NON_FINITE), 0) for i in range(30)]
    assert [d.action for d in decisions].count(Action.ALERT) == 1
    assert not any(d.applies for d in decisions) and Action.STOP not in {d.action for d in decisions}


@pytest.mark.parametrize(("oldest", "end"), [(0, Action.REWIND), (None, Action.HANDOVER)])
def test_a_state_that_is_not_finite_goes_back_or_stops(oldest: int | None, end: Action) -> None:
    policy = Policy(PolicyConfig(handovers=1))
    broken = seen(100, Verdict.NON_FINITE)
    first = policy.escalate(broken, "a weight is not finite", oldest, damaged=True)
    assert first.action is end
    if end is Action.HANDOVER:
        assert policy.cannot_hand_over(first, "no checkpoint", damaged=True).action is Action.STOP
        assert policy.state.alert is None


@pytest.mark.parametrize("damaged", [True, False])
def test_without_a_checkpoint_nothing_is_handed_over(damaged: bool) -> None:
    policy = Policy(CONFIG)
    decision = policy.decide(seen(100, Verdict.SPIKE), None)
    assert decision.action is Action.HANDOVER
    instead = policy.cannot_hand_over(decision, "no checkpoint is older", damaged)
    assert instead.action is (Action.STOP if damaged else Action.ALERT)
    assert "no checkpoint is older" in instead.reason
    assert Action.HANDOVER not in [t.action for t in policy.state.taken]


def test_spent_handovers_lead_to_an_alert() -> None:
    policy = Policy(PolicyConfig(handovers=1))
    assert policy.decide(seen(100, Verdict.SPIKE), None).action is Action.HANDOVER
    policy.handing_over(Cause.UNKNOWN)
    policy.resumed(80, 80)
    second = policy.decide(seen(101, Verdict.SPIKE), None)
    assert second.action is Action.ALERT and "the 1 handovers per 2000 steps" in second.reason


def test_spent_rewinds_hand_over_only_if_memory_has_no_good_state() -> None:
    policy = Policy(PolicyConfig(rewinds=1))
    assert trip(policy, 100, Cause.STATE) is Action.REWIND
    other = Policy(policy.config, policy.state.model_copy(deep=True))
    assert policy.decide(seen(101, Verdict.SPIKE), 0).action is Action.ALERT
    assert other.decide(seen(101, Verdict.SPIKE), None).action is Action.HANDOVER


def test_handovers_that_lead_to_no_new_ground_are_counted() -> None:
    policy = Policy(PolicyConfig(handovers=9))
    counts = []
    for step in (100, 110, 118, 400):
        policy.decide(seen(step, Verdict.SPIKE), None)
        policy.handing_over(Cause.UNKNOWN)
        counts.append(policy.state.barren_handovers(CONFIG.verify_steps))
        policy.resumed(step - 40, step - 40)
    assert counts == [1, 2, 3, 1]


def test_checkpoints_are_left_without_proof_once_per_new_ground() -> None:
    """And for the budget of hand-overs; a proof spends nothing, and no other remedy comes along with either."""
    policy = Policy(PolicyConfig(handovers=2, rewinds=99), has_fp8=True)
    for step, may in ((100, True), (110, False), (118, False), (400, True), (800, False)):
        decision = policy.decide(seen(step, Verdict.SPIKE), 0)
        policy.abandon(decision, "its content is wrong", proven=True)
        policy.handing_over(Cause.STORAGE)
        assert policy.may_suspect == may, step
        if may:
            assert policy.abandon(decision, "it came back", proven=False).action is Action.HANDOVER
            assert policy.handing_over(Cause.STORAGE) == "" and policy.fp8
        policy.resumed(step - 40, step - 40)
    taken = [(t.step, t.cause) for t in policy.state.taken if t.action is Action.HANDOVER]
    assert taken == [(100, Cause.STORAGE), (400, Cause.STORAGE)]


def test_budgets_come_back_after_their_window() -> None:
    policy = Policy(PolicyConfig(rewinds=1, budget_window=50))
    assert trip(policy, 10, Cause.STATE) is Action.REWIND
    run(policy, [seen(s) for s in range(11, 70)])
    assert trip(policy, 70, Cause.STATE) is Action.REWIND


def test_rewinds_for_data_that_were_proven_do_not_use_the_budget_up() -> None:
    """Some per cent of bad samples, found one by one, end in an alert at last, and never in an exit."""
    policy = Policy(CONFIG)
    actions = []
    for step in range(100, 100 + 20 * 40, 20):
        actions.append(trip(policy, step, Cause.DATA))
        run(policy, [seen(s) for s in range(step - 5, step + 16)])
    assert actions == [Action.REWIND] * CONFIG.data_rewinds + [Action.ALERT] * (40 - CONFIG.data_rewinds)
    weak = Policy(CONFIG)
    steps = range(100, 100 + 20 * 9, 20)
    assert [trip(weak, s, Cause.DATA, proven=False) for s in steps][-1] is Action.ALERT


# Bounds that nothing passes


@pytest.mark.parametrize("cause", [Cause.DATA, Cause.STATE])
def test_the_same_place_is_not_rewound_to_again_and_again(cause: Cause) -> None:
    policy = Policy(CONFIG)
    actions = [trip(policy, 100 + i % 2, cause, proven=False) for i in range(6)]
    assert actions[:SAME_PLACE] == [Action.REWIND] * SAME_PLACE
    assert actions[SAME_PLACE:] == [Action.ALERT, *[Action.APPLY] * (5 - SAME_PLACE)]
    assert trip(policy, 101 + SUSPICION, cause, proven=False) is Action.REWIND  # another place


def test_a_run_does_only_some_of_its_steps_again() -> None:
    policy, found = Policy(CONFIG), []
    for step in range(100, 1100, 100):
        found.append(trip(policy, step, Cause.DATA))
        policy.rewound(step - 10, 10)
    assert found == [Action.REWIND] * 7 + [Action.ALERT] + [Action.APPLY] * 2
    assert policy.decide(seen(1100, Verdict.CORRUPTED), 0).action is Action.REWIND  # that cannot wait
    assert (
        trip(Policy(CONFIG, policy.state.model_copy(update={"alert": None})), 2100, Cause.DATA)
        is Action.REWIND
    )


def test_outliers_that_stay_alone_are_refused_a_few_times_only() -> None:
    policy = Policy(CONFIG)

    def meet(step: int, severity: float = 1.5) -> Action:
        return policy.decide(seen(step, Verdict.OUTLIER, severity=severity), 0).action

    assert [meet(300 * i) for i in range(1, 8)] == [Action.DISCARD] * OUTLIERS + [Action.APPLY] * 2
    assert meet(2400, severity=3.0) is Action.DISCARD  # larger than any before
    assert meet(2401) is Action.DISCARD  # not alone
    assert meet(300 * OUTLIERS + OUTLIER_STEPS) is Action.DISCARD  # long ago


def test_outliers_of_an_incident_were_not_alone() -> None:
    policy = Policy(CONFIG)
    for step in range(300, 300 * (OUTLIERS + 1), 300):
        policy.decide(seen(step, Verdict.OUTLIER, severity=1.5), 0)
    trip(policy, 300 * OUTLIERS + 1, Cause.DATA)
    assert policy.decide(seen(3000, Verdict.OUTLIER, severity=1.5), 0).action is Action.DISCARD


def test_what_is_taken_away_untried_is_limited_in_a_thousand_steps() -> None:
    policy = Policy(CONFIG)
    assert policy.may_take_untried(UNTRIED) and not policy.may_take_untried(UNTRIED + 1)
    policy.take_untried(UNTRIED - 1)
    assert policy.may_take_untried(1) and not policy.may_take_untried(2)
    run(policy, [seen(UNTRIED_STEPS - 1)])
    assert not policy.may_take_untried(2)
    run(policy, [seen(UNTRIED_STEPS)])
    assert policy.may_take_untried(UNTRIED)


# What each remedy needs


def test_without_a_trial_nothing_is_changed() -> None:
    policy = Policy(PolicyConfig(rewinds=50))
    actions = [trip(policy, step, Cause.STATE) for step in range(1000, 2000, 30)]
    assert {Action.REWIND} <= set(actions) <= {Action.REWIND, Action.ALERT, Action.APPLY}
    assert not policy.state.limits and not policy.state.adjusted and policy.state.rewarm is None


def test_adjacent_trouble_is_not_called_recurred() -> None:
    policy = Policy(CONFIG)
    assert trip(policy, 100, Cause.STATE) is Action.REWIND
    policy.decide(seen(105, Verdict.SPIKE), 0)
    assert policy.recurred() and not policy.recurred(adjacent=True)


def test_two_bad_regions_in_a_row_are_not_called_recurred() -> None:
    policy = Policy(PolicyConfig(rewinds=50))
    for step in range(1000, 1400, 40):
        assert trip(policy, step, Cause.DATA) is Action.REWIND
        assert not policy.recurred()


def names(policy: Policy, good_rate: float | None = None, rate: float | None = None) -> list[str]:
    return [offer.name for offer in policy.offer_remedies(90, good_rate, rate)]


def test_a_cap_is_offered_where_the_rate_jumped_and_fp8_where_it_is_on() -> None:
    settings = ["rewarm", "reset_moments", "clip", "qk_clip", "z_loss", "beta2"]
    last = ["swiglu_clamp", "cut_lr"]
    assert names(Policy(CONFIG)) == [*settings, *last] == names(Policy(CONFIG), 1e-3, 1.9e-3)
    assert names(Policy(CONFIG, None, True), 1e-3, 1e-2) == ["cap_lr", *settings, "leave_fp8", *last]
    few = PolicyConfig(remedies=("clip", "cut_lr"))
    assert names(Policy(few), 1e-3, 1e-2) == ["clip", "cut_lr"]
    assert names(Policy(PolicyConfig(cuts=0)), 1e-3, 1e-2) == [*settings, "swiglu_clamp"]


def test_plain_pytorch_is_offered_for_kernels_that_are_in_use_and_may_be_left() -> None:
    policy = Policy(CONFIG, PolicyState(kernels=["loss"]))

    def offers(policy: Policy) -> dict[str, Offer]:
        return {offer.name: offer for offer in policy.offer_remedies(90, None, None, ["loss", "attention"])}

    assert [*offers(policy)][-3:] == ["other_kernels", "swiglu_clamp", "cut_lr"]
    assert "other_kernels" not in offers(Policy(PolicyConfig(fallbacks=0)))
    policy.decide(seen(100, Verdict.SPIKE), 0)
    remedy = policy.adopt(offers(policy)["other_kernels"], "it won")
    assert (remedy.action, remedy.cause) == (Action.FALL_BACK, Cause.NUMERICS)
    assert "without attention for the rest" in remedy.reason and policy.state.kernels == ["loss", "attention"]
    policy = Policy(CONFIG, PolicyState.model_validate_json(policy.state.model_dump_json()))
    policy.state.taken.clear()
    assert policy.take_back_failed() == [] and "other_kernels" not in offers(policy)


def test_kernels_that_were_left_in_vain_are_used_again_but_not_those_that_computed_wrong_numbers() -> None:
    policy = Policy(CONFIG, PolicyState(kernels=["loss"]))
    policy.decide(seen(100, Verdict.SPIKE), 0)
    (offer,) = (o for o in policy.offer_remedies(90, None, None, ["loss", "attention"]) if o.kernels)
    policy.adopt(offer, "it won")
    policy = Policy(CONFIG, PolicyState.model_validate_json(policy.state.model_dump_json()))
    assert policy.take_back_failed() == ["other_kernels"] and policy.state.kernels == ["loss"]
    assert policy.take_back_failed() == []  # once
    kept = Policy(CONFIG, PolicyState(kernels=["loss"]))
    kept.decide(seen(100, Verdict.SPIKE), 0)
    kept.adopt(offer, "it won")
    run(kept, [seen(s) for s in range(101, 102 + CONFIG.recur_steps)])
    assert kept.take_back_failed() == [] and kept.state.kernels == ["loss", "attention"]


def test_an_offer_leaves_the_policy_as_it_is() -> None:
    policy = Policy(CONFIG, None, True)
    policy.decide(seen(100, Verdict.SPIKE), 0)
    before = policy.state.model_copy(deep=True)
    offers = policy.offer_remedies(90, 1e-3, 1e-2, ["attention"])
    assert [offer.name for offer in offers] == list(CONFIG.remedies)  # every one, the least intrusive first
    assert policy.state == before and all(offer.policy.state != before for offer in offers)


def test_a_cap_holds_the_rate_of_the_good_state_without_a_warm_up() -> None:
    policy = Policy(CONFIG)
    given = trip_and_try(policy, 100, "cap_lr", 1e-3, 1e-2)
    assert (given.action, given.cause) == (Action.CAP_LR, Cause.LEARNING_RATE)
    assert "stays at or below 0.001" in given.reason and given.reason.endswith(": it won")
    assert policy.rate(101, 1e-2) == 1e-3
    policy.follow(5e-4)
    assert policy.rate(101, 5e-4) == 5e-4


def test_a_warm_up_begins_at_the_good_state_again_and_after_a_further_rewind_there() -> None:
    policy = Policy(CONFIG)
    assert trip_and_try(policy, 100, "rewarm").action is Action.ADJUST
    assert policy.rate(100, 1.0) == pytest.approx(0.1) and policy.rate(100 + CONFIG.rewarm_steps, 1.0) == 1.0
    assert policy.rate(100 + CONFIG.rewarm_steps // 2, 1.0) == pytest.approx(0.55)
    policy.rewound(80, 30)
    assert policy.rate(80, 1.0) == pytest.approx(0.1)
    policy.resumed(60, 60)
    assert policy.rate(60, 1.0) == pytest.approx(0.1)


def test_a_remedy_that_did_not_last_is_not_offered_again_soon_but_a_cut_is() -> None:
    policy = Policy(CONFIG)
    for name in ("rewarm", "clip", "cut_lr"):
        trip_and_try(policy, 100 + 20 * len(policy.state.taken), name)
    left = names(policy)
    assert "rewarm" not in left and "clip" not in left and "cut_lr" in left
    assert policy.state.adjusted == ["clip"] and policy.rate(10**6, 1.0) == 0.5
    policy = Policy(CONFIG, PolicyState.model_validate_json(policy.state.model_dump_json()))
    run(policy, [seen(s) for s in range(200, 200 + CONFIG.recur_steps)])
    assert "rewarm" in names(policy) and "clip" not in names(policy)  # it is in force


def test_branches_are_limited() -> None:
    policy = Policy(CONFIG)
    policy.state.tried = TRIED - 100
    assert policy.may_try_remedies(100, 1000) and not policy.may_try_remedies(101, 1000)
    assert policy.may_try_remedies(101, 10**6)


def test_a_lasting_change_that_did_not_help_is_taken_back() -> None:
    policy = Policy(CONFIG)
    trip_and_try(policy, 100, "clip")
    assert policy.take_back_failed() == ["clip"] and policy.state.adjusted == []
    trip_and_try(policy, 140, "z_loss")
    run(policy, [seen(s) for s in range(140, 141 + CONFIG.recur_steps + 1)])
    assert policy.take_back_failed() == [] and policy.state.adjusted == ["z_loss"]


def test_moments_that_began_again_are_gone_with_an_older_state() -> None:
    policy = Policy(CONFIG)
    trip_and_try(policy, 100, "reset_moments")
    assert "reset_moments" not in names(policy)
    policy.resumed(100, 100)
    assert "reset_moments" not in names(policy)
    policy.resumed(60, 60)
    assert "reset_moments" in names(policy) and policy.state.rewarm == 60


def test_what_no_trial_has_shown_is_released_when_it_was_the_rate() -> None:
    policy = Policy(CONFIG)
    assert trip(policy, 100, Cause.DATA, proven=False, bad=(7, 9)) is Action.REWIND
    policy = Policy(CONFIG, PolicyState.model_validate_json(policy.state.model_dump_json()))
    policy.skipped([20, 21], proven=False)
    policy.skipped([30], proven=True)
    assert trip_and_try(policy, 120, "cap_lr", 1e-3, 1e-2).release == (7, 9, 20, 21)
    sure = Policy(CONFIG)
    trip(sure, 100, Cause.DATA, bad=(7, 9))
    assert trip_and_try(sure, 120, "cut_lr").release == ()
    other = Policy(CONFIG)
    trip(other, 100, Cause.DATA, proven=False, bad=(7, 9))
    assert trip_and_try(other, 120, "rewarm").release == ()


@pytest.mark.parametrize("cause", [Cause.UNKNOWN, Cause.HARDWARE])
def test_a_handover_cuts_no_rate(cause: Cause) -> None:
    policy = Policy(PolicyConfig(handovers=5))
    for step in (100, 130, 160):
        assert policy.decide(seen(step, Verdict.SPIKE), None).action is Action.HANDOVER
        assert policy.handing_over(cause) == "" and not policy.state.limits


# Corpora and hosts


def test_a_corpus_that_is_guilty_again_and_again_is_swapped_out_if_enough_is_left() -> None:
    for may_swap, proven, last in (
        (False, True, Action.REWIND),
        (True, True, Action.SWAP_CORPUS),
        (True, False, Action.REWIND),
    ):
        policy = Policy(PolicyConfig(swap_after=3))
        actions = [trip(policy, 100 * i, Cause.DATA, may_swap=may_swap, proven=proven) for i in range(1, 5)]
        assert actions == [*[Action.REWIND] * 3, last]


def test_nobody_is_swapped_out_for_the_incidents_of_others() -> None:
    policy = Policy(PolicyConfig(swap_after=3))
    actions = [trip(policy, 100 * i, Cause.DATA, corpus, True) for i, corpus in enumerate("aabbccc", 1)]
    assert actions == [Action.REWIND] * 7
    assert trip(policy, 800, Cause.DATA, "c", True) is Action.SWAP_CORPUS


@pytest.mark.parametrize(("handovers", "last"), [(2, Action.HANDOVER), (0, Action.ALERT)])
def test_a_host_that_computes_wrongly_three_times_is_left(handovers: int, last: Action) -> None:
    policy = Policy(PolicyConfig(handovers=handovers))
    actions = [trip(policy, 100 * i, Cause.HARDWARE) for i in range(1, 4)]
    assert actions == [Action.REWIND, Action.REWIND, last]


# Verification


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
    policy = Policy(PolicyConfig(rewinds=SAME_PLACE, budget_window=50))
    actions = []
    for _ in range(SAME_PLACE + 2):  # 200 steps for every attempt, always back to the same place
        actions.append(trip(policy, 300, Cause.STATE))
        run(policy, [seen(s) for s in range(100, 300)])
    assert actions == [Action.REWIND] * SAME_PLACE + [Action.ALERT, Action.APPLY]


def test_the_refused_steps_before_belong_to_the_incident() -> None:
    policy = Policy(CONFIG)
    decisions = [policy.decide(seen(s, Verdict.NON_FINITE), 0) for s in (61, 62, 63)]
    assert decisions[-1].action is Action.REWIND and decisions[-1].finding.onset == 61


def test_a_memory_of_two_cuts_and_of_leaving_fp8_can_be_read() -> None:
    cuts = [{"kind": "cut", "value": 0.5, "updates": at, "clock": 400} for at in (20, 90)]
    old: dict[str, Any] = {"clock": 400, "fallbacks": [7], "returns": [9], "limits": cuts}
    old |= {"taken": [{"clock": 30, "step": 30, "action": "rewind", "cause": "data", "corpus": "a"}]}
    state = PolicyState.model_validate(old)
    policy = Policy(CONFIG, state, has_fp8=True)
    assert policy.fp8 and policy.state.rested == 2 and policy.rate(1000, 1.0) == 0.25
    assert PolicyState.model_validate_json(state.model_dump_json()) == state
    run(policy, [seen(s) for s in range(401, 601)])
    assert policy.relax(seen(600), 600, 1.0) and policy.rate(1000, 1.0) == 0.5


@given(
    st.lists(st.tuples(VERDICTS, st.floats(0, 9), st.booleans()), max_size=120),
    st.integers(0, 119),
    st.lists(st.sampled_from(list(Cause)), min_size=120, max_size=120),
    st.lists(st.booleans(), min_size=120, max_size=120),
)
def test_saved_and_restored_it_decides_the_same_and_stays_within_budgets(
    steps: list[tuple[Verdict, float, bool]], cut: int, causes: list[Cause], proven: list[bool]
) -> None:
    config = PolicyConfig(rewinds=4, data_rewinds=3, cuts=2, swaps=1, handovers=2, budget_window=1000)
    straight, saved = Policy(config), Policy(config)
    counts = dict.fromkeys(Action, 0)
    for i, (verdict, severity, on_trend) in enumerate(steps):
        if i == cut:
            saved = Policy(config, PolicyState.model_validate_json(saved.state.model_dump_json()))
        finding = seen(i + 1, verdict, severity, on_trend=on_trend or verdict is not Verdict.HEALTHY)

        def decide(policy: Policy, finding: Any = finding, i: int = i) -> tuple[Decision, object]:
            decision = policy.decide(finding, 0)
            if decision.action is not Action.REWIND:
                return decision, None
            if causes[i] is Cause.LEARNING_RATE:
                return decision, policy.adopt(policy.offer_remedies(i, 1e-3, 1e-2)[i % 3], "it won")
            return decision, policy.remedy(causes[i], i, "a", "why" * policy.may_swap("a"), proven[i])

        one, other = decide(straight), decide(saved)
        assert one == other and straight.state == saved.state
        counts[one[0].action] += 1
        if verdict is Verdict.NON_FINITE:
            assert not one[0].applies  # whatever budgets say, such an update is never applied
    assert counts[Action.REWIND] <= config.rewinds + config.data_rewinds
    assert counts[Action.HANDOVER] <= config.handovers and not counts[Action.STOP]
    assert 0 < straight.rate(10**6, 1.0) <= 1


def test_new_ground_restores_the_budget_of_rewinds_for_bad_data() -> None:
    """Though nothing else was done meanwhile; and the budget that is spent is named."""
    policy = Policy(PolicyConfig(data_rewinds=2, budget_window=1000))
    for step in (100, 200):
        assert trip(policy, step, Cause.DATA) is Action.REWIND
    spent = policy.decide(seen(300, Verdict.SPIKE), 0)
    assert spent.action is Action.ALERT and "the 2 rewinds for bad data per 1000 steps" in spent.reason
    run(policy, [seen(step) for step in range(301, 1400)])
    assert policy.decide(seen(1400, Verdict.SPIKE), 0).action is Action.REWIND


def test_what_heals_by_itself_is_left_to_itself_for_some_steps_once() -> None:
    config = PolicyConfig(wait=40, recur_steps=100)
    policy, spike = Policy(config), partial(seen, verdict=Verdict.SPIKE)
    assert policy.may_wait and not Policy(PolicyConfig()).may_wait
    decision = policy.decide(spike(100, onset=95), 0)
    assert decision.action is Action.REWIND and policy.wait(decision.finding) == 140
    assert [t.action for t in policy.state.taken] == [Action.WAIT]
    policy = Policy(config, PolicyState.model_validate_json(policy.state.model_dump_json()))
    assert run(policy, [spike(s, onset=95) for s in range(101, 110)]) == [Action.APPLY] * 9
    lone = [seen(s, Verdict.OUTLIER) for s in range(110, 116)]
    assert run(policy, lone) == [Action.DISCARD] * 3 + [Action.APPLY] * 3  # never all of them
    assert policy.decide(seen(116, Verdict.NON_FINITE), 0).action is Action.REWIND  # that does not heal
    assert not policy.is_waiting(116) and not policy.may_wait
    run(policy, [seen(s) for s in range(117, 260)])
    assert policy.may_wait


def test_trouble_after_what_has_healed_is_not_waited_for() -> None:
    policy = Policy(PolicyConfig(wait=400))
    policy.wait(policy.decide(seen(5000, Verdict.SPIKE, onset=4995), 0).finding)
    run(policy, [seen(s) for s in range(5001, 5040)])
    assert not policy.state.watching and not policy.is_waiting(5040)
    assert policy.decide(seen(5050, Verdict.SPIKE, onset=5048), 5040).action is Action.REWIND


@pytest.mark.parametrize("verdict", [Verdict.HEALTHY, Verdict.SPIKE])
def test_what_has_not_healed_in_time_is_undone_to_before_it_began(verdict: Verdict) -> None:
    policy = Policy(PolicyConfig(wait=200))
    policy.wait(policy.decide(seen(100, Verdict.SPIKE, onset=95), 0).finding)
    waiting = [seen(s, verdict, onset=s - 3, on_trend=False) for s in range(101, 300)]
    assert set(run(policy, waiting)) == {Action.APPLY}
    decision = policy.decide(
        seen(300, verdict, onset=297, on_trend=False), 0
    )  # more steps than may be done again
    assert decision.action is Action.REWIND and decision.finding.onset == 95
    policy = Policy(PolicyConfig(wait=40))
    policy.wait(policy.decide(seen(100, Verdict.SPIKE, onset=95), 0).finding)
    healed = [policy.decide(seen(s), 0).healed for s in range(101, 140)]
    assert sum(healed) == 1


def test_steps_that_are_done_again_after_a_wait_are_not_waited_for() -> None:
    """Neither after its end, nor after a rewind in its middle: trouble there is acted on, and looked for."""
    for last, verdict in ((140, Verdict.SPIKE), (120, Verdict.NON_FINITE)):
        policy = Policy(PolicyConfig(wait=40, non_finite=1))
        policy.wait(policy.decide(seen(100, Verdict.SPIKE, onset=95), 0).finding)
        assert policy.is_waiting(last - 1)
        decision = policy.decide(seen(last, verdict, onset=95), 0)
        assert decision.action is Action.REWIND
        policy.remedy(Cause.STATE, 90)
        policy.rewound(94, last - 94)
        assert not any(policy.is_waiting(step) for step in range(95, 200))
        run(policy, [seen(s, on_trend=False) for s in range(95, 115)])
        assert policy.decide(seen(118, Verdict.SPIKE, onset=117), 110).action is not Action.APPLY
