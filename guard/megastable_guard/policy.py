"""The policy: from verdicts, history and budgets to an action. Pure: training, dry run and backtest share this code.

The ladder: apply < discard < rewind (and skip or defer) < what wins among the remedies that are tried < swap the corpus
out < hand over to a restart from a checkpoint < alert (train on, refuse single updates, notify a person). Reversible
before irreversible: what changes how the run trains is offered by `offer_remedies`, and taken only if its branch wins.
An exhausted budget pauses the remedy, not the run. STOP is reserved for non-finite numbers with nothing to go back to,
and for `last_resort=stop`. `decide` is called before every update; `remedy` or `adopt` after a rewind, with the
findings; `relax` lifts limits of the rate; `fp8` says whether the coming step computes in FP8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from megastable_guard import learning_rate_limits, policy_state
from megastable_guard.actions import Action, Cause, Decision, Remedy
from megastable_guard.guard_config import PolicyConfig, RemedyName
from megastable_guard.learning_rate_limits import Limit
from megastable_guard.policy_state import Alert, PolicyState, Taken
from megastable_guard.signals import Finding, Verdict

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
# Lasting changes, in words; engine/adjustments.py makes them.
ADJUSTED = {
    "clip": "gradients are clipped at a quarter of optimizer.clip for the rest of the run",
    "qk_clip": "attention logits are kept at 100 or less by QK-clip for the rest of the run",
    "z_loss": "the z-loss is ten times as large for the rest of the run",
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

    def decide(self, finding: Finding, oldest: int | None) -> Decision:
        """The action on a step. oldest: step of the oldest snapshot; None = there is none."""
        s, c, step = self.state, self.config, finding.step
        s.clock = max(s.clock, step)
        s.refused = [refused for refused in s.refused if 0 <= step - refused < SUSPICION]
        if finding.verdict is Verdict.HEALTHY:
            return self._decide_on_healthy(finding, oldest)
        if finding.verdict is Verdict.SHIFT or (finding.verdict is Verdict.OUTLIER and finding.severity < 1):
            return Decision(Action.APPLY, finding, finding.reason)
        if self._has_waited:
            finding = replace(finding, onset=min(finding.onset, s.tripped))
        single = finding.verdict in (Verdict.OUTLIER, Verdict.NON_FINITE)
        most = c.non_finite if finding.verdict is Verdict.NON_FINITE else c.discards
        if single and len(s.refused) + 1 < most:
            if known := self._is_known_outlier(finding):
                return Decision(Action.APPLY, finding, known)
            s.refused.append(step)
            return Decision(Action.DISCARD, finding, finding.reason)
        if self.is_waiting(step) and finding.verdict is not Verdict.NON_FINITE:
            return Decision(
                Action.APPLY, finding, f"left to itself until step {s.waits_until}: {finding.reason}"
            )
        reason = finding.reason
        if single:
            reason = f"{len(s.refused) + 1} updates stood out within {SUSPICION} steps; {reason}"
            finding = replace(finding, onset=min([finding.onset, *s.refused]))
        return self.escalate(finding, reason, oldest)

    def _decide_on_healthy(self, finding: Finding, oldest: int | None) -> Decision:
        """Apply, unless the last action is not proven in time."""
        s, c = self.state, self.config
        healed = self._healed(finding)
        if s.watching and finding.step >= s.watch_until and not finding.on_trend:
            since = replace(finding, onset=min(finding.onset, s.tripped))
            steps = c.wait if self._has_waited else c.verify_steps
            return self.escalate(since, f"not back on the trend {steps} steps after the last action", oldest)
        if finding.on_trend and policy_state.is_fallback_over(s, c):
            s.returns.append(s.clock)
        return Decision(Action.APPLY, finding, "", healed=healed)

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

    def wait(self, finding: Finding) -> int:
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

    def skipped(self, positions: Sequence[int], proven: bool) -> None:
        """Bad samples were skipped without a rewind. If an action was being verified, they explain its incident.
        proven: as in `remedy`."""
        s = self.state
        last = next((t for t in reversed(s.taken) if t.action is Action.REWIND), None)
        if s.watching and last is not None:
            last.cause, last.proven = Cause.DATA, last.proven or proven
        self._take(Action.SKIP, s.clock, Cause.DATA)
        self._found_bad(positions, proven)

    def _found_bad(self, positions: Sequence[int], proven: bool) -> None:
        """What the action that was taken last takes away."""
        last = self.state.taken[-1]
        last.proven, last.unproven = proven, () if proven else tuple(positions)

    def may_take_untried(self, count: int) -> bool:
        """Whether so many samples more may be taken away without a clear win in a trial."""
        s = self.state
        s.untried = [(clock, taken) for clock, taken in s.untried if s.clock - clock < UNTRIED_STEPS]
        return sum(taken for _, taken in s.untried) + count <= UNTRIED

    def are_costly(self, positions: Sequence[int]) -> bool:
        """Whether most of these samples were deferred by a trial, as they cost more than they teach."""
        places, known = np.asarray(positions), np.zeros(len(positions), dtype=bool)
        for first, end in self.state.costly:
            known |= (places >= first) & (places < end)
        return 2 * int(known.sum()) > len(positions)

    def take_untried(self, count: int) -> None:
        """So many were taken away."""
        self.state.untried.append((self.state.clock, count))

    def may_look_back(self, step: int, onset: int, oldest: int | None) -> bool:
        """Whether steps from `onset` up to `step` may be examined on an earlier state, and undone if samples are
        guilty. oldest: as in `decide`."""
        found = Finding(step, Verdict.SHIFT, 1.0, onset)
        return oldest is not None and oldest < onset and not self._forbids_rewind(found)

    def undo(self, finding: Finding, reason: str) -> Decision:
        """Rewind to before the onset of what has raised no alarm, but was looked at and may be undone."""
        return self.escalate(finding, reason, finding.onset - 1)

    @property
    def may_suspect(self) -> bool:
        """Whether a checkpoint may be abandoned without proof against it: once, until there is new ground, and while
        hand-overs are left. An incident that recurs on an older one as well is not the checkpoint's fault."""
        barren = self.state.barren_handovers(self.config.verify_steps)
        return not barren and not self._tell_spent_handovers()

    def abandon(self, decision: Decision, reason: str, proven: bool) -> Decision:
        """Hand over because the resumed checkpoint is bad. If that is proven it costs no budget: each time an older one
        is used, so the hand-overs are finite."""
        if not proven:
            self._take(Action.HANDOVER, decision.finding.step, Cause.STORAGE)
        return replace(decision, action=Action.HANDOVER, reason=f"{decision.reason}; {reason}")

    def hand_over(
        self, finding: Finding, reason: str, damaged: bool = False, cause: Cause = Cause.UNKNOWN
    ) -> Decision:
        """Hand over to a restart from a checkpoint, if the budget allows. damaged: the state cannot be trained on."""
        if spent := self._tell_spent_handovers():
            return self._train_on(finding, f"{reason}; {spent}", damaged)
        self._take(Action.HANDOVER, finding.step, cause)
        return Decision(Action.HANDOVER, finding, reason)

    def escalate(self, finding: Finding, reason: str, oldest: int | None, damaged: bool = False) -> Decision:
        """The lowest available rung above a refused update. A rewind's further remedy follows when its cause is known.
        oldest: as in `decide`. damaged: the state cannot be trained on."""
        s, action = self.state, Action.REWIND
        untouched = oldest is not None and oldest < finding.onset
        if not untouched:
            have = "there is no snapshot" if oldest is None else f"the oldest snapshot is of step {oldest}"
            reason, action = f"{reason}; {have}, and it began at step {finding.onset}", Action.HANDOVER
        elif forbidden := self._forbids_rewind(finding):
            reason, action = f"{reason}; {forbidden}", Action.HANDOVER
            if not damaged:  # where memory still has a good state, an older one is no better
                return self._train_on(finding, reason, damaged)
        if action is Action.HANDOVER and (spent := self._tell_spent_handovers()):
            return self._train_on(finding, f"{reason}; {spent}", damaged)
        if s.watching:
            s.recurrences += 1
        s.outliers = [(at, severity) for at, severity in s.outliers if finding.onset - at >= SUSPICION]
        s.refused, s.good = [], 0
        s.watching, s.tripped, s.watch_until = True, finding.step, finding.step + self.config.verify_steps
        self._take(action, finding.step)
        return Decision(action, finding, reason)

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
        s.taken = [t for t in s.taken if s.clock - t.clock < self.config.budget_window]

    # Handing over

    def handing_over(self, cause: Cause, kernels: Sequence[str] = ()) -> str:
        """The decided hand-over takes place: returns the message on its side effects. Called when replays have proven
        or cleared the hardware. kernels: as in `Examined`.

        A hand-over that did not help leads to leaving FP8.
        """
        s, c = self.state, self.config
        s.taken[-1].cause, s.alert = cause, None
        if c.rewind_warmup and cause is not Cause.HARDWARE:
            s.rewound = s.clock  # `resumed` sets its update
        again = self._count(Action.HANDOVER) > 1
        if kernels:
            return f"; {policy_state.leave_kernels(s, kernels)}"
        if cause in (Cause.HARDWARE, Cause.STORAGE):
            return ""
        if self.may_fall_back and (again or cause is Cause.NUMERICS):
            return f"; without FP8 from there on, {self._leave_fp8()}"
        return ""

    def cannot_hand_over(self, decision: Decision, reason: str, damaged: bool = False) -> Decision:
        """There is no checkpoint to go back to. damaged: the state is not finite."""
        s = self.state
        if s.taken and s.taken[-1].action is Action.HANDOVER:
            s.taken.pop()
        return self._train_on(decision.finding, f"{decision.reason}; {reason}", damaged)

    def resumed(self, step: int, updates: int) -> None:
        """A new process continues from `step`. Any verification continues, past the step that tripped."""
        s = self.state
        learning_rate_limits.moved_back(s.limits, updates)
        s.rewound = None if s.rewound is None else min(s.rewound, updates)
        if s.rewarm is not None and updates < s.rewarm:
            # An older state, of before it; moments that begin again are gone with it, too.
            s.rewarm = updates
            for t in s.taken:
                t.remedy = "" if t.remedy == "reset_moments" else t.remedy
        s.refused = [refused for refused in s.refused if refused <= step]

    # Budgets

    def _count(self, action: Action, *causes: Cause, within: int | None = None) -> int:
        """How often `action` was taken, for one of `causes` if given, in the window of new ground."""
        since = self.state.clock - (within or self.config.budget_window)
        return sum(
            t.action is action and t.clock > since and (not causes or t.cause in causes)
            for t in self.state.taken
        )

    def _tell_spent(self, counts: Mapping[str, tuple[int, int]]) -> str:
        """Which budget is spent, as a clause; "" if none is. counts: of actions, and how many there may be, by name."""
        spent = [f"the {most} {name}" for name, (count, most) in counts.items() if count >= most]
        return (
            f"{spent[0]} per {self.config.budget_window} steps (stability.policy) are spent" if spent else ""
        )

    def _tell_spent_handovers(self) -> str:
        return self._tell_spent({"handovers": (self._count(Action.HANDOVER), self.config.handovers)})

    def _tell_spent_rewinds(self) -> str:
        """Proven bad data is no sign that rewinding does not help, nor is hardware that was wrong: each has its own."""
        c, since = self.config, self.state.clock - self.config.budget_window
        proven = sum(t.proven and t.clock > since for t in self.state.taken if t.action is Action.REWIND)
        hardware = self._count(Action.REWIND, Cause.HARDWARE)
        others = self._count(Action.REWIND) - proven - hardware
        return self._tell_spent(
            {"rewinds": (others, c.rewinds), "rewinds for bad data": (proven, c.data_rewinds),
             "rewinds for hardware": (hardware, c.rewinds)}
        )  # fmt: skip

    def _forbids_rewind(self, finding: Finding) -> str:
        """Why the run may not be rewound for a finding, as a clause; empty if it may."""
        if spent := self._tell_spent_rewinds():
            return spent
        if finding.verdict in (Verdict.NON_FINITE, Verdict.CORRUPTED):
            return ""  # nothing else is left
        s = self.state
        here = [
            t for t in s.taken
            if t.action is Action.REWIND and t.cause is not Cause.HARDWARE and abs(t.step - finding.step) < SUSPICION
        ]  # fmt: skip
        if len(here) >= SAME_PLACE:
            return f"it was rewound {SAME_PLACE} times around step {finding.step} already"
        # The steps of a wait are paid for: whoever allowed it allowed that they may be lost.
        if not self._has_waited and not self.may_redo(finding.step - finding.onset):
            return f"{s.redone} steps were done again already, of {s.clock}"
        return ""

    def may_redo(self, steps: int) -> bool:
        """Whether the run may do so many steps again."""
        s = self.state
        return s.redone + steps < max(REDONE, REDONE_SHARE * s.clock)

    # After a rewind

    def recurred(self, adjacent: bool = False) -> bool:
        """Called before `remedy`: whether the incident came back although no sample was found guilty the last time:
        soon after it, or for the third time in a window. An incident next to skipped samples is attributed to data
        until shown otherwise."""
        soon = self._count(Action.REWIND, *BLAMELESS, within=self.config.recur_steps)
        return not adjacent and (soon > 0 or self._count(Action.REWIND, *BLAMELESS) > 1)

    def may_swap(self, corpus: str) -> bool:
        """Called before `remedy`: whether samples of a corpus were bad so often that the run is to be tried without."""
        proven = [
            t for t in self.state.taken if t.action is Action.REWIND and t.proven and t.corpus == corpus
        ]
        return len(proven) >= self.config.swap_after and self._count(Action.SWAP_CORPUS) < self.config.swaps

    def remedy(
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
        learning_rate_limits.moved_back(s.limits, updates)
        last = s.taken[-1]
        last.cause, last.corpus = cause, corpus
        if cause is Cause.DATA:
            self._found_bad(bad, proven)
        match cause:
            case Cause.DATA:
                given = Remedy(Action.REWIND, cause, "the bad samples are skipped")
                if swap:
                    self._take(Action.SWAP_CORPUS, s.tripped, cause, corpus)
                    given = Remedy(Action.SWAP_CORPUS, cause, swap)
            case Cause.NUMERICS:
                given = self._against_numerics(kernels)
            case Cause.HARDWARE:
                given = self._against_hardware()
            case _:
                given = Remedy(Action.REWIND, cause, "no samples in particular are bad")
        if given.action is not Action.ALERT:
            s.alert = None
        return given

    def _against_hardware(self) -> Remedy:
        c = self.config
        if self._count(Action.REWIND, Cause.HARDWARE) < c.hardware:
            return Remedy(Action.REWIND, Cause.HARDWARE, "the data is innocent: nothing is skipped")
        reason = f"{c.hardware} incidents that do not recur on the same data and state"
        if spent := self._tell_spent_handovers():
            return self._pause(Cause.HARDWARE, f"{reason}; {spent}")
        self._take(Action.HANDOVER, self.state.tripped, Cause.HARDWARE)
        return Remedy(Action.HANDOVER, Cause.HARDWARE, reason)

    def _against_numerics(self, kernels: Sequence[str]) -> Remedy:
        s, c = self.state, self.config
        if kernels:
            self._take(Action.FALL_BACK, s.tripped, Cause.NUMERICS)
            return Remedy(Action.FALL_BACK, Cause.NUMERICS, policy_state.leave_kernels(s, kernels))
        if not self.may_fall_back:
            reason = f"no fall-backs from FP8 are left (stability.policy.fallbacks={c.fallbacks})"
            return self._pause(Cause.NUMERICS, reason)
        reason = f"without FP8 from here on, {self._leave_fp8()}"
        self._take(Action.FALL_BACK, s.tripped, Cause.NUMERICS)
        return Remedy(Action.FALL_BACK, Cause.NUMERICS, reason)

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
        failed = {t.remedy for t in s.taken if t.remedy and s.clock - t.clock <= c.recur_steps}
        lifted = learning_rate_limits.lifted_lately(s.limits, s.clock, c.recur_steps) is not None
        jumped = good_rate is not None and rate is not None and rate > learning_rate_limits.JUMP * good_rate
        limits_left = not learning_rate_limits.spent(s.limits, c)
        used = [kernel for kernel in kernels if kernel not in s.kernels]
        possible: dict[str, bool] = {
            "cap_lr": lifted or (jumped and limits_left and "cap_lr" not in failed),
            "cut_lr": limits_left and not lifted,
            "leave_fp8": self.may_fall_back and "leave_fp8" not in failed,
            "other_kernels": bool(used) and self.may_leave_kernels and "other_kernels" not in failed,
            "rewarm": "rewarm" not in failed,
            "reset_moments": "reset_moments" not in failed,
            **{name: name not in s.adjusted and name not in failed for name in ADJUSTED},
        }
        for name in get_args(RemedyName):
            if name not in c.remedies or not possible[name]:
                continue
            other = Policy(c, s.model_copy(deep=True), self.has_fp8)
            learning_rate_limits.moved_back(other.state.limits, updates)
            given = other._change(name, updates, good_rate, rate, used)
            offers.append(Offer(name, other, given, tuple(other.state.kernels[len(s.kernels) :])))
        return offers

    def _change(
        self, name: str, updates: int, good_rate: float | None, rate: float | None, used: Sequence[str]
    ) -> Remedy:
        """Change the state by an offered remedy. used: kernels that may be left; others as in `offer_remedies`."""
        s, c = self.state, self.config
        warmup = f"the learning rate warms up again, over {c.rewarm_steps} updates"
        match name:
            case "cap_lr" | "cut_lr":
                limit = learning_rate_limits.lifted_lately(s.limits, s.clock, c.recur_steps)
                if limit is not None:  # the one that was lifted last returns
                    limit.lifted, limit.times = None, limit.times + 1
                    limit.updates, limit.clock = updates, s.clock
                else:
                    limit = Limit(kind="cut", value=c.cut_factor, updates=updates, clock=s.clock)
                    if name == "cap_lr":
                        limit.kind, limit.value, limit.scheduled = "cap", good_rate or 0.0, rate
                    s.limits.append(limit)
                steps = learning_rate_limits.rest(s.limits, limit, c)
                lasting = f"for {steps} steps of new ground at least"
                if steps is None:
                    lasting = f"for good (stability.policy.cuts={c.cuts}, cut_rest={c.cut_rest})"
                action = Action.CAP_LR if limit.kind == "cap" else Action.CUT_LR
                reason = f"{learning_rate_limits.words(limit)}, {lasting}"
                return Remedy(action, Cause.LEARNING_RATE, reason)
            case "leave_fp8":
                reason = f"without FP8 from here on, {self._leave_fp8()}"
                return Remedy(Action.FALL_BACK, Cause.NUMERICS, reason)
            case "other_kernels":
                return Remedy(Action.FALL_BACK, Cause.NUMERICS, policy_state.leave_kernels(s, used))
            case "rewarm":
                s.rewarm = updates
                return Remedy(Action.ADJUST, Cause.STATE, warmup)
            case "reset_moments":
                s.rewarm = updates
                reason = f"the optimizer's moments begin again at zero, and {warmup}"
                return Remedy(Action.ADJUST, Cause.MOMENTS, reason)
        s.adjusted.append(name)
        return Remedy(Action.ADJUST, Cause.MOMENTS if name == "beta2" else Cause.STATE, ADJUSTED[name])

    def may_try_remedies(self, steps: int, run: int) -> bool:
        """Whether branches with remedies of so many steps together may be trained, in a run of `run` steps."""
        return self.state.tried + steps <= max(TRIED, TRIED_SHARE * run)

    def take_back_failed(self) -> list[str]:
        """Take back the lasting changes after which the trouble came back soon: they did not help. Their names."""
        s = self.state
        soon = [t for t in s.taken if s.clock - t.clock <= self.config.recur_steps]
        gone = [t.remedy for t in soon if t.remedy in s.adjusted or t.kernels]
        s.adjusted = [name for name in s.adjusted if name not in gone]
        s.kernels = [name for name in s.kernels if not any(name in t.kernels for t in soon)]
        for t in soon:
            t.kernels = ()
        return gone

    def adopt(self, offer: Offer, reason: str) -> Remedy:
        """Go on with a remedy whose branch has won, for this reason."""
        tried, self.state = self.state.tried, offer.policy.state
        self.state.tried = tried
        last = self.state.taken[-1]
        last.cause, last.proven, last.unproven = offer.remedy.cause, False, ()
        release = self._unproven_lately() if offer.remedy.action in (Action.CAP_LR, Action.CUT_LR) else ()
        self._take(offer.remedy.action, self.state.tripped, offer.remedy.cause)
        self.state.taken[-1].remedy, self.state.alert = offer.name, None
        self.state.taken[-1].kernels = offer.kernels
        return replace(offer.remedy, reason=f"{offer.remedy.reason}: {reason}", release=release)

    def _unproven_lately(self) -> tuple[int, ...]:
        """The samples that were taken away lately without a clear trial."""
        s, since = self.state, self.state.clock - self.config.recur_steps
        return tuple(position for t in s.taken if t.clock >= since for position in t.unproven)

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

    def follow(self, scheduled: float) -> None:
        """Call with the scheduled rate of every coming update, before `rate`."""
        learning_rate_limits.follow(self.state.limits, self.state.clock, scheduled)

    def rate(self, updates: int, scheduled: float) -> float:
        """The rate of the update after `updates` applied ones, with the schedule at `scheduled`."""
        s, c = self.state, self.config
        share = learning_rate_limits.after_rewind(s.rewound, updates, c.rewind_warmup, c.rewind_warmup_from)
        share = min(share, learning_rate_limits.after_rewind(s.rewarm, updates, c.rewarm_steps, REWARM_FROM))
        return learning_rate_limits.limited(s.limits, updates, scheduled, c.rewarm_steps, share)

    def rewound(self, updates: int, redone: int) -> bool:
        """The run was rewound to `updates` applied ones, by `redone` steps: whether the rate warms up from there."""
        s = self.state
        s.redone += redone
        s.rewarm = None if s.rewarm is None else min(s.rewarm, updates)
        if self.config.rewind_warmup:
            self.state.rewound = updates
        return self.config.rewind_warmup > 0

    def relax(self, finding: Finding, updates: int, scheduled: float) -> list[str]:
        """Lift limits that have lasted long enough, or that the schedule has fallen below; a sentence for each.

        Called after an applied step, with the scheduled rate of its update.
        """
        s, c = self.state, self.config
        if not s.limits or s.watching or s.refused or not finding.on_trend:
            return []
        s.limits = learning_rate_limits.settled(s.limits, s.clock, c.budget_window)
        told = []
        for cap in learning_rate_limits.outgrown(s.limits, finding.step, scheduled, c.verify_steps):
            s.limits.remove(cap)
            told.append(f"the schedule is at {scheduled:.3g}, no longer above {cap.highest(scheduled):.3g}")
        limit = learning_rate_limits.rested(s.limits, s.clock, c)
        if limit is not None:
            limit.lifted, limit.lifted_updates = s.clock, updates
            told.append(
                f"{s.clock - limit.clock} steps of new ground on the trend since {learning_rate_limits.words(limit)}: "
                f"the old rate is tried again, over {c.rewarm_steps} updates"
            )
        return told
