"""Limits of the learning rate: cuts (a factor) and caps (a maximum rate), and when they are lifted; the warm-up after a
rewind. Pure.

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

from megastable_guard.guard_config import PolicyConfig

Kind = Literal["cut", "cap"]

JUMP = 2.0  # ratio of scheduled rates, in either direction, that counts as a jump


class Limit(BaseModel):
    """kind: "cut", value: a factor; or "cap", value: the highest rate. updates: applied ones when it was imposed;
    clock: the farthest step reached by then. times: how often it was imposed. lifted, lifted_updates:
    the same for its end, None while it holds. Of a cap: scheduled, the schedule's rate that `value` belongs to, and
    latest, that of the latest update; jumped: the clock of its last jump. None: the cap does not move."""

    model_config = ConfigDict(extra="forbid")

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

    def highest(self, scheduled: float) -> float:
        """The highest rate under a cap, with the schedule at `scheduled`."""
        return self.value if self.scheduled is None else self.value * min(1.0, scheduled / self.scheduled)


def limited(
    limits: Sequence[Limit], updates: int, scheduled: float, rewarm: int, share: float = 1.0
) -> float:
    """The rate of the update after `updates` applied ones, with the schedule at `scheduled`.

    After a cut the rate warms up from a tenth of the cut rate over `rewarm` updates; a cap needs no warm-up, as the
    good state was trained at that rate. share: of the rate, that the warm-up after a rewind allows; of two warm-ups
    the lower one holds.
    """
    rate = scheduled
    newest = max((limit.updates for limit in limits if limit.holds and limit.kind == "cut"), default=None)
    for limit in limits:
        full = rate * limit.value if limit.kind == "cut" else min(rate, limit.highest(scheduled))
        if limit.holds:
            rate = full
        elif rewarm > (since := max(0, updates - limit.lifted_updates)):
            rate = full + (rate - full) * since / rewarm
    return rate * min(share, after_rewind(newest, updates, rewarm, 0.1))


def after_rewind(rewound: int | None, updates: int, length: int, begin: float) -> float:
    """Share of the rate that the update after `updates` applied ones has, where it warms up from the share `begin`
    over `length` updates since `rewound` of them; None: never."""
    if rewound is None or length <= (since := max(0, updates - rewound)):
        return 1.0
    return begin + (1 - begin) * since / length


def follow(limits: Sequence[Limit], clock: int, scheduled: float) -> None:
    """Update the caps to the scheduled rate of the coming update. At a jump they keep their value, and fall from
    there."""
    for limit in limits:
        if limit.kind != "cap" or limit.scheduled is None or scheduled <= 0:
            continue
        before = limit.latest or limit.scheduled
        if not 1 / JUMP <= scheduled / before <= JUMP:
            limit.value, limit.scheduled, limit.jumped = limit.highest(before), scheduled, clock
        limit.latest = scheduled


def spent(limits: Sequence[Limit], config: PolicyConfig) -> bool:
    """Whether no further limit may be imposed."""
    return sum(limit.times for limit in limits) >= config.cuts


def rest(limits: Sequence[Limit], limit: Limit, config: PolicyConfig) -> int | None:
    """Minimum duration of a limit in steps of new ground; None = for good."""
    return None if spent(limits, config) or not config.cut_rest else config.cut_rest * 2 ** (limit.times - 1)


def outgrown(limits: Sequence[Limit], step: int, scheduled: float, settled: int) -> list[Limit]:
    """Caps that the schedule has fallen below again, past the step at which they were imposed, and `settled` steps
    after its jump: until then a rewind may lead to before it."""
    return [
        limit
        for limit in limits
        if limit.kind == "cap"
        and limit.holds
        and step > limit.clock
        and (limit.jumped is None or step >= limit.jumped + settled)
        and scheduled <= limit.highest(scheduled)
    ]


def rested(limits: Sequence[Limit], clock: int, config: PolicyConfig) -> Limit | None:
    """The newest limit that holds, if its time is over. Older ones have to wait for it."""
    held = [limit for limit in limits if limit.holds]
    if not held:
        return None
    last = held[-1]
    steps = rest(limits, last, config)
    return last if steps is not None and clock - last.clock >= steps else None


def lifted_lately(limits: Sequence[Limit], clock: int, within: int) -> Limit | None:
    """The newest limit that was lifted at most `within` steps of new ground ago."""
    lately = [limit for limit in limits if limit.lifted is not None and clock - limit.lifted <= within]
    return max(lately, key=lambda limit: limit.lifted or 0, default=None)


def settled(limits: Sequence[Limit], clock: int, window: int) -> list[Limit]:
    """The limits that still count: one lifted successfully for `window` steps of new ground is forgotten."""
    return [limit for limit in limits if limit.lifted is None or clock - limit.lifted < window]


def moved_back(limits: Sequence[Limit], updates: int) -> None:
    """The run continues from `updates` applied ones: later starts and ends move there."""
    for limit in limits:
        limit.updates = min(limit.updates, updates)
        limit.lifted_updates = min(limit.lifted_updates, updates)


def words(limit: Limit) -> str:
    """The effect of a limit, as a part of a sentence."""
    if limit.kind == "cap":
        return f"the learning rate stays at or below {limit.value:.3g}, and goes down with the schedule"
    return f"the learning rate is multiplied by {limit.value:g}"
