"""Verdicts, history and budgets in; what to do out. Pure: the training process, a dry run, the backtest and (later)
the supervisor decide by the same code.

The ladder: apply < discard < rewind (and skip) < cut the learning rate < swap the corpus out < hand over to a
restart from a checkpoint < stop. Each rung above discard has a budget per window of steps; a rung that is spent or did
not help leads to the next. `decide` is asked before every update; after a rewind `remedy` is told the cause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from megastable.stability.settings import PolicyConfig
from megastable.stability.signals import Finding, Verdict


class Action(StrEnum):
    APPLY = "apply"
    DISCARD = "discard"  # this update is refused; the data moves on
    REWIND = "rewind"  # back to a snapshot before the onset, skip, go on
    CUT_LR = "cut_lr"  # rewind, and go on with a smaller rate
    SWAP_CORPUS = "swap_corpus"  # rewind, and go on without a corpus
    HANDOVER = "handover"  # end the process: restart from a checkpoint before the onset
    STOP = "stop"  # end the run: a person is needed

    @property
    def ends(self) -> bool:
        return self in (Action.HANDOVER, Action.STOP)

    @property
    def rewinds(self) -> bool:
        return self in (Action.REWIND, Action.CUT_LR, Action.SWAP_CORPUS)


class Cause(StrEnum):
    DATA = "data"  # samples that are bad on the good state, too
    STATE = "state"  # the same data is harmless on the good state
    LEARNING_RATE = "learning_rate"  # it recurs with other data
    HARDWARE = "hardware"  # the same data on the same state gave something else
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Decision:
    """What to do about a step, and why. healed: the last action is proven by now."""

    action: Action
    finding: Finding
    reason: str
    healed: bool = False

    @property
    def applies(self) -> bool:
        return self.action is Action.APPLY


class Taken(BaseModel):
    """An action of the past. clock: the farthest step that had been reached by then: what is done again after a rewind
    is no new ground, and brings no budget back. corpus: the guilty one."""

    model_config = ConfigDict(extra="forbid")

    clock: int
    step: int
    action: Action
    cause: Cause = Cause.UNKNOWN
    corpus: str | None = None


class PolicyState(BaseModel):
    """All that the policy remembers. Kept over rewinds, in every checkpoint.

    clock: the farthest step so far. refused: steps of the discards that belong to no incident yet. watching: an action
    was taken at step `tripped` and is being verified until `watch_until`; good: steps on the trend since. recurrences:
    how often the present incident came back. cuts: updates at which the learning rate was cut.
    """

    model_config = ConfigDict(extra="forbid")

    clock: int = 0
    refused: list[int] = []
    watching: bool = False
    tripped: int = 0
    watch_until: int = 0
    good: int = 0
    recurrences: int = 0
    taken: list[Taken] = []
    cuts: list[int] = []


SUSPICION = 16  # steps after which a refused update is forgotten: bad regions are a few batches long


class Policy:
    """Decides for one run. `state` is its memory."""

    def __init__(self, config: PolicyConfig, state: PolicyState | None = None) -> None:
        self.config = config
        self.state = state or PolicyState()

    # Before an update

    def decide(self, finding: Finding, oldest: int | None) -> Decision:
        """What to do about a step. oldest: step of the oldest snapshot there is; None = there is none."""
        s, c, step = self.state, self.config, finding.step
        s.clock = max(s.clock, step)
        s.refused = [refused for refused in s.refused if 0 <= step - refused < SUSPICION]
        if finding.verdict is Verdict.HEALTHY:
            healed = self._healed(finding)
            if s.watching and step >= s.watch_until and not finding.on_trend:
                since = replace(finding, onset=min(finding.onset, s.tripped))
                reason = f"not back on the trend {c.verify_steps} steps after the last action"
                return self._climb(since, reason, oldest)
            return Decision(Action.APPLY, finding, "", healed=healed)
        if finding.verdict is Verdict.OUTLIER and finding.severity < 1:
            return Decision(Action.APPLY, finding, finding.reason)
        if finding.verdict in (Verdict.OUTLIER, Verdict.NON_FINITE):
            s.refused.append(step)
            most = c.non_finite if finding.verdict is Verdict.NON_FINITE else c.discards
            if len(s.refused) < most:
                return Decision(Action.DISCARD, finding, finding.reason)
            count = f"{len(s.refused)} updates were refused within {SUSPICION} steps"
            since = replace(finding, onset=min(finding.onset, *s.refused))
            return self._climb(since, f"{count}; {finding.reason}", oldest)
        return self._climb(finding, finding.reason, oldest)

    def _healed(self, finding: Finding) -> bool:
        """Whether the last action is proven: enough steps on the trend beyond the one it tripped at. Ends the watch."""
        s = self.state
        s.good += s.watching and finding.step > s.tripped and finding.on_trend
        if not s.watching or s.good < max(1, self.config.verify_steps // 2):
            return False
        s.watching, s.recurrences = False, 0
        return True

    def escalate(self, finding: Finding, reason: str, oldest: int | None) -> Decision:
        """A discarded update that turned out to be worse: the state itself is damaged."""
        return self._climb(finding, reason, oldest)

    def leave(self, decision: Decision, reason: str) -> Decision:
        """A rewind that cannot be carried out after all."""
        action = self._last_resort(decision.finding.step)
        return replace(decision, action=action, reason=f"{decision.reason}; {reason}")

    def _climb(self, finding: Finding, reason: str, oldest: int | None) -> Decision:
        """The lowest rung that may be taken. A rewind's further remedy follows when its cause is known."""
        s = self.state
        if s.watching:
            s.recurrences += 1
        action = Action.REWIND
        if self._spent(action):
            action, reason = Action.HANDOVER, f"{reason}; {self._budget(Action.REWIND)} are spent"
        elif oldest is None or oldest >= finding.onset:
            have = "there is no snapshot" if oldest is None else f"the oldest snapshot is of step {oldest}"
            action = Action.HANDOVER
            reason = f"{reason}; {have}, and it began at step {finding.onset}"
        s.refused, s.good = [], 0
        s.watching, s.tripped, s.watch_until = True, finding.step, finding.step + self.config.verify_steps
        if action is Action.HANDOVER:
            action = self._last_resort(finding.step)
            if action is Action.STOP:
                reason = f"{reason}; {self._budget(Action.HANDOVER)} are spent"
        else:
            self._take(action, finding.step)
        return Decision(action, finding, reason)

    def _take(
        self, action: Action, step: int, cause: Cause = Cause.UNKNOWN, corpus: str | None = None
    ) -> None:
        s = self.state
        s.taken.append(Taken(clock=s.clock, step=step, action=action, cause=cause, corpus=corpus))
        s.taken = [t for t in s.taken if s.clock - t.clock < self.config.budget_window]

    def _last_resort(self, step: int) -> Action:
        action = Action.STOP if self._spent(Action.HANDOVER) else Action.HANDOVER
        self._take(action, step)
        return action

    def _count(self, action: Action, *causes: Cause, within: int | None = None) -> int:
        """How often `action` was taken, for one of `causes` if given, in the window of new ground."""
        since = self.state.clock - (within or self.config.budget_window)
        return sum(
            t.action is action and t.clock > since and (not causes or t.cause in causes)
            for t in self.state.taken
        )

    def _limit(self, action: Action) -> int:
        c = self.config
        return {
            Action.REWIND: c.rewinds,
            Action.SWAP_CORPUS: c.swaps,
            Action.HANDOVER: c.handovers,
        }[action]

    def _spent(self, action: Action) -> bool:
        return self._count(action) >= self._limit(action)

    def _budget(self, action: Action) -> str:
        limit = self._limit(action)
        return f"the {limit} {action.value}s per {self.config.budget_window} steps (stability.policy)"

    # After a rewind

    def remedy(self, cause: Cause, updates: int, culprit: str | None, may_swap: bool) -> tuple[Action, str]:
        """What else is done on the rewound state, and why; REWIND: skipping what attribution names is enough.

        updates: of that state. culprit: the corpus of most guilty samples; may_swap: enough is left without it.
        """
        s, c = self.state, self.config
        s.taken[-1].cause, s.taken[-1].corpus = cause, culprit
        s.cuts = [min(cut, updates) for cut in s.cuts]
        if cause is Cause.DATA:
            guilty = sum(
                t.action is Action.REWIND and t.cause is Cause.DATA and t.corpus == culprit for t in s.taken
            )
            if guilty >= c.swap_after and may_swap and not self._spent(Action.SWAP_CORPUS):
                self._take(Action.SWAP_CORPUS, s.tripped, cause, culprit)
                reason = f"{guilty} incidents with data of {culprit} within {c.budget_window} steps"
                return Action.SWAP_CORPUS, reason
            return Action.REWIND, "the guilty samples are skipped"
        if cause is Cause.HARDWARE:
            if self._count(Action.REWIND, Cause.HARDWARE) >= c.hardware:
                reason = f"{c.hardware} incidents that do not recur on the same data and state"
                return self._last_resort(s.tripped), reason
            return Action.REWIND, "the data is innocent: nothing is skipped"
        if cause is Cause.LEARNING_RATE:
            if len(s.cuts) >= c.cuts:
                reason = f"the {c.cuts} cuts of a run (stability.policy.cuts) are spent"
                return self._last_resort(s.tripped), reason
            s.cuts.append(updates)
            self._take(Action.CUT_LR, s.tripped, cause)
            return Action.CUT_LR, f"the learning rate is multiplied by {c.cut_factor} and warmed up again"
        return Action.REWIND, "nobody in particular is guilty: the window is skipped"

    def recurred(self) -> bool:
        """Asked before `remedy`: whether what is acted on came back although nobody was found guilty the last time:
        soon after it, or for the third time in a window."""
        c, blameless = self.config, (Cause.STATE, Cause.LEARNING_RATE)
        soon = self._count(Action.REWIND, *blameless, within=c.recur_steps)
        return soon > 0 or self._count(Action.REWIND, *blameless) > 1

    def resumed(self, step: int, updates: int) -> None:
        """A new process goes on from `step`. What was being verified still is, beyond the step that tripped."""
        s = self.state
        s.cuts = [min(cut, updates) for cut in s.cuts]
        s.refused = [refused for refused in s.refused if refused <= step]

    # The learning rate

    def rate_factor(self, updates: int) -> float:
        """What the schedule's rate is multiplied by at the update after `updates` applied ones."""
        s, c = self.state, self.config
        factor = c.cut_factor ** len(s.cuts)
        since = updates - s.cuts[-1] if s.cuts else c.rewarm_steps
        if since >= c.rewarm_steps:
            return factor
        return factor * (0.1 + 0.9 * max(0, since) / c.rewarm_steps)
