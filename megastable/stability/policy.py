"""Verdicts, history and budgets in; what to do out. Pure: the training process, a dry run, the backtest and the
supervisor decide by the same code.

The ladder: apply < discard < rewind (and skip) < fall back from FP8 < cut the learning rate < swap the corpus out <
hand over to a restart from a checkpoint < stop. Each rung above discard has a budget; a rung that is spent or did not
help leads to the next. `decide` is asked before every update; after a rewind `remedy` is told the cause; when processes
end that should have gone on, the supervisor asks `after_failure`. `fp8` says what the coming step computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile

from pydantic import BaseModel, ConfigDict

from megastable.stability.settings import PolicyConfig
from megastable.stability.signals import Finding, Verdict


class Action(StrEnum):
    APPLY = "apply"
    DISCARD = "discard"  # this update is refused; the data moves on
    REWIND = "rewind"  # back to a snapshot before the onset, skip, go on
    FALL_BACK = "fall_back"  # rewind, and go on without FP8
    CUT_LR = "cut_lr"  # rewind, and go on with a smaller rate
    SWAP_CORPUS = "swap_corpus"  # rewind, and go on without a corpus
    HANDOVER = "handover"  # end the process: restart from a checkpoint before the onset
    RESTART = "restart"  # start the processes again, from the newest good checkpoint
    STOP = "stop"  # end the run: a person is needed

    @property
    def ends(self) -> bool:
        return self in (Action.HANDOVER, Action.STOP)

    @property
    def rewinds(self) -> bool:
        return self in (Action.REWIND, Action.FALL_BACK, Action.CUT_LR, Action.SWAP_CORPUS)


class Cause(StrEnum):
    DATA = "data"  # samples that are bad on the good state, too
    NUMERICS = "numerics"  # the same step without FP8 is harmless
    STATE = "state"  # the same data is harmless on the good state
    LEARNING_RATE = "learning_rate"  # it recurs with other data
    HARDWARE = "hardware"  # the same data on the same state gave something else
    PROCESS = "process"  # a process died, was killed or hung
    STORAGE = "storage"  # a checkpoint was damaged
    CODE = "code"  # it fails at the same step with other data, too
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
    how often the present incident came back. cuts: updates at which the learning rate was cut. fallbacks, returns:
    clocks at which FP8 was left and gone back to, in turns.
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
    fallbacks: list[int] = []
    returns: list[int] = []

    @property
    def resting(self) -> bool:
        """Whether FP8 was left, and not gone back to."""
        return len(self.fallbacks) > len(self.returns)

    @property
    def rested(self) -> int:
        """Steps of new ground without FP8 because it was left."""
        ends = [*self.returns, self.clock]
        return sum(end - begin for begin, end in zip(self.fallbacks, ends, strict=False))


SUSPICION = 16  # steps after which a refused update is forgotten: bad regions are a few batches long


class Policy:
    """Decides for one run. `state` is its memory. has_fp8: whether the recipe wants FP8."""

    def __init__(self, config: PolicyConfig, state: PolicyState | None = None, has_fp8: bool = False) -> None:
        self.config = config
        self.state = state or PolicyState()
        self.has_fp8 = has_fp8

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
            if finding.on_trend and self._rest_is_over():
                s.returns.append(s.clock)
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
        """A discarded update that turned out to be worse: the state itself is damaged, and no rate is to blame."""
        return self._climb(finding, reason, oldest, cut=False)

    def leave(self, decision: Decision, reason: str, cause: Cause = Cause.UNKNOWN) -> Decision:
        """A rewind that cannot be carried out after all. cause: as far as it is known."""
        action, more = self._last_resort(decision.finding.step, cause is not Cause.HARDWARE, cause)
        return replace(decision, action=action, reason=f"{decision.reason}; {reason}{more}")

    def _climb(self, finding: Finding, reason: str, oldest: int | None, cut: bool = True) -> Decision:
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
            action, more = self._last_resort(finding.step, cut)
            reason += more
        else:
            self._take(action, finding.step)
        return Decision(action, finding, reason)

    def _take(
        self, action: Action, step: int, cause: Cause = Cause.UNKNOWN, corpus: str | None = None
    ) -> None:
        s = self.state
        s.taken.append(Taken(clock=s.clock, step=step, action=action, cause=cause, corpus=corpus))
        s.taken = [t for t in s.taken if s.clock - t.clock < self.config.budget_window]

    def _last_resort(self, step: int, cut: bool = True, cause: Cause = Cause.UNKNOWN) -> tuple[Action, str]:
        """Hand over or stop, and what is to be said about it. cut: where a hand-over did not help FP8 is left, too, or
        where that was done already the rate is cut."""
        s, c = self.state, self.config
        if self._spent(Action.HANDOVER):
            self._take(Action.STOP, step)
            return Action.STOP, f"; {self._budget(Action.HANDOVER)} are spent"
        again, more = cut and self._count(Action.HANDOVER) > 0, ""
        if self.may_fall_back and (again or cause is Cause.NUMERICS):
            s.fallbacks.append(s.clock)
            more = f"; without FP8 from there on, {self._rest_in_words()}"
        elif again and len(s.cuts) < c.cuts:
            s.cuts.append(s.clock)  # `resumed` learns of which update
            more = f"; the learning rate is multiplied by {c.cut_factor}, too"
        self._take(Action.HANDOVER, step)
        return Action.HANDOVER, more

    def cannot_hand_over(self) -> None:
        """There is no checkpoint to go back to: what a hand-over would have changed stays as it was."""
        s = self.state
        s.taken[-1].action = Action.STOP
        s.cuts = [cut for cut in s.cuts if cut != s.clock]
        by_itself = any(t.action is Action.FALL_BACK and t.clock == s.clock for t in s.taken)
        if s.resting and s.fallbacks[-1] == s.clock and not by_itself:
            s.fallbacks.pop()

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
                action, more = self._last_resort(s.tripped, cut=False)
                return action, reason + more
            return Action.REWIND, "the data is innocent: nothing is skipped"
        if cause is Cause.NUMERICS and not self.may_fall_back:
            action, more = self._last_resort(s.tripped, cut=False)
            return action, f"FP8 is not to be left any more (stability.policy.fallbacks={c.fallbacks}){more}"
        if cause in (Cause.NUMERICS, Cause.LEARNING_RATE) and self.may_fall_back:
            s.fallbacks.append(s.clock)
            self._take(Action.FALL_BACK, s.tripped, cause)
            first = "" if cause is Cause.NUMERICS else "before the learning rate is cut: "
            return Action.FALL_BACK, f"{first}without FP8 from here on, {self._rest_in_words()}"
        if cause is Cause.LEARNING_RATE:
            if len(s.cuts) >= c.cuts:
                reason = f"the {c.cuts} cuts of a run (stability.policy.cuts) are spent"
                action, more = self._last_resort(s.tripped)
                return action, reason + more
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

    # FP8

    @property
    def fp8(self) -> bool:
        """Whether the coming step computes in FP8."""
        return self.has_fp8 and not self.state.resting

    @property
    def may_fall_back(self) -> bool:
        """Whether FP8 is on, and may be left."""
        return self.fp8 and len(self.state.fallbacks) < self.config.fallbacks

    @property
    def rest(self) -> int | None:
        """Steps of new ground that the last fall-back lasts at least; None = for good."""
        c, count = self.config, len(self.state.fallbacks)
        return None if count >= c.fallbacks or not c.fp8_rest else c.fp8_rest * 2 ** max(0, count - 1)

    def _rest_is_over(self) -> bool:
        """Asked at a step on the trend: whether FP8 may be tried again."""
        s, rest = self.state, self.rest
        calm = s.resting and not s.watching and not s.refused
        return calm and rest is not None and s.clock - s.fallbacks[-1] >= rest

    @property
    def precision(self) -> str:
        """Why the coming step computes in FP8, or not: a sentence, once FP8 was left."""
        s, c = self.state, self.config
        if s.resting:
            return f"fall-back {len(s.fallbacks)} of {c.fallbacks}: without FP8 {self._rest_in_words()}"
        rest = s.returns[-1] - s.fallbacks[-1] if s.returns else 0
        return (
            f"{rest} steps of new ground without FP8, nothing is being watched, no update was refused lately"
        )

    def _rest_in_words(self) -> str:
        rest = self.rest
        if rest is not None:
            return f"for {rest} steps of new ground at least"
        return (
            f"for good (stability.policy.fallbacks={self.config.fallbacks}, fp8_rest={self.config.fp8_rest})"
        )

    # The learning rate

    def rate_factor(self, updates: int) -> float:
        """What the schedule's rate is multiplied by at the update after `updates` applied ones."""
        s, c = self.state, self.config
        factor = c.cut_factor ** len(s.cuts)
        since = updates - s.cuts[-1] if s.cuts else c.rewarm_steps
        if since >= c.rewarm_steps:
            return factor
        return factor * (0.1 + 0.9 * max(0, since) / c.rewarm_steps)


