"""The ladder: which verdict leads to which action, what evidence each needs, and that a spent budget ends no run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from megastable_guard.actions import Action, Cause, Verdict
from megastable_guard.guard_config import PolicyConfig
from megastable_guard.policy import (
    OUTLIER_STEPS,
    OUTLIERS,
    SAME_PLACE,
    SUSPICION,
    TRIED,
    UNTRIED,
    UNTRIED_STEPS,
    Policy,
)
from megastable_guard.policy_state import PolicyState
from tests.guard.traces import CONFIG, run, seen, trip, trip_and_try

LASTING = [Verdict.SPIKE, Verdict.DRIFT, Verdict.PLATEAU, Verdict.OSCILLATION]
REWIND, ALERT, APPLY, HANDOVER, DISCARD = (
    Action.REWIND, Action.ALERT, Action.APPLY, Action.HANDOVER, Action.DISCARD
)  # fmt: skip


def with_fp8(**config: int) -> Policy:
    return Policy(PolicyConfig(**config), has_fp8=True)


def restored(policy: Policy) -> Policy:
    """As the next process has it."""
    state = PolicyState.model_validate_json(policy.state.model_dump_json())
    return Policy(policy.config, state, policy.has_fp8)


def alerted(**config: Any) -> Policy:
    policy = Policy(PolicyConfig(rewinds=0, **config))
    assert policy.decide_on_step(seen(100, Verdict.SPIKE), 0).action is ALERT
    return policy


def names(
    policy: Policy, good_rate: float | None = None, rate: float | None = None, kernels: Sequence[str] = ()
) -> list[str]:
    return [offer.name for offer in policy.offer_remedies(90, good_rate, rate, kernels)]


def calm(policy: Policy, first: int, end: int) -> list[int]:
    """Healthy steps [first, end); those after which the coming step computes in FP8."""
    return [step for step in range(first, end) if policy.decide_on_step(seen(step), 0).applies and policy.fp8]


# Before an update


def test_decide_refuses_a_single_hard_batch_and_forgets_it() -> None:
    policy = Policy(CONFIG)
    steps = [seen(100), seen(101, Verdict.OUTLIER), *(seen(s) for s in range(102, 140))]
    assert run(policy, steps) == [APPLY, DISCARD, *[APPLY] * 38]
    assert policy.state.taken == [] and policy.state.refused == [] and not policy.state.watching
    assert run(policy, [seen(200, Verdict.OUTLIER, 0.9)]) == [APPLY]  # it only stands out


@pytest.mark.parametrize(
    ("verdict", "most"), [(Verdict.OUTLIER, CONFIG.discards), (Verdict.NON_FINITE, CONFIG.non_finite)]
)
def test_decide_rewinds_after_refusing_again_and_again(verdict: Verdict, most: int) -> None:
    policy = Policy(CONFIG)
    decisions = [policy.decide_on_step(seen(100 + i, verdict), 0) for i in range(most)]
    assert [d.action for d in decisions] == [*[DISCARD] * (most - 1), REWIND]
    assert decisions[-1].finding.onset == 100  # the refused steps before belong to it


@pytest.mark.parametrize("verdict", LASTING)
def test_decide_rewinds_what_lasts_at_once(verdict: Verdict) -> None:
    policy = Policy(CONFIG)
    decision = policy.decide_on_step(seen(100, verdict, onset=98), oldest=90)
    assert decision.action is REWIND and "at 100" in decision.reason
    assert policy.state.watching and policy.state.taken[0].step == 100


@pytest.mark.parametrize(
    ("oldest", "words"), [(None, "there is no snapshot"), (98, "the oldest snapshot is of step 98")]
)
def test_decide_hands_over_without_a_snapshot_from_before_the_onset(oldest: int | None, words: str) -> None:
    decision = Policy(CONFIG).decide_on_step(seen(100, Verdict.SPIKE, onset=98), oldest)
    assert decision.action is HANDOVER and words in decision.reason


def test_decide_refuses_outliers_that_stay_alone_a_few_times_only() -> None:
    policy = Policy(CONFIG)

    def meet(step: int, severity: float = 1.5) -> Action:
        return policy.decide_on_step(seen(step, Verdict.OUTLIER, severity=severity), 0).action

    assert [meet(300 * i) for i in range(1, 8)] == [DISCARD] * OUTLIERS + [APPLY] * 2
    assert meet(2400, severity=3.0) is DISCARD  # larger than any before
    assert meet(2401) is DISCARD  # not alone
    assert meet(300 * OUTLIERS + OUTLIER_STEPS) is DISCARD  # long ago
    policy = Policy(CONFIG)
    assert [meet(300 * i) for i in range(1, OUTLIERS + 1)] == [DISCARD] * OUTLIERS
    trip(policy, 300 * OUTLIERS + 1, Cause.DATA)
    assert meet(3000) is DISCARD  # the last one was of an incident


# Budgets: a spent one pauses the remedy

STATE, DATA, HARDWARE = Cause.STATE, Cause.DATA, Cause.HARDWARE


@pytest.mark.parametrize(
    ("config", "trips", "expected"),
    [
        ({"rewinds": 2}, [(100, STATE), (200, STATE), (300, STATE)], [REWIND, REWIND, ALERT]),
        ({"rewinds": 1, "last_resort": "stop"}, [(100, STATE), (200, STATE)], [REWIND, Action.STOP]),
        # The same place is not rewound to again and again; another one is.
        ({}, [(100 + i % 2, STATE) for i in range(4)] + [(101 + SUSPICION, STATE)],
         [REWIND] * SAME_PLACE + [ALERT, APPLY, REWIND]),
        # A host that computes wrongly three times is left, if it can be.
        ({"handovers": 2}, [(100 * i, HARDWARE) for i in range(1, 4)], [REWIND, REWIND, HANDOVER]),
        ({"handovers": 0}, [(100 * i, HARDWARE) for i in range(1, 4)], [REWIND, REWIND, ALERT]),
    ],
)  # fmt: skip
def test_policy_keeps_its_budgets(
    config: dict[str, Any], trips: list[tuple[int, Cause]], expected: list[Action]
) -> None:
    policy = Policy(PolicyConfig.model_validate(config))
    assert [trip(policy, step, cause) for step, cause in trips] == expected


def test_policy_says_how_often_and_where_it_was_rewound() -> None:
    policy = Policy(CONFIG)
    for step in (100, 101, 103):  # a state that is corrupted cannot be trained on, wherever it happens
        assert policy.decide_on_step(seen(step, Verdict.CORRUPTED), 0).action is REWIND
    assert "it was rewound 3 times around steps 100 to 103 already" in trip_reason(policy, 104)
    policy = Policy(CONFIG)
    assert [trip(policy, 100, STATE) for _ in range(SAME_PLACE)] == [REWIND] * SAME_PLACE
    assert "it was rewound 2 times around step 100 already" in trip_reason(policy, 102)


def trip_reason(policy: Policy, step: int) -> str:
    return policy.decide_on_step(seen(step, Verdict.SPIKE), 0).reason


def test_policy_has_another_budget_of_rewinds_for_proven_bad_data() -> None:
    """Some per cent of bad samples, found one by one, end in an alert at last, and never in an exit."""
    policy, actions = Policy(CONFIG), []
    for step in range(100, 100 + 20 * 40, 20):
        actions.append(trip(policy, step, DATA))
        run(policy, [seen(s) for s in range(step - 5, step + 16)])
    assert actions == [REWIND] * CONFIG.data_rewinds + [ALERT] * (40 - CONFIG.data_rewinds)
    weak = Policy(CONFIG)
    steps = range(100, 100 + 20 * 9, 20)
    assert [trip(weak, s, DATA, proven=False) for s in steps][-1] is ALERT
    short = Policy(PolicyConfig(data_rewinds=2, budget_window=1000))
    assert [trip(short, step, DATA) for step in (100, 200, 300)] == [REWIND, REWIND, ALERT]
    assert short.state.alert is not None
    assert "the 2 rewinds for bad data per 1000 steps" in short.state.alert.reason
    run(short, [seen(step) for step in range(301, 1400)])  # new ground
    assert short.decide_on_step(seen(1400, Verdict.SPIKE), 0).action is REWIND


def test_policy_does_only_some_of_its_steps_again() -> None:
    policy, found = Policy(CONFIG), []
    for step in range(100, 1100, 100):
        found.append(trip(policy, step, DATA))
        policy.note_rewind(step - 10, 10)
    assert found == [REWIND] * 7 + [ALERT] + [APPLY] * 2
    assert policy.decide_on_step(seen(1100, Verdict.CORRUPTED), 0).action is REWIND  # that cannot wait
    later = Policy(CONFIG, policy.state.model_copy(update={"alert": None}))
    assert trip(later, 2100, DATA) is REWIND
    # What is done again is no new ground: 200 steps for every attempt, always back to the same place.
    policy, actions = Policy(PolicyConfig(rewinds=SAME_PLACE, budget_window=50)), []
    for _ in range(SAME_PLACE + 2):
        actions.append(trip(policy, 300, STATE))
        run(policy, [seen(s) for s in range(100, 300)])
    assert actions == [REWIND] * SAME_PLACE + [ALERT, APPLY]


def test_policy_limits_what_is_taken_away_untried() -> None:
    policy = Policy(CONFIG)
    assert policy.may_take_untried(UNTRIED) and not policy.may_take_untried(UNTRIED + 1)
    policy.take_untried(UNTRIED - 1)
    assert policy.may_take_untried(1) and not policy.may_take_untried(2)
    run(policy, [seen(UNTRIED_STEPS - 1)])
    assert not policy.may_take_untried(2)
    run(policy, [seen(UNTRIED_STEPS)])
    assert policy.may_take_untried(UNTRIED)
    policy.state.tried = TRIED - 100
    assert policy.may_try_remedies(100, 1000) and not policy.may_try_remedies(101, 1000)
    assert policy.may_try_remedies(101, 10**6)


# Alerts and hand-overs


def test_alert_is_raised_once_and_everything_finite_is_applied() -> None:
    policy = alerted()
    for step, verdict in enumerate([*LASTING, Verdict.NON_FINITE, *LASTING], start=101):
        decision = policy.decide_on_step(seen(step, verdict), 0)
        assert decision.action is (DISCARD if verdict is Verdict.NON_FINITE else APPLY)
        assert verdict is Verdict.NON_FINITE or decision.reason.startswith("alert since step 100")
    assert policy.state.alert is not None and policy.state.alert.step == 100
    # An update that is not finite is never applied, not even that which raises the alert.
    policy = Policy(PolicyConfig(rewinds=0))
    decisions = [policy.decide_on_step(seen(100 + i, Verdict.NON_FINITE), 0) for i in range(30)]
    assert [d.action for d in decisions].count(ALERT) == 1 and not any(d.applies for d in decisions)
    # Single outliers are refused, as always; but no more than `discards` of any 16 steps.
    policy = alerted()
    actions = run(policy, [seen(s, Verdict.OUTLIER) for s in range(101, 401)])
    refused = [i for i, action in enumerate(actions) if action is DISCARD]
    assert set(actions) == {APPLY, DISCARD}
    assert all(sum(i <= j < i + SUSPICION for j in refused) <= CONFIG.discards for i in refused)


def test_alert_is_over_when_it_is_quiet_again_or_a_remedy_resumes() -> None:
    policy = alerted()
    healed = [s for s in range(101, 140) if policy.decide_on_step(seen(s), 0).healed]
    assert healed == [100 + CONFIG.verify_steps // 2] and policy.state.alert is None
    policy = Policy(PolicyConfig(rewinds=1, budget_window=50))
    assert [trip(policy, step, STATE) for step in (10, 12)] == [REWIND, ALERT]
    run(policy, [seen(s, Verdict.SPIKE) for s in range(13, 59)])
    assert policy.state.alert is not None
    assert trip(policy, 61, STATE) is REWIND and policy.state.alert is None


@pytest.mark.parametrize("damaged", [True, False])
def test_hand_over_without_a_checkpoint_is_an_alert_or_a_stop(damaged: bool) -> None:
    policy = Policy(CONFIG)
    decision = policy.decide_on_step(seen(100, Verdict.SPIKE), None)
    assert decision.action is HANDOVER
    instead = policy.cannot_hand_over(decision, "no checkpoint is older", damaged)
    assert instead.action is (Action.STOP if damaged else ALERT)
    assert "no checkpoint is older" in instead.reason
    assert HANDOVER not in [t.action for t in policy.state.taken]


def test_hand_over_is_limited_and_taken_only_where_memory_has_no_good_state() -> None:
    policy = Policy(PolicyConfig(handovers=1))
    assert policy.decide_on_step(seen(100, Verdict.SPIKE), None).action is HANDOVER
    policy.carry_out_handover(Cause.UNKNOWN)
    policy.resume_from(80, 80)
    second = policy.decide_on_step(seen(101, Verdict.SPIKE), None)
    assert second.action is ALERT and "the 1 handovers per 2000 steps" in second.reason
    policy = Policy(PolicyConfig(rewinds=1))
    assert trip(policy, 100, STATE) is REWIND
    other = restored(policy)
    assert policy.decide_on_step(seen(101, Verdict.SPIKE), 0).action is ALERT
    assert other.decide_on_step(seen(101, Verdict.SPIKE), None).action is HANDOVER


def test_abandon_leaves_checkpoints_without_proof_once_per_new_ground() -> None:
    """And for the budget of hand-overs; a proof spends nothing, and no other remedy comes along with either."""
    policy = Policy(PolicyConfig(handovers=2, rewinds=99), has_fp8=True)
    for step, may in ((100, True), (110, False), (118, False), (400, True), (800, False)):
        decision = policy.decide_on_step(seen(step, Verdict.SPIKE), 0)
        policy.abandon_checkpoint(decision, "its content is wrong", proven=True)
        policy.carry_out_handover(Cause.STORAGE)
        assert policy.may_suspect == may, step
        if may:
            assert policy.abandon_checkpoint(decision, "it came back", proven=False).action is HANDOVER
            assert policy.carry_out_handover(Cause.STORAGE) == "" and policy.fp8
        policy.resume_from(step - 40, step - 40)
    taken = [(t.step, t.cause) for t in policy.state.taken if t.action is HANDOVER]
    assert taken == [(100, Cause.STORAGE), (400, Cause.STORAGE)]


# What each remedy needs


def test_recurred_is_not_said_of_adjacent_trouble_nor_of_bad_data() -> None:
    policy = Policy(CONFIG)
    assert trip(policy, 100, STATE) is REWIND
    policy.decide_on_step(seen(105, Verdict.SPIKE), 0)
    assert policy.has_recurred() and not policy.has_recurred(adjacent=True)
    policy = Policy(CONFIG)
    assert [trip(policy, step, DATA) for step in (1000, 1040, 1080)] == [REWIND] * 3
    assert not policy.has_recurred()


ROUTERS = ["hold_router", "router_z_loss", "balance_loss", "no_balance_loss", "router_rate"]


def test_offer_remedies_needs_a_jump_for_a_cap_and_fp8_and_kernels_to_leave_them() -> None:
    once = ["rewarm", "reset_bias", "past_routing", "reset_moments"]
    settings = [*once, "clip", "qk_clip", "z_loss", *ROUTERS, "beta2"]
    last = ["swiglu_clamp", "cut_lr"]
    assert names(Policy(CONFIG)) == [*settings, *last] == names(Policy(CONFIG), 1e-3, 1.9e-3)
    assert names(Policy(CONFIG, None, True), 1e-3, 1e-2) == ["cap_lr", *settings, "leave_fp8", *last]
    few = PolicyConfig(remedies=("clip", "cut_lr"))
    assert names(Policy(few), 1e-3, 1e-2) == ["clip", "cut_lr"]
    assert names(Policy(PolicyConfig(cuts=0)), 1e-3, 1e-2) == [*settings, "swiglu_clamp"]
    used = ["loss", "attention"]
    assert "other_kernels" in names(Policy(CONFIG, PolicyState(kernels=["loss"])), kernels=used)
    assert "other_kernels" not in names(Policy(CONFIG, PolicyState(kernels=used)), kernels=used)
    assert "other_kernels" not in names(Policy(PolicyConfig(fallbacks=0)), kernels=used)
    # Every one, the least intrusive first; an offer leaves the policy as it is.
    policy = Policy(CONFIG, None, True)
    policy.decide_on_step(seen(100, Verdict.SPIKE), 0)
    before = policy.state.model_copy(deep=True)
    offers = policy.offer_remedies(90, 1e-3, 1e-2, ["attention"])
    assert [offer.name for offer in offers] == list(CONFIG.remedies)
    assert policy.state == before
    in_the_state = ("reset_bias", "past_routing")
    assert all(offer.policy.state != before for offer in offers if offer.name not in in_the_state)


def test_adopted_kernels_are_used_again_where_they_were_left_in_vain() -> None:
    """Not those that computed wrong numbers."""

    def adopt() -> Policy:
        policy = Policy(CONFIG, PolicyState(kernels=["loss"]))
        policy.decide_on_step(seen(100, Verdict.SPIKE), 0)
        (offer,) = (o for o in policy.offer_remedies(90, None, None, ["loss", "attention"]) if o.kernels)
        remedy = policy.adopt_remedy(offer, "it won")
        assert (remedy.action, remedy.cause) == (Action.FALL_BACK, Cause.NUMERICS)
        assert policy.state.kernels == ["loss", "attention"]
        return restored(policy)

    policy = adopt()
    assert policy.take_back_failed() == ["other_kernels"] and policy.state.kernels == ["loss"]
    assert policy.take_back_failed() == []  # once
    kept = adopt()
    run(kept, [seen(s) for s in range(101, 102 + CONFIG.recur_steps)])
    assert kept.take_back_failed() == [] and kept.state.kernels == ["loss", "attention"]


def test_adopted_warm_up_begins_at_the_good_state_and_again_after_a_further_rewind() -> None:
    policy = Policy(CONFIG)
    assert trip_and_try(policy, 100, "rewarm").action is Action.ADJUST
    assert (
        policy.limit_rate(100, 1.0) == pytest.approx(0.1)
        and policy.limit_rate(100 + CONFIG.rewarm_steps, 1.0) == 1.0
    )
    assert policy.limit_rate(100 + CONFIG.rewarm_steps // 2, 1.0) == pytest.approx(0.55)
    policy.note_rewind(80, 30)
    assert policy.limit_rate(80, 1.0) == pytest.approx(0.1)
    policy.resume_from(60, 60)
    assert policy.limit_rate(60, 1.0) == pytest.approx(0.1)


def test_remedy_that_did_not_last_is_not_offered_again_soon_but_a_cut_is() -> None:
    policy = Policy(CONFIG)
    for name in ("rewarm", "clip", "cut_lr"):
        trip_and_try(policy, 100 + 20 * len(policy.state.taken), name)
    left = names(policy)
    assert "rewarm" not in left and "clip" not in left and "cut_lr" in left
    assert policy.state.adjusted == ["clip"] and policy.limit_rate(10**6, 1.0) == 0.5
    policy = restored(policy)
    run(policy, [seen(s) for s in range(200, 200 + CONFIG.recur_steps)])
    assert "rewarm" in names(policy) and "clip" not in names(policy)  # it is in force
    policy = Policy(CONFIG)
    trip_and_try(policy, 100, "clip")
    assert policy.take_back_failed() == ["clip"] and policy.state.adjusted == []
    trip_and_try(policy, 140, "z_loss")
    run(policy, [seen(s) for s in range(140, 141 + CONFIG.recur_steps + 1)])
    assert policy.take_back_failed() == [] and policy.state.adjusted == ["z_loss"]


def test_resumed_from_an_older_state_offers_to_reset_moments_again() -> None:
    policy = Policy(CONFIG)
    trip_and_try(policy, 100, "reset_moments")
    policy.resume_from(100, 100)
    assert "reset_moments" not in names(policy)
    policy.resume_from(60, 60)
    assert "reset_moments" in names(policy) and policy.state.rewarm == 60


def test_adopt_releases_what_no_trial_has_shown_when_it_was_the_rate() -> None:
    policy = Policy(CONFIG)
    assert trip(policy, 100, DATA, proven=False, bad=(7, 9)) is REWIND
    policy = restored(policy)
    policy.note_skipped([20, 21], proven=False)
    policy.note_skipped([30], proven=True)
    assert trip_and_try(policy, 120, "cap_lr", 1e-3, 1e-2).release == (7, 9, 20, 21)
    for proven, name in ((True, "cut_lr"), (False, "rewarm")):
        other = Policy(CONFIG)
        trip(other, 100, DATA, proven=proven, bad=(7, 9))
        assert trip_and_try(other, 120, name).release == ()


@pytest.mark.parametrize(
    ("may_swap", "proven", "last"),
    [(False, True, REWIND), (True, True, Action.SWAP_CORPUS), (True, False, REWIND)],
)
def test_remedy_leaves_a_corpus_out_that_was_bad_again_and_again(
    may_swap: bool, proven: bool, last: Action
) -> None:
    policy = Policy(PolicyConfig(swap_after=3))
    actions = [trip(policy, 100 * i, DATA, may_swap=may_swap, proven=proven) for i in range(1, 5)]
    assert actions == [*[REWIND] * 3, last]
    policy = Policy(PolicyConfig(swap_after=3))  # nobody is left out for the incidents of others
    assert [trip(policy, 100 * i, DATA, corpus, True) for i, corpus in enumerate("aabbccc", 1)] == [
        REWIND
    ] * 7
    assert trip(policy, 800, DATA, "c", True) is Action.SWAP_CORPUS


# Verification, and what is left to itself


def test_policy_verifies_an_action_on_steps_past_the_one_that_tripped() -> None:
    policy = Policy(CONFIG)
    trip(policy, 100, DATA)
    back = [policy.decide_on_step(seen(s), 0) for s in range(91, 130)]  # rewound to step 90
    assert [d.finding.step for d in back if d.healed] == [100 + CONFIG.verify_steps // 2]
    assert not policy.state.watching
    policy = Policy(CONFIG)
    trip(policy, 100, DATA)  # a single step on the trend proves nothing
    assert not any(policy.decide_on_step(seen(s, on_trend=s % 3 == 0), 0).healed for s in range(91, 130))
    policy = Policy(CONFIG)
    trip(policy, 100, STATE)
    *before, last = [policy.decide_on_step(seen(s, on_trend=False), 0) for s in range(91, 131)]
    assert [d.action for d in before] == [APPLY] * 39
    assert (last.action, last.finding.onset, last.finding.step) == (REWIND, 100, 130)
    assert "not back on the trend" in last.reason and policy.has_recurred()


def waiting(step: int = 100, **config: int) -> Policy:
    policy = Policy(PolicyConfig(**config))
    decision = policy.decide_on_step(seen(step, Verdict.SPIKE, onset=step - 5), 0)
    assert decision.action is REWIND and policy.begin_waiting(decision.finding) == step + config["wait"]
    return policy


def test_wait_leaves_what_heals_by_itself_alone_for_some_steps_once() -> None:
    policy = waiting(wait=40, recur_steps=100)
    assert Policy(policy.config).may_wait and not Policy(PolicyConfig()).may_wait
    assert [t.action for t in policy.state.taken] == [Action.WAIT]
    policy = restored(policy)
    assert run(policy, [seen(s, Verdict.SPIKE, onset=95) for s in range(101, 110)]) == [APPLY] * 9
    lone = [seen(s, Verdict.OUTLIER) for s in range(110, 116)]
    assert run(policy, lone) == [DISCARD] * 3 + [APPLY] * 3  # never all of them
    assert policy.decide_on_step(seen(116, Verdict.NON_FINITE), 0).action is REWIND  # that does not heal
    assert not policy.is_waiting(116) and not policy.may_wait
    run(policy, [seen(s) for s in range(117, 260)])
    assert policy.may_wait
    policy = waiting(5000, wait=400)
    run(policy, [seen(s) for s in range(5001, 5040)])
    assert not policy.state.watching and not policy.is_waiting(5040)
    assert policy.decide_on_step(seen(5050, Verdict.SPIKE, onset=5048), 5040).action is REWIND


@pytest.mark.parametrize("verdict", [Verdict.HEALTHY, Verdict.SPIKE])
def test_wait_ends_in_a_rewind_to_before_it_began(verdict: Verdict) -> None:
    policy = waiting(wait=200)
    left = [seen(s, verdict, onset=s - 3, on_trend=False) for s in range(101, 300)]
    assert set(run(policy, left)) == {APPLY}
    decision = policy.decide_on_step(seen(300, verdict, onset=297, on_trend=False), 0)
    assert decision.action is REWIND and decision.finding.onset == 95  # more steps than may be done again
    policy = waiting(wait=40)
    assert sum(policy.decide_on_step(seen(s), 0).healed for s in range(101, 140)) == 1


@pytest.mark.parametrize(("last", "verdict"), [(140, Verdict.SPIKE), (120, Verdict.NON_FINITE)])
def test_wait_does_not_hold_for_steps_that_are_done_again(last: int, verdict: Verdict) -> None:
    """Neither after its end, nor after a rewind in its middle: trouble there is acted on, and looked for."""
    policy = waiting(wait=40, non_finite=1)
    assert policy.is_waiting(last - 1)
    assert policy.decide_on_step(seen(last, verdict, onset=95), 0).action is REWIND
    policy.choose_remedy(STATE, 90)
    policy.note_rewind(94, last - 94)
    assert not any(policy.is_waiting(step) for step in range(95, 200))
    run(policy, [seen(s, on_trend=False) for s in range(95, 115)])
    assert policy.decide_on_step(seen(118, Verdict.SPIKE, onset=117), 110).action is not APPLY


# FP8 and kernels


def test_fp8_returns_after_a_rest_of_new_ground_twice_as_long_each_time_and_at_last_stays_off() -> None:
    policy, step, rests = with_fp8(fallbacks=3, fp8_rest=40, budget_window=1000), 100, []
    for _ in range(3):
        assert trip(policy, step, Cause.NUMERICS) is Action.FALL_BACK and not policy.fp8
        again = calm(policy, step - 5, step + 2000)  # what is done again is no rest
        rests.append(again[0] - step if again else None)
        step += 2000
    assert rests == [40, 80, None] and "for good" in policy.precision
    assert "fall-back 3 of 3" in policy.precision
    # Where a person gives it more, it is tried again.
    more = Policy(PolicyConfig(fallbacks=4, fp8_rest=40), policy.state, has_fp8=True)
    assert calm(more, step, step + 10)
    never = with_fp8(fallbacks=0)
    assert not never.may_fall_back and trip(never, 400, Cause.NUMERICS) is ALERT and never.fp8


def test_fp8_does_not_return_while_something_is_watched_or_was_refused_lately() -> None:
    policy = with_fp8(fp8_rest=10)
    trip(policy, 100, Cause.NUMERICS)
    late = 100 + CONFIG.verify_steps // 2
    assert not calm(policy, 95, late) and policy.state.watching
    assert policy.decide_on_step(seen(late, Verdict.OUTLIER), 0).action is DISCARD
    assert policy.decide_on_step(seen(late + 1), 0).healed and not policy.fp8
    assert calm(policy, late + 2, late + 40)[0] == late + 16


@pytest.mark.parametrize("cause", [Cause.UNKNOWN, Cause.NUMERICS, HARDWARE])
def test_second_handover_leaves_fp8_unless_it_was_the_hardware(cause: Cause) -> None:
    policy = with_fp8(handovers=3)
    for step in (100, 130):
        finding = policy.decide_on_step(seen(step, Verdict.SPIKE), 0).finding
        assert policy.hand_over(finding, "no snapshot is good").action is HANDOVER
        told = policy.carry_out_handover(cause)
        left = cause is Cause.NUMERICS or (cause is Cause.UNKNOWN and step == 130)
        assert policy.fp8 is not left and (left or told == "")
        policy.resume_from(step - 20, step - 20)
    again = restored(policy)
    again.resume_from(110, 108)
    assert again.fp8 is (cause is HARDWARE) and not again.state.limits


def test_kernels_are_left_once_and_for_good_and_fp8_is_not_left_for_them() -> None:
    policy = with_fp8()
    for step in (100, 400):
        policy.decide_on_step(seen(step, Verdict.SPIKE), 0)
        remedy = policy.choose_remedy(Cause.NUMERICS, step - 1, kernels=("attention", "loss"))
        assert remedy.action is Action.FALL_BACK
        assert "without attention and loss for the rest" in remedy.reason
    calm(policy, 395, 2000)
    assert policy.state.kernels == ["attention", "loss"] and policy.fp8 and not policy.state.fallbacks
    for cause in (Cause.NUMERICS, Cause.STORAGE):  # whatever the checkpoint is worth
        policy = with_fp8()
        policy.hand_over(policy.decide_on_step(seen(100, Verdict.SPIKE), 0).finding, "no snapshot is good")
        assert "without attention" in policy.carry_out_handover(cause, ("attention",))
        assert policy.state.kernels == ["attention"] and policy.fp8
