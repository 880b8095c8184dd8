"""Weigh evidence about a chain of incidents as log10 odds of data, state and learning rate. Pure.

Every observation has a stated weight, the log10 of how much more probable it is under one cause than usual:

| observation (`Clue`) | rate | state | data |
|---|---|---|---|
| before anything is known | -1 | 0 | 0 |
| no sample is guilty on the good state; p: odds of the state against the samples | 0 | 0 | -p |
| samples are guilty on the good state; p: odds of the samples against the state | 0 | 0 | +p |
| the scheduled rate more than doubled since the good state | +4 | 0 | 0 |
| the same, but in the recipe's warm-up | +1 | 0 | 0 |
| came back far from all that was left out, nobody guilty (p as above, at most 1) | +p | -1 | 0 |
| came back next to what was left out, nobody guilty | 0 | -1 | 0 |
| came back on the state that the process began with, which has no older one | 0 | +1 | 0 |
| came back within `recur_steps` of lifting a limit of the rate | +3 | 0 | 0 |
| came back although the rate was capped | -4 | 0 | 0 |
| it began before the oldest snapshot | 0 | +1 | 0 |
| no snapshot is good | 0 | +2 | 0 |

The odds of a cause are its sum minus that of the next best cause. The odds required for each remedy are in
`PolicyConfig` (`odds_*`). p comes from attribution (`attribution.weighed`), and is 0 if no loss stood out: then a test
without a guilty sample had no power, and says nothing. The other numbers are rounded judgements: for example, a state
that was replaced by an older one and still trips is one tenth as probable as the culprit. No sum exceeds ±`CERTAIN`,
as tests of the same kind share their weaknesses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from megastable.stability.actions import Cause
from megastable.stability.learning_rate_limits import JUMP

CERTAIN = 4.0  # 10,000 to 1
HYPOTHESES = (Cause.LEARNING_RATE, Cause.STATE, Cause.DATA)


class Clue(StrEnum):
    NOBODY = "no sample is guilty on the good state"
    GUILTY = "samples are guilty on the good state"
    JUMPED = "the scheduled rate jumped"
    WARMING = "the scheduled rate rose in the warm-up"
    FAR = "it came back far from what was left out"
    ADJACENT = "it came back next to what was left out"
    BEGINNING = "it came back on the state that the process began with, which has no older one"
    LIFTED = "it came back when a limit of the rate was lifted"
    CAPPED = "it came back although the rate was capped"
    NO_POINT = "it began before the oldest snapshot"
    NO_GOOD_POINT = "no snapshot is good"


WEIGHTS: dict[Clue, tuple[float, float, float]] = {  # rate, state, data
    Clue.NOBODY: (0.0, 0.0, -1.0),
    Clue.GUILTY: (0.0, 0.0, 1.0),
    Clue.JUMPED: (4.0, 0.0, 0.0),
    Clue.WARMING: (1.0, 0.0, 0.0),
    Clue.FAR: (0.0, -1.0, 0.0),  # the rate's weight is the power of the test
    Clue.ADJACENT: (0.0, -1.0, 0.0),
    Clue.BEGINNING: (0.0, 1.0, 0.0),
    Clue.LIFTED: (3.0, 0.0, 0.0),
    Clue.CAPPED: (-4.0, 0.0, 0.0),
    Clue.NO_POINT: (0.0, 1.0, 0.0),
    Clue.NO_GOOD_POINT: (0.0, 2.0, 0.0),
}
# Facts that do not change from one incident of a chain to the next, and count once.
ONCE = (Clue.JUMPED, Clue.WARMING, Clue.CAPPED, Clue.NO_POINT, Clue.NO_GOOD_POINT)


@dataclass(frozen=True)
class Examined:
    """Findings on the good state, beside the cause. odds: log10, of the named cause; 0 = unknown.

    adjacent: the incident is next to samples that the previous incident skipped. good_rate, rate: scheduled (before
    cuts and caps) at the good state and when it tripped, None if unknown. warming: in the recipe's warm-up.
    beginning: the good state is the one that this process resumed from, its checkpoint is the suspect (origin.py), and
    there is no older one to hand over to. guilty: positions of the guilty and inferred samples. kernels: names of those
    without which the step is harmless.
    """

    odds: float = 0.0
    adjacent: bool = False
    good_rate: float | None = None
    rate: float | None = None
    warming: bool = False
    beginning: bool = False
    guilty: tuple[int, ...] = ()
    kernels: tuple[str, ...] = ()

    @property
    def jumped(self) -> bool:
        return self.good_rate is not None and self.rate is not None and self.rate > JUMP * self.good_rate


class Account(BaseModel):
    """The evidence of one chain of incidents. since, clock: of its first and its newest observation. sums: log10
    weights of HYPOTHESES. clues: the observations, in order."""

    model_config = ConfigDict(extra="forbid")

    since: int
    clock: int
    sums: tuple[float, float, float] = (-1.0, 0.0, 0.0)
    clues: list[Clue] = []

    def odds(self, cause: Cause) -> float:
        """log10 odds of a cause against the next best; -CERTAIN for a cause without an account."""
        if cause not in HYPOTHESES:
            return -CERTAIN
        own = HYPOTHESES.index(cause)
        return self.sums[own] - max(value for i, value in enumerate(self.sums) if i != own)

    def __str__(self) -> str:
        names = ("rate", "state", "data")
        return ", ".join(f"{name} {value:+.1f}" for name, value in zip(names, self.sums, strict=True))


def weigh(account: Account, clock: int, clue: Clue, power: float = 1.0) -> Account:
    """The account with one more observation. power: p of NOBODY, GUILTY and FAR, not negative."""
    if clue in ONCE and clue in account.clues:
        return account
    rate, state, data = WEIGHTS[clue]
    if clue in (Clue.NOBODY, Clue.GUILTY):
        data *= power
    elif clue is Clue.FAR:
        rate = min(1.0, power)
    sums = tuple(
        max(-CERTAIN, min(CERTAIN, old + new))
        for old, new in zip(account.sums, (rate, state, data), strict=True)
    )
    return Account(since=account.since, clock=clock, sums=sums, clues=[*account.clues, clue])  # type: ignore[arg-type]


def clues(
    cause: Cause, found: Examined, again: bool, lifted: bool, capped: bool
) -> Iterator[tuple[Clue, float]]:
    """The observations of one examined incident, each with its power. cause: as measured; DATA or none.

    again: the previous incident had no guilty sample, either. lifted: a limit of the rate was lifted recently. capped:
    the rate is capped because it had jumped.
    """
    nobody, power = cause is not Cause.DATA, max(0.0, found.odds)
    if nobody and lifted:
        yield Clue.LIFTED, 1.0
    elif again:
        yield Clue.BEGINNING if found.beginning else Clue.ADJACENT if found.adjacent else Clue.FAR, power
    if again and capped:
        yield Clue.CAPPED, 1.0
    yield Clue.NOBODY if nobody else Clue.GUILTY, power
    if found.jumped:
        yield Clue.WARMING if found.warming else Clue.JUMPED, 1.0
