"""The policy: from verdicts, history and budgets to an action. Pure: training, dry run and backtest share this code.

The ladder: apply < discard < rewind (and skip or defer) < what wins among the remedies that are tried < swap the corpus
out < hand over to a restart from a checkpoint < alert (train on, refuse single updates, notify a person). Reversible
before irreversible: what changes how the run trains is offered by `offer_remedies`, and taken only if its branch wins.
An exhausted budget pauses the remedy, not the run. STOP is reserved for non-finite numbers with nothing to go back to,
and for `last_resort=stop`. `decide_on_step` is called before every update; `choose_remedy` or `adopt_remedy` after a
rewind, with the findings; `lift_limits` lifts limits of the rate; `fp8` says whether the coming step computes in FP8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from megastable_guard import policy_state
from megastable_guard.actions import Action, Cause, Decision, Finding, Remedy, Verdict
from megastable_guard.guard_config import PolicyConfig, RemedyName
from megastable_guard.policy_state import Alert, Limit, PolicyState, Taken

# A refused update is forgotten after so many steps: bad regions span a few batches.
SUSPICION = 16
# Most rewinds within `SUSPICION` steps of each other: one more would end as they did.
SAME_PLACE = 2
# Most samples that may be taken away without a clear win in a trial: of one incident, and within `UNTRIED_STEPS`.
FEW, UNTRIED, UNTRIED_STEPS = 64, 64, 1000
# After `OUTLIERS` single outliers were refused within `OUTLIER_STEPS`, one of at most `LARGER` times the largest of
# their severities is applied.
OUTLIERS, OUTLIER_STEPS, LARGER = 5, 10_000, 1.25
# A run may do `REDONE` of its steps again, or `REDONE_SHARE` of them if that is more.
REDONE, REDONE_SHARE = 64, 0.05
# Branches with remedies may take `TRIED` steps of a run, or `TRIED_SHARE` of its steps if that is more.
TRIED, TRIED_SHARE = 1024, 0.02
# Causes that clear the data, the hardware and the numerics.
BLAMELESS = (Cause.STATE, Cause.MOMENTS, Cause.LEARNING_RATE)
# Share of the rate at which it warms up again.
REWARM_FROM = 0.1
ONCE = ("reset_bias", "past_routing", "reset_moments")  # what a remedy changes at once in the state
# Lasting changes, in words; engine/adjustments.py makes them.
ADJUSTED = {
    "clip": "gradients are clipped at a quarter of optimizer.clip for the rest of the run",
    "qk_clip": "attention logits are kept at 100 or less by QK-clip for the rest of the run",
    "z_loss": "the z-loss is ten times as large for the rest of the run",
    "hold_router": "the weights of routers grow no larger for the rest of the run",
    "router_z_loss": "the z-loss of routers is ten times as large for the rest of the run",
    "balance_loss": "the balance loss of experts is ten times as large for the rest of the run",
    "no_balance_loss": "experts have no balance loss for the rest of the run",
    "router_rate": "routers learn at three tenths of the rate for the rest of the run",
    "beta2": "beta2 is lower for the rest of the run",
    "swiglu_clamp": "the factors of SwiGLU are clamped at 10 for the rest of the run",
}


@dataclass(frozen=True)
class Offer:
    """A remedy that may be tried. policy: as it would be with it. kernels: those that it leaves."""

    name: str
    policy: Policy
    remedy: Remedy
    kernels: tuple[str, ...]


class Policy:
    """Decides for one run. `state` is its memory. has_fp8: whether the recipe uses FP8."""

    def __init__(self, config: PolicyConfig, state: PolicyState | None = None, has_fp8: bool = False) -> None:
        self.config = config
        self.state = state or PolicyState()
        self.has_fp8 = has_fp8

    # Before an update

    def decide_on_step(self, finding: Finding, oldest: int | None) -> Decision:
        """The action on a step. oldest: step of the oldest snapshot; None = there is none."""
        s, c, step = self.state, self.config, finding.step
        s.clock = max(s.clock, step)
        s.refused = [refused_step for refused_step in s.refused if 0 <= step - refused_step < SUSPICION]
        if finding.verdict is Verdict.HEALTHY:
            return self._decide_on_healthy(finding, oldest)
        if finding.verdict is Verdict.SHIFT or (finding.verdict is Verdict.OUTLIER and finding.severity < 1):
            return Decision(Action.APPLY, finding, finding.reason)
        if self._has_waited:
            finding = replace(finding, onset=min(finding.onset, s.tripped))
        is_single = finding.verdict in (Verdict.OUTLIER, Verdict.NON_FINITE)
        most_discards = c.non_finite if finding.verdict is Verdict.NON_FINITE else c.discards
        if is_single and len(s.refused) + 1 < most_discards:
            if known_outlier := self._is_known_outlier(finding):
                return Decision(Action.APPLY, finding, known_outlier)
            s.refused.append(step)
            return Decision(Action.DISCARD, finding, finding.reason)
        if self.is_waiting(step) and finding.verdict is not Verdict.NON_FINITE:
            return Decision(
                Action.APPLY, finding, f"left to itself until step {s.waits_until}: {finding.reason}"
            )
        decision_reason = finding.reason
        if is_single:
            decision_reason = (
                f"{len(s.refused) + 1} updates stood out within {SUSPICION} steps; {decision_reason}"
            )
            finding = replace(finding, onset=min([finding.onset, *s.refused]))
        return self.escalate_trouble(finding, decision_reason, oldest)

    def _decide_on_healthy(self, finding: Finding, oldest: int | None) -> Decision:
        """Apply, unless the last action is not proven in time."""
        s, c = self.state, self.config
        is_proven = self._healed(finding)
        if s.watching and finding.step >= s.watch_until and not finding.on_trend:
            earlier_finding = replace(finding, onset=min(finding.onset, s.tripped))
            steps = c.wait if self._has_waited else c.verify_steps
            return self.escalate_trouble(
                earlier_finding, f"not back on the trend {steps} steps after the last action", oldest
            )
        if finding.on_trend and policy_state.is_fallback_over(s, c):
            s.returns.append(s.clock)
        return Decision(Action.APPLY, finding, "", healed=is_proven)

    def is_waiting(self, step: int) -> bool:
        """Whether trouble is left to itself at a step; not where it is done again, once something was done about it."""
        return self._has_waited and step < self.state.waits_until

    @property
    def _has_waited(self) -> bool:
        """Whether the present trouble was left to itself, and nothing else was done about it."""
        s = self.state
        return s.watching and bool(s.taken) and s.taken[-1].action is Action.WAIT

    @property
    def may_wait(self) -> bool:
        """Whether trouble may be left to itself: not what comes back soon after."""
        s, c = self.state, self.config
        return c.wait > 0 and (not s.waits_until or s.clock - s.waits_until > c.recur_steps)

    def begin_waiting(self, finding: Finding) -> int:
        """Leave the trouble for which a rewind was decided last to itself, until the step that is returned. If it is
        not over by then, it is rewound to before it began."""
        s = self.state
        s.taken.pop()
        s.tripped, s.watch_until = finding.onset, finding.step + self.config.wait
        s.waits_until = s.watch_until
        self._take(Action.WAIT, finding.step, Cause.STATE)
        return s.waits_until

    def _is_known_outlier(self, finding: Finding) -> str:
        """Why a single outlier is applied: the run has them now and then, and they stay alone. Else "", and it is
        remembered."""
        s = self.state
        s.outliers = [(at, severity) for at, severity in s.outliers if s.clock - at < OUTLIER_STEPS]
        if finding.verdict is not Verdict.OUTLIER or s.refused:
            return ""
        alone = [severity for at, severity in s.outliers if finding.step - at >= SUSPICION]
        if len(alone) >= OUTLIERS and finding.severity <= LARGER * max(alone):
            return (
                f"{len(alone)} like it were refused within {OUTLIER_STEPS:,} steps, and nothing came of them"
            )
        s.outliers.append((finding.step, finding.severity))
        return ""

    def _healed(self, finding: Finding) -> bool:
        """Whether the last action is proven: enough steps on the trend past the step that tripped. Ends the watch."""
        s = self.state
        s.good += s.watching and finding.step > s.tripped and finding.on_trend
        if not s.watching or s.good < max(1, self.config.verify_steps // 2):
            return False
        s.watching, s.recurrences, s.alert = False, 0, None
        return True

    def trained_through(self, alone: bool) -> None:
        """The rewind that was decided last did not take place: nothing was wrong. alone: nothing else was done about
        the incident, which would be verified."""
        s = self.state
        if s.taken and s.taken[-1].action is Action.REWIND:
            s.taken.pop()
        s.refused = []
        if alone:
            s.watching, s.recurrences, s.good, s.alert = False, 0, 0, None
        else:  # it was counted as one of the trouble that is being watched
            s.recurrences = max(0, s.recurrences - 1)

    def note_skipped(self, positions: Sequence[int], proven: bool) -> None:
        """Bad samples were skipped without a rewind. If an action was being verified, they explain its incident.
        proven: as in `choose_remedy`."""
        s = self.state
        last_rewind = next(
            (past_action for past_action in reversed(s.taken) if past_action.action is Action.REWIND), None
        )
        if s.watching and last_rewind is not None:
            last_rewind.cause, last_rewind.proven = Cause.DATA, last_rewind.proven or proven
        self._take(Action.SKIP, s.clock, Cause.DATA)
        self._found_bad(positions, proven)

    def _found_bad(self, positions: Sequence[int], proven: bool) -> None:
        """What the action that was taken last takes away."""
        last_action = self.state.taken[-1]
        last_action.proven, last_action.unproven = proven, () if proven else tuple(positions)

    def may_take_untried(self, count: int) -> bool:
        """Whether so many samples more may be taken away without a clear win in a trial."""
        s = self.state
        s.untried = [
            (taken_at, sample_count)
            for taken_at, sample_count in s.untried
            if s.clock - taken_at < UNTRIED_STEPS
        ]
        return sum(sample_count for _, sample_count in s.untried) + count <= UNTRIED

    def are_costly(self, positions: Sequence[int]) -> bool:
        """Whether most of these samples were deferred by a trial, as they cost more than they teach."""
        sample_positions, known_costly = np.asarray(positions), np.zeros(len(positions), dtype=bool)
        for range_begin, range_end in self.state.costly:
            known_costly |= (sample_positions >= range_begin) & (sample_positions < range_end)
        return 2 * int(known_costly.sum()) > len(positions)

    def take_untried(self, count: int) -> None:
        """So many were taken away."""
        self.state.untried.append((self.state.clock, count))

    def may_look_back(self, step: int, onset: int, oldest: int | None) -> bool:
        """Whether steps from `onset` up to `step` may be examined on an earlier state, and undone if samples are
        bad. oldest: as in `decide_on_step`."""
        look_finding = Finding(step, Verdict.SHIFT, 1.0, onset)
        return oldest is not None and oldest < onset and not self._forbids_rewind(look_finding)

    def undo_steps(self, finding: Finding, reason: str) -> Decision:
        """Rewind to before the onset of what has raised no alarm, but was looked at and may be undone."""
        return self.escalate_trouble(finding, reason, finding.onset - 1)

    @property
    def may_suspect(self) -> bool:
        """Whether a checkpoint may be abandoned without proof against it: once, until there is new ground, and while
        hand-overs are left. An incident that recurs on an older one as well is not the checkpoint's fault."""
        barren_handovers = self.state.barren_handovers(self.config.verify_steps)
        return not barren_handovers and not self._tell_spent_handovers()

    def abandon_checkpoint(self, decision: Decision, reason: str, proven: bool) -> Decision:
        """Hand over because the resumed checkpoint is bad. If that is proven it costs no budget: each time an older one
        is used, so the hand-overs are finite."""
        if not proven:
            self._take(Action.HANDOVER, decision.finding.step, Cause.STORAGE)
        return replace(decision, action=Action.HANDOVER, reason=f"{decision.reason}; {reason}")

    def hand_over(
        self, finding: Finding, reason: str, damaged: bool = False, cause: Cause = Cause.UNKNOWN
    ) -> Decision:
        """Hand over to a restart from a checkpoint, if the budget allows. damaged: the state cannot be trained on."""
        if spent_budget := self._tell_spent_handovers():
            return self._train_on(finding, f"{reason}; {spent_budget}", damaged)
        self._take(Action.HANDOVER, finding.step, cause)
        return Decision(Action.HANDOVER, finding, reason)

    def escalate_trouble(
        self, finding: Finding, reason: str, oldest: int | None, damaged: bool = False
    ) -> Decision:
        """The lowest available rung above a refused update. A rewind's further remedy follows when its cause is known.
        oldest: as in `decide_on_step`. damaged: the state cannot be trained on."""
        # Memory first: a rewind costs some steps, a hand-over costs a restart and all steps since the checkpoint.
        # Without a snapshot from before the onset only a checkpoint can help. Where there is one, but rewinding is
        # forbidden, an older state would end as this one did: so the run trains on, unless the present state cannot be
        # trained on.
        s, next_rung = self.state, Action.REWIND
        has_older_snapshot = oldest is not None and oldest < finding.onset
        if not has_older_snapshot:
            have = "there is no snapshot" if oldest is None else f"the oldest snapshot is of step {oldest}"
            reason, next_rung = f"{reason}; {have}, and it began at step {finding.onset}", Action.HANDOVER
        elif forbidden_why := self._forbids_rewind(finding):
            reason, next_rung = f"{reason}; {forbidden_why}", Action.HANDOVER
            if not damaged:  # where memory still has a good state, an older one is no better
                return self._train_on(finding, reason, damaged)
        if next_rung is Action.HANDOVER and (spent_budget := self._tell_spent_handovers()):
            return self._train_on(finding, f"{reason}; {spent_budget}", damaged)
        if s.watching:
            s.recurrences += 1
        s.outliers = [(at, severity) for at, severity in s.outliers if finding.onset - at >= SUSPICION]
        s.refused, s.good = [], 0
        s.watching, s.tripped, s.watch_until = True, finding.step, finding.step + self.config.verify_steps
        self._take(next_rung, finding.step)
        return Decision(next_rung, finding, reason)

    def _train_on(self, finding: Finding, reason: str, damaged: bool) -> Decision:
        """The last rung: alert, and continue with refusals only; STOP if nothing can continue, or the settings say
        so."""
        s, c = self.state, self.config
        if damaged or c.last_resort == "stop":
            self._take(Action.STOP, finding.step)
            return Decision(Action.STOP, finding, reason)
        if finding.verdict is not Verdict.HEALTHY or not s.watching:
            s.watching, s.tripped, s.good = True, finding.step, 0
            s.watch_until = finding.step + c.verify_steps
        if s.alert is None:
            s.alert = Alert(step=finding.step, reason=reason)
            return Decision(Action.ALERT, finding, reason)
        action = Action.DISCARD if finding.verdict is Verdict.NON_FINITE else Action.APPLY
        return Decision(action, finding, f"alert since step {s.alert.step}: {reason}")

    def _take(
        self, action: Action, step: int, cause: Cause = Cause.UNKNOWN, corpus: str | None = None
    ) -> None:
        s = self.state
        s.taken.append(Taken(clock=s.clock, step=step, action=action, cause=cause, corpus=corpus))
        s.taken = [
            past_action for past_action in s.taken if s.clock - past_action.clock < self.config.budget_window
        ]

    # Handing over

    def carry_out_handover(self, cause: Cause, kernels: Sequence[str] = ()) -> str:
        """The decided hand-over takes place: returns the message on its side effects. Called when replays have proven
        or cleared the hardware. kernels: as in `Examined`.

        A hand-over that did not help leads to leaving FP8.
        """
        s, c = self.state, self.config
        s.taken[-1].cause, s.alert = cause, None
        if c.rewind_warmup and cause is not Cause.HARDWARE:
            s.rewound = s.clock  # `resume_from` sets its update
        is_second = self._count(Action.HANDOVER) > 1
        if kernels:
            return f"; {policy_state.leave_kernels(s, kernels)}"
        if cause in (Cause.HARDWARE, Cause.STORAGE):
            return ""
        if self.may_fall_back and (is_second or cause is Cause.NUMERICS):
            return f"; without FP8 from there on, {self._leave_fp8()}"
        return ""

    def cannot_hand_over(self, decision: Decision, reason: str, damaged: bool = False) -> Decision:
        """There is no checkpoint to go back to. damaged: the state is not finite."""
        s = self.state
        if s.taken and s.taken[-1].action is Action.HANDOVER:
            s.taken.pop()
        return self._train_on(decision.finding, f"{decision.reason}; {reason}", damaged)

    def resume_from(self, step: int, updates: int) -> None:
        """A new process continues from `step`. Any verification continues, past the step that tripped."""
        s = self.state
        policy_state.move_limits_back(s.limits, updates)
        s.rewound = None if s.rewound is None else min(s.rewound, updates)
        if s.rewarm is not None and updates < s.rewarm:
            # An older state, of before it; moments that begin again are gone with it, too.
            s.rewarm = updates
            for past_action in s.taken:
                past_action.remedy = "" if past_action.remedy in ONCE else past_action.remedy
        s.refused = [refused_step for refused_step in s.refused if refused_step <= step]

    # Budgets

    def _count(self, action: Action, *causes: Cause, within: int | None = None) -> int:
        """How often `action` was taken, for one of `causes` if given, in the window of new ground."""
        window_begin = self.state.clock - (within or self.config.budget_window)
        return sum(
            past_action.action is action
            and past_action.clock > window_begin
            and (not causes or past_action.cause in causes)
            for past_action in self.state.taken
        )

    def _tell_spent(self, counts: Mapping[str, tuple[int, int]]) -> str:
        """Which budget is spent, as a clause; "" if none is. counts: of actions, and how many there may be, by name."""
        spent = [
            f"the {most} {count_name}"
            for count_name, (taken_count, most) in counts.items()
            if taken_count >= most
        ]
        return (
            f"{spent[0]} per {self.config.budget_window} steps (policy.budget_window) are spent"
            if spent
            else ""
        )

    def _tell_spent_handovers(self) -> str:
        return self._tell_spent({"handovers": (self._count(Action.HANDOVER), self.config.handovers)})

    def _tell_spent_rewinds(self) -> str:
        """Proven bad data is no sign that rewinding does not help, nor is hardware that was wrong: each has its own."""
        c, window_begin = self.config, self.state.clock - self.config.budget_window
        proven_rewinds = sum(
            t.proven and t.clock > window_begin for t in self.state.taken if t.action is Action.REWIND
        )
        hardware = self._count(Action.REWIND, Cause.HARDWARE)
        other_rewinds = self._count(Action.REWIND) - proven_rewinds - hardware
        return self._tell_spent(
            {"rewinds": (other_rewinds, c.rewinds), "rewinds for bad data": (proven_rewinds, c.data_rewinds),
             "rewinds for hardware": (hardware, c.rewinds)}
        )  # fmt: skip

    def _forbids_rewind(self, finding: Finding) -> str:
        """Why the run may not be rewound for a finding, as a clause; empty if it may."""
        if spent_budget := self._tell_spent_rewinds():
            return spent_budget
        # Such a state cannot be trained on: nothing else is left, wherever it happens and whatever was done again.
        if finding.verdict in (Verdict.NON_FINITE, Verdict.CORRUPTED):
            return ""
        # A further rewind to the same place would end as the others did. Those for hardware do not count: the steps
        # themselves were harmless.
        s = self.state
        rewinds_here = [
            t for t in s.taken
            if t.action is Action.REWIND and t.cause is not Cause.HARDWARE and abs(t.step - finding.step) < SUSPICION
        ]  # fmt: skip
        if len(rewinds_here) >= SAME_PLACE:
            first_step, *_, last_step = sorted(t.step for t in rewinds_here)
            place_text = (
                f"step {last_step}" if first_step == last_step else f"steps {first_step} to {last_step}"
            )
            return f"it was rewound {len(rewinds_here)} times around {place_text} already"
        # The steps of a wait are paid for: whoever allowed it allowed that they may be lost.
        if not self._has_waited and not self.may_redo(finding.step - finding.onset):
            return f"{s.redone} steps were done again already, of {s.clock}"
        return ""

    def may_redo(self, steps: int) -> bool:
        """Whether the run may do so many steps again."""
        s = self.state
        return s.redone + steps < max(REDONE, REDONE_SHARE * s.clock)

    # After a rewind

    def has_recurred(self, adjacent: bool = False) -> bool:
        """Called before `choose_remedy`: whether the incident came back although no sample was found bad the last
        time: soon after it, or for the third time in a window. An incident next to skipped samples is attributed to
        data until shown otherwise."""
        soon = self._count(Action.REWIND, *BLAMELESS, within=self.config.recur_steps)
        return not adjacent and (soon > 0 or self._count(Action.REWIND, *BLAMELESS) > 1)

    def may_swap(self, corpus: str) -> bool:
        """Called before `choose_remedy`: whether samples of a corpus were bad so often that the run is to be tried
        without."""
        proven_rewinds = [
            past_action
            for past_action in self.state.taken
            if past_action.action is Action.REWIND and past_action.proven and past_action.corpus == corpus
        ]
        return (
            len(proven_rewinds) >= self.config.swap_after
            and self._count(Action.SWAP_CORPUS) < self.config.swaps
        )

    def choose_remedy(
        self, cause: Cause, updates: int, corpus: str | None = None, swap: str = "",
        proven: bool = False, bad: Sequence[int] = (), kernels: Sequence[str] = (),
    ) -> Remedy:  # fmt: skip
        """The further action on the rewound state, and why; REWIND: skipping or deferring is enough.

        cause: of the experiments. updates: of that state. corpus: of most of the bad samples; swap: why it is left out,
        if the branch without it has won. bad: positions of the bad samples; proven: a trial has clearly shown that they
        do harm, or they were not finite; else they are released if the rate soon proves to be the cause. kernels: names
        of those without which the step is harmless.
        """
        s = self.state
        policy_state.move_limits_back(s.limits, updates)
        last_action = s.taken[-1]
        last_action.cause, last_action.corpus = cause, corpus
        if cause is Cause.DATA:
            self._found_bad(bad, proven)
        match cause:
            case Cause.DATA:
                chosen_remedy = Remedy(Action.REWIND, cause, "the bad samples are skipped")
                if swap:
                    self._take(Action.SWAP_CORPUS, s.tripped, cause, corpus)
                    chosen_remedy = Remedy(Action.SWAP_CORPUS, cause, swap)
            case Cause.NUMERICS:
                chosen_remedy = self._against_numerics(kernels)
            case Cause.HARDWARE:
                chosen_remedy = self._against_hardware()
            case _:
                chosen_remedy = Remedy(Action.REWIND, cause, "no samples in particular are bad")
        if chosen_remedy.action is not Action.ALERT:
            s.alert = None
        return chosen_remedy

    def _against_hardware(self) -> Remedy:
        c = self.config
        if self._count(Action.REWIND, Cause.HARDWARE) < c.hardware:
            return Remedy(Action.REWIND, Cause.HARDWARE, "the data is harmless: nothing is skipped")
        decision_reason = f"{c.hardware} incidents that do not recur on the same data and state"
        if spent_budget := self._tell_spent_handovers():
            return self._pause(Cause.HARDWARE, f"{decision_reason}; {spent_budget}")
        self._take(Action.HANDOVER, self.state.tripped, Cause.HARDWARE)
        return Remedy(Action.HANDOVER, Cause.HARDWARE, decision_reason)

    def _against_numerics(self, kernels: Sequence[str]) -> Remedy:
        s, c = self.state, self.config
        if kernels:
            self._take(Action.FALL_BACK, s.tripped, Cause.NUMERICS)
            return Remedy(Action.FALL_BACK, Cause.NUMERICS, policy_state.leave_kernels(s, kernels))
        if not self.may_fall_back:
            decision_reason = f"no fall-backs from FP8 are left (stability.policy.fallbacks={c.fallbacks})"
            return self._pause(Cause.NUMERICS, decision_reason)
        decision_reason = f"without FP8 from here on, {self._leave_fp8()}"
        self._take(Action.FALL_BACK, s.tripped, Cause.NUMERICS)
        return Remedy(Action.FALL_BACK, Cause.NUMERICS, decision_reason)

    def _pause(self, cause: Cause, reason: str) -> Remedy:
        """On the rewound state: take no further action, and notify a person."""
        s = self.state
        if self.config.last_resort == "stop":
            self._take(Action.STOP, s.tripped, cause)
            return Remedy(Action.STOP, cause, reason)
        s.alert = s.alert or Alert(step=s.tripped, reason=reason)
        return Remedy(Action.ALERT, cause, reason)

    # Remedies that are tried

    def offer_remedies(
        self, updates: int, good_rate: float | None, rate: float | None, kernels: Sequence[str] = ()
    ) -> list[Offer]:
        """What may be tried on the rewound state, the least intrusive first, each with the policy that it would lead
        to: a copy of this one.

        Args:
            updates: applied ones of that state.
            good_rate, rate: scheduled, at that state and when it tripped; None if unknown.
            kernels: names of those that the run uses, or has left.
        """
        s, c, offers = self.state, self.config, list[Offer]()
        was_lifted = policy_state.find_lately_lifted(s.limits, s.clock, c.recur_steps) is not None
        # The limit that was lifted may return, and a further cut be tried, although the trouble came back.
        failed_remedies = {t.remedy for t in s.taken if s.clock - t.clock <= c.recur_steps}
        failed_remedies -= {"cut_lr", "cap_lr"} if was_lifted else {"cut_lr"}
        rate_jumped = good_rate is not None and rate is not None and rate > policy_state.JUMP * good_rate
        limits_left = not policy_state.are_limits_spent(s.limits, c)
        used_kernels = [kernel_name for kernel_name in kernels if kernel_name not in s.kernels]
        possible: dict[str, bool] = {
            "cap_lr": was_lifted or (rate_jumped and limits_left),
            "cut_lr": limits_left and not was_lifted,
            "leave_fp8": self.may_fall_back,
            "other_kernels": bool(used_kernels) and self.may_leave_kernels,
            **dict.fromkeys(("rewarm", *ONCE), True),
            **{name: name not in s.adjusted for name in ADJUSTED},
        }
        for name in get_args(RemedyName):
            if name not in c.remedies or name in failed_remedies or not possible[name]:
                continue
            other_policy = Policy(c, s.model_copy(deep=True), self.has_fp8)
            policy_state.move_limits_back(other_policy.state.limits, updates)
            offered_remedy = other_policy._change(name, updates, good_rate, rate, used_kernels)
            offers.append(
                Offer(name, other_policy, offered_remedy, tuple(other_policy.state.kernels[len(s.kernels) :]))
            )
        return offers

    def _change(
        self, name: str, updates: int, good_rate: float | None, rate: float | None, used: Sequence[str]
    ) -> Remedy:
        """Change the state by an offered remedy. used: kernels that may be left; others as in `offer_remedies`."""
        s, c = self.state, self.config
        warmup_text = f"the learning rate warms up again, over {c.rewarm_steps} updates"
        match name:
            case "cap_lr" | "cut_lr":
                rate_limit = policy_state.find_lately_lifted(s.limits, s.clock, c.recur_steps)
                if rate_limit is not None:  # the one that was lifted last returns
                    rate_limit.lifted, rate_limit.times = None, rate_limit.times + 1
                    rate_limit.updates, rate_limit.clock = updates, s.clock
                else:
                    rate_limit = Limit(kind="cut", value=c.cut_factor, updates=updates, clock=s.clock)
                    if name == "cap_lr":
                        rate_limit.kind, rate_limit.value = "cap", good_rate or 0.0
                        rate_limit.scheduled = rate
                    s.limits.append(rate_limit)
                least_steps = policy_state.limit_duration(s.limits, rate_limit, c)
                lasting_text = f"for {least_steps} steps of new ground at least"
                if least_steps is None:
                    lasting_text = f"for good (policy.cuts={c.cuts}, policy.cut_rest={c.cut_rest})"
                action = Action.CAP_LR if rate_limit.kind == "cap" else Action.CUT_LR
                decision_reason = f"{policy_state.describe_limit(rate_limit)}, {lasting_text}"
                return Remedy(action, Cause.LEARNING_RATE, decision_reason)
            case "leave_fp8":
                decision_reason = f"without FP8 from here on, {self._leave_fp8()}"
                return Remedy(Action.FALL_BACK, Cause.NUMERICS, decision_reason)
            case "other_kernels":
                return Remedy(Action.FALL_BACK, Cause.NUMERICS, policy_state.leave_kernels(s, used))
            case "rewarm":
                s.rewarm = updates
                return Remedy(Action.ADJUST, Cause.STATE, warmup_text)
            case "reset_bias":
                return Remedy(Action.ADJUST, Cause.STATE, "the biases of all experts begin again at zero")
            case "past_routing":
                decision_reason = "for 64 updates experts are chosen by router weights of 8 to 16 updates ago"
                return Remedy(Action.ADJUST, Cause.STATE, decision_reason)
            case "reset_moments":
                s.rewarm = updates
                decision_reason = f"the optimizer's moments begin again at zero, and {warmup_text}"
                return Remedy(Action.ADJUST, Cause.MOMENTS, decision_reason)
        s.adjusted.append(name)
        return Remedy(Action.ADJUST, Cause.MOMENTS if name == "beta2" else Cause.STATE, ADJUSTED[name])

    def may_try_remedies(self, steps: int, run: int) -> bool:
        """Whether branches with remedies of so many steps together may be trained, in a run of `run` steps."""
        return self.state.tried + steps <= max(TRIED, TRIED_SHARE * run)

    def take_back_failed(self) -> list[str]:
        """Take back the lasting changes after which the trouble came back soon: they did not help. Their names."""
        s = self.state
        soon = [t for t in s.taken if s.clock - t.clock <= self.config.recur_steps]
        failed_names = [t.remedy for t in soon if t.remedy in s.adjusted or t.kernels]
        s.adjusted = [change_name for change_name in s.adjusted if change_name not in failed_names]
        s.kernels = [
            change_name for change_name in s.kernels if not any(change_name in t.kernels for t in soon)
        ]
        for t in soon:
            t.kernels = ()
        return failed_names

    def adopt_remedy(self, offer: Offer, reason: str) -> Remedy:
        """Go on with a remedy whose branch has won, for this reason."""
        tried_steps, self.state = self.state.tried, offer.policy.state
        self.state.tried = tried_steps
        last_action = self.state.taken[-1]
        last_action.cause, last_action.proven, last_action.unproven = offer.remedy.cause, False, ()
        release = self._unproven_lately() if offer.remedy.action in (Action.CAP_LR, Action.CUT_LR) else ()
        self._take(offer.remedy.action, self.state.tripped, offer.remedy.cause)
        self.state.taken[-1].remedy, self.state.alert = offer.name, None
        self.state.taken[-1].kernels = offer.kernels
        return replace(offer.remedy, reason=f"{offer.remedy.reason}: {reason}", release=release)

    def _unproven_lately(self) -> tuple[int, ...]:
        """The samples that were taken away lately without a clear trial."""
        s, window_begin = self.state, self.state.clock - self.config.recur_steps
        return tuple(
            position
            for past_action in s.taken
            if past_action.clock >= window_begin
            for position in past_action.unproven
        )

    # Numerics

    @property
    def may_leave_kernels(self) -> bool:
        return self.config.fallbacks > 0

    @property
    def fp8(self) -> bool:
        """Whether the coming step computes in FP8."""
        return self.has_fp8 and not self.state.resting

    @property
    def may_fall_back(self) -> bool:
        """Whether FP8 is on, and may be left."""
        return self.fp8 and len(self.state.fallbacks) < self.config.fallbacks

    @property
    def precision(self) -> str:
        """Why the coming step computes in FP8, or not: a sentence, after FP8 was left once."""
        return policy_state.explain_precision(self.state, self.config)

    def _leave_fp8(self) -> str:
        self.state.fallbacks.append(self.state.clock)
        return policy_state.tell_fallback(self.state, self.config)

    # The learning rate

    def follow_schedule(self, scheduled: float) -> None:
        """Call with the scheduled rate of every coming update, before `limit_rate`."""
        policy_state.follow_schedule(self.state.limits, self.state.clock, scheduled)

    def limit_rate(self, updates: int, scheduled: float) -> float:
        """The rate of the update after `updates` applied ones, with the schedule at `scheduled`."""
        s, c = self.state, self.config
        warmup_share = policy_state.warmup_share(s.rewound, updates, c.rewind_warmup, c.rewind_warmup_from)
        warmup_share = min(
            warmup_share, policy_state.warmup_share(s.rewarm, updates, c.rewarm_steps, REWARM_FROM)
        )
        return policy_state.limit_rate(s.limits, updates, scheduled, c.rewarm_steps, warmup_share)

    def note_rewind(self, updates: int, redone: int) -> bool:
        """The run was rewound to `updates` applied ones, by `redone` steps: whether the rate warms up from there."""
        s = self.state
        s.redone += redone
        s.rewarm = None if s.rewarm is None else min(s.rewarm, updates)
        if self.config.rewind_warmup:
            self.state.rewound = updates
        return self.config.rewind_warmup > 0

    def lift_limits(self, finding: Finding, updates: int, scheduled: float) -> list[str]:
        """Lift limits that have lasted long enough, or that the schedule has fallen below; a sentence for each.

        Called after an applied step, with the scheduled rate of its update.
        """
        s, c = self.state, self.config
        if not s.limits or s.watching or s.refused or not finding.on_trend:
            return []
        s.limits = policy_state.drop_settled_limits(s.limits, s.clock, c.budget_window)
        lifted_reasons = []
        for cap in policy_state.find_outgrown_caps(s.limits, finding.step, scheduled, c.verify_steps):
            s.limits.remove(cap)
            lifted_reasons.append(
                f"the schedule is at {scheduled:.3g}, no longer above {cap.highest_rate(scheduled):.3g}"
            )
        limit = policy_state.find_rested_limit(s.limits, s.clock, c)
        if limit is not None:
            limit.lifted, limit.lifted_updates = s.clock, updates
            lifted_reasons.append(
                f"{s.clock - limit.clock} steps of new ground on the trend since {policy_state.describe_limit(limit)}: "
                f"the old rate is tried again, over {c.rewarm_steps} updates"
            )
        return lifted_reasons