# Above the process


@dataclass(frozen=True)
class Failure:
    """How an attempt ended that should have gone on.

    what: its kind, the same where it is the same failure ("SIGKILL", "hang", "RuntimeError: ..."). step: the one that
    was being done, None where none was begun. host: where, None where that is not known. clock: the farthest step that
    was done by then. skipped: the samples of that step were skipped because of it.
    """

    what: str
    step: int | None
    host: str | None
    clock: int
    skipped: bool = False


@dataclass(frozen=True)
class Remedy:
    """What is done about a failure, and why: Action.RESTART or Action.STOP. skip: the samples of the step first."""

    action: Action
    cause: Cause
    reason: str
    skip: bool = False


def after_failure(failures: Sequence[Failure], hosts: int, config: PolicyConfig) -> Remedy:
    """What to do after the last of `failures`, those of one run in order; hosts: how many it runs on."""
    c, last = config, failures[-1]
    recent = [f for f in failures if last.clock - f.clock < c.budget_window]
    there = sum(f.host == last.host and f.host is not None for f in recent)
    if hosts > 1 and there >= c.same_host:
        reason = f"{there} failures of {last.host} within {c.budget_window} steps: it is that host"
        return Remedy(Action.STOP, Cause.HARDWARE, reason)
    here = _trailing(recent, lambda f: (f.what, f.step) == (last.what, last.step) and f.step is not None)
    if len(here) >= c.same_place:
        often = f"{last.what} at step {last.step}, {len(here)} times in a row"
        if any(f.skipped for f in here):
            return Remedy(
                Action.STOP, Cause.CODE, f"{often}, with other data, too: code or settings, no luck"
            )
        return Remedy(Action.RESTART, Cause.DATA, f"{often}: its samples are skipped", skip=True)
    barren = _trailing(recent, lambda f: f.clock == last.clock)
    if len(barren) >= c.barren:
        reason = f"{len(barren)} failures in a row without a step of new ground (stability.policy.barren)"
        return Remedy(Action.STOP, Cause.PROCESS, reason)
    if len(recent) > c.restarts:
        reason = f"the {c.restarts} restarts per {c.budget_window} steps (stability.policy) are spent"
        return Remedy(Action.STOP, Cause.PROCESS, reason)
    return Remedy(Action.RESTART, Cause.PROCESS, f"{last.what}: luck, as far as can be told")


def _trailing(failures: Sequence[Failure], like: Callable[[Failure], bool]) -> list[Failure]:
    """Those at the end, without a gap."""
    return list(takewhile(like, reversed(failures)))


def pause(failures: Sequence[Failure], most: float) -> float:
    """Seconds to wait before a restart: none after new ground, then doubling from 1 up to `most`."""
    count = len(_trailing(failures, lambda f: f.clock == failures[-1].clock))
    return 0.0 if count <= 1 else min(most, 2.0 ** (count - 2))
