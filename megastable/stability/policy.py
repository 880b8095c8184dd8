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
    """An action of the past. clock: steps the process had looked at by then (unlike step, it never goes back)."""

    model_config = ConfigDict(extra="forbid")

    clock: int
    step: int
    action: Action
    cause: Cause = Cause.UNKNOWN


class PolicyState(BaseModel):
    """All that the policy remembers. Kept over rewinds, in every checkpoint.

    refused: clocks of the discards that belong to no incident yet. watching: an action was taken and is being verified,
    until step `watch_until`. tripped: the step at which it was taken. recurrences: how often the present incident came
    back. cuts: updates at which the learning rate was cut.
    """

    model_config = ConfigDict(extra="forbid")

    clock: int = 0
    refused: list[int] = []
    watching: bool = False
    tripped: int = 0
    watch_until: int = 0
    recurrences: int = 0
    taken: list[Taken] = []
    cuts: list[int] = []


SUSPICION = 16  # steps after which a refused update is forgotten: bad regions are a few batches long
LADDER = (Action.REWIND, Action.CUT_LR, Action.SWAP_CORPUS, Action.HANDOVER, Action.STOP)


class Policy:
    """Decides for one run. `state` is its memory."""

    def __init__(self, config: PolicyConfig, state: PolicyState | None = None) -> None:
        self.config = config
        self.state = state or PolicyState()

    # Before an update

    def decide(self, finding: Finding, oldest: int | None) -> Decision:
        """What to do about a step. oldest: step of the oldest snapshot there is; None = there is none."""
        s, c = self.state, self.config
        s.clock += 1
        s.refused = [clock for clock in s.refused if s.clock - clock < SUSPICION]
        if finding.verdict is Verdict.HEALTHY:
            if s.watching and finding.step >= s.watch_until and not finding.on_trend:
                since = replace(finding, onset=min(finding.onset, s.tripped))
                reason = f"not back on the trend {c.verify_steps} steps after the last action"
                return self._climb(since, reason, oldest)
            return Decision(Action.APPLY, finding, "", healed=self._healed(finding))
        if finding.verdict is Verdict.OUTLIER and finding.severity < 1:
            return Decision(Action.APPLY, finding, finding.reason)
        if finding.verdict in (Verdict.OUTLIER, Verdict.NON_FINITE):
            s.refused.append(s.clock)
            most = c.non_finite if finding.verdict is Verdict.NON_FINITE else c.discards
            if len(s.refused) < most:
                return Decision(Action.DISCARD, finding, finding.reason)
            count = f"{len(s.refused)} updates were refused within {SUSPICION} steps"
            return self._climb(finding, f"{count}; {finding.reason}", oldest)
        return self._climb(finding, finding.reason, oldest)

    def _healed(self, finding: Finding) -> bool:
        """Whether the last action is proven: well beyond the step it tripped at, and on the trend. Ends the watch."""
        s = self.state
        early = finding.step < s.watch_until - self.config.verify_steps // 2
        if not s.watching or early or not finding.on_trend:
            return False
        s.watching, s.recurrences = False, 0
        return True

    def escalate(self, finding: Finding, reason: str, oldest: int | None) -> Decision:
        """A discarded update that turned out to be worse: the state itself is damaged."""
        return self._climb(finding, reason, oldest)

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
            action, reason = (
                Action.HANDOVER,
                f"{reason}; {have}, and it began at step {finding.onset}",
            )
        if action is Action.HANDOVER and self._spent(action):
            action, reason = Action.STOP, f"{reason}; {self._budget(Action.HANDOVER)} are spent"
        self._take(action, finding.step)
        return Decision(action, finding, reason)

    def _take(self, action: Action, step: int) -> None:
        s = self.state
        s.refused = []
        s.watching, s.tripped, s.watch_until = True, step, step + self.config.verify_steps
        s.taken.append(Taken(clock=s.clock, step=step, action=action))
        s.taken = [t for t in s.taken if s.clock - t.clock < self.config.budget_window]

    def _count(self, action: Action, cause: Cause | None = None) -> int:
        since = self.state.clock - self.config.budget_window
        return sum(
            t.action is action and t.clock > since and cause in (None, t.cause) for t in self.state.taken
        )

    def _limit(self, action: Action) -> int:
        c = self.config
        limits = {
            Action.REWIND: c.rewinds, Action.CUT_LR: c.cuts, Action.SWAP_CORPUS: c.swaps, Action.HANDOVER: c.handovers,
        }  # fmt: skip
        return limits[action]

    def _spent(self, action: Action) -> bool:
        return self._count(action) >= self._limit(action)

    def _budget(self, action: Action) -> str:
        limit = self._limit(action)
        return f"the {limit} {action.value}s per {self.config.budget_window} steps (stability.policy)"

    # After a rewind

    def remedy(self, cause: Cause, updates: int, corpora_left: int) -> tuple[Action, str]:
        """What else is done on the rewound state, and why. updates: of that state. corpora_left: blended in still.

        REWIND: skipping what attribution names is enough.
        """
        s, c = self.state, self.config
        s.taken[-1].cause = cause
        if cause is Cause.DATA:
            guilty = self._count(Action.REWIND, Cause.DATA)
            if guilty >= c.swap_after and corpora_left > 1 and not self._spent(Action.SWAP_CORPUS):
                self._note(Action.SWAP_CORPUS)
                return Action.SWAP_CORPUS, f"{guilty} data incidents within {c.budget_window} steps"
            return Action.REWIND, "the guilty samples are skipped"
        if cause is Cause.HARDWARE:
            if self._count(Action.REWIND, Cause.HARDWARE) >= c.hardware:
                return self._leave(f"{c.hardware} incidents that do not recur on the same data and state")
            return Action.REWIND, "the data is innocent: nothing is skipped"
        if cause is Cause.LEARNING_RATE:
            if self._spent(Action.CUT_LR):
                return self._leave(f"{self._budget(Action.CUT_LR)} are spent")
            s.cuts.append(updates)
            self._note(Action.CUT_LR)
            return Action.CUT_LR, f"the learning rate is multiplied by {c.cut_factor} and warmed up again"
        return Action.REWIND, "nobody in particular is guilty: the window is skipped"

    def _note(self, action: Action) -> None:
        s = self.state
        s.taken.append(Taken(clock=s.clock, step=s.tripped, action=action))

    def _leave(self, reason: str) -> tuple[Action, str]:
        action = Action.STOP if self._spent(Action.HANDOVER) else Action.HANDOVER
        self._note(action)
        return action, reason

    def recurred(self) -> bool:
        """Whether the present incident came back after an action against it that found nobody guilty."""
        rewinds = [t for t in self.state.taken if t.action is Action.REWIND]
        return self.state.recurrences > 0 and len(rewinds) > 1 and rewinds[-2].cause is not Cause.DATA

    # The learning rate

    def rate_factor(self, updates: int) -> float:
        """What the schedule's rate is multiplied by at the update after `updates` applied ones."""
        s, c = self.state, self.config
        factor = c.cut_factor ** len(s.cuts)
        since = updates - s.cuts[-1] if s.cuts else c.rewarm_steps
        if since >= c.rewarm_steps:
            return factor
        return factor * (0.1 + 0.9 * max(0, since) / c.rewarm_steps)
