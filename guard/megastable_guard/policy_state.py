"""The policy's state: preserved over rewinds, in every checkpoint and in the journal; and what it says of leaving FP8
and kernels: for how long, and why."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from megastable_guard.actions import Action, Cause
from megastable_guard.guard_config import PolicyConfig
from megastable_guard.learning_rate_limits import Limit

WRONG_KERNELS = (
    "by plain PyTorch a step that went wrong was harmless, or a branch clearly better: so it goes on"
)


class Taken(BaseModel):
    """A past action. clock: the farthest step reached by then: steps repeated after a rewind are no new ground, and
    restore no budget. corpus: of most of the bad samples. proven: a trial has clearly shown that they do harm, or they
    were not finite; else unproven: their positions. remedy: the name of the one that was tried, and won; kernels: those
    that it left."""

    model_config = ConfigDict(extra="forbid")

    clock: int
    step: int
    action: Action
    cause: Cause = Cause.UNKNOWN
    corpus: str | None = None
    proven: bool = False
    unproven: tuple[int, ...] = ()
    remedy: str = ""
    kernels: tuple[str, ...] = ()


class Alert(BaseModel):
    """An episode without further automatic action: since which step, and why."""

    model_config = ConfigDict(extra="forbid")

    step: int
    reason: str


class PolicyState(BaseModel):
    """clock: the farthest step so far. refused: steps of the discards that belong to no incident yet. watching: an
    action was taken at step `tripped` and is being verified until `watch_until`; good: steps on the trend since.
    recurrences: how often the present incident came back. limits: of the learning rate. rewound: applied updates of the
    state that the last rewind led to, where the rate warms up; None: no rewind, or no warm-up is configured. rewarm: of
    the state from which it warms up as a remedy. adjusted: the names of lasting changes of how the run trains. tried:
    steps of branches with remedies. fallbacks, returns: clocks at which FP8 was left and resumed. kernels: the names of
    those that were left. outliers: steps and severities of single outliers that were refused. redone: steps
    that rewinds have undone. untried: clocks at which samples were taken away without a clear win in a trial, and how
    many. costly: where samples come again that a trial has deferred, as they cost more than they teach, [first, end).
    waits_until: the step until which the last trouble was left to itself. alert: the episode.
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
    limits: list[Limit] = []
    rewound: int | None = None
    rewarm: int | None = None
    adjusted: list[str] = []
    tried: int = 0
    fallbacks: list[int] = []
    returns: list[int] = []
    kernels: list[str] = []
    outliers: list[tuple[int, float]] = []
    redone: int = 0
    untried: list[tuple[int, int]] = []
    costly: list[tuple[int, int]] = []
    waits_until: int = 0
    alert: Alert | None = None

    @property
    def resting(self) -> bool:
        """Whether FP8 was left, and not resumed."""
        return len(self.fallbacks) > len(self.returns)

    @property
    def rested(self) -> int:
        """Steps of new ground since FP8 was left."""
        ends = [*self.returns, self.clock]
        return sum(end - begin for begin, end in zip(self.fallbacks, ends, strict=False))

    def barren_handovers(self, verify_steps: int) -> int:
        """Number of latest hand-overs without new ground: at most `verify_steps` steps from each to the next, and from
        the last to the farthest step. Each further one needs an older checkpoint."""
        count, later = 0, self.clock
        for taken in reversed([t for t in self.taken if t.action is Action.HANDOVER]):
            if later - taken.clock > verify_steps:
                break
            count, later = count + 1, taken.clock
        return count


def rest_of_fallback(state: PolicyState, config: PolicyConfig) -> int | None:
    """Minimum duration of the last fall-back, in steps of new ground; None = for good."""
    count = len(state.fallbacks)
    if count >= config.fallbacks or not config.fp8_rest:
        return None
    return config.fp8_rest * 2 ** max(0, count - 1)


def is_fallback_over(state: PolicyState, config: PolicyConfig) -> bool:
    """Whether FP8 may be tried again; asked at a step on the trend."""
    s, steps = state, rest_of_fallback(state, config)
    calm = s.resting and not s.watching and not s.refused
    return calm and steps is not None and s.clock - s.fallbacks[-1] >= steps


def explain_precision(state: PolicyState, config: PolicyConfig) -> str:
    """Why the coming step computes in FP8, or not: a sentence, after FP8 was left once."""
    s = state
    if s.resting:
        return f"fall-back {len(s.fallbacks)} of {config.fallbacks}: without FP8 {tell_fallback(s, config)}"
    steps = s.returns[-1] - s.fallbacks[-1] if s.returns else 0
    return f"{steps} steps of new ground without FP8, nothing is being watched, no update was refused lately"


def tell_fallback(state: PolicyState, config: PolicyConfig) -> str:
    """How long FP8 stays off, in words."""
    steps = rest_of_fallback(state, config)
    if steps is not None:
        return f"for {steps} steps of new ground at least"
    return f"for good (stability.policy.fallbacks={config.fallbacks}, fp8_rest={config.fp8_rest})"


def leave_kernels(state: PolicyState, names: Sequence[str]) -> str:
    """Leave kernels for the rest of the run, in words. Numbers that were wrong once cannot be trusted later, so they
    are not tried again by this version of them."""
    state.kernels += [name for name in names if name not in state.kernels]
    return f"without {' and '.join(names)} for the rest of the run"
