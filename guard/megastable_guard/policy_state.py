"""The policy's memory, which outlives rewinds, checkpoints and processes, and the limits that it keeps: of the learning
rate (cuts, a factor, and caps, a maximum), and of FP8 and kernels that were left. Pure.

A cap starts at the rate of the good state and falls with the schedule: by the schedule's relative decrease, ignoring
jumps. It does not rise with it.

A limit is on trial: after `cut_rest` steps of new ground on the trend it is lifted, and the rate ramps back over
`rewarm_steps` updates. If the instability returns within `recur_steps`, the limit returns, and lasts twice as long; the
last of `cuts` stays for good. A cap also ends when the schedule has jumped back below it and stayed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from megastable_guard.actions import Action, Cause
from megastable_guard.guard_config import PolicyConfig

Kind = Literal["cut", "cap"]

JUMP = 2.0  # ratio of scheduled rates, in either direction, that counts as a jump


class _Memory(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Limit(_Memory):
    """kind: "cut", value: a factor; or "cap", value: the highest rate. updates: applied ones when it was imposed;
    clock: the farthest step reached by then. times: how often it was imposed. lifted, lifted_updates:
    the same for its end, None while it holds. Of a cap: scheduled, the schedule's rate that `value` belongs to, and
    latest, that of the latest update; jumped: the clock of its last jump. None: the cap does not move."""

    kind: Kind
    value: float
    updates: int
    clock: int
    times: int = 1
    lifted: int | None = None
    lifted_updates: int = 0
    scheduled: float | None = None
    latest: float | None = None
    jumped: int | None = None

    @property
    def holds(self) -> bool:
        return self.lifted is None

    def highest_rate(self, scheduled: float) -> float:
        """The highest rate under a cap, with the schedule at `scheduled`."""
        return self.value if self.scheduled is None else self.value * min(1.0, scheduled / self.scheduled)


def limit_rate(
    limits: Sequence[Limit], updates: int, scheduled: float, rewarm: int, share: float = 1.0
) -> float:
    """The rate of the update after `updates` applied ones, with the schedule at `scheduled`.

    After a cut the rate warms up from a tenth of the cut rate over `rewarm` updates; a cap needs no warm-up, as the
    good state was trained at that rate. share: of the rate, that the warm-up after a rewind allows; of two warm-ups
    the lower one holds.
    """
    rate = scheduled
    newest_cut = max((limit.updates for limit in limits if limit.holds and limit.kind == "cut"), default=None)
    for limit in limits:
        limited_rate = rate * limit.value if limit.kind == "cut" else min(rate, limit.highest_rate(scheduled))
        if limit.holds:
            rate = limited_rate
        elif rewarm > (updates_since := max(0, updates - limit.lifted_updates)):
            rate = limited_rate + (rate - limited_rate) * updates_since / rewarm
    return rate * min(share, warmup_share(newest_cut, updates, rewarm, 0.1))


def warmup_share(rewound: int | None, updates: int, length: int, begin: float) -> float:
    """Share of the rate that the update after `updates` applied ones has, where it warms up from the share `begin`
    over `length` updates since `rewound` of them; None: never."""
    if rewound is None or length <= (updates_since := max(0, updates - rewound)):
        return 1.0
    return begin + (1 - begin) * updates_since / length


def follow_schedule(limits: Sequence[Limit], clock: int, scheduled: float) -> None:
    """Update the caps to the scheduled rate of the coming update. At a jump they keep their value, and fall from
    there."""
    for rate_limit in limits:
        if rate_limit.kind != "cap" or rate_limit.scheduled is None or scheduled <= 0:
            continue
        rate_before = rate_limit.latest or rate_limit.scheduled
        if not 1 / JUMP <= scheduled / rate_before <= JUMP:
            rate_limit.value, rate_limit.scheduled, rate_limit.jumped = (
                rate_limit.highest_rate(rate_before),
                scheduled,
                clock,
            )
        rate_limit.latest = scheduled


def are_limits_spent(limits: Sequence[Limit], config: PolicyConfig) -> bool:
    """Whether no further limit may be imposed."""
    return sum(rate_limit.times for rate_limit in limits) >= config.cuts


def limit_duration(limits: Sequence[Limit], limit: Limit, config: PolicyConfig) -> int | None:
    """Minimum duration of a limit in steps of new ground; None = for good."""
    return (
        None
        if are_limits_spent(limits, config) or not config.cut_rest
        else config.cut_rest * 2 ** (limit.times - 1)
    )


def find_outgrown_caps(limits: Sequence[Limit], step: int, scheduled: float, settled: int) -> list[Limit]:
    """Caps that the schedule has fallen below again, past the step at which they were imposed, and `settled` steps
    after its jump: until then a rewind may lead to before it."""
    return [
        rate_limit
        for rate_limit in limits
        if rate_limit.kind == "cap"
        and rate_limit.holds
        and step > rate_limit.clock
        and (rate_limit.jumped is None or step >= rate_limit.jumped + settled)
        and scheduled <= rate_limit.highest_rate(scheduled)
    ]


def find_rested_limit(limits: Sequence[Limit], clock: int, config: PolicyConfig) -> Limit | None:
    """The newest limit that holds, if its time is over. Older ones have to wait for it."""
    held_limits = [rate_limit for rate_limit in limits if rate_limit.holds]
    if not held_limits:
        return None
    newest_limit = held_limits[-1]
    least_steps = limit_duration(limits, newest_limit, config)
    return newest_limit if least_steps is not None and clock - newest_limit.clock >= least_steps else None


def find_lately_lifted(limits: Sequence[Limit], clock: int, within: int) -> Limit | None:
    """The newest limit that was lifted at most `within` steps of new ground ago."""
    lately_lifted = [
        rate_limit
        for rate_limit in limits
        if rate_limit.lifted is not None and clock - rate_limit.lifted <= within
    ]
    return max(lately_lifted, key=lambda limit: limit.lifted or 0, default=None)


def drop_settled_limits(limits: Sequence[Limit], clock: int, window: int) -> list[Limit]:
    """The limits that still count: one lifted successfully for `window` steps of new ground is forgotten."""
    return [
        rate_limit for rate_limit in limits if rate_limit.lifted is None or clock - rate_limit.lifted < window
    ]


def move_limits_back(limits: Sequence[Limit], updates: int) -> None:
    """The run continues from `updates` applied ones: later starts and ends move there."""
    for rate_limit in limits:
        rate_limit.updates = min(rate_limit.updates, updates)
        rate_limit.lifted_updates = min(rate_limit.lifted_updates, updates)


def describe_limit(limit: Limit) -> str:
    """The effect of a limit, as a part of a sentence."""
    if limit.kind == "cap":
        return f"the learning rate stays at or below {limit.value:.3g}, and goes down with the schedule"
    return f"the learning rate is multiplied by {limit.value:g}"


WRONG_KERNELS = (
    "by plain PyTorch a step that went wrong was harmless, or a branch clearly better: so it goes on"
)


class Taken(_Memory):
    """A past action. clock: the farthest step reached by then: steps repeated after a rewind are no new ground, and
    restore no budget. corpus: of most of the bad samples. proven: a trial has clearly shown that they do harm, or they
    were not finite; else unproven: their positions. remedy: the name of the one that was tried, and won; kernels: those
    that it left."""

    clock: int
    step: int
    action: Action
    cause: Cause = Cause.UNKNOWN
    corpus: str | None = None
    proven: bool = False
    unproven: tuple[int, ...] = ()
    remedy: str = ""
    kernels: tuple[str, ...] = ()


class Alert(_Memory):
    """An episode without further automatic action: since which step, and why."""

    step: int
    reason: str


class PolicyState(_Memory):
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
        rest_ends = [*self.returns, self.clock]
        return sum(
            resumed_at - left_at for left_at, resumed_at in zip(self.fallbacks, rest_ends, strict=False)
        )

    def barren_handovers(self, verify_steps: int) -> int:
        """Number of latest hand-overs without new ground: at most `verify_steps` steps from each to the next, and from
        the last to the farthest step. Each further one needs an older checkpoint."""
        barren_count, later_clock = 0, self.clock
        for taken_action in reversed([t for t in self.taken if t.action is Action.HANDOVER]):
            if later_clock - taken_action.clock > verify_steps:
                break
            barren_count, later_clock = barren_count + 1, taken_action.clock
        return barren_count


def rest_of_fallback(state: PolicyState, config: PolicyConfig) -> int | None:
    """Minimum duration of the last fall-back, in steps of new ground; None = for good."""
    fallback_count = len(state.fallbacks)
    if fallback_count >= config.fallbacks or not config.fp8_rest:
        return None
    return config.fp8_rest * 2 ** max(0, fallback_count - 1)


def is_fallback_over(state: PolicyState, config: PolicyConfig) -> bool:
    """Whether FP8 may be tried again; asked at a step on the trend."""
    s, least_steps = state, rest_of_fallback(state, config)
    is_quiet = s.resting and not s.watching and not s.refused
    return is_quiet and least_steps is not None and s.clock - s.fallbacks[-1] >= least_steps


def explain_precision(state: PolicyState, config: PolicyConfig) -> str:
    """Why the coming step computes in FP8, or not: a sentence, after FP8 was left once."""
    s = state
    if s.resting:
        return f"fall-back {len(s.fallbacks)} of {config.fallbacks}: without FP8 {tell_fallback(s, config)}"
    rest_steps = s.returns[-1] - s.fallbacks[-1] if s.returns else 0
    return f"{rest_steps} steps of new ground without FP8, nothing is being watched, no update was refused lately"


def tell_fallback(state: PolicyState, config: PolicyConfig) -> str:
    """How long FP8 stays off, in words."""
    least_steps = rest_of_fallback(state, config)
    if least_steps is not None:
        return f"for {least_steps} steps of new ground at least"
    return f"for good (stability.policy.fallbacks={config.fallbacks}, fp8_rest={config.fp8_rest})"


def leave_kernels(state: PolicyState, names: Sequence[str]) -> str:
    """Leave kernels for the rest of the run, in words. Numbers that were wrong once cannot be trusted later, so they
    are not tried again by this version of them."""
    state.kernels += [kernel_name for kernel_name in names if kernel_name not in state.kernels]
    return f"without {' and '.join(names)} for the rest of the run"
