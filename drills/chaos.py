"""Faults of a cluster: a plan drawn from a seed, which, where and when; and what became of each. Pure.

Each fault has a run of its own, so that what was found, blamed and lost belongs to one fault.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from drills.cluster_faults import Kind
from drills.exercise import Outcome
from megastable.base.errors import HOST_GONE, OK, ConfigError

# What rank 0 is doing when the fault strikes (rank_ipc.Progress), besides "starting", which no step belongs to.
PHASES = ("step", "checkpoint", "evaluate")
STARTING = "starting"
NOBODY = "nobody"
Verdict = tuple[float | None, str, str | None]  # seconds until it, a sentence, the host that it blames
Item = TypeVar("Item")


class Planned(BaseModel):
    """The `number`-th fault: of what kind, on which host. It strikes in `phase` once `step` steps are done, and lasts
    for `seconds`; 0: no longer than it takes to do it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    kind: str
    host: str
    phase: str
    step: int
    seconds: float

    def describe(self) -> str:
        return f"{self.kind} ({self.seconds:g} s)" if self.seconds else self.kind


def plan(
    kinds: Sequence[Kind],
    hosts: Sequence[str],
    seed: int,
    faults: int,
    steps: int,
    head: str | None = None,
    seconds: float | None = None,
) -> list[Planned]:
    """`faults` of them in runs of `steps` steps: every kind once before any twice; likewise phases, and for every kind
    the hosts it may happen to. Neither in the first nor in the last tenth of the steps, except at the start.

    head: the supervisor's host, the first one if None. seconds: of all faults that last; else drawn. Raises ConfigError
    if a kind has no host to happen to.
    """
    head = hosts[0] if head is None else head
    for kind in kinds:
        if not kind.places(hosts, head):
            raise ConfigError(
                f"{kind.name} happens to {kind.place}, and there is only {head}: take more hosts"
            )
    if not kinds or steps < 1:
        raise ConfigError(f"{len(kinds)} kinds of faults in runs of {steps} steps: nothing can be planned")
    chance = random.Random(seed)
    ordered, phases = _rounds(kinds, chance), _rounds((STARTING, *PHASES), chance)
    places = {kind.name: _rounds(kind.places(hosts, head), chance) for kind in kinds}
    planned = []
    for number, kind in zip(range(1, faults + 1), ordered):
        phase = PHASES[0] if kind.early else next(phases)
        step = chance.randint(min(steps, -(-steps // 10)), max(1, steps - -(-steps // 10)))
        step = min(step, max(1, steps // 4)) if kind.early else step
        drawn = round(chance.uniform(*kind.seconds), 1) if kind.seconds is not None else 0.0
        planned.append(
            Planned(
                number=number, kind=kind.name, host=next(places[kind.name]), phase=phase,
                step=0 if phase == STARTING else step,
                seconds=seconds if seconds is not None and kind.seconds is not None else drawn,
            )
        )  # fmt: skip
    return planned


def _rounds(items: Sequence[Item], chance: random.Random) -> Iterator[Item]:
    """All items in random order, again and again, each time in another one."""
    while True:
        yield from chance.sample(items, len(items))


def spread(planned: Sequence[Planned], steps: int) -> list[Planned]:
    """The same faults, evenly over the steps of one run. It starts only once."""
    gap = steps * 0.9 / (len(planned) + 1)
    return [
        one.model_copy(update={
            "step": round(steps * 0.05 + gap * number),
            "phase": "step" if one.phase == STARTING else one.phase,
        })
        for number, one in enumerate(planned, 1)
    ]  # fmt: skip


class ClusterOutcome(Outcome):
    """A fault and its run. found: seconds from the fault to the verdict, None without one; verdict: a sentence, empty
    without one. blamed: the host it names; expected: the one that it had to name; harmless: whether there need not be a
    verdict. exit: code of the supervisor, None if
    it never ended. same: whether the bytes are those of an undisturbed run, None if it has not ended as one. cost:
    seconds that the run took longer than an undisturbed one."""

    planned: Planned
    found: float | None
    verdict: str
    blamed: str | None
    expected: str | None
    harmless: bool
    exit: int | None
    same: bool | None
    cost: float | None
    verdict_right: bool
    end_right: bool

    @property
    def right(self) -> bool:
        return self.verdict_right and self.end_right

    def describe(self) -> str:
        return f"{self.verdict or 'no verdict'}, {'right' if self.right else 'WRONG'}"

    def describe_expected(self) -> str:
        nobody = f" or {NOBODY}" if self.harmless else ""
        return f"{self.expected}{nobody}" if self.expected else NOBODY

    def describe_end(self) -> str:
        if self.exit is None:
            return "never ended"
        if self.exit != OK:
            return f"exit {self.exit}"
        return {True: "yes", False: "no", None: "unknown"}[self.same]


def judge(
    kind: Kind,
    planned: Planned,
    verdict: Verdict,
    exit: int | None,
    same: bool | None,
    cost: float | None,
    spared: bool = False,
) -> ClusterOutcome:
    """Judge what became of a fault.

    Args:
        kind: of the fault.
        planned: the fault.
        verdict: what was said of it.
        exit: code of the supervisor.
        same: whether the bytes are those of an undisturbed run.
        cost: seconds that the run took longer.
        spared: whether a host can take the place of another.
    """
    found, said, blamed = verdict
    return ClusterOutcome(
        planned=planned, found=found, verdict=said, blamed=blamed, expected=kind.blamed(planned.host),
        harmless=kind.harmless, exit=exit, same=same, cost=cost,
        verdict_right=kind.accepts(said, blamed, planned.host),
        end_right=(exit == OK and same is True) if kind.back or spared else exit == HOST_GONE,
    )  # fmt: skip
