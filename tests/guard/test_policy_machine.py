"""Any run at all: budgets hold, nothing finite ends it, a remedy is what was offered, limits can be lifted."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megastable_guard import policy_state
from megastable_guard.actions import Action, Cause, Decision, Verdict
from megastable_guard.guard_config import PolicyConfig
from megastable_guard.policy import SUSPICION, Policy
from megastable_guard.policy_state import PolicyState
from tests.guard.traces import VERDICTS, seen
from tests.tiers import examples

KERNELS = ["attention", "loss"]

BY_EXAMINATION = Cause.STATE, Cause.DATA, Cause.HARDWARE, Cause.NUMERICS
RATES = st.sampled_from([1e-3, 1.5e-3, 1e-2])


class PolicyLadder(RuleBasedStateMachine):
    """A run as the training loop drives it; its twin is saved and loaded again and again."""

    config = PolicyConfig(
        rewinds=5, data_rewinds=7, handovers=2, cuts=3, cut_rest=30, fallbacks=2, fp8_rest=20, budget_window=300,
        verify_steps=10, recur_steps=50, wait=15,
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.other = Policy(self.config, None, True), Policy(self.config, None, True)
        self.step, self.refused = 0, list[int]()
        self.left_at = list[int]()  # clocks at which FP8 was left, as seen from outside

    def both(self, act):  # type: ignore[no-untyped-def]
        before, one = self.policy.fp8, act(self.policy)
        assert one == act(self.other) and self.policy.state == self.other.state
        now, s = self.policy.fp8, self.policy.state
        if before and not now:
            self.left_at.append(s.clock)
        elif now and not before:
            rest = self.config.fp8_rest * 2 ** (len(self.left_at) - 1)
            assert s.clock - self.left_at[-1] >= rest and len(self.left_at) < self.config.fallbacks
            assert not s.watching and not s.refused
        return one

    @rule(
        count=st.integers(1, 50),
        on_trend=st.booleans(),
        verdict=VERDICTS,
        oldest=st.none() | st.just(0),
        cause=st.sampled_from([*BY_EXAMINATION, Cause.LEARNING_RATE]),
        proven=st.booleans(),
        good_rate=st.none() | RATES,
        rate=st.none() | RATES,
        checkpoint=st.booleans(),
    )
    def steps(
        self, count: int, on_trend: bool, verdict: Verdict, oldest: int | None, cause: Cause, proven: bool,
        good_rate: float | None, rate: float | None, checkpoint: bool,
    ) -> None:  # fmt: skip
        """Healthy ones, then one that is not, and what follows."""
        for _ in range(count):
            self.step += 1
            decision = self.both(lambda p: p.decide_on_step(seen(self.step, on_trend=on_trend), oldest))
            if decision.applies:
                self.relax(decision, 1e-3)
            if self.acted(decision, cause, (proven, good_rate, rate), checkpoint):
                return
        self.step += 1
        decision = self.both(lambda p: p.decide_on_step(seen(self.step, verdict), oldest))
        self.acted(decision, cause, (proven, good_rate, rate), checkpoint)

    def relax(self, decision: Decision, scheduled: float) -> None:
        self.both(lambda p: p.lift_limits(decision.finding, self.step, scheduled))

    def acted(
        self,
        decision: Decision,
        cause: Cause,
        found: tuple[bool, float | None, float | None],
        checkpoint: bool,
    ) -> bool:
        """Carry out a decision as recovery does; whether the run went back."""
        p = self.policy
        assert decision.applies <= (decision.finding.verdict is not Verdict.NON_FINITE)
        if decision.action is Action.DISCARD and decision.finding.verdict is Verdict.OUTLIER:
            self.refused = [
                s for s in self.refused if decision.finding.step - s < SUSPICION and s < self.step
            ]
            self.refused.append(self.step)
            assert len(self.refused) < self.config.discards + self.config.non_finite
        if decision.action is Action.REWIND and cause is Cause.STATE and p.may_wait:
            rewinds = sum(t.action is Action.REWIND for t in p.state.taken)
            assert self.both(lambda p: p.begin_waiting(decision.finding)) == self.step + self.config.wait
            assert sum(t.action is Action.REWIND for t in p.state.taken) == rewinds - 1
            return False
        if decision.action is Action.REWIND:
            limits, (proven, *rates) = sum(limit.times for limit in p.state.limits), found
            offered = [offer.name for offer in p.offer_remedies(self.step, *rates, KERNELS)]
            assert offered == [name for name in p.config.remedies if name in offered]
            assert ("other_kernels" in offered) <= (p.state.kernels == [])
            if cause is Cause.LEARNING_RATE and offered:
                name = offered[self.step % len(offered)]
                remedy = self.both(
                    lambda p: p.adopt_remedy(
                        {o.name: o for o in p.offer_remedies(self.step, *rates, KERNELS)}[name], "it won"
                    )
                )
                assert p.state.taken[-1].remedy == name
            else:
                remedy = self.both(
                    lambda p: p.choose_remedy(cause, self.step, "a", "why" * p.may_swap("a"), proven)
                )
            assert remedy.action is not Action.STOP
            if remedy.action is Action.SWAP_CORPUS:
                bad = [t for t in p.state.taken if t.action is Action.REWIND and t.cause is Cause.DATA]
                assert sum(t.proven for t in bad) >= self.config.swap_after
            if remedy.action not in (Action.CUT_LR, Action.CAP_LR):
                assert sum(limit.times for limit in p.state.limits) == limits
            if remedy.action is Action.HANDOVER:
                decision = Decision(Action.HANDOVER, decision.finding, remedy.reason)
        if decision.action is Action.HANDOVER:
            if checkpoint:
                self.both(lambda p: p.carry_out_handover(cause))
                self.step = max(0, self.step - 20)
                self.both(lambda p: p.resume_from(self.step, self.step))
                return True
            decision = self.both(lambda p: p.cannot_hand_over(decision, "no checkpoint"))
        assert decision.action is not Action.STOP
        if decision.action.rewinds:
            self.step, self.refused = max(0, self.step - 7), []
        return decision.action.rewinds

    @rule()
    def restart(self) -> None:
        self.other = Policy(
            self.config, PolicyState.model_validate_json(self.other.state.model_dump_json()), True
        )
        self.both(lambda p: p.resume_from(self.step, self.step))

    @precondition(lambda self: any(limit.holds for limit in self.policy.state.limits))
    @rule()
    def calm_for_long(self) -> None:
        """Every limit that is not for good ends, one after the other."""
        last = [limit for limit in self.policy.state.limits if limit.holds][-1]
        rest = policy_state.limit_duration(self.policy.state.limits, last, self.config)
        for _ in range((rest or 200) + SUSPICION + self.config.verify_steps + 60):
            self.step += 1
            decision = self.both(lambda p: p.decide_on_step(seen(self.step), 0))
            self.relax(decision, 1.0)
        assert last.holds is (rest is None)

    @rule(oldest=st.none() | st.just(0), checkpoint=st.booleans())
    def damage(self, oldest: int | None, checkpoint: bool) -> None:
        """The state itself is not finite: back, or at last a stop."""
        finding = seen(self.step, Verdict.NON_FINITE)
        decision = self.both(
            lambda p: p.escalate_trouble(finding, "a weight is not finite", oldest, damaged=True)
        )
        if decision.action is Action.HANDOVER and not checkpoint:
            decision = self.both(lambda p: p.cannot_hand_over(decision, "no checkpoint", True))
        assert decision.action in (Action.REWIND, Action.HANDOVER, Action.STOP)
        if decision.action is Action.STOP:
            self.policy, self.other = Policy(self.config, None, True), Policy(self.config, None, True)
            self.step, self.refused, self.left_at = 0, [], []
        elif decision.action is Action.REWIND:
            self.both(lambda p: p.choose_remedy(Cause.HARDWARE, self.step))
        else:
            self.both(lambda p: p.carry_out_handover(Cause.HARDWARE))

    @invariant()
    def budgets(self) -> None:
        s, c = self.policy.state, self.config
        counted = {a: sum(t.action is a for t in s.taken) for a in Action}
        assert counted[Action.REWIND] <= c.rewinds + c.data_rewinds
        assert counted[Action.HANDOVER] <= c.handovers
        assert sum(limit.times for limit in s.limits) <= c.cuts and len(s.fallbacks) <= c.fallbacks
        assert 0 < self.policy.limit_rate(self.step, 1e-3) <= 1e-3
        assert s.alert is None or s.watching
        assert len(s.fallbacks) == len(self.left_at) and self.policy.fp8 is not s.resting
        assert 0 <= s.rested <= s.clock


PolicyLadder.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40)
TestLadder = PolicyLadder.TestCase
