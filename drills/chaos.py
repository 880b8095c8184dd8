"""A plan of faults for a cluster, drawn from a seed: which, where and when. Pure.

Each fault has a run of its own, so that what was found, blamed and lost belongs to one fault.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from drills.cluster_faults import Kind
from megastable.base.errors import ConfigError

# What rank 0 is doing when the fault strikes (rank_ipc.Progress), besides "starting", which no step belongs to.
PHASES = ("step", "checkpoint", "evaluate")
STARTING = "starting"
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
